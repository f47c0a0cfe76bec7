"""ResiHP: the paper's progressive planner, and our joint one, as they run in jobs.

Source: PAPER.md (Scheduler, Executor) and :mod:`resihp_ext.scheduler`; nothing is simplified: the
same planners answer in real jobs. Processes stay; an interrupted iteration is repeated; state comes
from live ranks. When no replica holds a layer any more, state comes from the last checkpoint.

Parameter: how long a plan is expected to last (``lifetime_s``).

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from itertools import pairwise

from resihp_ext.plan.plan import Plan
from resihp_ext.scheduler.decide import decide
from resihp_ext.scheduler.infeasible import InfeasibleError
from resihp_ext.scheduler.problem import Problem
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.layout import Layout
from resihp_ext.simulator.policy import Answer, Cause, Policy, Sense, Undone, View
from resihp_ext.simulator.restart import read_s
from resihp_ext.simulator.setting import Setting

LIFETIME_S = 1800.0


class Planned(Policy):
    """Asks a planner."""

    sense = Sense.WORKLOAD
    planner: str

    def __init__(self, lifetime_s: float = LIFETIME_S) -> None:
        self.lifetime_s = lifetime_s
        self._known: dict[tuple[Health, str], Answer] = {}

    def begin(self, setting: Setting) -> Layout:
        return Layout(plan=setting.nominal)

    def answer(self, view: View) -> Answer:
        held = view.layout or view.held
        if held is None or (view.layout is not None and view.cause is Cause.WAITED):
            return Answer(layout=view.layout, reason="nothing is new")
        key = (view.health, held.plan.digest)
        if key not in self._known:
            self._known[key] = self._plan(view, held)
        found = self._known[key]
        if found.layout is not None and found.layout.plan.digest == held.plan.digest:
            found = Answer(layout=held, reason=found.reason)
        return found

    def problem(self, view: View, held: Layout) -> Problem:
        """What the planner is asked."""
        return view.setting.problem(view.health, held.plan, self.lifetime_s)

    def _plan(self, view: View, held: Layout) -> Answer:
        setting = view.setting
        try:
            made = decide(self.problem(view, held), self.planner)
        except InfeasibleError as error:
            return Answer(layout=None, undone=Undone.CHECKPOINT, reason=str(error))
        pause_s, undone = made.transition_s, Undone.NOTHING
        if view.cause is Cause.DEAD or view.layout is None:
            undone = Undone.STEP
        if lost_layers(held.plan, view.health):
            pause_s, undone = pause_s + read_s(setting), Undone.CHECKPOINT
        return Answer(
            layout=Layout(plan=made.plan),
            pause_s=pause_s,
            undone=undone,
            moved_bytes=made.moved_bytes,
            reason=made.reason,
        )


class Progressive(Planned):
    """The paper."""

    name = "progressive"
    planner = "progressive"


class Joint(Planned):
    """Ours."""

    name = "joint"
    planner = "joint"


def lost_layers(plan: Plan, health: Health) -> bool:
    """Whether no live rank holds some piece of some layer.

    A TP group of ``k`` holds a layer in ``k`` pieces; that of a dead one lives on in other replicas
    only.
    """
    cuts: set[int] = set()
    for replica in plan.replicas:
        for stage in replica.stages:
            cuts |= set(stage.layers)
    return any(_lost(plan, health, layer) for layer in sorted(cuts)[:-1])


def _lost(plan: Plan, health: Health, layer: int) -> bool:
    dead = health.dead
    missing: list[list[tuple[float, float]]] = []
    for replica in plan.replicas:
        for stage in replica.stages:
            if stage.layers[0] <= layer < stage.layers[1]:
                gone = [i for i, rank in enumerate(stage.ranks) if rank in dead]
                missing.append([(i / stage.tp, (i + 1) / stage.tp) for i in gone])
    if not all(missing):
        return False
    edges = sorted({edge for spans in missing for span in spans for edge in span})
    middles = [(a + b) / 2 for a, b in pairwise(edges)]
    return any(all(any(a < x < b for a, b in spans) for spans in missing) for x in middles)
