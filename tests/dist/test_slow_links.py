"""A slow link between two real ranks: messages come later, whole, and nobody else waits."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest

from resihp_ext.faults.lasting import Hold
from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.plan import Instance, uniform_plan
from resihp_ext.testing.ranks import run_ranks, start_ranks

pytestmark = pytest.mark.dist

LIMIT_S = 60.0
ROWS, HIDDEN, MICRO_BATCHES = 256, 256, 4
BYTES = 4 * ROWS * HIDDEN
BUSY_S, EXTRA_S = 0.05, 0.04


def connected(hold: Hold | None) -> tuple[Any, Any, Any]:
    """One end of a boundary between two stages of a rank each, and what crosses it."""
    import torch
    import torch.distributed as dist

    from megatron.resilience.executor.groups import GroupPool
    from megatron.resilience.executor.place import Seat
    from megatron.resilience.executor.wire import Boundary, Wire
    from megatron.resilience.executor.world import World

    dist.init_process_group("gloo")
    plan = uniform_plan(num_layers=2, tp=1, pp=2, dp=1, micro_batches=MICRO_BATCHES)
    wire = Wire(
        plan=plan,
        seat=Seat.of(plan, dist.get_rank()),
        pool=GroupPool(World(members=(0, 1)), timedelta(seconds=LIMIT_S)),
        sequence_parallel=False,
        holds=lambda peer: hold,
    )
    at = Boundary(
        rows=ROWS, samples=1, hidden=HIDDEN, dtype=torch.float32, device=torch.device("cpu")
    )
    dist.barrier()
    return wire, at, torch


def exchange(hold: Hold | None) -> dict[str, list[float]]:
    """The first rank sends all micro-batches at once; what the other gets, and when."""
    wire, at, torch = connected(hold)
    begun_s = time.monotonic()
    found: dict[str, list[float]] = {"at_s": [], "value": []}
    for number in range(MICRO_BATCHES):
        if int(os.environ["RANK"]) == 0:
            action = Action(
                kind=Kind.SEND_FORWARD, micro_batch=number, peer=Instance(replica=0, stage=1)
            )
            wire.send(
                torch.full((ROWS, 1, HIDDEN), 1.0 + number),
                action,
                Instance(replica=0, stage=0),
                at,
            )
        else:
            action = Action(
                kind=Kind.RECV_FORWARD, micro_batch=number, peer=Instance(replica=0, stage=0)
            )
            got = wire.receive(action, at)
            found["value"] += [float(got.min()), float(got.max())]
        found["at_s"].append(time.monotonic() - begun_s)
    wire.finish()
    found["at_s"].append(time.monotonic() - begun_s)
    wire.close()
    return found


def test_a_narrow_link_lets_one_message_through_after_the_other() -> None:
    hold = Hold(extra_s_per_byte=EXTRA_S / BYTES, busy_s_per_byte=BUSY_S / BYTES)
    sender, receiver = run_ranks(2, exchange, hold, timeout_s=LIMIT_S)
    assert receiver["value"] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]
    assert sender["at_s"][MICRO_BATCHES - 1] < 0.5 * BUSY_S, "sending does not wait"
    came_s = receiver["at_s"][:MICRO_BATCHES]
    due_s = [EXTRA_S + number * BUSY_S for number in range(MICRO_BATCHES)]
    assert all(came > due - 0.02 for came, due in zip(came_s, due_s, strict=True)), came_s
    # The machine may have other work.
    assert came_s[-1] < due_s[-1] + 1.0
    assert sender["at_s"][-1] > due_s[-1] - 0.02, "the pass ends when all have left"


def test_a_delay_lets_messages_pass_side_by_side() -> None:
    sender, receiver = run_ranks(2, exchange, Hold(delay_s=0.2), timeout_s=LIMIT_S)
    came_s = receiver["at_s"][:MICRO_BATCHES]
    assert came_s[0] > 0.18
    assert all(after - before < 0.15 for before, after in pairwise(came_s)), came_s
    assert sender["at_s"][MICRO_BATCHES - 1] < 0.1


def test_a_healthy_link_is_left_alone() -> None:
    _, receiver = run_ranks(2, exchange, None, timeout_s=LIMIT_S)
    assert receiver["value"] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 4.0, 4.0]


def break_off() -> tuple[float, int]:
    """Messages of a pass that is broken off never leave, and their thread is gone."""
    import threading

    wire, at, torch = connected(Hold(delay_s=1000.0))
    begun_s = time.monotonic()

    class BrokenOffError(Exception):
        pass

    def stop() -> None:
        raise BrokenOffError

    if int(os.environ["RANK"]) == 0:
        action = Action(kind=Kind.SEND_FORWARD, micro_batch=0, peer=Instance(replica=0, stage=1))
        wire.send(torch.ones(ROWS, 1, HIDDEN), action, Instance(replica=0, stage=0), at)
        with pytest.raises(BrokenOffError):
            wire.finish(stop)
    wire.close()
    threads = [one for one in threading.enumerate() if one.name == "held messages"]
    return time.monotonic() - begun_s, len(threads)


def test_a_pass_that_is_broken_off_forgets_what_it_held_back() -> None:
    (took_s, threads), _ = run_ranks(2, break_off, timeout_s=LIMIT_S)
    assert took_s < 5.0
    assert threads == 0


def lose_the_receiver() -> str:
    wire, at, torch = connected(Hold(delay_s=1.0))
    if int(os.environ["RANK"]) == 1:
        os._exit(7)
    action = Action(kind=Kind.SEND_FORWARD, micro_batch=0, peer=Instance(replica=0, stage=1))
    for number in range(MICRO_BATCHES):
        action = Action(
            kind=Kind.SEND_FORWARD, micro_batch=number, peer=Instance(replica=0, stage=1)
        )
        wire.send(torch.ones(ROWS, 1, HIDDEN), action, Instance(replica=0, stage=0), at)
    try:
        wire.finish()
    except RuntimeError as error:
        return type(error).__name__
    finally:
        wire.close()
    return "nothing"


def test_errors_of_held_messages_reach_the_sender() -> None:
    with start_ranks(2, lose_the_receiver) as ranks:
        (said,) = ranks.join(LIMIT_S, survivors=[0])
    assert said != "nothing"
