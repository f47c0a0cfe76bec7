"""Traces of measured steps: written through the job's own log and clock, checked slice by slice."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from megatron.resilience.timing.clock import StepClock
from resihp_ext.detector.timed import RankStep
from resihp_ext.events import Event, EventLog
from resihp_ext.plan.action import RECEIVES, Kind

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
STEPS, MICRO_BATCHES = 3, 4
AT_S = 1.7e9
Slice = dict[str, Any]


def record(folder: Path, rank: int, back_s: float = 0.0) -> None:
    """Some steps by the clock of a real rank, with a receive and a wait for partners in each.

    Args:
        back_s: By how much the host's wall clock is set back before the last step.
    """
    now = [0.0]
    wall_back = [0.0]
    clock = StepClock(rank, now_s=lambda: now[0], wall_s=lambda: AT_S + now[0] - wall_back[0])
    log = EventLog(folder, rank=rank)

    def write(times: RankStep) -> None:
        log.write(Event.STEP_TIMES, step=times.step, times=msgspec.to_builtins(times))

    clock.on_step.append(write)
    for step in range(1, STEPS + 1):
        wall_back[0] = back_s if step == STEPS else 0.0
        clock.restart(step, 0)
        for number in range(MICRO_BATCHES):
            for kind in (Kind.RECV_FORWARD, Kind.FORWARD, Kind.BACKWARD, Kind.SEND_BACKWARD):
                clock.begin(kind, number, number % 2)
                now[0] += 1 / 3e3
                if kind is Kind.FORWARD:
                    with clock.waiting():
                        now[0] += 1 / 7e3
        for kind in (Kind.SYNC, Kind.STEP):
            clock.begin(kind)
            now[0] += 0.001
        clock.finish()
    log.close()


def trace(folder: Path, out: Path) -> list[Slice]:
    main = runpy.run_path(str(ROOT / "tools" / "trace.py"))["main"]
    assert main([str(folder), "-o", str(out)]) == 0
    found: list[Slice] = json.loads(out.read_text())["traceEvents"]
    return found


def nested(slices: Iterable[Slice]) -> int:
    """Walks a track as a viewer does; gives the greatest depth.

    Raises:
        AssertionError: two slices overlap without one being inside the other.
    """
    stack: list[int] = []
    deepest = 0
    for one in slices:
        begin_ns, end_ns = round(one["ts"] * 1e3), round((one["ts"] + one["dur"]) * 1e3)
        while stack and stack[-1] <= begin_ns:
            stack.pop()
        assert not stack or end_ns <= stack[-1], one
        stack.append(end_ns)
        deepest = max(deepest, len(stack))
    return deepest


@pytest.mark.parametrize("back_s", [0.0, 0.004], ids=["clock", "clock set back"])
def test_slices_nest_and_never_overlap(tmp_path: Path, back_s: float) -> None:
    for rank in (0, 2):
        record(tmp_path, rank, back_s)
    found = trace(tmp_path, tmp_path / "trace.json")
    for rank in (0, 2):
        track = [one for one in found if one["ph"] == "X" and one["pid"] == rank]
        assert nested(track) == 2
        actions = [one for one in track if one["name"] != "wait"]
        assert len(actions) == STEPS * (4 * MICRO_BATCHES + 2)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(actions))
        assert [one["name"] for one in actions[:8]] == [
            *("RECV F0", "F0", "B0", "SEND B0"),
            *("RECV F1#1", "F1#1", "B1#1", "SEND B1#1"),
        ]
        assert actions[-1]["name"] == "STEP"
        assert actions[1]["args"]["step"] == 1
        assert actions[1]["args"]["wait_ms"] == pytest.approx(1 / 7)
        waits = [one for one in track if one["name"] == "wait"]
        assert len(waits) == 2 * STEPS * MICRO_BATCHES, "in receives and forward passes"
        assert waits[1]["dur"] == pytest.approx(1e3 / 7, abs=0.002)
    names = [one["args"]["name"] for one in found if one["name"] == "process_name"]
    assert names == ["rank 0", "rank 2"]
    assert len(RECEIVES) == 2


def test_an_overlap_would_be_seen() -> None:
    slices = [{"ts": 0.0, "dur": 2.0}, {"ts": 1.0, "dur": 2.0}]
    with pytest.raises(AssertionError):
        nested(slices)


def test_changes_of_the_layout_are_instants(tmp_path: Path) -> None:
    record(tmp_path, 0)
    log = EventLog(tmp_path, rank=0)
    log.write(Event.TRANSITION, step=2, receipt=0, from_version=0, to_version=3, reason="died")
    log.close()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "step_times", "times": [0, "x"]}\n{"event": "step_ti')
    (instant,) = [one for one in trace(tmp_path, tmp_path / "t.json") if one["ph"] == "i"]
    assert (instant["name"], instant["s"]) == ("plan 0 to 3", "g")
    assert instant["args"]["reason"] == "died"


@pytest.mark.parametrize(
    ("prepare", "line"),
    [
        (lambda _folder: None, "No such file or directory; give the --resilience-dir of a run"),
        (lambda folder: EventLog(folder, rank=0).close(), "no times of steps; run the job with"),
        (lambda folder: _binary(folder), "is no text"),
        (lambda folder: record(folder, 0), "Is a directory"),
    ],
    ids=["missing", "no timings", "binary", "out"],
)
def test_what_cannot_be_drawn_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: Any, line: str
) -> None:
    prepare(tmp_path / "run")
    main = runpy.run_path(str(ROOT / "tools" / "trace.py"))["main"]
    assert main([str(tmp_path / "run"), "-o", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert (said.count("\n"), line in said) == (1, True), said


def _binary(folder: Path) -> None:
    folder.mkdir()
    (folder / "events.jsonl").write_bytes(b"\xff\xfe")
