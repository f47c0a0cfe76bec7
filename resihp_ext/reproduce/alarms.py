"""Table 5: false alarms of a healthy job, and what they cost; ours against Greyhound.

The detectors' own code on labelled synthetic runs without faults, so that every alarm is a false
one. PAPER says neither how long a run is nor in which order its documents come. So figures are for
1,000 iterations, and for data of two kinds: ``shuffled``, and ``by source``, where the documents'
lengths follow another law every 50 iterations (log-normal, definitions of Python source, whole
files of it), as in a corpus that is read file by file or repository by repository. What one
validation costs is not simulated but taken from PAPER.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import get_args

from resihp_ext.detector.bocd import BocdConfig
from resihp_ext.detector.detector import Detector
from resihp_ext.detector.greyhound import SlowIterations
from resihp_ext.detector.scene import Documents, Scene
from resihp_ext.detector.score import is_alarm
from resihp_ext.detector.series import Run
from resihp_ext.detector.slots import finite_median
from resihp_ext.reproduce.figure import Bars, Cell, Claim, Figure, Part, Results, Scale
from resihp_ext.simulator.presets import setting
from resihp_ext.simulator.times import Times

STEPS, SMALL_STEPS, RUNS = 300, 150, 2
PER_STEPS = 1000
BLOCK_STEPS = 50
NOISE = 0.01
HAZARDS_STEPS = (50, 100, 250, 1000)
"""Greyhound's is not published; swept with and without dropping outliers."""
ORDERS = ("shuffled", "by source")


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column of the paper's table."""

    name: str
    configuration: str
    seq_length: int
    ours: float
    """False alarms of a run, in the paper."""
    theirs: float
    ours_s: float
    """Of one validation, in the paper."""


def _column(name: str, model: str, seq_k: int, *paper: float) -> Column:
    ours, theirs, ours_s = paper
    return Column(
        name=name,
        configuration=model,
        seq_length=1024 * seq_k,
        ours=ours,
        theirs=theirs,
        ours_s=ours_s,
    )


