"""Who is hung, who is a victim, and when nothing is wrong; all by a clock of the test."""

from __future__ import annotations

import pytest

from resihp_ext.control.hang import HangRules, Verdict, Watch
from resihp_ext.control.messages import Progress

pytestmark = pytest.mark.unit

RULES = HangRules(floor_s=30.0, silence_s=5.0, stuck_floor_s=60.0)


class Node:
    """Workers whose progress a test makes, and a watch that looks four times a second."""

    def __init__(self, ranks: int = 2, rules: HangRules = RULES, *, settled: bool = True) -> None:
        self.now_s = 100.0
        self.watch = Watch(rules)
        self.ticks = dict.fromkeys(range(ranks), 0)
        self.phase = dict.fromkeys(range(ranks), "forward")
        self.waiting: set[int] = set()
        self.still: set[int] = set()
        self.silent: set[int] = set()
        self.stopped: set[int] = set()
        self.step = 6
        for rank in range(ranks):
            self.watch.begin(rank, self.now_s)
        if settled:
            self.run(0.25)
            self.step = 7
            self.run(0.25)

    def run(self, for_s: float) -> list[Verdict]:
        found = []
        for _ in range(round(for_s * 4)):
            self.now_s += 0.25
            for rank in self.ticks:
                self.ticks[rank] += rank not in self.still | self.silent
                if rank not in self.silent:
                    self.watch.heard(self.progress(rank), self.now_s)
            found += self.watch.look(self.now_s, self.stopped.__contains__)
        return found

    def progress(self, rank: int) -> Progress:
        return Progress(
            rank=rank,
            step=self.step,
            micro_batch=0,
            phase=self.phase[rank],
            waiting=rank in self.waiting,
            ticks=self.ticks[rank],
        )

    def step_lasting(self, for_s: float) -> list[Verdict]:
        """One tick of all workers that takes so long."""
        everyone, self.still = self.still, set(self.ticks)
        found = self.run(for_s)
        self.still = everyone
        return found + self.run(0.25)


def ranks(found: list[Verdict]) -> list[int]:
    return [verdict.rank for verdict in found]


def test_moving_workers_are_left_alone() -> None:
    assert not Node().run(4000.0)


def test_worker_that_stands_still_is_hung_and_its_victims_are_not() -> None:
    node = Node()
    node.run(1.0)
    node.still, node.waiting = {0, 1}, {1}
    assert not node.run(29.0)
    (verdict,) = node.run(2.0)
    assert verdict.rank == 0
    assert "step 7, phase forward" in verdict.cause


def test_silent_worker_is_found_soon() -> None:
    node = Node()
    node.run(1.0)
    node.silent = {1}
    assert not node.run(5.0)
    (verdict,) = node.run(0.5)
    assert (verdict.rank, "no sign of life" in verdict.cause) == (1, True)


def test_silent_worker_that_waited_is_found_too() -> None:
    node = Node()
    node.waiting = {1}
    node.run(1.0)
    node.silent = {1}
    assert ranks(node.run(6.0)) == [1]


def test_worker_that_never_spoke_is_not_silent_but_hung_in_the_end() -> None:
    """Imports and the first connection take as long as they take."""
    node = Node(settled=False)
    node.silent = {0}
    assert not node.run(1790.0)
    assert ranks(node.run(20.0)) == [0]


def test_worker_stopped_right_after_its_first_words_is_silent() -> None:
    node = Node()
    node.silent = node.stopped = {0}
    node.watch.begin(0, node.now_s, speaks=True)
    assert ranks(node.run(6.0)) == [0]


@pytest.mark.parametrize(
    ("phase", "for_s"),
    [("setup", 1700), ("recovery", 290), ("evaluation", 1700), ("checkpoint", 3500)],
)
def test_long_phases_raise_no_alarm(phase: str, for_s: float) -> None:
    node = Node()
    node.phase = dict.fromkeys(node.phase, phase)
    node.run(1.0)
    assert not node.step_lasting(for_s)


@pytest.mark.parametrize("before", ["setup", "recovery", "change"])
def test_first_step_may_take_long_and_does_not_count_as_usual(before: str) -> None:
    """Kernels are compiled in it, also after each change of the layout."""
    node = Node()
    for again in range(2):
        node.phase = dict.fromkeys(node.phase, before)
        node.run(1.0)
        node.phase = dict.fromkeys(node.phase, "forward")
        node.step += again
        node.run(0.25)
        assert not node.step_lasting(590.0)
        node.silent = {0}  # a compiler that keeps the interpreter
        assert not node.run(50.0)
        node.silent = set()
        node.run(0.25)
        node.step += 1
        node.run(0.5)
        assert node.watch.limit_s("forward") == 30.0
    node.still = {0}
    assert ranks(node.run(31.0)) == [0]


