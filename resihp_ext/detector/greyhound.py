"""Greyhound's way, for comparison: change points of the raw iteration time, then peers compared.

Iteration times with |z| > 3 are dropped; over which times z is taken is not published, here it is
the last 30, so that a change that stays is given on after three or four steps. BOCD with a hazard
of 1/250, a prior from the first 30 iterations, an alarm when a run shorter than 10 has a
probability above 0.8, run lengths up to 300; a change is kept when it is more than 10 iterations
after the last one and the means differ by more than 10 %.

Attribution, best of all, is by validation: benchmarks of every device and link while training is
paused, where those count as slow that take more than 1.1 times the median of their kind (published:
twice the median for devices, and links only when no device is slow; both would only find less).
Without benchmarks the timers of the step must do: the ranks, and then the links, that are at least
1.2 times as slow for a token as the median of those with the same role.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from resihp_ext.detector.bocd import BocdConfig
from resihp_ext.detector.reader import Reader, Step
from resihp_ext.detector.slots import Array, Sample, Slots, finite_median
from resihp_ext.detector.suspect import Report, Suspect
from resihp_ext.detector.transfers import Transfers
from resihp_ext.detector.verify import Change, Changes
from resihp_ext.plan.plan import Plan
from resihp_ext.plan.schedule import one_forward_one_backward

SUSPICIOUS_RATIO = 1.2
VALIDATED_RATIO = 1.1
DISTANCE = 10
OUTLIER_Z = 3.0
OUTLIER_WINDOW_STEPS = 30
OUTLIER_LEAST_STEPS = 5
"""Observations without which nothing is an outlier."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Benchmarks:
    """Of all devices and links while training is paused."""

    compute_s: Array
    """Of each rank of :attr:`Greyhound.ranks`."""
    pair_s: Array
    """Of each pair of :attr:`Greyhound.pairs`."""


class Outliers:
    """Holds back what is far from the last observations, and drops it unless it stays."""

    def __init__(self) -> None:
        self._window: deque[float] = deque(maxlen=OUTLIER_WINDOW_STEPS)
        self._held: list[float] = []

    def observe(self, value: float) -> list[float]:
        """Takes the next observation; returns those, in order, that are no outliers (any more)."""
        self._window.append(value)
        self._held.append(value)
        held, window = np.array(self._held), np.array(self._window)
        far = np.abs(held - window.mean()) > OUTLIER_Z * window.std()
        if len(window) < OUTLIER_LEAST_STEPS:
            far[:] = False
        kept = np.flatnonzero(~far)
        if not len(kept):
            return []
        # What came before one that is kept has not stayed.
        self._held = self._held[int(kept[-1]) + 1 :]
        return [float(value) for value in held[kept]]


class SlowIterations:
    """The series of raw iteration times: when do they become longer, and stay so?"""

    def __init__(self, config: BocdConfig | None = None, *, drop_outliers: bool = True) -> None:
        self._changes = Changes(config or BocdConfig(), ratio=0.1, distance=DISTANCE)
        self._outliers = Outliers() if drop_outliers else None

    @property
    def settled(self) -> bool:
        """Whether the prior is there."""
        return not self._changes.unsettled

    def observe(self, seconds: float) -> Change | None:
        """Takes an iteration; any change that stays is returned, to slower or faster."""
        given = self._outliers.observe(seconds) if self._outliers else [seconds]
        found = [change for value in given if (change := self._changes.observe(value))]
        return found[-1] if found else None


