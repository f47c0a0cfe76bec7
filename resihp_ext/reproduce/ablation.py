"""Figure 11: what device exclusion, layer repartition and workload migration are worth, alone and
together.

PAPER gives their order by gain: exclusion, migration, repartition.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from resihp_ext.reproduce.ablated import ABLATED, STEPS
from resihp_ext.reproduce.case import Case
from resihp_ext.reproduce.figure import Bars, Claim, Figure, Part, Results, Scale
from resihp_ext.reproduce.ratios import geometric, goodput, over
from resihp_ext.reproduce.scenarios import MIXED, SLOW, STOP

CONFIGURATIONS = ("llama2-13b-16k", "llama2-30b-16k")
SCENARIOS = (STOP, SLOW[1], SLOW[2], MIXED)
NONE, ALL = next(iter(ABLATED)), list(ABLATED)[-1]
ORDER = ("exclusion", "migration", "repartition")
"""PAPER's, by gain."""


def _cases(scale: Scale) -> dict[tuple[str, str], list[Case]]:
    names = CONFIGURATIONS[:1] if scale.small else CONFIGURATIONS
    return {
        (name, scenario.name): [
            Case(configuration=name, scenario=scenario, seed=seed, policies=tuple(ABLATED))
            for seed in range(scale.seeds)
        ]
        for name in names
        for scenario in SCENARIOS
    }


def tasks(scale: Scale) -> list[Case]:
    """Every variant in every scenario."""
    return [case for cases in _cases(scale).values() for case in cases]


def make(part: Part, scale: Scale, results: Results) -> Figure:
    """Goodput by variant, and what each step gains alone and last."""
    rows = []
    gains: dict[str, list[float]] = {step: [] for step in STEPS}
    last: dict[str, list[float]] = {step: [] for step in STEPS}
    bars: dict[str, list[float]] = {variant: [] for variant in ABLATED}
    found = _cases(scale)
    for (name, scenario), cases in found.items():
        by = {variant: goodput(results, cases, variant) for variant in ABLATED}
        for variant, value in by.items():
            bars[variant].append(value)
            rows.append((name, scenario, variant, value, over(value, by[NONE])))
        for step in STEPS:
            gains[step].append(over(by[step], by[NONE]))
            rest = " + ".join(one for one in STEPS if one != step)
            last[step].append(over(by[ALL], by[rest]))
    alone = {step: geometric(values) for step, values in gains.items()}
    final = {step: geometric(values) for step, values in last.items()}
    order = sorted(STEPS, key=lambda step: -alone[step])
    final_order = sorted(STEPS, key=lambda step: -final[step])
    agreed = [place for place, step in enumerate(ORDER) if order[place] == step]
    claim = Claim(
        quantity="places in the order of gains (exclusion > migration > repartition) that agree",
        values=(float(len(agreed)),),
        paper=(3.0, 3.0),
        why="" if len(agreed) == len(ORDER) else _why(alone, final, order, final_order),
    )
    return Figure(
        name=part.name,
        title=part.title,
        source=part.source,
        columns=("configuration", "scenario", "steps", "goodput", "over_no_step"),
        rows=tuple(rows),
        claims=(claim,),
        charts=(
            Bars(
                title="Throughput over a healthy job, by steps of the planner",
                unit="goodput",
                groups=tuple(f"{name} {scenario}" for name, scenario in found),
                series=tuple((variant, tuple(values)) for variant, values in bars.items()),
            ),
        ),
        notes=(_said(alone, final, order),),
    )


def _said(alone: dict[str, float], final: dict[str, float], order: list[str]) -> str:
    steps = "; ".join(
        f"{one} {alone[one]:.3f}x alone, {final[one]:.3f}x as the last" for one in order
    )
    return (
        "Geometric means over scenarios, of each step over none, and of all steps over all "
        f"others: {steps}."
    )


def _why(
    alone: dict[str, float], final: dict[str, float], order: list[str], final_order: list[str]
) -> str:
    text = f"Alone the order is {' > '.join(order)}, added last it is {' > '.join(final_order)}."
    dead = [one for one in ORDER if alone[one] < 1.005]
    if dead:
        text += (
            f" {' and '.join(dead)} alone gain{'s' if len(dead) == 1 else ''} less than 0.5 %: a "
            "lost group takes its replica with it, and what is left is alike."
        )
    return text


ABLATION = Part(
    name="ablation",
    title="What each step of the planner is worth",
    source="Figure 11",
    tasks=tasks,
    make=make,
)
