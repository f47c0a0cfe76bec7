"""How a policy gets to know of slow devices: the same detectors as in jobs, on simulated series.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from resihp_ext.detector.config import DetectorConfig
from resihp_ext.detector.greyhound import SlowIterations
from resihp_ext.detector.slots import Array
from resihp_ext.detector.watch import Watch
from resihp_ext.plan.plan import Plan
from resihp_ext.simulator.health import Health, Link
from resihp_ext.simulator.policy import Sense
from resihp_ext.simulator.setting import Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Alarm:
    """Something seems to have changed; a validation says what."""

    delay_s: float
    """During which training goes on before the validation."""
    pause_s: float
    """During which training stands still for it."""


class Eye(ABC):
    """Watches the iterations of one run."""

    @abstractmethod
    def adopt(self, plan: Plan, known: Health) -> None:
        """From now on this plan is run, and so much is known."""

    @abstractmethod
    def observe(self, step: int, seconds: float, truth: Health) -> Alarm | None:
        """Takes an iteration."""


class Blind(Eye):
    """Sees nothing."""

    def adopt(self, plan: Plan, known: Health) -> None:
        """Nothing to learn."""

    def observe(self, step: int, seconds: float, truth: Health) -> Alarm | None:
        return None


class Raw(Eye):
    """Greyhound: change points of iteration times; everybody stops for the validation."""

    def __init__(self, setting: Setting) -> None:
        self._times = setting.times
        self._series = SlowIterations()

    def adopt(self, plan: Plan, known: Health) -> None:
        """Iterations of another layout take another time: that is no change."""
        self._series = SlowIterations()

    def observe(self, step: int, seconds: float, truth: Health) -> Alarm | None:
        if self._series.observe(seconds) is None:
            return None
        times = self._times
        return Alarm(delay_s=times.greyhound_profiling_s, pause_s=times.greyhound_validation_s)


class Workload(Eye):
    """Ours: own work of every device, and transfers of every link, over what is usual for them.

    What the fits of jobs leave of a healthy device's variation is drawn as noise here; everything
    after it is the same code.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting, self._config = setting, DetectorConfig()
        self._alarm = Alarm(delay_s=0.0, pause_s=setting.times.validation_s)
        self._rng = np.random.default_rng([setting.seed, 3])
        self._noise: Array = np.empty((0, 0))
        self._turn = 0

    def adopt(self, plan: Plan, known: Health) -> None:
        """Lays out the series; what is known is no news."""
        self._ranks = [rank for one in plan.replicas for rank in one.ranks]
        self._index = {rank: i for i, rank in enumerate(self._ranks)}
        self._links = sorted(_links(plan, self._setting.cluster.node_of))
        self._link_index = {link: len(self._ranks) + i for i, link in enumerate(self._links)}
        size = len(self._ranks) + len(self._links)
        self._watch = Watch(size, self._config.device_over_ratio, self._config)
        deviation = self._setting.times.iteration_noise
        block = self._config.settle_steps
        self._watch.settle(np.exp(self._rng.normal(0, deviation, (block, size))))
        for i, p in self._slow(known):
            self._watch.know([i], 1 / p)
        self._noise, self._turn = np.empty((0, size)), 0
        self._seen, self._level = known, self._levels(known)

    def observe(self, step: int, seconds: float, truth: Health) -> Alarm | None:
        if truth is not self._seen:
            self._seen, self._level = truth, self._levels(truth)
        rises, back = self._watch.observe(step, self._level * self._draw())
        return self._alarm if rises or back else None

    def _draw(self) -> Array:
        if self._turn == len(self._noise):
            size = self._noise.shape[1]
            deviation = self._setting.times.iteration_noise
            self._noise = np.exp(self._rng.normal(0, deviation, (256, size)))
            self._turn = 0
        self._turn += 1
        return np.asarray(self._noise[self._turn - 1])

    def _levels(self, health: Health) -> Array:
        levels = np.ones(len(self._ranks) + len(self._links))
        for i, p in self._slow(health):
            levels[i] = 1 / p
        return levels

    def _slow(self, health: Health) -> list[tuple[int, float]]:
        devices = ((self._index.get(rank), p) for rank, p in health.devices)
        links = ((self._link_index.get(link), left) for link, left in health.links)
        return [(i, p) for i, p in (*devices, *links) if i is not None and p > 0]


def _links(plan: Plan, node_of: dict[int, int]) -> set[Link]:
    """Pairs of nodes between which the plan sends messages."""
    found: set[Link] = set()
    for one in plan.replicas:
        for here, there in zip(one.stages, one.stages[1:], strict=False):
            ends = {(node_of[a], node_of[b]) for a in here.ranks for b in there.ranks}
            found |= {(min(a, b), max(a, b)) for a, b in ends if a != b}
    return found


def eye(sense: Sense, setting: Setting) -> Eye:
    """The eye of a policy."""
    if sense is Sense.BLIND:
        return Blind()
    return Raw(setting) if sense is Sense.RAW else Workload(setting)