class Greyhound:
    """One job on one plan."""

    def __init__(
        self, plan: Plan, config: BocdConfig | None = None, *, drop_outliers: bool = True
    ) -> None:
        self._slots = Slots(plan, one_forward_one_backward(plan))
        self._reader = Reader(self._slots)
        self._transfers = Transfers(self._slots)
        self._iterations = SlowIterations(config, drop_outliers=drop_outliers)
        node_of = {d.rank: d.node for d in plan.devices}
        self._roles = [self._role(rank) for rank in self._slots.ranks]
        self._near = [node_of[a] == node_of[b] for a, b in self._transfers.pairs]

    @property
    def ranks(self) -> tuple[int, ...]:
        """In the order of benchmarks, as :attr:`pairs`."""
        return self._slots.ranks

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Of ranks between which messages are sent."""
        return self._transfers.pairs

    @property
    def settled(self) -> bool:
        """Whether the prior is there."""
        return self._iterations.settled

    def observe(self, step: int, steps: Mapping[int, Step]) -> Report:
        """Judges a step: any slower iteration time that stays is an alarm."""
        return self.judge(step, self._reader.read(steps))

    def judge(
        self, step: int, sample: Sample, validate: Callable[[], Benchmarks] | None = None
    ) -> Report:
        """The same on arrays; ``validate`` is called at an alarm."""
        observed = finite_median(sample.total_s)
        change = self._iterations.observe(observed)
        nothing = Report(step=step, observed_s=observed, predicted_s=np.nan, ratio=np.nan)
        if change is None or change.after <= change.before:
            return nothing
        ratio = change.after / change.before
        since = step - change.age + 1
        suspects = self._slow(validate(), since) if validate else self._suspects(sample, since)
        return Report(
            step=step,
            observed_s=observed,
            predicted_s=change.before,
            ratio=ratio,
            suspects=suspects,
            unexplained=not suspects,
        )

    def _role(self, rank: int) -> tuple[int, ...]:
        """Ranks with the same layers and TP degree do the same work for a token."""
        stages = [self._slots.plan.stage(one) for one in self._slots.plan.instances_of(rank)]
        return (stages[0].tp, *(edge for stage in stages for edge in stage.layers))

    def _suspects(self, sample: Sample, since: int) -> tuple[Suspect, ...]:
        slots, compute = self._slots, self._slots.compute
        ranks, size = slots.rank_of[compute], len(self._roles)
        load = slots.load(slots.node_of[compute], sample)
        own = np.bincount(ranks, np.nan_to_num(sample.own_s[compute]), size)
        with np.errstate(all="ignore"):
            own /= np.bincount(ranks, np.nan_to_num(load), size)
        roles = self._roles
        found = self._devices(_above(own, roles, SUSPICIOUS_RATIO), since)
        if found:
            return found
        seconds = self._transfers.seconds(sample)
        return self._links(_above(seconds, self._near, SUSPICIOUS_RATIO), since)

    def _slow(self, benchmarks: Benchmarks, since: int) -> tuple[Suspect, ...]:
        alike = [0] * len(self.ranks)
        devices = _above(benchmarks.compute_s, alike, VALIDATED_RATIO)
        links = _above(benchmarks.pair_s, self._near, VALIDATED_RATIO)
        return self._devices(devices, since) + self._links(links, since)

    def _devices(self, above: Sequence[tuple[int, float]], since: int) -> tuple[Suspect, ...]:
        return tuple(
            Suspect(
                kind="device",
                ranks=(self.ranks[i],),
                p=min(1 / ratio, 1.0),
                since_step=since,
                evidence=f"rank {self.ranks[i]} takes {ratio:.2f} times its peers' time",
            )
            for i, ratio in above
        )

    def _links(self, above: Sequence[tuple[int, float]], since: int) -> tuple[Suspect, ...]:
        return tuple(
            Suspect(
                kind="link",
                ranks=self.pairs[i],
                p=min(1 / ratio, 1.0),
                since_step=since,
                evidence=f"link {self.pairs[i]} takes {ratio:.2f} times its peers' time",
            )
            for i, ratio in above
        )


def _above(values: Array, roles: Sequence[Hashable], least_ratio: float) -> list[tuple[int, float]]:
    """Members that are far above the median of their role."""
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i, role in enumerate(roles):
        members[role].append(i)
    found = []
    for mine in members.values():
        usual = finite_median(values[mine])
        ratios = [(i, float(values[i]) / usual) for i in mine]
        found += [(i, ratio) for i, ratio in ratios if ratio >= least_ratio]
    return found
