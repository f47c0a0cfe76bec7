"""Between two steps: when a job is armed, and when a proposal is taken up by everyone at once.

The change itself is collective and has tests of its own with real ranks; here it is only recorded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core import num_microbatches_calculator as calculator
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron.resilience.executor.world import World
from megatron.resilience.recovery import boundary as boundary_module
from megatron.resilience.recovery import loop_state as loop_module
from megatron.resilience.recovery.abort import Abort
from megatron.resilience.recovery.boundary import STEPS_AHEAD, Boundary
from megatron.resilience.recovery.loop_state import LoopState
from megatron.resilience.recovery.member import Member
from resihp_ext.control import messages as say
from resihp_ext.plan.plan import Plan, uniform_plan

pytestmark = pytest.mark.unit

PLAN = uniform_plan(num_layers=4, tp=1, pp=1, dp=2, micro_batches=2, virtual=1, devices_per_node=2)


@dataclass
class Recorded:
    """What a boundary asks of the recovery, and what it had it do."""

    member: Member
    world: World
    plan: Plan = PLAN
    has_changed: bool = False
    copies: Any = field(default_factory=lambda: SimpleNamespace(between_steps=lambda: None))
    step: int = 0
    taken: list[bool] = field(default_factory=list)

    def pace_step(self, step: int) -> None:
        self.step = step

    def take_up(self, _loop: Any, *, newcomer: bool) -> None:
        self.member.take_proposal()
        self.taken.append(newcomer)


class Sent(list[say.Message]):
    """A link that keeps what it is given."""

    send = list[say.Message].append


class Rank:
    """One rank's boundary, and what it has said and done."""

    def __init__(self, rank: int, members: tuple[int, ...], *, joins: bool = False) -> None:
        self.member, self.sent = Member(rank, Abort()), Sent()
        self.member.link = self.sent
        self.recovery = Recorded(self.member, World(members=members))
        self.driven: list[Any] = []
        self.boundary = Boundary(
            self.recovery,  # type: ignore[arg-type]
            describe=lambda: "the problem",
            also=self.driven.append,
            joins=joins,
        )

    def begin(self, arguments: argparse.Namespace, step: int) -> None:
        """The training loop comes to the step after ``step``."""
        arguments.curr_iteration = step
        self.boundary([])


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Stands for Megatron's global arguments, which need a whole job around them."""
    found = argparse.Namespace(curr_iteration=0, train_iters=100, consumed_train_samples=0)
    for module in (boundary_module, loop_module):
        monkeypatch.setattr(module, "current_args", lambda: found)
    return found


@pytest.fixture(autouse=True, scope="module")
def growing_batch() -> Iterator[None]:
    """Megatron's own counting: 8 samples a step, from the 32nd sample on 16."""
    calculator.init_num_microbatches_calculator(
        0, micro_batch_size=2, data_parallel_size=1, step_batch_size_schedule="0:8 32:16"
    )
    yield
    calculator.destroy_num_microbatches_calculator()


def propose(number: int, *members: int) -> say.Propose:
    return say.Propose(number=number, epoch=9, members=members, plan="{}", reason="rank 3 joins")


def vote(ranks: list[Rank]) -> None:
    """What the reduction of the gradient norm does with the ballots."""
    ballots = [rank.boundary.ballot() for rank in ranks]
    sums = tuple(sum(column) for column in zip(*ballots, strict=True))
    for rank in ranks:
        rank.boundary.counted(sums)


def agreed(rank: Rank) -> list[say.Agreed]:
    return [message for message in rank.sent if isinstance(message, say.Agreed)]


def test_a_job_is_described_by_rank_0_and_armed_by_all_once(arguments: argparse.Namespace) -> None:
    ranks = [Rank(rank, (0, 1)) for rank in (0, 1)]
    for step in (4, 5):
        for rank in ranks:
            rank.begin(arguments, step)
    described = say.Described(rank=0, problem="the problem", plan=PLAN.to_json())
    assert ranks[0].sent == [described, say.Armed(rank=0)]
    assert ranks[1].sent == [say.Armed(rank=1)]
    assert [rank.recovery.step for rank in ranks] == [6, 6], "steps count from 1"


def test_a_newcomer_is_taken_in_before_its_first_step(arguments: argparse.Namespace) -> None:
    rank = Rank(3, (3,), joins=True)
    for step in (7, 8):
        rank.begin(arguments, step)
    assert rank.recovery.taken == [True]
    assert rank.sent == [], "it is armed by what the members say of it"
    assert rank.driven == [[]], "a timetable goes on with the next step"


def test_a_timetable_is_out_of_date_once_the_coordinator_has_spoken(
    arguments: argparse.Namespace,
) -> None:
    rank = Rank(0, (0,))
    rank.begin(arguments, 0)
    rank.recovery.has_changed = True
    rank.begin(arguments, 1)
    assert rank.driven == [[]]