COLUMNS = (
    _column("small 8K", "qwen2.5-7b-8k", 8, 0.0, 3.7, 0.034),
    _column("medium 16K", "llama2-13b-16k", 16, 0.1, 5.2, 0.045),
    _column("medium 32K", "llama2-13b-16k", 32, 0.3, 8.7, 0.049),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """Alarms of healthy runs, for :data:`PER_STEPS` iterations."""

    ours: float
    greyhound: tuple[float, ...]
    """By hazard; first with outliers dropped, then with all."""
    deviation: float
    """Of raw iteration times, relative."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """One healthy job under both detectors."""

    configuration: str
    seq_length: int
    order: str
    steps: int
    seed: int

    def run(self) -> Counted:
        """Counts alarms."""
        made = setting(self.configuration)
        shape = replace(made.shape, seq_length=self.seq_length)
        scene = Scene(
            plan=made.nominal,
            shape=shape,
            noise=NOISE,
            faults=(),
            steps=self.steps,
            seed=self.seed,
        )
        ours = Detector(scene.plan)
        theirs = [
            SlowIterations(BocdConfig(hazard_steps=hazard), drop_outliers=drop)
            for drop in (True, False)
            for hazard in HAZARDS_STEPS
        ]
        mine, counts, totals_s = 0, [0] * len(theirs), []
        run = Run(scene)
        for step in range(1, self.steps + 1):
            run.scene = replace(scene, documents=self._documents(step))
            records = run.walk(step)
            total_s = finite_median(ours.reader.read(records).total_s)
            totals_s.append(total_s)
            mine += is_alarm(ours.observe(step, records))
            for i, one in enumerate(theirs):
                change = one.observe(total_s)
                counts[i] += change is not None and change.after > change.before
        scale = PER_STEPS / self.steps
        return Counted(
            ours=mine * scale,
            greyhound=tuple(count * scale for count in counts),
            deviation=pstdev(totals_s) / fmean(totals_s),
        )

    def _documents(self, step: int) -> Documents:
        laws: tuple[Documents, ...] = get_args(Documents)
        return laws[0] if self.order == ORDERS[0] else laws[step // BLOCK_STEPS % len(laws)]


def _runs(column: Column, order: str, scale: Scale) -> list[Watched]:
    return [
        Watched(
            configuration=column.configuration,
            seq_length=column.seq_length,
            order=order,
            steps=SMALL_STEPS if scale.small else STEPS,
            seed=seed,
        )
        for seed in range(1 if scale.small else RUNS)
    ]


def _columns(scale: Scale) -> tuple[Column, ...]:
    return COLUMNS[:1] if scale.small else COLUMNS


def tasks(scale: Scale) -> list[Watched]:
    """Every column, both orders."""
    return [
        task
        for column in _columns(scale)
        for order in ORDERS
        for task in _runs(column, order, scale)
    ]


def make(part: Part, scale: Scale, results: Results) -> Figure:
    """False alarms and their cost by column of the paper's table and order of data."""
    rows: list[tuple[Cell, ...]] = []
    claims: list[Claim] = []
    bars: dict[str, list[float]] = {
        f"{who}, {o}": [] for o in ORDERS for who in ("ours", "Greyhound")
    }
    stop_s = Times().greyhound_validation_s
    for column in _columns(scale):
        by = {}
        for order in ORDERS:
            one = _mean([results[task] for task in _runs(column, order, scale)])
            by[order], theirs = one, _published(one)
            bars[f"ours, {order}"].append(one.ours)
            bars[f"Greyhound, {order}"].append(theirs)
            cost = (one.ours * column.ours_s, theirs * stop_s)
            paper = (column.ours, column.theirs, column.ours_s, stop_s)
            rows.append(
                (column.name, order, one.deviation, one.ours, *one.greyhound, *cost, *paper)
            )
        claims += _claims(column, by, scale)
    chart = Bars(
        title=f"False alarms in {PER_STEPS:,} healthy iterations",
        unit="",
        groups=tuple(column.name for column in _columns(scale)),
        series=tuple((name, tuple(values)) for name, values in bars.items()),
    )
    greyhounds = [f"greyhound_{hazard}{all_}" for all_ in ("", "_all") for hazard in HAZARDS_STEPS]
    return Figure(
        name=part.name,
        title=part.title,
        source=part.source,
        columns=(
            *("case", "data", "deviation", "ours", *greyhounds, "ours_cost_s", "greyhound_cost_s"),
            *("ours_paper", "greyhound_paper", "ours_validation_s_paper", "greyhound_validation_s"),
        ),
        rows=tuple(rows),
        claims=tuple(claims),
        charts=(chart,),
        notes=(
            f"{RUNS} runs of {STEPS} iterations each, counted for {PER_STEPS:,}; PAPER counts for "
            f"a run and gives no length. Greyhound: hazards of one in {HAZARDS_STEPS} iterations, "
            "with outliers dropped and (_all) kept; 250 and dropped in the chart and the cost. "
            "The cost is alarms times one validation: ours as in the paper's table, Greyhound's "
            f"{stop_s} s, the middle of the paper's range; not measured here.",
        ),
    )


def _published(one: Counted, *, drop: bool = True) -> float:
    """With the hazard of BASELINES 3.3, which drops outliers."""
    place = HAZARDS_STEPS.index(250)
    return one.greyhound[place if drop else place + len(HAZARDS_STEPS)]


def _mean(found: list[Counted]) -> Counted:
    return Counted(
        ours=fmean(one.ours for one in found),
        greyhound=tuple(
            fmean(values) for values in zip(*(one.greyhound for one in found), strict=True)
        ),
        deviation=fmean(one.deviation for one in found),
    )


def _claims(column: Column, by: dict[str, Counted], scale: Scale) -> list[Claim]:
    ours = Claim(
        quantity=f"false alarms, {column.name}, ours",
        values=tuple(one.ours for one in by.values()),
        paper=(0.0, column.ours),
        better="low",
    )
    kept = {drop: [_published(one, drop=drop) for one in by.values()] for drop in (True, False)}
    theirs = Claim(
        quantity=f"false alarms, {column.name}, Greyhound",
        values=(*kept[True], *kept[False]),
        paper=(column.theirs, column.theirs),
        why="" if scale.small else _why(by, kept),
    )
    return [ours, theirs]


def _why(by: dict[str, Counted], kept: dict[bool, list[float]]) -> str:
    """Which of the two unknowns moves Greyhound's alarms most."""
    said = "; ".join(
        f"{order} data (iteration times spread by {one.deviation:.1%}): {kept[True][i]:.1f} with "
        f"outliers dropped, {kept[False][i]:.1f} with them kept"
        for i, (order, one) in enumerate(by.items())
    )
    by_treatment = abs(fmean(kept[False]) - fmean(kept[True]))
    by_order = abs(sum(values[1] - values[0] for values in kept.values())) / 2
    parts = [one.greyhound[i : i + 4] for one in by.values() for i in (0, len(HAZARDS_STEPS))]
    by_hazard = max(max(part) - min(part) for part in parts)
    moves = {
        "dropping outliers or not": by_treatment,
        "the order of the data": by_order,
        "the hazard": by_hazard,
    }
    order = sorted(moves, key=lambda name: -moves[name])
    ranked = ", ".join(f"{name} ({moves[name]:.1f})" for name in order)
    return f"{said}. What moves it, most first: {ranked}."


ALARMS = Part(
    name="false-alarms",
    title="False alarms and their cost",
    source="Table 5",
    tasks=tasks,
    make=make,
)
