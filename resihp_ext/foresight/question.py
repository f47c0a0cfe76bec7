"""The question as the simulator understands it: a job, sources of faults, policies, runs.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from resihp_ext.cost.cluster import Cluster
from resihp_ext.plan.plan import Device
from resihp_ext.simulator.laws import Law, Severity, Source, Target
from resihp_ext.simulator.policies.registry import POLICIES
from resihp_ext.simulator.restart import read_s
from resihp_ext.simulator.setting import Setting
from resihp_ext.simulator.times import Times
from resihp_ext.whatif.scene import healthy_ground
from resihp_ext.whatif.settings import Settings

DEFAULT_POLICIES = ("restart", "progressive", "joint")
HOUR_S = 3600.0
MOST_SEEDS = 1000
LEAST_CHECKPOINT_S = 1.0
"""Cost of a checkpoint for the best interval, where it holds nothing up: it loads storage."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """Everything that is asked."""

    setting: Setting
    sources: tuple[Source, ...]
    policies: tuple[str, ...]
    until_s: float
    seeds: tuple[int, ...]
    goal: float | None
    """Wanted goodput ratio."""
    interval_chosen: bool
    """Whether the interval of checkpoints is the best one by formula."""

    def with_spares(self, nodes: int) -> Question:
        """The same with so many nodes more than the layout needs."""
        return replace(self, setting=with_spares(self.setting, nodes))

    @property
    def spare_nodes(self) -> int:
        """Nodes that the layout does not touch."""
        used = {rank for one in self.setting.nominal.replicas for rank in one.ranks}
        touched = {one.node for one in self.setting.cluster.devices if one.rank in used}
        return len({one.node for one in self.setting.cluster.devices} - touched)


def question(settings: Settings) -> Question:
    """Builds the question.

    Raises:
        UserError: something is missing or does not fit; one line.
    """
    ground = healthy_ground(settings)
    healthy = ground.healthy
    cost = healthy.cost
    sources = _sources(settings)
    setting = Setting(
        name=f"{healthy.shape.name} on {ground.grid.devices} devices",
        cluster=healthy.cluster,
        shape=healthy.shape,
        cost=cost,
        memory=healthy.policy,
        nominal=healthy.current,
    )
    times = Times(
        restart_s=settings.number("restart-s", Times().restart_s),
        checkpoint_s=_not_negative(settings, "checkpoint-s", 0.0),
    )
    chosen = "checkpoint-every-s" not in settings
    setting = replace(setting, times=times)
    every_s = best_interval_s(setting, sources) if chosen else 0.0
    every_s = settings.number("checkpoint-every-s", every_s)
    times = replace(times, checkpoint_every_s=every_s)
    count = settings.whole("seeds", most=MOST_SEEDS) or 8
    first = int(_not_negative(settings, "seed", 0))
    return Question(
        setting=replace(setting, times=times),
        sources=sources,
        policies=_policies(settings),
        until_s=settings.number("hours", 24.0) * HOUR_S,
        seeds=tuple(range(first, first + count)),
        goal=_goal(settings),
        interval_chosen=chosen,
    )


def best_interval_s(setting: Setting, sources: Sequence[Source]) -> float:
    """Between two checkpoints, for who loses all work since the last one: ``sqrt(2 C M)`` with the
    cost ``C`` of a checkpoint and the mean time ``M`` between losses (Young 1974, Daly 2006)."""
    rate = 0.0
    devices = len(setting.cluster.devices)
    nodes = len({one.node for one in setting.cluster.devices})
    for one in sources:
        if one.severity is None:
            targets = 1 if not one.each else nodes if one.target is Target.NODE else devices
            rate += targets / one.gap.mean_s
    if not rate:
        return Times().checkpoint_every_s
    cost_s = max(setting.times.checkpoint_s, read_s(setting), LEAST_CHECKPOINT_S)
    return math.sqrt(2 * cost_s / rate)


def with_spares(setting: Setting, nodes: int) -> Setting:
    """The cluster with exactly so many nodes beyond those that the layout touches."""
    used = {rank for one in setting.nominal.replicas for rank in one.ranks}
    touched = {one.node for one in setting.cluster.devices if one.rank in used}
    devices = [one for one in setting.cluster.devices if one.node in touched]
    each = setting.devices_per_node
    rank, node = max(one.rank for one in devices) + 1, max(touched) + 1
    devices += [Device(rank=rank + at, node=node + at // each) for at in range(nodes * each)]
    cluster = Cluster(devices=tuple(devices), memory_bytes=setting.cluster.memory_bytes)
    return replace(
        setting, cluster=cluster, nominal=replace(setting.nominal, devices=cluster.devices)
    )


def _sources(settings: Settings) -> tuple[Source, ...]:
    hours = {
        name: _not_negative(settings, f"{name}-mtbf-h", default)
        for name, default in (("device", 50_000.0), ("node", 0.0), ("slow", 0.0), ("link", 0.0))
    }
    every_s = _not_negative(settings, "fault-every-s", 0.0)
    repair = Law(mean_s=settings.number("repair-h", 4.0) * HOUR_S)
    lasts = Law(mean_s=settings.number("slow-h", 1.0) * HOUR_S)
    severity = Severity(settings.choice("severity", list(Severity), Severity.MEDIUM))
    found = []
    for name, target, slow in (
        ("device", Target.DEVICE, False),
        ("node", Target.NODE, False),
        ("slow", Target.DEVICE, True),
        ("link", Target.NETWORK, True),
    ):
        # Deaths "every so often" take the place of those by the device's own clock.
        if not hours[name] or (name == "device" and every_s and "device-mtbf-h" not in settings):
            continue
        found.append(
            Source(
                target=target,
                gap=Law(mean_s=hours[name] * HOUR_S),
                each=True,
                lasts=lasts if slow else repair,
                severity=severity if slow else None,
            )
        )
    if every_s:
        found.append(Source(target=Target.DEVICE, gap=Law(mean_s=every_s), lasts=repair))
    return tuple(found)


def _policies(settings: Settings) -> tuple[str, ...]:
    given = settings.texts("policy") or DEFAULT_POLICIES
    names = [name.strip() for text in given for name in text.split(",")]
    if "all" in names:
        return tuple(POLICIES)
    for name in names:
        if name not in POLICIES:
            raise settings.error(
                "policy", f"{name!r} is unknown; choose from {', '.join(POLICIES)}, or all"
            )
    return tuple(dict.fromkeys(names))


def _goal(settings: Settings) -> float | None:
    if "goal" not in settings:
        return None
    goal = settings.number("goal", 1.0)
    if goal >= 1:
        raise settings.error("goal", f"{goal:g}: expected a part of 1, such as 0.97")
    return goal


def _not_negative(settings: Settings, name: str, default: float) -> float:
    text = settings.text(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise settings.error(name, f"expected 0 or a number above it, got {text!r}")
    return value
