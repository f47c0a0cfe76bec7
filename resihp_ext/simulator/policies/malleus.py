"""Malleus: TP groups, layers and micro-batches anew for devices as slow as they are.

Source: BASELINES 6, from Hetu's ``strategy.py``.

* A device is a straggler from 1.2 times the healthy time on, and a new plan is made only when some
  device's time ratio has moved by more than 0.3, or a device has died or come back. Death is a rate
  of 0: the source does not treat it apart.
* Groups: :mod:`resihp_ext.simulator.tp_groups`. Rates come from the cost model instead of a table.
* Pipelines: groups stay in the replica of their node, or are spread so that all replicas are about
  as fast; slow groups come first or stay in their place.
* First program, layers of each stage: ``min max y_j l_j``, within memory. Second, micro-batches of
  each pipeline: ``min max o_i m_i``. Hetu gives both to a solver. Both have one constraint that
  couples, the sum, and times that grow with what is given; so giving each unit to whoever is
  fastest with it is exact (:func:`resihp_ext.scheduler.layers.balanced`: if an optimum differed,
  some unit could be moved to where greed put it without making the slowest slower). A stage that
  is slowest with a single layer is left out. For ``o_i m_i`` the whole pipeline is played, fill and
  drain included, and ``m_i >= stages_i``, which that product needs, is not asked for.
* Every combination of these choices is priced, and the fastest plan is taken.
* State moves in memory, from live owners; layers that nobody holds come from the last checkpoint.

Groups of any degree, such as 3 of 4, are not Malleus. It measures every device, so it gets the
detector that does (:attr:`Sense.WORKLOAD`); suspended devices are probed as all others.

Parameters: ``STRAGGLER_RATIO``, ``SAFE_GAP``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from resihp_ext.plan.plan import Plan, Replica, Stage
from resihp_ext.scheduler.layers import balanced, edges
from resihp_ext.scheduler.movement import arranged
from resihp_ext.scheduler.prices import Group, StageKind
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.layout import Layout
from resihp_ext.simulator.policies.planned import lost_layers
from resihp_ext.simulator.policies.restarting import LEAST_GAIN
from resihp_ext.simulator.policy import Answer, Cause, Policy, Sense, Undone, View
from resihp_ext.simulator.pricing import Pricing, used
from resihp_ext.simulator.restart import read_s
from resihp_ext.simulator.setting import Setting
from resihp_ext.simulator.tp_groups import Cut, Node, cuts_of

STRAGGLER_RATIO = 1.2
SAFE_GAP = 0.3

Choice = tuple[tuple[int, ...], bool, bool]
"""The cut of each damaged node; whether groups are spread; whether slow ones come first."""
Pipelines = list[list[Group]]
"""Groups of each replica, in the order of its stages."""


class Malleus(Policy):
    """Plans anew."""

    name = "malleus"
    sense = Sense.WORKLOAD

    def begin(self, setting: Setting) -> Layout:
        self._planned_for = Health()
        return Layout(plan=setting.nominal)

    def answer(self, view: View) -> Answer:
        running = view.layout
        broken = running is None or bool(used(running.plan) & view.health.dead)
        if not broken and not self._has_moved(view.health):
            return Answer(layout=running, reason="no ratio has moved far enough")
        self._planned_for = view.health
        current = (running or view.held or Layout(plan=view.setting.nominal)).plan
        pricing = Pricing(view.setting, view.health, current)
        plan = _Search(pricing).best()
        if plan is None:
            return Answer(
                layout=None, undone=Undone.CHECKPOINT, reason="no groups hold the model: waits"
            )
        if running is not None and not broken:
            gain = 1 - pricing.iteration_s(plan) / pricing.iteration_s(running.plan)
            if gain < LEAST_GAIN:
                return Answer(layout=running, reason="no other plan is faster")
        return self._change(view, pricing, current, plan)

    def _change(self, view: View, pricing: Pricing, current: Plan, plan: Plan) -> Answer:
        moved = pricing.moved_bytes(plan)
        pause_s = view.setting.cost.transition_s(moved, plan)
        undone = Undone.STEP if view.cause is Cause.DEAD else Undone.NOTHING
        if view.layout is None or lost_layers(current, view.health):
            pause_s, undone = pause_s + read_s(view.setting), Undone.CHECKPOINT
        groups = sum(len(one.stages) for one in plan.replicas)
        return Answer(
            layout=Layout(plan=plan),
            pause_s=pause_s,
            undone=undone,
            moved_bytes=sum(moved.values()),
            reason=f"planned anew: {groups} groups in {len(plan.replicas)} pipelines",
        )

    def _has_moved(self, health: Health) -> bool:
        before, now = self._planned_for.p, health.p
        for rank in before.keys() | now.keys():
            a, b = before.get(rank, 1.0), now.get(rank, 1.0)
            if (a <= 0) != (b <= 0) or (a > 0 and b > 0 and abs(1 / a - 1 / b) > SAFE_GAP):
                return True
        return False


class _Search:
    """All combinations of cuts, spreads and orders."""

    def __init__(self, pricing: Pricing) -> None:
        self._pricing, self._setting = pricing, pricing.setting
        self._problem = pricing.problem
        self._nominal = pricing.setting.nominal
        # What is hardly slow counts as healthy.
        self._p = {
            rank: p for rank, p in pricing.health.devices if p <= 0 or 1 / p >= STRAGGLER_RATIO
        }
        self._tp = max(stage.tp for one in self._nominal.replicas for stage in one.stages)
        powers = [2**n for n in range(self._tp.bit_length())]
        valid = set(self._problem.valid_tps(self._tp))
        self._degrees = [degree for degree in powers if degree in valid]
        self._place = {
            stage.ranks: (number, place)
            for number, one in enumerate(self._nominal.replicas)
            for place, stage in enumerate(one.stages)
        }
        self._home = {rank: place for group, place in self._place.items() for rank in group}
        self._whole: list[Group] = []
        self._damaged: list[list[Cut]] = []
        self._cut()
        self._seen: set[tuple[Replica, ...]] = set()

    def best(self) -> Plan | None:
        """The fastest plan, with as many pipelines as possible; None: the model fits nowhere."""
        if not self._p:
            return self._nominal
        for pipelines in range(len(self._nominal.replicas), 0, -1):
            found = self._with(pipelines)
            if found is not None:
                return found
        return None

    def _with(self, pipelines: int) -> Plan | None:
        """All damaged nodes cut by the same rule; then each by another one, if that is faster."""
        best: tuple[float, Plan, Choice] | None = None
        rules = range(max(map(len, self._damaged), default=1))
        for rule, spread, first in product(rules, (False, True), (True, False)):
            choice = ((rule,) * len(self._damaged), spread, first)
            best = self._faster(best, choice, pipelines)
        for node, cuts in enumerate(self._damaged):
            for rule in range(len(cuts)):
                if best is not None:
                    before, spread, first = best[2]
                    cut = (*before[:node], rule, *before[node + 1 :])
                    best = self._faster(best, (cut, spread, first), pipelines)
        return best[1] if best else None

    def _faster(
        self, best: tuple[float, Plan, Choice] | None, choice: Choice, pipelines: int
    ) -> tuple[float, Plan, Choice] | None:
        """What a choice gives, if it fits and is faster than the best."""
        rules, spread, first = choice
        groups = list(self._whole)
        for cuts, rule in zip(self._damaged, rules, strict=True):
            cut = cuts[min(rule, len(cuts) - 1)]
            groups += [*cut.full, *cut.rest]
        replicas = self._built(self._arranged(groups, pipelines, spread, first))
        if replicas is None or replicas in self._seen:
            return best
        self._seen.add(replicas)
        plan = self._pricing.plan(replicas, self._pricing.dealt(replicas))
        seconds = self._pricing.iteration_s(plan)
        if (best is None or seconds < best[0]) and self._pricing.fits(plan):
            return seconds, plan, choice
        return best

    # Groups.

    def _cut(self) -> None:
        """The groups of whole nodes, and the cuts of damaged ones."""
        for node in self._nodes():
            if any(rank in self._p for rank in node.ranks):
                self._damaged.append(cuts_of(node, self._p, self._tp, self._degrees, self._rate))
            else:
                self._whole += node.nominal

    def _nodes(self) -> list[Node]:
        ranks: dict[int, list[int]] = {}
        for one in self._setting.cluster.devices:
            ranks.setdefault(one.node, []).append(one.rank)
        mine: dict[int, list[Group]] = {}
        for group in self._place:
            mine.setdefault(self._setting.cluster.node_of[group[0]], []).append(group)
        return [Node(tuple(ranks[node]), tuple(mine.get(node, ()))) for node in sorted(ranks)]

    def _rate(self, degree: int, p: float) -> float:
        return 1 / sum(self._problem.prices.pair(StageKind(1, degree, p, False, False, False)))

    def _speed(self, group: Group) -> float:
        return self._rate(len(group), min(self._p.get(rank, 1.0) for rank in group))

    # Pipelines.

    def _arranged(
        self, groups: Sequence[Group], pipelines: int, spread: bool, slow_first: bool
    ) -> Pipelines:
        """Groups to pipelines, and their order there."""
        found: Pipelines = [[] for _ in range(pipelines)]
        for group in sorted(groups, key=lambda one: (-self._speed(one), self._at(one))):
            home = self._at(group)[0]
            if (spread and group not in self._place) or home >= pipelines:
                home = min(range(pipelines), key=lambda i: (self._total(found[i]), i))
            found[home].append(group)
        if spread:
            self._even_out(found)
        fastest = self._rate(self._tp, 1.0)

        def order(group: Group) -> tuple[float, tuple[int, int], Group]:
            slow = slow_first and self._speed(group) < fastest * (1 - 1e-9)
            return (self._speed(group) if slow else fastest, self._at(group)[::-1], group)

        return [sorted(one, key=order) for one in found]

    def _at(self, group: Group) -> tuple[int, int]:
        """Nominal replica and stage of most of its ranks."""
        places = [self._home.get(rank, (len(self._nominal.replicas), 0)) for rank in group]
        return min(set(places), key=lambda place: (-places.count(place), place))

    def _total(self, groups: Sequence[Group]) -> float:
        return sum(map(self._speed, groups))

    def _even_out(self, found: Pipelines) -> None:
        """Moves groups from the fastest pipeline to the slowest while that evens them out."""
        for _ in range(sum(map(len, found))):
            totals = [self._total(one) for one in found]
            high, low = totals.index(max(totals)), totals.index(min(totals))
            gap = totals[high] - totals[low]
            able = [g for g in found[high] if self._speed(g) < gap * (1 - 1e-9)]
            if not able:
                return
            moved = min(able, key=lambda g: (abs(gap / 2 - self._speed(g)), g))
            found[high].remove(moved)
            found[low].append(moved)

    # Layers.

    def _built(self, pipelines: Pipelines) -> tuple[Replica, ...] | None:
        found = []
        for groups in pipelines:
            replica = self._replica(groups, len(pipelines))
            if replica is None:
                return None
            found.append(replica)
        return tuple(found)

    def _replica(self, groups: Sequence[Group], shards: int) -> Replica | None:
        best: tuple[float, Replica] | None = None
        left = list(groups)
        while left:
            depths = self._depths(left, shards)
            if depths is None:
                break
            loads = [self._load(left, place, depth) for place, depth in enumerate(depths)]
            slowest = loads.index(max(loads))
            if best is None or loads[slowest] < best[0]:
                best = (loads[slowest], self._staged(left, depths))
            if depths[slowest] > 1:
                break
            del left[slowest]
        return best[1] if best else None

    def _depths(self, groups: Sequence[Group], shards: int) -> tuple[int, ...] | None:
        count, total = len(groups), self._nominal.micro_batches
        limits = [
            self._problem.most_layers(
                tp=len(group),
                place=place,
                stages=count,
                shards=shards,
                in_flight=min(count - place, total),
            )
            for place, group in enumerate(groups)
        ]
        num_layers = self._nominal.num_layers
        return balanced(num_layers, lambda i, n: self._load(groups, i, n), limits)

    def _load(self, groups: Sequence[Group], place: int, depth: int) -> float:
        prices, group = self._problem.prices, groups[place]
        first, last = place == 0, place == len(groups) - 1
        p, across = prices.slowest(group), prices.across(group)
        return sum(prices.pair(StageKind(depth, len(group), p, first, last, across)))

    def _staged(self, groups: Sequence[Group], depths: Sequence[int]) -> Replica:
        return Replica(
            stages=tuple(
                Stage(ranks=arranged(self._problem, group, layers), layers=layers)
                for group, layers in zip(groups, edges(tuple(depths)), strict=True)
            )
        )
