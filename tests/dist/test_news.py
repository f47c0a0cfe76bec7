"""Times of a step on their way from a worker over its agent to the coordinator."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from control_peers import Owner, SmallRules, Worker, agent, coordinator, node_hello

from resihp_ext.control import messages as say
from resihp_ext.control.frames import new_token
from resihp_ext.detector.timed import RankStep

pytestmark = pytest.mark.dist

ACTIONS, STEPS = 2000, 5
"""More in a step than fit into a small message."""

TELL = f"""
from resihp_ext.detector.timed import RankStep, TimedAction
from resihp_ext.plan.action import Kind
for step in range(1, {STEPS} + 1):
    action = TimedAction(Kind.FORWARD, 1, 0, 0.5, float(step), 0.25)
    times = RankStep(0, step, 1, 1e9, 2.0, (action,) * {ACTIONS}, ())
    link.offer(say.Timed(rank=0, times=times))
link.send(say.Ready(rank=0))
"""


def test_times_arrive_as_they_were_told(tmp_path: Path) -> None:
    token, rules, owner = new_token(), SmallRules(), Owner()
    with ExitStack() as stack:
        server = stack.enter_context(coordinator(token, rules))
        node = stack.enter_context(agent(token, tmp_path / "agent.sock", owner))
        node.join(*server.address, node_hello())
        worker = Worker.python(tmp_path / "agent.sock", token, TELL)
        found: list[RankStep] = [rules.heard(say.Timed)[1].times for _ in range(STEPS)]
        rules.heard(say.Ready)
        assert worker.wait(timeout=30) == 0
    assert [times.step for times in found] == list(range(1, STEPS + 1))
    assert [times.actions[-1].own_s for times in found] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert {len(times.actions) for times in found} == {ACTIONS}
