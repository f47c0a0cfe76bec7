"""Table 5: false alarms of a healthy job, and what they cost; ours against Greyhound.

The detectors' own code on labelled synthetic runs without faults, so that every alarm is a false
one. PAPER does not say how many iterations a run has: 1,000. What one validation costs is not
simulated but taken from PAPER; the cost of a run is alarms times that.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from resihp_ext.detector.bocd import BocdConfig
from resihp_ext.detector.detector import Detector
from resihp_ext.detector.greyhound import SlowIterations
from resihp_ext.detector.scene import Scene
from resihp_ext.detector.score import is_alarm
from resihp_ext.detector.series import Run
from resihp_ext.detector.slots import finite_median
from resihp_ext.reproduce.figure import Bars, Cell, Claim, Figure, Part, Results, Scale
from resihp_ext.simulator.presets import setting
from resihp_ext.simulator.times import Times

STEPS, SMALL_STEPS = 1000, 150
NOISE = 0.01
HAZARDS_STEPS = (50, 100, 250, 1000)
HAZARD_STEPS = 250
"""Of Greyhound's claims (BASELINES 3.3)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One column of the paper's table."""

    name: str
    configuration: str
    seq_length: int
    ours: float
    """False alarms of a run, in the paper."""
    theirs: float
    ours_s: float
    """Of one validation, in the paper."""


ROWS = (
    Row(
        name="small 8K",
        configuration="qwen2.5-7b-8k",
        seq_length=8192,
        ours=0.0,
        theirs=3.7,
        ours_s=0.034,
    ),
    Row(
        name="medium 16K",
        configuration="llama2-13b-16k",
        seq_length=16384,
        ours=0.1,
        theirs=5.2,
        ours_s=0.045,
    ),
    Row(
        name="medium 32K",
        configuration="llama2-13b-16k",
        seq_length=32768,
        ours=0.3,
        theirs=8.7,
        ours_s=0.049,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Alarms of one healthy run."""

    ours: int
    greyhound: tuple[int, ...]
    """By :data:`HAZARDS_STEPS`."""
    iteration_s: float
    deviation: float
    """Of raw iteration times, relative."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One healthy job under both detectors."""

    configuration: str
    seq_length: int
    steps: int
    seed: int

    def run(self) -> Counted:
        """Counts alarms."""
        made = setting(self.configuration)
        scene = Scene(
            plan=made.nominal,
            shape=replace(made.shape, seq_length=self.seq_length),
            noise=NOISE,
            faults=(),
            steps=self.steps,
            seed=self.seed,
        )
        ours = Detector(scene.plan)
        theirs = [SlowIterations(BocdConfig(hazard_steps=one)) for one in HAZARDS_STEPS]
        mine, counts, totals_s = 0, [0] * len(theirs), []
        for step, records in Run(scene):
            total_s = finite_median(ours.reader.read(records).total_s)
            totals_s.append(total_s)
            mine += is_alarm(ours.observe(step, records))
            for i, one in enumerate(theirs):
                change = one.observe(total_s)
                counts[i] += change is not None and change.after > change.before
        mean_s = fmean(totals_s)
        deviation = fmean((one - mean_s) ** 2 for one in totals_s) ** 0.5 / mean_s
        return Counted(ours=mine, greyhound=tuple(counts), iteration_s=mean_s, deviation=deviation)


def _mine(row: Row, scale: Scale) -> list[Watched]:
    # Rare events: more runs than of throughput.
    seeds = 1 if scale.small else max(4, scale.seeds)
    return [
        Watched(
            configuration=row.configuration,
            seq_length=row.seq_length,
            steps=SMALL_STEPS if scale.small else STEPS,
            seed=seed,
        )
        for seed in range(seeds)
    ]


def tasks(scale: Scale) -> list[Watched]:
    """Every column, several runs."""
    rows = ROWS[:2] if scale.small else ROWS
    return [task for row in rows for task in _mine(row, scale)]


def make(part: Part, scale: Scale, results: Results) -> Figure:
    """False alarms and their cost by column of the paper's table."""
    rows: list[tuple[Cell, ...]] = []
    claims, ours, theirs = [], [], []
    times = Times()
    stop_s = times.greyhound_validation_s
    place = HAZARDS_STEPS.index(HAZARD_STEPS)
    for row in ROWS[:2] if scale.small else ROWS:
        found: list[Counted] = [results[task] for task in _mine(row, scale)]
        mine = fmean(one.ours for one in found)
        swept = [fmean(one.greyhound[i] for one in found) for i in range(len(HAZARDS_STEPS))]
        ours.append(mine)
        theirs.append(swept[place])
        steps = SMALL_STEPS if scale.small else STEPS
        rows.append(
            (
                *(row.name, len(found), steps, fmean(one.deviation for one in found)),
                *(mine, row.ours, *swept, row.theirs),
                *(mine * row.ours_s, swept[place] * stop_s, row.ours_s, stop_s),
            )
        )
        for who, value, paper in (
            ("ours", mine, row.ours),
            ("Greyhound", swept[place], row.theirs),
        ):
            claims.append(
                Claim(
                    quantity=f"false alarms of a run, {row.name}, {who}",
                    values=(value,) if who == "ours" else tuple(swept),
                    paper=(0.0, paper) if who == "ours" else (paper, paper),
                    better="low" if who == "ours" else None,
                )
            )
    names = tuple(str(one[0]) for one in rows)
    chart = Bars(
        title="False alarms of a healthy run",
        unit="",
        groups=names,
        series=(("ResiHP", tuple(ours)), ("Greyhound", tuple(theirs))),
    )
    return Figure(
        name=part.name,
        title=part.title,
        source=part.source,
        columns=(
            *("case", "runs", "iterations", "deviation_of_iterations", "ours", "ours_paper"),
            *(f"greyhound_hazard_{one}" for one in HAZARDS_STEPS),
            *("greyhound_paper", "ours_cost_s", "greyhound_cost_s"),
            *("ours_validation_s_paper", "greyhound_validation_s_paper"),
        ),
        rows=tuple(rows),
        claims=tuple(claims),
        charts=(chart,),
        notes=(
            f"Runs of {SMALL_STEPS if scale.small else STEPS} iterations; PAPER gives no length. "
            f"Greyhound's hazard is not published: swept over one in {HAZARDS_STEPS} iterations, "
            "the claim's range is over them. Costs are alarms times the paper's own time of one "
            f"validation (ours as in the table, Greyhound's {stop_s} s); profiling of "
            f"{times.greyhound_profiling_s:.0f} s before it does not stop training.",
        ),
    )


ALARMS = Part(
    name="false-alarms",
    title="False alarms and their cost",
    source="Table 5",
    tasks=tasks,
    make=make,
)
