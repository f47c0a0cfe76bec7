"""What the ratios of the throughput figures hang on: one assumption changed at a time.

PAPER does not say how its runs were set up, and some parameters of baselines could not be checked.
Each is changed on one configuration, up and down; a ratio outside the paper's range is explained by
what moves it, and by whether any of it would bring it inside.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log

from resihp_ext.reproduce.case import Case
from resihp_ext.reproduce.figure import Cell, Claim, Figure, Part, Results, Scale
from resihp_ext.reproduce.ratios import OURS, PAPER, goodput, over
from resihp_ext.reproduce.scenarios import MIXED, SLOW, STOP, Scenario
from resihp_ext.simulator.documents import Documents
from resihp_ext.simulator.laws import Severity, Target
from resihp_ext.simulator.policies.registry import POLICIES
from resihp_ext.simulator.presets import Assumptions
from resihp_ext.simulator.times import Times

CONFIGURATION = "llama2-13b-16k"
KINDS: dict[str, Scenario] = {"fail-stop": STOP, "fail-slow": SLOW[1], "mixed": MIXED}
"""What stands for each kind of failure."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One assumption, changed."""

    name: str
    assumptions: Assumptions = Assumptions()  # noqa: RUF009 - frozen
    targets: tuple[Target, ...] | None = None
    gap_s: float | None = None
    severity: Severity | None = None
    instead: tuple[str, str] | None = None
    """Another policy in the place of one."""

    def policy(self, name: str) -> str:
        """Who runs in its place."""
        return self.instead[1] if self.instead and self.instead[0] == name else name

    def scenario(self, base: Scenario) -> Scenario:
        """With the change, as far as it is one of the scenario."""
        made = base
        if self.targets is not None:
            made = replace(made, slow_targets=self.targets)
        if self.gap_s is not None:
            made = replace(made, gap_s=self.gap_s)
        if self.severity is not None and made.slow is not None:
            made = replace(made, slow=self.severity)
        return made


def _times(name: str, **changed: float) -> Variant:
    return Variant(name=name, assumptions=Assumptions(times=replace(Times(), **changed)))


BASE = Variant(name="as it is")
VARIANTS = (
    Variant(name="2 micro-batches a stage instead of 4", assumptions=Assumptions(rounds=2)),
    Variant(name="8 micro-batches a stage instead of 4", assumptions=Assumptions(rounds=8)),
    Variant(
        name="documents of even length",
        assumptions=Assumptions(documents=Documents(log_deviation=0.4)),
    ),
    Variant(
        name="one document a sequence",
        assumptions=Assumptions(documents=Documents(log_mean=20.0, log_deviation=0.0)),
    ),
    Variant(name="slow devices only", targets=(Target.DEVICE,)),
    Variant(name="slow networks only", targets=(Target.NETWORK,)),
    Variant(name="weak instead of medium slowness", severity=Severity.WEAK),
    Variant(name="severe instead of medium slowness", severity=Severity.SEVERE),
    Variant(name="a fault every 2 h instead of 30 min", gap_s=7200.0),
    _times("checkpoints every 5 min instead of 30", checkpoint_every_s=300.0),
    _times("restarts in 30 s instead of 120 s", restart_s=30.0),
    _times("restarts in 600 s instead of 120 s", restart_s=600.0),
    _times("changes in running jobs in 0.5 s instead of 2 s", regroup_s=0.5),
    _times("changes in running jobs in 20 s instead of 2 s", regroup_s=20.0),
    _times("profiling before validation in 1 s instead of 20 s", greyhound_profiling_s=1.0),
    _times("noise of 3 % instead of 1 %", iteration_noise=0.03),
    Variant(
        name="ReCycle with room for as many activations as stages, not twice as many",
        instead=("recycle", "recycle, room 1"),
    ),
    Variant(
        name="ReCycle with room for four times as many activations as stages",
        instead=("recycle", "recycle, room 4"),
    ),
    Variant(
        name="plans expected to last 10 min instead of 30", instead=(OURS, "progressive, 600 s")
    ),
    Variant(
        name="plans expected to last 2 h instead of 30 min", instead=(OURS, "progressive, 7200 s")
    ),
)


def cases(scale: Scale, kind: str, variant: Variant) -> list[Case]:
    """All seeds."""
    return [
        Case(
            configuration=CONFIGURATION,
            scenario=variant.scenario(KINDS[kind]),
            seed=seed,
            policies=tuple(variant.policy(one) for one in POLICIES),
            assumptions=variant.assumptions,
        )
        for seed in range(scale.seeds)
    ]


def tasks(scale: Scale, kinds: Sequence[str] = tuple(KINDS)) -> list[Case]:
    """Every variant of these kinds; none in a small run, which explains nothing."""
    variants = () if scale.small else (BASE, *VARIANTS)
    return [case for kind in kinds for one in variants for case in cases(scale, kind, one)]


def ratio(results: Results, found: Sequence[Case], theirs: str, variant: Variant = BASE) -> float:
    """Ours over a baseline."""
    mine, other = variant.policy(OURS), variant.policy(theirs)
    return over(goodput(results, found, mine), goodput(results, found, other))


def why(claim: Claim, kind: str, theirs: str, scale: Scale, results: Results) -> str:
    """One or two sentences about a ratio that is outside; empty where all of it is inside."""
    if claim.within or scale.small:
        return ""
    base = ratio(results, cases(scale, kind, BASE), theirs)
    moved = [(one.name, ratio(results, cases(scale, kind, one), theirs, one)) for one in VARIANTS]
    order = sorted(moved, key=lambda pair: -abs(log(pair[1] / base)))
    low, high = min(value for _, value in moved), max(value for _, value in moved)
    (first, one), (second, two) = order[:2]
    inside = [name for name, value in moved if claim.paper[0] <= value <= claim.paper[1]]
    text = (
        f"On {CONFIGURATION} ({KINDS[kind].name}) it is {base:.2f}x, and {low:.2f}x to {high:.2f}x "
        f"when one assumption is changed: most by {first} ({one:.2f}x) and {second} ({two:.2f}x)."
    )
    if claim.paper[0] <= base <= claim.paper[1]:
        return f"{text} Inside the paper's range there; elsewhere the cluster's size decides."
    if inside:
        return f"{text} In the paper's range it would be with {' or with '.join(inside[:3])}."
    return f"{text} No single change brings it into the paper's range."


def make(part: Part, scale: Scale, results: Results) -> Figure:
    """Ratios by kind, baseline and variant."""
    rows: list[tuple[Cell, ...]] = []
    for kind, baselines in PAPER.items():
        for theirs, paper in baselines.items():
            if theirs not in POLICIES or scale.small:
                continue
            for one in (BASE, *VARIANTS):
                value = ratio(results, cases(scale, kind, one), theirs, one)
                rows.append((kind, theirs, one.name, value, *paper))
    return Figure(
        name=part.name,
        title=part.title,
        source=part.source,
        columns=("kind", "over", "changed", "ratio", "paper_low", "paper_high"),
        rows=tuple(rows),
        notes=(
            f"Throughput of ResiHP over baselines on {CONFIGURATION}, with one assumption changed "
            "at a time: none of them is stated in what is known of the paper.",
        ),
    )


SWEEP = Part(
    name="sensitivity",
    title="What the ratios hang on",
    source="not in the paper",
    tasks=tasks,
    make=make,
)