def test_a_proposal_is_taken_up_some_steps_after_all_know_it(arguments: argparse.Namespace) -> None:
    ranks = [Rank(rank, (2, 5)) for rank in (2, 5)]
    ranks[0].member.hear(propose(3, 2, 3, 5))
    arguments.curr_iteration = 10
    arguments.consumed_train_samples = 24
    vote(ranks)
    assert not agreed(ranks[0]), "one of two does not know it yet"
    ranks[1].member.hear(propose(3, 2, 3, 5))
    arguments.curr_iteration = 11
    vote(ranks)
    (word,) = agreed(ranks[0])
    assert (word.number, word.step) == (3, 11 + STEPS_AHEAD)
    assert json.loads(word.loop) == {"consumed_train_samples": 24 + 8 + 16}
    assert not agreed(ranks[1]), "the lowest member speaks for all"
    vote(ranks)
    assert len(agreed(ranks[0])) == 1, "what is agreed is not agreed again"
    for step in range(12, 12 + STEPS_AHEAD + 1):
        for rank in ranks:
            rank.begin(arguments, step)
        due = [False] if step >= 11 + STEPS_AHEAD else []
        assert [rank.recovery.taken for rank in ranks] == [due, due]


def test_a_loss_makes_void_what_was_agreed(arguments: argparse.Namespace) -> None:
    ranks = [Rank(rank, (0, 1)) for rank in (0, 1)]
    for rank in ranks:
        rank.member.hear(propose(1, 0, 1, 2))
    vote(ranks)
    for rank in ranks:
        rank.member.hear(say.View(epoch=1, members=(0, 1), losses=()))
        rank.begin(arguments, STEPS_AHEAD)
        rank.begin(arguments, STEPS_AHEAD + 1)
        assert rank.recovery.taken == []


def test_another_proposal_than_the_agreed_one_waits_for_its_own_vote(
    arguments: argparse.Namespace,
) -> None:
    rank = Rank(0, (0,))
    rank.member.hear(propose(1, 0, 2))
    vote([rank])
    rank.member.hear(say.Withdraw(number=1))
    rank.member.hear(propose(2, 0, 3))
    rank.begin(arguments, STEPS_AHEAD)
    assert rank.recovery.taken == []
    arguments.curr_iteration = STEPS_AHEAD
    vote([rank])
    assert [one.number for one in agreed(rank)] == [1, 2]


def test_nobody_is_taken_in_behind_the_last_step(arguments: argparse.Namespace) -> None:
    rank = Rank(0, (0,))
    rank.member.hear(propose(1, 0, 2))
    for step, expected in ((99, 0), (100 - STEPS_AHEAD, 0), (99 - STEPS_AHEAD, 1)):
        arguments.curr_iteration = step
        vote([rank])
        assert len(agreed(rank)) == expected


@given(known=st.lists(st.integers(0, 4), min_size=1, max_size=6))
def test_ballots_agree_if_and_only_if_all_know_the_same(known: list[int]) -> None:
    found = argparse.Namespace(curr_iteration=0, train_iters=100, consumed_train_samples=0)
    with pytest.MonkeyPatch.context() as patch:
        for module in (boundary_module, loop_module):
            patch.setattr(module, "current_args", lambda: found)
        members = tuple(range(len(known)))
        ranks = [Rank(rank, members) for rank in members]
        for rank, number in zip(ranks, known, strict=True):
            if number:
                rank.member.hear(propose(number, *members))
        vote(ranks)
        for rank in ranks:
            rank.begin(found, STEPS_AHEAD)
    same = known[0] > 0 and len(set(known)) == 1
    assert [rank.recovery.taken for rank in ranks] == [[False] if same else []] * len(ranks)


# -- what a newcomer's loop is told --------------------------------------------


def scheduler() -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0),
        init_lr=0.0,
        max_lr=1.0,
        min_lr=0.1,
        lr_warmup_steps=16,
        lr_decay_steps=160,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.1,
        wd_incr_steps=160,
        wd_incr_style="linear",
    )


def test_a_newcomer_goes_on_with_the_rate_and_the_counts_of_the_others(
    arguments: argparse.Namespace,
) -> None:
    members, newcomers = scheduler(), scheduler()
    for _ in range(7):
        members.step(increment=8)
    newcomers.step(increment=3)
    arguments.consumed_train_samples, arguments.consumed_valid_samples = 56, 4
    arguments.num_floating_point_operations_so_far = 2.5e15
    told = LoopState(members).told(done=31)
    for name in tuple(vars(arguments)):
        setattr(arguments, name, -1)
    assert LoopState(newcomers).take(told) == 31
    assert newcomers.num_steps == 56
    for name in ("lr", "weight_decay"):
        (mine,), (theirs,) = (
            [group[name] for group in one.optimizer.param_groups] for one in (newcomers, members)
        )
        assert mine == theirs
    counted = (arguments.consumed_train_samples, arguments.consumed_valid_samples)
    assert counted == (56, 4)
    assert arguments.skipped_train_samples == 0
    assert arguments.num_floating_point_operations_so_far == 2.5e15


def test_a_newcomer_begins_with_the_batch_size_of_the_others(
    arguments: argparse.Namespace,
) -> None:
    """Upstream saves a checkpoint when the size grows, and all must see it in the same step."""
    for consumed, size in ((0, 8), (24, 16), (48, 16)):
        calculator.update_num_microbatches(arguments.consumed_train_samples, False)
        arguments.consumed_train_samples = consumed
        text = LoopState.ahead(STEPS_AHEAD)
        assert calculator.get_current_global_batch_size() == (8 if consumed < 32 else 16)
        calculator.update_num_microbatches(0, False)
        arguments.consumed_train_samples = 0
        LoopState.begin(7, text)
        assert arguments.iteration == 7
        assert calculator.get_num_microbatches() == size // 2
        calculator.update_num_microbatches(arguments.consumed_train_samples, True)
        assert calculator.get_num_microbatches() == size // 2, "no change in its first step"
