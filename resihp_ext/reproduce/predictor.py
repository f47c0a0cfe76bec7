"""Table 4: how far predicted times of micro-batches (MTP) and iterations (ITP) are from real ones.

The detector's own code on labelled synthetic runs; healthy jobs, packed sequences. The noise of an
action's time decides most of it, and PAPER does not say how noisy its testbed was: three levels.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from resihp_ext.detector.accuracy import FIT_STEPS, Step, errors_of
from resihp_ext.detector.scene import Scene
from resihp_ext.detector.series import Run
from resihp_ext.reproduce.figure import Bars, Claim, Figure, Part, Results, Scale
from resihp_ext.simulator.presets import setting

JUDGED_STEPS, SMALL_STEPS = 50, 10
NOISES = (0.005, 0.01, 0.02)
"""Standard deviations of an action's time, relative."""
NOISE = 0.01
"""That of the claims: what emulated and simulated jobs have everywhere."""
PAPER = {
    # MTP and ITP, in percent.
    "qwen2.5-7b-8k": (1.19, 2.81),
    "llama2-13b-16k": (1.21, 4.89),
}
WORST = (1.58, 5.06)
"""Of all models of the paper."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Mean absolute errors in percent."""

    mtp: float
    itp: float


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One healthy job."""

    configuration: str
    noise: float
    steps: int
    seed: int

    def run(self) -> Errors:
        """Learns from the first steps, is judged by the rest."""
        found = errors_of(self._steps())
        return Errors(
            mtp=100 * float(np.mean(found["mtp"])), itp=100 * float(np.mean(found["itp"]))
        )

    def _steps(self) -> Iterator[Step]:
        made = setting(self.configuration)
        scene = Scene(
            plan=made.nominal,
            shape=made.shape,
            noise=self.noise,
            faults=(),
            # Detectors pass over the first two.
            steps=2 + FIT_STEPS + self.steps,
            seed=self.seed,
        )
        for step, records in Run(scene):
            yield step, made.nominal, records


def tasks(scale: Scale) -> list[Predicted]:
    """Every model at every noise."""
    steps = SMALL_STEPS if scale.small else JUDGED_STEPS
    names = ("qwen2.5-7b-8k",) if scale.small else (*PAPER, "llama2-7b-8k", "qwen2.5-14b-16k")
    return [
        Predicted(configuration=name, noise=noise, steps=steps, seed=0)
        for name in names
        for noise in (NOISES if name in PAPER and not scale.small else (NOISE,))
    ]


def make(part: Part, scale: Scale, results: Results) -> Figure:
    """MTP and ITP by model and noise."""
    found: dict[Predicted, Errors] = {task: results[task] for task in tasks(scale)}
    rows = []
    for task, errors in found.items():
        paper = PAPER.get(task.configuration, (None, None))
        rows.append((task.configuration, task.noise, errors.mtp, paper[0], errors.itp, paper[1]))
    mine = {task.configuration: errors for task, errors in found.items() if task.noise == NOISE}
    claims = []
    for place, what in enumerate(("MTP", "ITP")):
        values = {name: (one.mtp, one.itp)[place] for name, one in mine.items()}
        for name, paper in PAPER.items():
            if name in values:
                claims.append(
                    Claim(
                        quantity=f"{what} error (MAPE), {name}",
                        values=(values[name],),
                        paper=(0.0, paper[place]),
                        unit="%",
                        better="low",
                    )
                )
        claims.append(
            Claim(
                quantity=f"{what} error (MAPE), worst",
                values=(max(values.values()),),
                paper=(0.0, WORST[place]),
                unit="%",
                better="low",
            )
        )
    chart = Bars(
        title=f"Mean absolute error at {NOISE:.0%} noise",
        unit="%",
        groups=tuple(mine),
        series=(
            ("MTP", tuple(one.mtp for one in mine.values())),
            ("ITP", tuple(one.itp for one in mine.values())),
        ),
    )
    return Figure(
        name=part.name,
        title=part.title,
        source=part.source,
        columns=("configuration", "noise", "mtp_mape", "mtp_paper", "itp_mape", "itp_paper"),
        rows=tuple(rows),
        claims=tuple(claims),
        charts=(chart,),
        notes=(_hangs_on(found),),
    )


def _hangs_on(found: dict[Predicted, Errors]) -> str:
    """How the errors follow the noise."""
    name = next(iter(found)).configuration
    mine = [(t.noise, e) for t, e in found.items() if t.configuration == name]
    said = "; ".join(f"{e.mtp:.2f} % and {e.itp:.2f} % at {noise:.1%}" for noise, e in mine)
    return (
        f"Errors follow the noise of single actions, which PAPER does not state: {name} has MTP "
        f"and ITP errors of {said} noise. The real code on synthetic series: no testbed is "
        "measured."
    )


PREDICTOR = Part(
    name="predictor",
    title="Errors of predicted times",
    source="Table 4",
    tasks=tasks,
    make=make,
)
