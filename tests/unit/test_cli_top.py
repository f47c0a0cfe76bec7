"""``resihp top``: frames of a recorded status, the view, and what ends it."""

from __future__ import annotations

import io
import json
import os
import pty
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_cli_job import left_over

from megatron.resilience.cli.main import main
from resihp_ext.commands import top
from resihp_ext.commands.frame import Row, fitted, frame, plain, rank_rows
from resihp_ext.commands.job import JobOverError, UnreachableError
from resihp_ext.commands.look import Look, Watcher, latest_events, latest_receipts
from resihp_ext.commands.picture import as_text
from resihp_ext.control.ask import Address
from resihp_ext.plan.plan import Device, Instance, Plan, Replica, Stage

pytestmark = pytest.mark.unit

RECORDED = Path(__file__).parents[1] / "golden" / "top" / "status.json"
WIDTH = 110


def status() -> dict[str, Any]:
    """Rank 3 gets a new process, node n2 cannot be spared, n3 is lost."""
    return dict(json.loads(RECORDED.read_text()))


def plan() -> Plan:
    """Ranks 0 and 1 share a stage; 5 is slow and has fewer layers; 2 stands by."""
    stages = (
        Stage(ranks=(0, 1), layers=(0, 4)),
        Stage(ranks=(4,), layers=(4, 7)),
        Stage(ranks=(5,), layers=(7, 8)),
    )
    p_of = {5: 0.52, 3: 0.0, 6: 0.0, 7: 0.0}
    return Plan(
        version=2,
        num_layers=8,
        devices=tuple(Device(rank=k, node=k // 2, p=p_of.get(k, 1.0)) for k in range(8)),
        replicas=(Replica(stages=stages),),
        routes=(tuple(Instance(replica=0, stage=k) for k in range(3)),) * 4,
    ).validated()


def event(name: str, step: int, at_s: float, **fields: Any) -> dict[str, Any]:
    return {"time_s": at_s, "rank": 0, "step": step, "event": name, **fields}


def events() -> list[dict[str, Any]]:
    steps = [
        event("iteration", step, 1000.0 + step / 2, losses={"lm loss": 5.0 + 1 / step})
        for step in range(1, 32)
    ]
    change = event("transition", 29, 1014.2, from_version=1, to_version=2, reason="n3 is lost")
    layout = {"tp": 2, "pp": 2, "dp": 2}
    return [event("job_start", 0, 1000.0, layout=layout), *steps[:28], change, *steps[28:]]


RECEIPT = {
    "step": 28,
    "from_version": 1,
    "to_version": 2,
    "reason": "ranks 6, 7 are lost with node n3: no beat",
    "total_s": 0.4231,
    "moved_bytes": 3 * 2**20,
}


def look(**changes: Any) -> Look:
    known = Look(
        status=status(),
        at_s=1016.0,
        host="n0",
        place="10.0.0.1:4711",
        plan=plan(),
        events=events(),
        receipts={1: RECEIPT},
    )
    return replace(known, **changes)


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


# Frames


def test_the_frame_of_a_recorded_status(golden: Callable[[str, str], None]) -> None:
    golden("top/frame.txt", plain(frame(look(), width=WIDTH)) + "\n")


def test_a_measured_speed_is_shown_where_the_plan_knows_none() -> None:
    found = {row.cells[0]: row for row in rank_rows(look(status=status() | {"speeds": {"0": 0.7}}))}
    assert (found["0"].cells[-1], found["0"].style) == ("0.70", "yellow")
    assert found["1"].cells[-1] == "1.00"


def test_colours_say_what_is_wrong() -> None:
    styles = {row.cells[0]: row.style for row in rank_rows(look())}
    assert styles == {
        "0-1": "",
        "2": "",
        "3": "yellow",
        "4": "",
        "5": "yellow",
        "6-7": "bold red",
    }
    lines = [line for line in frame(look(), width=WIDTH)[:11] if line.plain]
    by_line = {line.plain.split()[0]: str(line.style) for line in lines}
    assert (by_line["n0"], by_line["n2"], by_line["n3"]) == ("", "yellow", "bold red")


def test_what_is_not_known_is_left_out() -> None:
    text = plain(frame(look(plan=None, events=(), receipts={}), width=WIDTH))
    assert "0-1    n0    member     -" in text
    assert "events" not in text
    assert "receipts" not in text
    older = {key: value for key, value in status().items() if key not in ("plan", "standby")}
    assert "running: step 31" in plain(frame(look(status=older), width=WIDTH))


def test_an_end_and_a_recovery_are_said() -> None:
    over = status() | {"phase": "stopping", "cause": "too few devices", "exit_code": 75}
    head = frame(look(status=over), width=WIDTH)[:3]
    assert [line.plain[:44] for line in head] == [
        "stopping: step 31, epoch 3, 5 of 8 ranks tak",
        "under way: ranks 4, 5 drained",
        "ends with exit code 75: too few devices",
    ]


def test_nothing_that_a_stranger_says_moves_the_cursor() -> None:
    evil = "x\x1b[2J\nrunning"
    bad = status() | {"refused": evil, "cause": evil}
    receipt = RECEIPT | {"reason": evil, "total_s": evil, "moved_bytes": None}
    strange = [
        event("transition", 1, 1.0, reason=evil),
        event("iteration", 2, float("nan"), losses={evil: evil}),
        event("job_start", 0, 1.0, layout=evil),
    ]
    for place in range(1, 4):
        lines = frame(look(status=bad, receipts={0: receipt}, events=strange[:place]), width=WIDTH)
        assert not [line for line in lines if not line.plain.isprintable()]


@pytest.mark.parametrize("size", [(40, 12), (80, 24), (110, 30), (200, 100), (1, 1)])
def test_a_frame_fits_into_the_terminal(size: tuple[int, int]) -> None:
    width, height = size
    lines = frame(look(), width=width, height=height)
    assert len(lines) <= height
    assert all(line.cell_len <= width for line in lines)


def large(nodes: int = 128) -> Look:
    """All is well, but for one node and one rank far down."""
    each = {"address": "a", "alive": True, "drained": False, "kept": False, "quarantined": False}
    found: dict[str, Any] = {
        f"n{n:03d}": each
        | {"ranks": {str(n * 8 + k): {"state": "member", "cause": ""} for k in range(8)}}
        for n in range(nodes)
    }
    found["n100"]["ranks"]["801"] = {"state": "lost", "cause": "was killed"}
    found["n090"] = found["n090"] | {"drained": True}
    return look(status=status() | {"nodes": found, "heard_ago_s": {}}, plan=None)


def test_in_a_large_job_what_is_wrong_stays_in_sight() -> None:
    lines = [line.plain for line in frame(large(), width=120, height=40)]
    assert len(lines) <= 40
    text = "\n".join(lines)
    assert "n090" in text
    assert "801       n100  lost" in text
    assert "more nodes, all well" in text
    assert "more groups of ranks, all well" in text
    assert "events" in text


def test_left_out_rows_that_are_not_well_are_not_called_well() -> None:
    rows = [Row((str(k),), "red") for k in range(5)]
    assert fitted(rows, 5, "nodes") == rows
    assert [row.cells[0] for row in fitted(rows, 3, "nodes")] == ["0", "1", "... 3 more nodes"]
    mixed = [Row(("a",)), Row(("b",), "red"), Row(("c",)), Row(("d",), "red")]
    assert [row.cells[0] for row in fitted(mixed, 3, "nodes")] == [
        "b",
        "d",
        "... 2 more nodes, all well",
    ]


# What is read


def folder(path: Path) -> Path:
    for name in ("plans", "receipts"):
        (path / name).mkdir()
    (path / "plans" / "002.json").write_text(plan().to_json())
    for number in range(7):
        receipt = RECEIPT | {"step": number}
        (path / "receipts" / f"{number:03d}.json").write_text(json.dumps(receipt))
    (path / "receipts" / "006.json").write_text("{")
    told = [*events()[:5], event("micro_batches", 5, 1.0), *events()]
    (path / "events.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))
    return path


class Played:
    """Stands where ``RunningJob`` does: only the network is left out."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.now = directory, status()
        self.where = Address(address="10.0.0.1", port=4711, token_file="t", node="n0")

    def status(self) -> dict[str, Any]:
        return self.now


def test_the_directory_is_read(tmp_path: Path) -> None:
    job = Played(folder(tmp_path))
    watcher = Watcher(job)  # type: ignore[arg-type]
    found = watcher.look()
    assert (found.host, found.place, found.plan) == ("n0", "10.0.0.1:4711", plan())
    assert found.events == events()  # not those of the job before
    assert [(n, one["step"]) for n, one in found.receipts.items()] == [(n, n) for n in range(2, 6)]
    (tmp_path / "plans" / "003.json").write_text(replace(plan(), version=3).to_json())
    job.now = status() | {"plan": 3}
    after = watcher.look().plan
    assert after is not None
    assert after.version == 3
    job.now = status() | {"plan": None}
    assert watcher.look().plan is None


def test_an_empty_directory_is_no_obstacle(tmp_path: Path) -> None:
    assert latest_events(tmp_path) == []
    assert list(latest_receipts(tmp_path)) == []


# The view


def terminal() -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=100, height=30, highlight=False, markup=False
    )


def shown(out: Console) -> str:
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue()


def looks(*found: Look | Exception) -> Callable[[], Look]:
    rest = list(found)

    def one() -> Look:
        now = rest.pop(0) if len(rest) > 1 else rest[0]
        if isinstance(now, Exception):
            raise now
        return now

    return one


def watch(out: Console, *found: Look | Exception, most: int = 400) -> None:
    """Until a look fails; q is pressed if none does."""
    poller = top.Poller(looks(*found), every_s=0.01)
    left = iter(range(most))

    def pressed(wait_s: float) -> str:
        time.sleep(0.005)
        return "" if next(left, None) is not None else "q"

    top.view(poller.first(), poller, out, pressed)


def test_the_view_follows_the_job_until_a_key() -> None:
    out = terminal()
    later = look(status=status() | {"step": 32})
    watch(out, look(), later, most=40)
    assert "running: step 31," in shown(out)
    assert "running: step 32," in shown(out)
    assert shown(out).endswith("\x1b[?25h\x1b[?1049l")  # the cursor, and the screen of before


def test_a_coordinator_that_is_lost_ends_the_view() -> None:
    out = terminal()
    with pytest.raises(UnreachableError, match="no coordinator answers"):
        watch(out, look(), UnreachableError("no coordinator answers"))
    assert shown(out).endswith("\x1b[?25h\x1b[?1049l")


def test_a_job_that_has_said_its_end_is_over_whatever_comes() -> None:
    over = look(status=status() | {"phase": "ended", "cause": "too few devices"})
    with pytest.raises(JobOverError, match=r"^the job is over: too few devices$"):
        watch(terminal(), over, UnreachableError("gone"))
    with pytest.raises(ZeroDivisionError):  # a mistake of ours stays one
        watch(terminal(), over, ZeroDivisionError())


def test_keys_are_read_one_by_one_and_the_terminal_is_left_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import termios

    ours, theirs = pty.openpty()
    with open(theirs) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        before = termios.tcgetattr(theirs)
        with top.keys() as pressed:
            assert pressed(0.0) == ""
            os.write(ours, b"q")
            assert pressed(5.0) == "q"
        assert termios.tcgetattr(theirs) == before
    os.close(ours)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with top.keys() as pressed:
        assert pressed(0.0) == ""


# The command


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    exit_code = main(["top", *words])
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return exit_code, err


@pytest.mark.parametrize("flags", [(), ("--once",)])
def test_what_is_no_job_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: tuple[str, ...],
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, as far as rich is concerned
    code, line = refused(capsys, str(tmp_path), *flags)
    assert (code, "no job runs with this --resilience-dir" in line) == (2, True)
    (tmp_path / "events.jsonl").touch()
    code, line = refused(capsys, str(tmp_path), *flags)
    assert (code, "the job is over" in line) == (3, True)
    code, line = refused(capsys, str(left_over(tmp_path)), *flags)
    assert (code, "no coordinator answers at 127.0.0.1:" in line) == (1, True)


def test_without_a_terminal_only_one_frame_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, line = refused(capsys, str(left_over(tmp_path)))
    assert (code, "--once prints one frame anywhere" in line) == (2, True)


@pytest.mark.parametrize(("phase", "code"), [("running", 0), ("recovering", 0), ("ended", 3)])
def test_one_frame(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    phase: str,
    code: int,
) -> None:
    monkeypatch.setattr(
        top.RunningJob, "status", lambda _self: status() | {"phase": phase}, raising=True
    )
    left_over(folder(tmp_path))
    assert main(["top", "--once", str(tmp_path)]) == code
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"{phase}: step 31, epoch 3, 5 of 8 ranks take part")
    assert "replica 0 stage 2" in out


def test_the_picture_of_status_is_the_same_as_before() -> None:
    """Both verbs draw with the same hand."""
    lines = as_text(status(), host="n0", place="10.0.0.1:4711").splitlines()
    head = [line.plain.rstrip() for line in frame(look(), width=200)]
    nodes = lines[lines.index("") + 1 :]
    assert nodes[:5] == head[head.index("") + 1 :][:5]