def test_first_step_is_bounded() -> None:
    node = Node(settled=False)
    node.run(1.0)
    node.still = {0}
    assert not node.run(599.0)
    assert ranks(node.run(2.0)) == [0]


def test_long_phases_are_bounded() -> None:
    node = Node()
    node.phase = dict.fromkeys(node.phase, "checkpoint")
    node.run(1.0)
    assert ranks(node.step_lasting(3610.0)) == [0, 1]


def test_library_call_may_keep_the_interpreter_in_a_patient_phase() -> None:
    node = Node()
    node.phase[0] = "checkpoint"
    node.run(1.0)
    node.silent = {0}
    assert not node.run(55.0)
    assert ranks(node.run(10.0)) == [0]


def test_stopped_process_gets_no_patience() -> None:
    node = Node()
    node.phase[0] = "checkpoint"
    node.run(1.0)
    node.silent, node.stopped = {0}, {0}
    (verdict,) = node.run(6.0)
    assert "is stopped" in verdict.cause


def test_limit_grows_with_what_was_healthy_in_that_phase_only() -> None:
    node = Node()
    node.run(1.0)
    node.step_lasting(20.0)
    assert node.watch.limit_s("forward") == pytest.approx(5 * 20.25)
    assert node.watch.limit_s("backward") == 30.0
    assert not node.step_lasting(95.0)
    node.still = {0}
    # Longest healthy tick by now: 95.25 s.
    assert not node.run(470.0)
    assert ranks(node.run(8.0)) == [0]


def test_second_incident_is_seen_again() -> None:
    node = Node()
    node.run(1.0)
    for _ in range(3):
        node.still = {0}
        assert ranks(node.run(31.0)) == [0]
        node.still = set()
        assert not node.run(10.0)
    # The time until a verdict was no healthy one.
    assert node.watch.limit_s("forward") == 30.0


def test_process_that_a_signal_did_not_end_is_named_again() -> None:
    node = Node()
    node.run(1.0)
    node.still = {0}
    assert ranks(node.run(92.0)) == [0, 0, 0]


def test_new_process_of_a_rank_begins_anew() -> None:
    node = Node()
    node.run(1.0)
    node.still = {0}
    assert not node.run(29.0)
    node.watch.begin(0, node.now_s)
    node.phase[0] = "setup"
    assert not node.run(600.0)


def test_dead_worker_is_not_watched() -> None:
    node = Node()
    node.run(1.0)
    node.watch.forget(0)
    node.silent = {0}
    assert not node.run(1000.0)


def test_worker_that_was_told_to_stop_waiting_has_to() -> None:
    node = Node()
    node.waiting, node.still = {0, 1}, {0, 1}
    assert not node.run(1000.0)
    for rank in (0, 1):
        node.watch.told(rank, node.now_s)
    node.still = {0}  # the other one is freed
    assert ranks(node.run(31.0)) == [0]


def test_gap_of_the_watcher_counts_against_nobody() -> None:
    """The whole node was stopped, or had no time for the agent."""
    node = Node()
    node.run(1.0)
    node.now_s += 3600.0
    assert not node.watch.look(node.now_s)
    node.silent = {0}
    assert not node.run(4.5)
    assert ranks(node.run(1.0)) == [0]


def test_all_who_wait_are_stuck_after_a_while() -> None:
    node = Node()
    node.run(1.0)
    node.waiting, node.still = {0, 1}, {0, 1}
    assert not node.run(60.0)
    assert node.watch.stuck_s(node.now_s) == 0.0
    node.run(1.0)
    assert node.watch.stuck_s(node.now_s) == pytest.approx(61.0, abs=0.5)
    node.still = {1}
    node.run(0.25)
    assert node.watch.stuck_s(node.now_s) == 0.0


def test_one_who_works_keeps_the_others_from_being_stuck() -> None:
    node = Node()
    node.phase = dict.fromkeys(node.phase, "checkpoint")
    node.waiting, node.still = {0}, {0, 1}
    node.run(1000.0)
    assert node.watch.stuck_s(node.now_s) == 0.0


def test_node_without_workers_is_not_stuck() -> None:
    assert Node(0).watch.stuck_s(1e9) == 0.0


def test_usual_long_waits_are_not_stuck() -> None:
    node = Node()
    node.run(1.0)
    node.waiting = {0, 1}
    node.run(0.25)
    node.step_lasting(50.0)
    node.still = {0, 1}
    node.run(240.0)
    assert node.watch.stuck_s(node.now_s) == 0.0
    node.run(20.0)
    assert node.watch.stuck_s(node.now_s) > 250.0
