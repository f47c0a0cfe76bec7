"""Greyhound (FALCON): slow devices and links borne, evened out, placed anew or left out, by cost.

Source: BASELINES 3, from the repositories of Greyhound and its detector; thresholds are the
artifact's. The ladder is a ski rental: a level is taken when the time lost since the slowness began
has reached what the level costs, so that no more than twice the best is ever spent on one step of
the ladder.

* S1: nothing.
* S2, slow devices: integer shares of micro-batches, at least one for each replica, gradients
  weighted by them. The paper's objective is the spread of the replicas' times; the time of the
  slowest one, taken here, is what a step lasts, and is never longer. The shares apply without a
  pause. Cost: the artifact's ``10 * (slow - healthy) / 2``, ten iterations between two checks.
* S3, slow links, or slow devices in several replicas: nodes change places so that slow links carry
  little, activations at best, instead of reductions; slow TP groups change places with groups of
  the same stage so that few replicas have any. (The artifact moves layers by latency in its place,
  and restarts; the paper's version is stronger.) Cost: its pause, in which state moves in memory
  between nodes. The artifact has 60 s for it in any case.
* S4: checkpoint, and a restart without the bad parts. Cost: saving, restarting, reading. The
  artifact computes it and never does it; here it is done.

A change of iteration times is confirmed more than 10 iterations after it, and the verdict comes
after that: what was lost until then counts (:data:`UNSEEN_ITERATIONS`), therefore S2 is the answer
to the verdict itself. The artifact compares wall time since the onset; lost time is the paper's.
A device that is fast again gets an equal share again. Deaths:
:mod:`resihp_ext.simulator.policies.restarting`.

Simplified: replicas keep the nominal layers and TP degrees, as in the source.
Parameters: ``patience_s`` (how often it is asked whether the next level is due), ``lifetime_s``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from resihp_ext.plan.plan import Plan, Replica
from resihp_ext.simulator.health import Health, Link
from resihp_ext.simulator.layout import Layout, Schedule
from resihp_ext.simulator.policies.restarting import LEAST_GAIN, Restarting, planned_restart_s
from resihp_ext.simulator.policy import Answer, Sense, View
from resihp_ext.simulator.pricing import Pricing, counts_of, used
from resihp_ext.simulator.setting import Setting
from resihp_ext.simulator.topology import Deal, grouped, placed

CHECK_ITERATIONS = 10
"""Between two checks of the ladder (BASELINES 3.8)."""
UNSEEN_ITERATIONS = 10
"""Lost before a change point is confirmed (BASELINES 3.4)."""


Place = Callable[[Pricing, Plan, Deal], Sequence[Replica] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Level:
    """One step of the ladder."""

    plan: Plan
    cost_s: float
    """Lost time at which it is taken."""
    pause_s: float
    moved_bytes: int = 0
    reason: str


class Greyhound(Restarting):
    """The ladder."""

    name = "greyhound"
    sense = Sense.RAW
    patience_s = 5.0

    def begin(self, setting: Setting) -> Layout:
        self._ladders: dict[tuple[Health, str], _Ladder] = {}
        self._healthy_s = Pricing(setting, Health()).iteration_s(setting.nominal)
        return super().begin(setting)

    def deal(self, pricing: Pricing, replicas: Sequence[Replica]) -> list[int]:
        """By speed where devices are slow; slow links are no reason."""
        ranks = {rank for one in replicas for rank in one.ranks}
        slow = any(rank in ranks for rank, _ in pricing.health.devices)
        return pricing.dealt(replicas) if slow else pricing.evenly(replicas)

    def schedule(self, pricing: Pricing, plan: Plan) -> Schedule:
        """1F1B."""
        return Schedule()

    def about_slowness(self, view: View, pricing: Pricing, running: Layout) -> Answer:
        key = (view.health, running.plan.digest)
        if key not in self._ladders:
            self._ladders[key] = _Ladder(self, pricing, running.plan, self._healthy_s)
        ladder = self._ladders[key]
        lost_s = view.lost_s + UNSEEN_ITERATIONS * ladder.behind_s
        level = next(ladder.levels(lost_s), None)
        if level is None or lost_s < level.cost_s:
            return Answer(layout=running, reason="S1: nothing better is due")
        return Answer(
            layout=Layout(plan=level.plan, schedule=running.schedule),
            pause_s=level.pause_s,
            moved_bytes=level.moved_bytes,
            reason=level.reason,
        )


class _Ladder:
    """What the levels would do for one layout on devices as they are known."""

    def __init__(self, policy: Greyhound, pricing: Pricing, plan: Plan, healthy_s: float) -> None:
        self._policy, self._pricing, self._plan = policy, pricing, plan
        self._now_s = pricing.iteration_s(plan)
        self.behind_s = max(0.0, self._now_s - healthy_s)
        """Of each iteration."""

    def levels(self, lost_s: float) -> Iterator[_Level]:
        """Those that make steps shorter, in the order of the ladder. A restart is not thought
        about before it can be due."""
        yield from self._running
        if lost_s >= planned_restart_s(self._pricing.setting):
            yield from self._restart

    @cached_property
    def _running(self) -> tuple[_Level, ...]:
        found = (self._micro_batches(), self._topology(placed), self._topology(grouped))
        return tuple(one for one in found if one is not None and self._is_faster(one.plan))

    def _is_faster(self, plan: Plan) -> bool:
        return self._pricing.iteration_s(plan) < self._now_s * (1 - LEAST_GAIN)

    def _micro_batches(self) -> _Level | None:
        """S2; also the way back to equal shares."""
        pricing, replicas = self._pricing, self._plan.replicas
        counts = self._policy.deal(pricing, replicas)
        if counts == counts_of(self._plan):
            return None
        return _Level(
            plan=pricing.plan(replicas, counts),
            cost_s=CHECK_ITERATIONS * self.behind_s / 2,
            pause_s=0.0,
            reason=f"S2: micro-batches {'/'.join(map(str, counts))}",
        )

    def _topology(self, place: Place) -> _Level | None:
        """S3."""
        pricing = self._pricing
        replicas = place(pricing, self._plan, self._policy.deal)
        if replicas is None:
            return None
        plan = pricing.plan(replicas, self._policy.deal(pricing, replicas))
        pause_s = pricing.move_s(plan)
        return _Level(
            plan=plan,
            cost_s=pause_s,
            pause_s=pause_s,
            moved_bytes=sum(pricing.moved_bytes(plan).values()),
            reason="S3: slow links carry less" if place is placed else "S3: slow groups together",
        )

    @cached_property
    def _restart(self) -> tuple[_Level, ...]:
        """S4, whatever is best to leave out."""
        pricing, working = self._pricing, used(self._plan)
        found: list[tuple[float, int, Plan]] = []
        for bad in self._bad_parts(working):
            plan = self._policy.rebuilt(pricing, bad)
            if plan is not None and self._is_faster(plan):
                found.append((pricing.iteration_s(plan), len(found), plan))
        if not found:
            return ()
        _, _, plan = min(found, key=lambda one: one[:2])
        pause_s = planned_restart_s(pricing.setting)
        count = len(working - used(plan))
        reason = f"S4: saved and started anew without {count} of the ranks"
        return (_Level(plan=plan, cost_s=pause_s, pause_s=pause_s, reason=reason),)

    def _bad_parts(self, working: frozenset[int]) -> Iterator[frozenset[int]]:
        """The slowest devices, or all slow ones, with and without nodes behind slow links."""
        health, node_of = self._pricing.health, self._pricing.setting.cluster.node_of
        limits = sorted({p for rank, p in health.devices if rank in working} | {0.0})
        cut = _cover({link for link in health.left if set(link) <= {node_of[r] for r in working}})
        behind = frozenset(rank for rank, node in node_of.items() if node in cut)
        for nodes in dict.fromkeys((frozenset[int](), behind)):
            for limit in limits:
                bad = nodes.union(rank for rank, p in health.devices if p <= limit)
                if bad & working:
                    yield bad


def _cover(links: set[Link]) -> set[int]:
    """Nodes without which no slow link is left, those with most of them first."""
    found: set[int] = set()
    while left := [link for link in links if not found & set(link)]:
        ends = [node for link in left for node in link]
        found.add(max(set(ends), key=lambda node: (ends.count(node), -node)))
    return found
