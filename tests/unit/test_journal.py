"""Receipts of changes: who writes them, what becomes part of them, and when."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.resilience.executor.transition import Phases
from megatron.resilience.faults.claims import as_text
from megatron.resilience.recovery.journal import Journal, free_receipt, write_whole
from megatron.resilience.recovery.notes import Notes
from resihp_ext.control import messages as say
from resihp_ext.events import Event, EventLog, read_events
from resihp_ext.faults.fault import Fault, Kind
from resihp_ext.plan.plan import Device, Plan, uniform_plan

pytestmark = pytest.mark.unit

LOSS = say.Loss(rank=0, cause="was killed by signal 9 (SIGKILL)", time_s=12.5)


def plan(version: int = 1) -> Plan:
    whole = uniform_plan(
        num_layers=4, tp=1, pp=2, dp=1, micro_batches=2, virtual=1, devices_per_node=2
    )
    return Plan.from_json(json.dumps(json.loads(whole.to_json()) | {"version": version}))


def receipt() -> dict[str, Any]:
    return {
        "step": 7,
        "from_version": 0,
        "to_version": 1,
        "total_s": 0.5,
        "moved_bytes": 2**20,
        "ranks_with_new_modules": [1],
        "reason": "rank 0 is lost",
        "phases_s": {"move": 0.5},
        "redone_steps": 0,
    }


def view(*members: int, loss: say.Loss = LOSS) -> say.View:
    return say.View(epoch=1, members=members, losses=(loss,))


def kept(folder: Path, number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "receipts" / f"{number:03d}.json").read_text())
    return found


def test_a_recovery_is_one_receipt_that_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = EventLog(tmp_path, rank=1)
    journal, phases = Journal(tmp_path, log, 1), Phases()
    assert not journal.writes
    journal.lost(view(1, 2), heard_s=time.perf_counter(), phases=phases)
    with phases("release"):
        pass
    assert journal.writes, "the lowest of those who are left"
    before_s = time.time()
    journal.changed(plan(), receipt())
    first = kept(tmp_path)
    loss = {"rank": 0, "cause": "was killed by signal 9 (SIGKILL)", "time_s": 12.5}
    assert first["losses"] == [loss]
    assert before_s <= first["resumed_s"] <= time.time()
    assert "repeat" not in first["phases_s"]
    time.sleep(0.05)
    journal.repeated(0.01, ends=False)
    journal.repeated(0.5, ends=True)
    last = kept(tmp_path)
    assert 0.03 < last["phases_s"].pop("resume") < 5.0, "between the last phase and the repeat"
    assert last["phases_s"] == {"move": 0.5, "repeat": 0.51}
    last = kept(tmp_path)
    assert last["redone_steps"] >= 1
    assert last["repeated_s"] >= last["resumed_s"]
    journal.repeated(9.0, ends=True)
    assert kept(tmp_path) == last, "what comes after is no part of this failure"
    log.close()
    (event,) = read_events(log.path)
    assert (event["event"], event["step"], event["receipt"]) == (Event.TRANSITION, 7, 0)
    assert event["reason"] == "rank 0 is lost"
    assert Plan.from_json((tmp_path / "plans" / "001.json").read_text()) == plan()
    assert "step 7: plan 0 to 1 in 0.50 s, 1.0 MiB moved" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.part"))


def test_only_the_lowest_member_writes(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None, 2)
    journal.lost(view(1, 2), heard_s=0.0, phases=Phases())
    journal.changed(plan(), receipt())
    journal.repeated(0.5, ends=True)
    assert not journal.writes
    assert not list(tmp_path.iterdir())


def test_a_change_without_a_loss_ends_with_itself(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None, 0)
    journal.changed(plan(), receipt())
    whole = kept(tmp_path)
    assert whole["losses"] == []
    journal.repeated(0.5, ends=True)
    assert kept(tmp_path) == whole


def test_a_later_failure_adds_nothing_to_an_earlier_receipt(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None, 1)
    journal.lost(view(1, 2), heard_s=0.0, phases=Phases())
    journal.changed(plan(), receipt())
    journal.repeated(0.5, ends=False)
    whole = kept(tmp_path)
    journal.lost(view(0, 1), heard_s=0.0, phases=Phases())
    journal.changed(plan(2), receipt())
    journal.repeated(0.5, ends=True)
    assert not journal.writes, "rank 0 is back, and writes"
    assert kept(tmp_path) == whole


def test_losses_belong_to_one_receipt_and_numbers_go_on(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None, 1)
    journal.lost(view(1, 2), heard_s=0.0, phases=Phases())
    journal.changed(plan(), receipt())
    journal.changed(plan(2), receipt())
    assert [len(kept(tmp_path, number)["losses"]) for number in (0, 1)] == [1, 0]
    assert free_receipt(tmp_path).name == "002.json", "also for a job that is resumed"
    (tmp_path / "receipts" / "000.json").unlink()
    assert free_receipt(tmp_path).name == "002.json"


def test_the_time_until_a_loss_was_heard_of_counts_from_when_it_was_seen(tmp_path: Path) -> None:
    seen_s, heard_s = time.time() - 2.0, time.perf_counter() - 0.5
    phases = Phases()
    seen = say.Loss(rank=0, cause="is silent", time_s=seen_s)
    journal = Journal(tmp_path, None, 1)
    journal.lost(view(1, loss=seen), heard_s=heard_s, phases=phases)
    assert phases.seconds["detect"] == pytest.approx(1.5, abs=0.1)
    assert phases.seconds["abort"] == pytest.approx(0.5, abs=0.1)
    first = dict(phases.seconds)
    journal.lost(view(1, loss=seen), heard_s=time.perf_counter(), phases=phases)
    assert phases.seconds == first, "a second loss meanwhile is part of the same recovery"


def test_without_a_time_nothing_is_said_about_it(tmp_path: Path) -> None:
    phases = Phases()
    unknown = say.Loss(rank=0, cause="is silent")
    Journal(tmp_path, None, 1).lost(view(1, loss=unknown), heard_s=0.0, phases=phases)
    assert phases.seconds == {}


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "000.json"
    write_whole(path, "one")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    assert path.read_text() == "one\n"


def strike(folder: Path, name: str, rank: int, time_s: float, delay_s: float = 0.0) -> None:
    fault = Fault(at_step=7, rank=rank, kind=Kind.KILL, delay_s=delay_s)
    (folder / "faults").mkdir(exist_ok=True)
    told = {"fault": as_text(fault), "time_s": time_s, "rank": rank, "phase": "vote"}
    (folder / "faults" / f"{name}.done").write_text(json.dumps(told))


def test_a_receipt_names_the_fault_on_purpose_and_when_it_struck(tmp_path: Path) -> None:
    journal = Journal(tmp_path, None, 1)
    now_s = time.time()
    strike(tmp_path, "000", 0, now_s - 50)  # before this rank was there: an older loss
    strike(tmp_path, "001", 0, now_s + 1, delay_s=2)
    strike(tmp_path, "002", 2, now_s + 4)  # somebody else
    strike(tmp_path, "003", 0, now_s + 6)  # later than the loss
    (tmp_path / "faults" / "004.done").write_text("{")
    loss = say.Loss(rank=0, cause="was killed", time_s=now_s + 5)
    journal.lost(view(1, 2, loss=loss), heard_s=time.perf_counter(), phases=Phases())
    journal.changed(plan(), receipt())
    found = kept(tmp_path)
    assert found["fault"]["name"] == "001"
    assert found["fault"]["time_s"] == pytest.approx(now_s + 3, abs=1e-3), "behind its delay"
    assert found["phases_s"]["notice"] == pytest.approx(2.0, abs=1e-3)
    again = say.Loss(rank=0, cause="was killed", time_s=now_s + 5.5)
    journal.lost(view(1, 2, loss=again), heard_s=time.perf_counter(), phases=Phases())
    journal.changed(plan(2), receipt())
    assert "fault" not in kept(tmp_path, 1), "a fault has one loss"
    assert "notice" not in kept(tmp_path, 1)["phases_s"]


def test_a_plan_for_slow_devices_has_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal(tmp_path, None, 0)
    journal.begins(plan(0))
    journal.changed(plan(1), receipt())
    assert "from step" not in capsys.readouterr().out
    slow = replace(plan(2), devices=(Device(rank=0, node=0, p=0.5), *plan().devices[1:]))
    journal.changed(slow, receipt())
    assert "resihp: from step 8 plan 2 instead of 1" in (said := capsys.readouterr().out)
    assert "rank 0 at 0.50 of full speed" in said
    journal.changed(replace(slow, version=3), receipt())
    assert "from step" not in capsys.readouterr().out
    journal.changed(plan(4), receipt())
    assert "rank 0 at 1.00 of full speed" in capsys.readouterr().out


def test_decisions_of_the_coordinator_become_events(tmp_path: Path) -> None:
    heard: list[say.Message] = []
    log = EventLog(tmp_path, rank=0)
    notes = Notes(log, heard.append)
    decision = say.Weighed(step=9, verdict="wait", why="yet", gain=0.5, lost_s=1.0, cost_s=2.0)
    notes(decision)
    notes(say.Withdraw(number=1))
    assert heard == [say.Withdraw(number=1)]
    log.close()
    notes(decision)  # the job has just ended
    Notes(None, heard.append)(decision)
    (event,) = read_events(log.path)
    assert (
        event.items()
        >= {
            "event": "weighed",
            "step": 9,
            "verdict": "wait",
            "why": "yet",
            "gain": 0.5,
            "lost_s": 1.0,
            "cost_s": 2.0,
        }.items()
    )


@pytest.mark.parametrize("rank", [1, 2], ids=["writes", "does not"])
def test_every_survivor_knows_what_a_recovery_took(tmp_path: Path, rank: int) -> None:
    journal = Journal(tmp_path, None, rank)
    journal.changed(plan(1), receipt())
    assert journal.recovered_s is None, "a change without a loss"
    loss = say.Loss(rank=0, cause="was killed", time_s=time.time() - 2.0)
    journal.lost(view(1, 2, loss=loss), heard_s=time.perf_counter(), phases=Phases())
    journal.changed(plan(2), receipt())
    assert journal.recovered_s == pytest.approx(2.0, abs=0.5)
