"""The event log: whole lines whoever else writes, readable after a kill, every event explained."""

from __future__ import annotations

import ast
import inspect
import json
import logging
import math
import multiprocessing
import os
import resource
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from resihp_ext import events
from resihp_ext.errors import UserError
from resihp_ext.events import Event, EventLog, read_events

pytestmark = pytest.mark.unit

FORK = multiprocessing.get_context("fork")
WRITERS, LINES = 4, 150


def write_lines(folder: Path, rank: int, start: Any) -> None:
    """Lines from short to longer than any buffer of a pipe or a file object."""
    log = EventLog(folder, rank=rank)
    start.wait(20)
    for step in range(LINES):
        length = (step * 997 + rank) % 30_000
        log.write(Event.ITERATION, step=step, padding=str(rank) * length)
    log.close()


def test_lines_of_several_processes_stay_whole(tmp_path: Path) -> None:
    start = FORK.Barrier(WRITERS)
    writers = [FORK.Process(target=write_lines, args=(tmp_path, r, start)) for r in range(WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines if line]
    assert found == read_events(tmp_path / "events.jsonl")
    assert len(found) == WRITERS * LINES
    for rank in range(WRITERS):
        own = [event for event in found if event["rank"] == rank]
        assert [event["step"] for event in own] == list(range(LINES)), "in the order written"
        for event in own:
            assert event["padding"] == str(rank) * ((event["step"] * 997 + rank) % 30_000)
    ranks = [event["rank"] for event in found]
    assert ranks != sorted(ranks), "they did write at the same time"


def write_for_ever(folder: Path) -> None:
    log = EventLog(folder, rank=0)
    step = 0
    while True:
        step += 1
        log.write(Event.ITERATION, step=step, padding="x" * 50_000)


def test_a_killed_writer_leaves_a_readable_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    writer = FORK.Process(target=write_for_ever, args=(tmp_path,))
    writer.start()
    deadline_s = time.monotonic() + 20
    while not (path.exists() and path.stat().st_size > 2_000_000):
        assert time.monotonic() < deadline_s
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join(20)
    found = read_events(path)
    assert [event["step"] for event in found] == list(range(1, len(found) + 1))
    assert len(found) >= 39


@pytest.mark.parametrize("kept_bytes", [1, 10, 40, -2, -1])
def test_a_torn_last_line_is_left_out(tmp_path: Path, kept_bytes: int) -> None:
    log = EventLog(tmp_path, rank=0)
    log.write(Event.JOB_START, step=0)
    whole = log.path.stat().st_size
    log.write(Event.JOB_END, step=9)
    log.close()
    content = log.path.read_bytes()
    log.path.write_bytes(content[: whole + kept_bytes if kept_bytes > 0 else kept_bytes])
    expected = [0, 9] if kept_bytes == -1 else [0]
    assert [event["step"] for event in read_events(log.path)] == expected, "-1: only the line end"


def test_an_empty_log_has_no_events(tmp_path: Path) -> None:
    EventLog(tmp_path, rank=0).close()
    assert read_events(tmp_path / "events.jsonl") == []


def test_a_log_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_events(tmp_path / "events.jsonl")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    before_s = time.time()
    log = EventLog(tmp_path / "a" / "b", rank=3)
    log.write(Event.ITERATION, step=7, losses={"lm loss": 1 / 3}, grad_norm=None, skipped=False)
    log.write(Event.JOB_END)
    log.close()
    first, last = read_events(tmp_path / "a" / "b" / "events.jsonl")
    assert before_s <= first.pop("time_s") <= last.pop("time_s") <= time.time()
    assert first == {
        "rank": 3,
        "step": 7,
        "event": "iteration",
        "losses": {"lm loss": 1 / 3},
        "grad_norm": None,
        "skipped": False,
    }
    assert last == {"rank": 3, "step": None, "event": "job_end"}


def test_no_text_breaks_a_line(tmp_path: Path) -> None:
    texts = ["two\nlines", "\r\n", "\u2028 \u0085 \x0c", "ü€𝄞", '"quotes" \\', "\x00"]
    log = EventLog(tmp_path, rank=0)
    for text in texts:
        log.write(Event.JOB_START, step=0, text=text)
    log.close()
    assert log.path.read_bytes().count(b"\n") == len(texts)
    assert [event["text"] for event in read_events(log.path)] == texts


def test_a_loss_that_is_no_number_is_kept(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=0)
    log.write(Event.ITERATION, step=1, losses={"a": math.nan, "b": math.inf})
    log.close()
    (event,) = read_events(log.path)
    assert math.isnan(event["losses"]["a"])
    assert event["losses"]["b"] == math.inf


def test_what_json_cannot_hold_writes_nothing(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=0)
    with pytest.raises(TypeError):
        log.write(Event.JOB_START, step=0, value=object())
    log.close()
    assert log.path.read_bytes() == b""


def test_a_resumed_job_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        log = EventLog(tmp_path, rank=0)
        log.write(Event.JOB_START, step=step)
        log.close()
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == [1, 2]


def test_a_directory_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    for folder in (blocked, blocked / "below"):
        with pytest.raises(UserError, match="give a writable --resilience-dir") as refusal:
            EventLog(folder, rank=0)
        assert str(folder / "events.jsonl") in str(refusal.value)
        assert "\n" not in str(refusal.value)


def test_a_closed_log_is_closed(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    log = EventLog(tmp_path, rank=0)
    log.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(ValueError, match="is closed"):
        log.write(Event.JOB_END)


class Kept(logging.Handler):
    """Messages of a logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def fill_disk(folder: Path, pipe: Any) -> None:
    """Writes with a limit on the size of files, as on a full disk that is freed later."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    kept = Kept()
    logging.getLogger("resihp_ext.events").addHandler(kept)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    log = EventLog(folder, rank=0)
    for step in range(50):
        log.write(Event.ITERATION, step=step, padding="x" * 100)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    log.write(Event.JOB_END, step=50)
    pipe.send(kept.lines)


def test_a_full_disk_stops_no_training_and_is_said_once(tmp_path: Path) -> None:
    ours, theirs = FORK.Pipe(duplex=False)
    writer = FORK.Process(target=fill_disk, args=(tmp_path, theirs))
    writer.start()
    assert ours.poll(20)
    (line,) = ours.recv()
    assert str(tmp_path / "events.jsonl") in line
    assert "File too large" in line
    writer.join(20)
    assert [event["step"] for event in read_events(tmp_path / "events.jsonl")] == [
        *range(5),
        50,
    ], "the line torn by the full disk must not swallow the next one"


def test_every_event_is_explained_below_its_name() -> None:
    (body,) = [
        node.body
        for node in ast.parse(inspect.getsource(events)).body
        if isinstance(node, ast.ClassDef) and node.name == "Event"
    ]
    explained = {
        ast.unparse(name.targets[0])
        for name, text in pairwise(body)
        if isinstance(name, ast.Assign)
        and isinstance(text, ast.Expr)
        and len(ast.literal_eval(text.value).split()) >= 3
    }
    assert explained == {event.name for event in Event}
    assert all(event.value == event.name.lower() for event in Event)
