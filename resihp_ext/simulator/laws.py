"""Random faults of a cluster: what fails how often, how badly, and for how long.

A source is one kind of fault: deaths of devices or of nodes, or slowness of devices, nodes, single
links or all links of a node. Times between its faults follow an exponential, Weibull, log-normal or
normal law, or are all alike; either for every target on its own, or for the whole cluster ("one
every 30 minutes", periodic or random), where each fault hits a target that has none of this source.
What is repaired after its time returns as a spare, or to where it was: policies decide.

Ranges of severity are assumptions, to be swept; the paper only names them weak, medium and severe.
What sources are published: failures of GPUs in large jobs, one in 3 hours on 16,384 of them
(Grattafiori et al. 2024, arXiv 2407.21783), about 50,000 hours each; slow phases in Greyhound's
injection, exponential gaps with a mean of 240 s to 300 s and durations N(120, 20) s.

The same seed gives the same bytes; every source, and every target with a clock of its own, has its
own stream of random numbers, so that another source changes nothing of the others.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import combinations
from math import gamma, inf, log

import numpy as np

from resihp_ext.cost.cluster import Cluster
from resihp_ext.errors import UserError
from resihp_ext.simulator.happenings import Happening
from resihp_ext.simulator.health import Link
from resihp_ext.simulator.spells import Spell, happenings_of

LEAST_S = 1.0
"""Of every time that is drawn: a normal law could give less than nothing."""


class Form(StrEnum):
    """Of a law."""

    FIXED = "fixed"
    """Always the mean."""
    EXPONENTIAL = "exponential"
    """Without memory."""
    WEIBULL = "weibull"
    """``shape`` below 1: many early, above 1: of age."""
    LOG_NORMAL = "log-normal"
    """``shape``: standard deviation of the logarithm."""
    NORMAL = "normal"
    """``shape``: standard deviation over the mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """How long something takes.

    Raises:
        UserError: a mean or shape that makes no sense.
    """

    mean_s: float
    form: Form = Form.EXPONENTIAL
    shape: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.mean_s < inf or not 0 < self.shape < inf:
            raise UserError(
                f"law {self.form}: mean {self.mean_s} s and shape {self.shape} must be positive"
            )

    def draw(self, rng: np.random.Generator) -> float:
        """Seconds, to a millisecond."""
        mean, shape = self.mean_s, self.shape
        match self.form:
            case Form.FIXED:
                drawn = mean
            case Form.EXPONENTIAL:
                drawn = rng.exponential(mean)
            case Form.WEIBULL:
                drawn = rng.weibull(shape) * mean / gamma(1 + 1 / shape)
            case Form.LOG_NORMAL:
                drawn = rng.lognormal(log(mean) - shape**2 / 2, shape)
            case Form.NORMAL:
                drawn = rng.normal(mean, shape * mean)
        return max(LEAST_S, round(float(drawn), 3))


class Severity(StrEnum):
    """How much a slow fault takes."""

    WEAK = "weak"
    MEDIUM = "medium"
    SEVERE = "severe"


LEFT = {
    Severity.WEAK: (0.7, 0.9),
    Severity.MEDIUM: (0.4, 0.7),
    Severity.SEVERE: (0.15, 0.4),
}
"""From and to of what is left of a device's speed or a link's bandwidth, all equally likely."""


class Target(StrEnum):
    """What a fault hits."""

    DEVICE = "device"
    NODE = "node"
    """All devices of a node."""
    LINK = "link"
    """The path between two nodes."""
    NETWORK = "network"
    """All paths of a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One kind of fault.

    Raises:
        UserError: links that die.
    """

    target: Target
    gap: Law
    """Between the faults of a target, from the end of one to the next; or of the cluster, from the
    begin of one to the next."""
    each: bool = False
    """Whether every target has its own clock; else there is one for the whole cluster."""
    lasts: Law | None = None
    """Until repair; None: for ever."""
    severity: Severity | None = None
    """None: it kills."""
    most: int | None = None
    """Faults in all, of a clock for the whole cluster."""

    def __post_init__(self) -> None:
        if self.severity is None and self.target in (Target.LINK, Target.NETWORK):
            raise UserError(f"source {self.target}: links become slow, they do not die: severity?")

    def left(self, rng: np.random.Generator) -> float:
        """What one fault leaves."""
        return 0.0 if self.severity is None else round(float(rng.uniform(*LEFT[self.severity])), 3)


@dataclass(frozen=True, slots=True)
class _Place:
    ranks: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()


def sample(
    cluster: Cluster, sources: Sequence[Source], *, until_s: float, seed: int
) -> tuple[Happening, ...]:
    """Draws what befalls a cluster.

    Args:
        until_s: Nothing begins or ends then or later.
    """
    spells: list[Spell] = []
    for number, source in enumerate(sources):
        places = _places(cluster, source.target)
        if source.each:
            for index, place in enumerate(places):
                rng = np.random.default_rng([seed, number, index])
                spells += _own_clock(source, place, until_s, rng)
        elif places:
            rng = np.random.default_rng([seed, number])
            spells += _common_clock(source, places, until_s, rng)
    return happenings_of(spells, until_s)


def _own_clock(
    source: Source, place: _Place, until_s: float, rng: np.random.Generator
) -> Iterator[Spell]:
    now_s = source.gap.draw(rng)
    while now_s < until_s:
        one = _spell(source, place, now_s, rng)
        yield one
        now_s = one.end_s + source.gap.draw(rng)


def _common_clock(
    source: Source, places: Sequence[_Place], until_s: float, rng: np.random.Generator
) -> Iterator[Spell]:
    free_s = [0.0] * len(places)
    now_s, count = source.gap.draw(rng), 0
    while now_s < until_s and count != source.most:
        free = [index for index, end_s in enumerate(free_s) if end_s <= now_s]
        if free:
            index = free[int(rng.integers(len(free)))]
            one = _spell(source, places[index], now_s, rng)
            free_s[index] = one.end_s
            count += 1
            yield one
        now_s = round(now_s + source.gap.draw(rng), 3)


def _spell(source: Source, place: _Place, begin_s: float, rng: np.random.Generator) -> Spell:
    begin_s = round(begin_s, 3)
    return Spell(
        begin_s=begin_s,
        end_s=inf if source.lasts is None else round(begin_s + source.lasts.draw(rng), 3),
        ranks=place.ranks,
        links=place.links,
        left=source.left(rng),
    )


def _places(cluster: Cluster, target: Target) -> list[_Place]:
    nodes: dict[int, list[int]] = {}
    for one in cluster.devices:
        nodes.setdefault(one.node, []).append(one.rank)
    links = list(combinations(sorted(nodes), 2))
    match target:
        case Target.DEVICE:
            return [_Place(ranks=(one.rank,)) for one in cluster.devices]
        case Target.NODE:
            return [_Place(ranks=tuple(nodes[node])) for node in sorted(nodes)]
        case Target.LINK:
            return [_Place(links=(link,)) for link in links]
        case Target.NETWORK:
            paths = [tuple(link for link in links if node in link) for node in sorted(nodes)]
            return [_Place(links=path) for path in paths if path]
