"""One message of every class of the schema."""

from __future__ import annotations

import typing

from resihp_ext.control import messages as say
from resihp_ext.control.messages import Message
from resihp_ext.detector.probe import Measured, Task, TaskKind
from resihp_ext.detector.timed import MicroBatch, RankStep, TimedAction
from resihp_ext.plan.action import Kind

TIMES = RankStep(
    rank=1,
    step=7,
    version=2,
    begun_s=1e9,
    total_s=0.5,
    actions=(
        TimedAction(
            kind=Kind.FORWARD, micro_batch=3, chunk=1, start_s=0.125, own_s=0.25, wait_s=0.0
        ),
    ),
    micro_batches=(MicroBatch(number=3, tokens=96, squared=5858),),
)

KINDS: tuple[type[Message], ...] = typing.get_args(say.AnyMessage)

SAMPLES: tuple[Message, ...] = (
    say.Hello(rank=3, incarnation=1, pid=4711, joins=True),
    say.Described(rank=0, problem='{"a": 1}', plan="{}"),
    say.Armed(rank=2),
    say.Progress(rank=1, step=9, micro_batch=2, phase="forward", waiting=False, ticks=77),
    say.Arrived(rank=1, epoch=2, region=5, result=(1.5, -0.0), versions=(1, 2), phase="sync"),
    say.Troubled(rank=1, epoch=2, text="connection reset"),
    say.Adopted(rank=1, epoch=2, version=3, took_s=0.75),
    say.Agreed(rank=0, number=1, step=12, loop="{}"),
    say.Ready(rank=9),
    say.Loading(rank=1, epoch=2),
    say.Leaving(rank=9, exit_code=75, cause="nothing is left", checkpoint="iter_0000004"),
    say.Timed(rank=1, times=TIMES),
    say.Probed(
        rank=1,
        number=4,
        step=31,
        took_s=0.04,
        measured=(Measured(0, (0.004, 0.005)), Measured(2, (0.001,))),
    ),
    say.Probe(
        number=4,
        epoch=2,
        tasks=(Task(TaskKind.GEMM, (0, 1, 5)), Task(TaskKind.P2P, (1, 2))),
    ),
    say.View(epoch=1, members=(0, 2), losses=(say.Loss(rank=1, cause="was killed"),)),
    say.Go(epoch=1, plan="{}", region=4, result=(), version=1, reason="rank 1 was killed"),
    say.Propose(number=1, epoch=2, members=(0, 1), plan="{}", reason="rank 1 joined"),
    say.Withdraw(number=1),
    say.Weighed(step=9, verdict="wait", why="so far", gain=0.3, lost_s=0.5, cost_s=2.0),
    say.Enter(number=1, step=12, loop="{}"),
    say.Stop(exit_code=75, cause="no layout fits"),
    say.NodeHello(node="a", address="10.0.0.1", ranks=(0, 1), slots=2),
    say.Assigned(ranks=(4, 5)),
    say.NodeBeat(node="a", step=3, alive=(0, 1), stuck_s=0.0, sent_s=12.5),
    say.Lease(sent_s=12.5),
    say.ForRanks(ranks=(0, 1), message=say.encode(say.Withdraw(number=1))),
    say.Exited(rank=1, incarnation=0, cause="was killed", exit_code=-9),
    say.Kill(rank=1, cause="makes no progress"),
    say.Replace(rank=1, incarnation=1),
    say.Restart(cause="rank 1 was killed"),
    say.EndNode(exit_code=0, cause=""),
    say.Ask(verb="drain", node="a"),
    say.Answer(ok=True, text="yes"),
)
