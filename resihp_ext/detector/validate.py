"""Is a suspect slow? What to measure, and what the measured seconds say.

A suspect is compared with healthy devices or links of the same kind that are measured at the same
boundary between two steps; so nobody has to know how fast a device should be. Only what stands out
of the noise is decided: all else is unknown.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot, inf, isfinite
from statistics import median

from resihp_ext.detector.probe import Task, TaskKind
from resihp_ext.detector.suspect import Suspect, Verdict
from resihp_ext.errors import UserError

Pair = tuple[int, int]
Seconds = Mapping[tuple[int, int], Sequence[float]]
"""By place of the task and rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JudgeConfig:
    """When measured seconds decide."""

    device_below_ratio: float = 1 / 1.15
    """A device is slow below this part of a healthy one's speed; as ``DetectorConfig`` has it."""
    link_below_ratio: float = 1 / 1.2
    """The same for links, and for a host's all-reduce."""
    sigmas: float = 3.0
    """So many standard errors must lie between a ratio and its limit."""
    least_samples: int = 3
    """Repetitions without which a median is none."""

    def __post_init__(self) -> None:
        if not all(0 < ratio <= 1 for ratio in (self.device_below_ratio, self.link_below_ratio)):
            raise UserError("validation: ratios must be above 0 and not above 1")
        if not (isfinite(self.sigmas) and self.sigmas >= 0) or self.least_samples < 1:
            raise UserError("validation: sigmas must be 0 or more, least_samples 1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a validation has found."""

    verdict: Verdict
    p: Mapping[int, float] = field(default_factory=dict)
    """Throughput of every rank for which it is decided, in (0, 1]."""
    links: Mapping[Pair, float] = field(default_factory=dict)
    """The same of pairs of ranks."""
    slow: frozenset[int] = frozenset()
    """Ranks whose devices are slow."""
    evidence: str = ""
    """One plain line for people."""

    @property
    def least_p(self) -> float | None:
        """The lowest of all throughputs; None if nothing is decided."""
        return min((*self.p.values(), *self.links.values()), default=None)


@dataclass(frozen=True, slots=True)
class _Sample:
    median_s: float
    error: float
    """Standard error over the median."""


def judge(
    suspect: Suspect, tasks: Sequence[Task], seconds: Seconds, config: JudgeConfig | None = None
) -> Finding:
    """What the seconds of a probe say of a suspect.

    Args:
        tasks: As ``references.tasks_for`` has given them.
        seconds: What came back; whatever is missing, or is no positive number, has no say.
    """
    config = config or JudgeConfig()
    if suspect.kind == "link":
        return _judge_link(suspect, tasks, seconds, config)
    found = _judge_devices(suspect, tasks, seconds, config)
    if suspect.kind == "host" and found.verdict is not Verdict.SLOW:
        return _judge_host(suspect, tasks, seconds, config, found)
    return found


def _judge_devices(
    suspect: Suspect, tasks: Sequence[Task], seconds: Seconds, config: JudgeConfig
) -> Finding:
    mine = set(suspect.ranks)
    samples = {
        rank: _sample(seconds.get((at, rank), ()), config)
        for at, task in enumerate(tasks)
        if task.kind is TaskKind.GEMM
        for rank in task.ranks
    }
    healthy = [one for rank, one in samples.items() if rank not in mine and one is not None]
    decided: dict[int, float] = {}
    verdicts, slow = [], set()
    for rank in suspect.ranks:
        verdict, p = _compare(samples.get(rank), healthy, config.device_below_ratio, config)
        verdicts.append(verdict)
        if verdict is not Verdict.UNKNOWN:
            decided[rank] = p
        if verdict is Verdict.SLOW:
            slow.add(rank)
    measured = {rank: one.median_s for rank, one in samples.items() if one is not None}
    return Finding(
        verdict=_overall(verdicts),
        p=decided,
        slow=frozenset(slow),
        evidence=_evidence("products", measured),
    )


def _judge_link(
    suspect: Suspect, tasks: Sequence[Task], seconds: Seconds, config: JudgeConfig
) -> Finding:
    pair = (min(suspect.ranks), max(suspect.ranks))
    samples = {
        (min(task.ranks), max(task.ranks)): _sample(seconds.get((at, task.ranks[0]), ()), config)
        for at, task in enumerate(tasks)
        if task.kind is TaskKind.P2P
    }
    healthy = [one for ends, one in samples.items() if ends != pair and one is not None]
    verdict, p = _compare(samples.get(pair), healthy, config.link_below_ratio, config)
    measured = {f"{a}-{b}": one.median_s for (a, b), one in samples.items() if one is not None}
    return Finding(
        verdict=verdict,
        links={} if verdict is Verdict.UNKNOWN else {pair: p},
        evidence=_evidence("messages", measured),
    )


def _judge_host(
    suspect: Suspect,
    tasks: Sequence[Task],
    seconds: Seconds,
    config: JudgeConfig,
    devices: Finding,
) -> Finding:
    """Its devices do not look slow by themselves: does what they do together?

    Then nothing measured says how much that costs a device: the suspicion's own figure stands.
    """
    mine = set(suspect.ranks)
    own, healthy = None, []
    for at, task in enumerate(tasks):
        if task.kind is not TaskKind.ALL_REDUCE:
            continue
        every = [_sample(seconds.get((at, rank), ()), config) for rank in task.ranks]
        found = [one for one in every if one is not None]
        # A ring is as slow as its slowest member sees it.
        slowest = max(found, key=lambda one: one.median_s) if found else None
        if mine >= set(task.ranks):
            own = slowest
        elif slowest is not None:
            healthy.append(slowest)
    verdict, ratio = _compare(own, healthy, config.link_below_ratio, config)
    if verdict is not Verdict.SLOW:
        return devices
    text = f"{devices.evidence}; all-reduce at {ratio:.2f} of the speed of other nodes"
    return Finding(
        verdict=Verdict.SLOW,
        p=dict.fromkeys(suspect.ranks, suspect.p),
        slow=frozenset(suspect.ranks),
        evidence=text[:400],
    )


def _compare(
    own: _Sample | None, healthy: Sequence[_Sample], limit: float, config: JudgeConfig
) -> tuple[Verdict, float]:
    """Verdict and throughput; 1.0 where it is unknown."""
    if own is None or not healthy:
        return Verdict.UNKNOWN, 1.0
    medians = [one.median_s for one in healthy]
    reference_s = median(medians)
    # References that do not agree with each other are none.
    apart = (max(medians) - min(medians)) / 2 / reference_s
    doubt = hypot(own.error, max(apart, *(one.error for one in healthy)))
    ratio = reference_s / own.median_s
    if not 0 < ratio < inf:  # times so far apart are no times
        return Verdict.UNKNOWN, 1.0
    margin = config.sigmas * doubt * ratio
    p = min(ratio, 1.0)
    if ratio + margin < limit:
        return Verdict.SLOW, p
    if ratio - margin >= limit:
        return Verdict.HEALTHY, p
    return Verdict.UNKNOWN, 1.0


def _sample(seconds: Sequence[float], config: JudgeConfig) -> _Sample | None:
    good = [one for one in seconds if isfinite(one) and one > 0]
    if len(good) < config.least_samples:
        return None
    middle = median(good)
    # 1.4826: from the median deviation to a standard deviation; 1.2533: from a mean's error to a
    # median's, both for normal noise.
    spread = 1.4826 * median(abs(one - middle) for one in good)
    return _Sample(middle, 1.2533 * spread / middle / len(good) ** 0.5)


def _overall(verdicts: Sequence[Verdict]) -> Verdict:
    if Verdict.SLOW in verdicts:
        return Verdict.SLOW
    if not verdicts or Verdict.UNKNOWN in verdicts:
        return Verdict.UNKNOWN
    return Verdict.HEALTHY


def _evidence(what: str, measured: Mapping[int, float] | Mapping[str, float]) -> str:
    parts = [f"{name}: {1e3 * value:.3g} ms" for name, value in measured.items()]
    return (f"{what}, median by rank: {', '.join(parts)}" if parts else "nothing measured")[:400]
