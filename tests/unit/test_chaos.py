"""What the chaos benchmark calls exact, and the records that it reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from megatron.resilience.iteration_records import IterationRecords
from megatron.resilience.patches.training_log import Iteration
from megatron.resilience.testing.chaos.ledger import Ledger, compare, differences, read_ledger
from megatron.resilience.testing.chaos.restart import Watch
from megatron.resilience.testing.chaos.scenario import RANKS, STEPS, Scenario, scenario
from resihp_ext.events import Event, EventLog, read_events
from resihp_ext.faults.fault import Fault, Kind, Phase

pytestmark = pytest.mark.unit

SEGMENTS = [[700, 324], [1024], [512, 512], [1000, 24]]


def events(folder: Path, rows: Iterable[dict[str, Any]]) -> Ledger:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"time_s": float(place), **row}) for place, row in enumerate(rows)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return read_ledger(folder)


def samples(step: int, *numbers: int, plan: int = 0, replica: int = 0) -> dict[str, Any]:
    batches = [{"tokens": 1024, "segments": SEGMENTS[number]} for number in numbers]
    return {
        "event": "micro_batches",
        "step": step,
        "plan": plan,
        "replica": replica,
        "micro_batches": batches,
    }


def done(step: int, loss: float = 2.0) -> dict[str, Any]:
    return {"event": "iteration", "step": step, "losses": {"lm loss": loss}, "grad_norm": 1.0}


def changed(step: int) -> dict[str, Any]:
    return {"event": "transition", "step": step}


@pytest.fixture
def reference(tmp_path: Path) -> Ledger:
    rows = []
    for step in (1, 2):
        rows += [samples(step, 0, 1), samples(step, 2, 3, replica=1), done(step)]
    return events(tmp_path / "reference", rows)


def test_a_repeated_step_counts_what_was_done_under_the_latest_plan(
    tmp_path: Path, reference: Ledger
) -> None:
    rows = [samples(1, 0, 1), samples(1, 2, 3, replica=1), done(1)]
    rows += [samples(2, 0, 1), changed(1)]
    rows += [samples(2, 1, plan=1), samples(2, 3, 2, 0, plan=1, replica=1), done(2)]
    assert compare(events(tmp_path, rows), reference, 2) == []


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([samples(2, 0, 1), samples(2, 2, 2, replica=1), done(2)], "step 2: lacks samples"),
        ([samples(2, 0, 1), done(2)], "step 2: lacks samples"),
        ([samples(2, 0, 1), samples(2, 2, 3, replica=1)], "no iteration of steps [2]"),
        ([done(2)], "no micro_batches of steps [2]"),
        ([*(samples(2, 0, 1), samples(2, 2, 3, replica=1)), done(2), done(2)], "done twice"),
        ([*(samples(2, 0, 1), samples(2, 2, 3, replica=1)), done(2), done(3)], "of steps [3]"),
        (
            [samples(2, 0, 1), samples(2, 2, 3, replica=1), done(2), changed(2), done(2)],
            "done twice",
        ),
    ],
)
def test_what_is_not_exact_is_named(
    tmp_path: Path, reference: Ledger, rows: list[dict[str, Any]], named: str
) -> None:
    first = [samples(1, 0, 1), samples(1, 2, 3, replica=1), done(1)]
    problems = compare(events(tmp_path, [*first, *rows]), reference, 2)
    assert any(named in problem for problem in problems), problems


def test_a_job_that_has_gone_back_may_do_a_step_again(tmp_path: Path, reference: Ledger) -> None:
    rows = []
    for plan in (0, 1):
        rows += [changed(0)] if plan else []
        for step in (1, 2):
            rows += [samples(step, 0, 1, plan=plan)]
            rows += [samples(step, 2, 3, plan=plan, replica=1), done(step)]
    assert compare(events(tmp_path, rows), reference, 2) == []


def test_differences_are_relative() -> None:
    assert differences({1: 2.0, 2: 4.4, 3: 9.0}, {1: 2.0, 2: 4.0}) == pytest.approx(0.1)


def test_a_run_is_drawn_from_its_number_and_leaves_every_shard() -> None:
    for number in range(60):
        drawn = [
            scenario(number, 7, kinds=list(Kind), separate=True, nodes_every=4) for _ in range(2)
        ]
        assert drawn[0] == drawn[1]
        run = drawn[0]
        assert run.nodes == (2 if number % 4 == 3 else 1)
        assert all(1 < fault.at_step < STEPS for fault in run.faults)
        left = set(range(RANKS)) - run.hit
        # Megatron's order: replicas of a shard are two apart; by nodes: four apart.
        apart = 4 if run.nodes == 2 else 2
        shards = {rank % 4 if run.nodes == 2 else (rank // 4, rank % apart) for rank in left}
        assert len(shards) == 4, run.faults


def test_ranks_of_a_node_that_is_hit_may_change() -> None:
    fault = Fault(at_step=3, phase=Phase.SYNC, kind=Kind.NODE, node="n1")
    run = Scenario(number=3, seed=3, nodes=2, faults=(fault,))
    assert run.hit == {4, 5, 6, 7}


def iteration(step: int) -> Iteration:
    return Iteration(
        step=step, losses={"lm loss": 2.0}, grad_norm=1.0, learning_rate=0.1, skipped=False
    )


@pytest.fixture
def ranks(tmp_path: Path) -> Iterable[list[IterationRecords]]:
    logs = [EventLog(tmp_path, rank=rank) for rank in range(3)]
    yield [IterationRecords(log, rank) for rank, log in enumerate(logs)]
    for log in logs:
        log.close()


def written(folder: Path) -> list[tuple[int, int]]:
    found = read_events(folder / "events.jsonl")
    return [(one["rank"], one["step"]) for one in found if one["event"] == Event.ITERATION]


def test_the_last_member_records_a_step(tmp_path: Path, ranks: list[IterationRecords]) -> None:
    for one in ranks:
        one.done(iteration(1), (0, 1, 2))
    assert written(tmp_path) == [(2, 1)]


@pytest.mark.parametrize("had_written", [True, False])
def test_the_record_of_a_lost_writer_is_made_up_for(
    tmp_path: Path, ranks: list[IterationRecords], had_written: bool
) -> None:
    for one in ranks if had_written else ranks[:2]:
        one.done(iteration(1), (0, 1, 2))
    for one in ranks[:2]:
        one.done(iteration(2), (0, 1))
    assert written(tmp_path) == [(2 if had_written else 1, 1), (1, 2)]


def test_the_last_step_is_made_up_for_at_the_end(
    tmp_path: Path, ranks: list[IterationRecords]
) -> None:
    ranks[1].done(iteration(5), (0, 1, 2))
    ranks[1].complete((0, 1))
    ranks[1].complete((0, 1))
    assert written(tmp_path) == [(1, 5)]


def test_the_time_of_a_restart_begins_with_the_kill(tmp_path: Path) -> None:
    log = tmp_path / "log"
    text = "".join(f" [2026-01-01 00:00:00.0] iteration {step:8}/      24 | x\n" for step in (8, 9))
    log.write_text(text + " [2026-01-01 00:00:00.0] iteration       10/")
    watch = Watch(log, kill_after=9)
    watch.look()
    assert watch.is_due
    assert sorted(watch.seen_s) == [8, 9], "a line that is not whole yet is not there"
    watch.killed_s = 1.0
    log.write_text(log.read_text() + "      24 | x\n")
    watch.look()
    assert watch.repeated_s > 1.0
