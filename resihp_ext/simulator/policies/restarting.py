"""What Greyhound and Adaptra have in common: against deaths they have nothing but the checkpoint.

Neither source says what follows a dead device, so both get what an operator does without help: the
job is started anew from its last checkpoint, on as many whole replicas as there are devices for
(:mod:`resihp_ext.simulator.refilling`); if not even one is left, it waits for repair. When devices
come back, the job is stopped again for the larger layout, with a checkpoint saved for it, if that
pays within ``lifetime_s``.

Parameter: ``lifetime_s``, how long a layout is expected to last; the same for all policies.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence

from resihp_ext.plan.plan import Plan, Replica
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.layout import Layout, Schedule
from resihp_ext.simulator.policy import Answer, Cause, Policy, Undone, View
from resihp_ext.simulator.pricing import Pricing, used
from resihp_ext.simulator.refilling import refilled
from resihp_ext.simulator.restart import read_s, restart_s
from resihp_ext.simulator.setting import Setting

LIFETIME_S = 1800.0
LEAST_GAIN = 1e-3
"""Part of a step: what is not faster by that much is as fast."""


class Restarting(Policy):
    """Starts anew after a death; what it does about slowness is up to the subclass."""

    def __init__(self, lifetime_s: float = LIFETIME_S) -> None:
        self.lifetime_s = lifetime_s

    @abstractmethod
    def deal(self, pricing: Pricing, replicas: Sequence[Replica]) -> list[int]:
        """Micro-batches of each replica."""

    @abstractmethod
    def schedule(self, pricing: Pricing, plan: Plan) -> Schedule:
        """How steps of a plan are done on links as they are."""

    @abstractmethod
    def about_slowness(self, view: View, pricing: Pricing, running: Layout) -> Answer:
        """What to do while everybody in the layout is alive."""

    def begin(self, setting: Setting) -> Layout:
        pricing = Pricing(setting, Health())
        return Layout(plan=setting.nominal, schedule=self.schedule(pricing, setting.nominal))

    def answer(self, view: View) -> Answer:
        running = view.layout
        current = running or view.held
        pricing = Pricing(view.setting, view.health, current.plan if current else None)
        if running is None or used(running.plan) & view.health.dead:
            return self._anew(view, pricing)
        if view.cause is Cause.BACK:
            larger = self._larger(view, pricing, running)
            if larger is not None:
                return larger
        return self.about_slowness(view, pricing, running)

    def rebuilt(self, pricing: Pricing, bad: Collection[int]) -> Plan | None:
        """The best that can be started anew without some ranks; None: nothing can."""
        replicas = refilled(pricing.setting, pricing.health, bad)
        if not replicas:
            return None
        plan = pricing.plan(replicas, self.deal(pricing, replicas))
        return plan if pricing.fits(plan) else None

    def _anew(self, view: View, pricing: Pricing) -> Answer:
        """Slow devices are left out if that is faster: the job is started anew in any case."""
        dead = view.health.dead
        slow = {rank for rank, p in view.health.devices if p > 0}
        plans = [
            plan
            for bad in dict.fromkeys((dead, dead | slow))
            if (plan := self.rebuilt(pricing, bad)) is not None
        ]
        if not plans:
            return Answer(
                layout=None,
                undone=Undone.CHECKPOINT,
                reason="no replica is whole: waits for repair",
            )
        plan = min(plans, key=pricing.iteration_s)
        return Answer(
            layout=Layout(plan=plan, schedule=self.schedule(pricing, plan)),
            pause_s=restart_s(view.setting),
            undone=Undone.CHECKPOINT,
            reason=f"started anew from the last checkpoint on {_replicas(plan)}",
        )

    def _larger(self, view: View, pricing: Pricing, running: Layout) -> Answer | None:
        """The job on more replicas, if stopping it for that pays."""
        plan = self.rebuilt(pricing, view.health.dead)
        if plan is None or len(plan.replicas) <= len(running.plan.replicas):
            return None
        now_s, then_s = pricing.iteration_s(running.plan), pricing.iteration_s(plan)
        pause_s = planned_restart_s(view.setting)
        if pause_s >= self.lifetime_s * (1 - then_s / now_s):
            return None
        return Answer(
            layout=Layout(plan=plan, schedule=self.schedule(pricing, plan)),
            pause_s=pause_s,
            saved=True,
            reason=f"devices are back: saved and started anew on {_replicas(plan)}",
        )


def planned_restart_s(setting: Setting) -> float:
    """A checkpoint saved, as fast as one is read, and the job started anew from it."""
    return read_s(setting) + restart_s(setting)


def _replicas(plan: Plan) -> str:
    count = len(plan.replicas)
    return "one replica" if count == 1 else f"{count} replicas"
