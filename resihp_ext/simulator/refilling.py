"""What a system without a layout of its own for a damaged cluster starts anew with: as many whole
replicas of the nominal shape as there are devices for.

Every operator can do that much, and none of the systems that restart from a checkpoint has
published more: replicas without a bad device stay as they are, the others are filled up with whole
TP groups of each other, and with groups of spare devices of one node, the fastest first. What is
left over is on standby; micro-batches go to fewer replicas.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from resihp_ext.plan.plan import Replica, Stage
from resihp_ext.scheduler.prices import Group
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.setting import Setting


def refilled(setting: Setting, health: Health, bad: Collection[int]) -> tuple[Replica, ...]:
    """As many replicas as possible without the bad ranks; none, if they are too few."""
    nominal = setting.nominal.replicas
    broken = [number for number, one in enumerate(nominal) if set(one.ranks) & set(bad)]
    whole = {number: one for number, one in enumerate(nominal) if number not in broken}
    taken = {rank for one in whole.values() for rank in one.ranks}
    free = [d.rank for d in setting.cluster.devices if d.rank not in taken and d.rank not in bad]
    for count in range(len(broken), -1, -1):
        kept = _most_alike(nominal, broken, set(free), count)
        found = _Filling(setting, health, free).fill([nominal[number] for number in kept])
        if found is not None:
            built = {**whole, **dict(zip(kept, found, strict=True))}
            return tuple(built[number] for number in sorted(built))
    raise AssertionError("no replica at all needs no device")


def _most_alike(
    nominal: tuple[Replica, ...], broken: list[int], free: set[int], count: int
) -> list[int]:
    """Those broken replicas that have lost least."""
    lost = {number: len(set(nominal[number].ranks) - free) for number in broken}
    return sorted(sorted(broken, key=lambda number: (lost[number], number))[:count])


class _Filling:
    """Gives groups to stages."""

    def __init__(self, setting: Setting, health: Health, free: list[int]) -> None:
        p, self._node_of = health.p, setting.cluster.node_of
        self._free = set(free)
        self._order = sorted(free, key=lambda rank: (-p.get(rank, 1.0), rank))
        stages = [stage for one in setting.nominal.replicas for stage in one.stages]
        self._intact = sorted(
            (stage.ranks for stage in stages if set(stage.ranks) <= self._free),
            key=lambda ranks: (-min(p.get(rank, 1.0) for rank in ranks), ranks),
        )

    def fill(self, wanted: list[Replica]) -> list[Replica] | None:
        """Replicas of the wanted shapes; None: too few devices."""
        own = {
            stage.ranks for one in wanted for stage in one.stages if set(stage.ranks) <= self._free
        }
        for group in own:
            self._free -= set(group)
        found = []
        for one in wanted:
            stages = []
            for stage in one.stages:
                ranks = stage.ranks if stage.ranks in own else self._group(stage)
                if ranks is None:
                    return None
                stages.append(replace(stage, ranks=ranks))
            found.append(Replica(stages=tuple(stages)))
        return found

    def _group(self, stage: Stage) -> Group | None:
        """A whole group of another stage, or spare devices of one node."""
        for group in self._intact:
            if len(group) == stage.tp and set(group) <= self._free:
                self._free -= set(group)
                return group
        across = len({self._node_of[rank] for rank in stage.ranks}) > 1
        rooms: dict[int, list[int]] = {}
        for rank in self._order:
            if rank in self._free:
                rooms.setdefault(-1 if across else self._node_of[rank], []).append(rank)
        for ranks in rooms.values():
            if len(ranks) >= stage.tp:
                spare = tuple(sorted(ranks[: stage.tp]))
                self._free -= set(spare)
                return spare
        return None
