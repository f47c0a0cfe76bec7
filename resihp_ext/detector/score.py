"""How good were the alarms of a labelled run?

An alarm is a report that would start a validation: one with suspects, or one that calls an
iteration slow for no known reason. It is a false alarm when nothing is slow at that step, nor was
in the last three; before the onset it is always false. Otherwise it is, once and for all its
suspects together,

* right: it names someone, and each suspect is the culprit of such a fault, in kind and ranks (all
  devices of a slow host, one by one, are the host);
* wrong: it names someone else (as well);
* unnamed: it names nobody.

A fault of factor 1.3 or more (a link's: that costs at least 1 % of a step) is found when its
culprit is named while it lasts, or, failing that, when an alarm comes while it lasts that names no
other fault's culprit.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from resihp_ext.detector.scene import Fault, Scene
from resihp_ext.detector.suspect import Report, SuspectKind

FACTOR = 1.3
MATERIAL_RATIO = 0.01
"""Of a step: what a slow link must cost to be worth finding."""
GRACE = 3
Culprit = tuple[SuspectKind, frozenset[int]]


@dataclass(kw_only=True)
class Score:
    """Counts of one or more runs."""

    right_alarms: int = 0
    wrong_alarms: int = 0
    unnamed_alarms: int = 0
    false_alarms: int = 0
    faults: int = 0
    found: int = 0
    right: int = 0
    """Faults whose culprit was named."""
    links: int = 0
    links_found: int = 0
    """Those among the faults that are links."""
    immaterial_links: int = 0
    """Slow links that cost too little: naming them is right, and not naming them, too."""
    mild: int = 0
    mild_found: int = 0
    """Devices and hosts below the factor."""
    healthy_steps: int = 0
    unsettled_onsets: int = 0
    """Faults that began before the detector could know what is healthy."""
    delays: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def alarms(self) -> int:
        """All alarms."""
        return self.right_alarms + self.wrong_alarms + self.unnamed_alarms + self.false_alarms

    def add(self, other: Score) -> None:
        """Adds the counts of another."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def figures(self) -> dict[str, Any]:
        """As the bench prints them."""
        alarms = self.alarms
        return {
            "precision": 1 - self.false_alarms / alarms if alarms else 1.0,
            "precision_culprit": self.right_alarms / alarms if alarms else 1.0,
            "recall": self.found / self.faults if self.faults else 1.0,
            "culprit_right": self.right / self.found if self.found else 1.0,
            "delay_iterations_median": median(self.delays) if self.delays else None,
            "delay_iterations_p95": float(np.percentile(self.delays, 95)) if self.delays else None,
            "false_alarms_per_1000": 1000 * self.false_alarms / max(self.healthy_steps, 1),
            "alarms": alarms,
            "wrong_culprit_alarms": self.wrong_alarms,
            "unnamed_alarms": self.unnamed_alarms,
            "false_alarms": self.false_alarms,
            "faults": self.faults,
            "links": self.links,
            "links_recall": self.links_found / self.links if self.links else 1.0,
            "immaterial_links": self.immaterial_links,
            "mild_faults": self.mild,
            "mild_recall": self.mild_found / self.mild if self.mild else 1.0,
            "unsettled_onsets": self.unsettled_onsets,
        }


def is_alarm(report: Report) -> bool:
    """Whether a report would start a validation."""
    return bool(report.suspects) or report.unexplained


def score(scene: Scene, reports: Sequence[Report], immaterial: Collection[Fault] = ()) -> Score:
    """Compares what was reported with what was done.

    Args:
        immaterial: Slow links that cost less than :data:`MATERIAL_RATIO` of a step.
    """
    result = Score()
    alarms = [report for report in reports if is_alarm(report)]
    for report in alarms:
        _score_alarm(scene, report, result)
    result.healthy_steps = sum(all(f.at(r.step) == 1 for f in scene.faults) for r in reports)
    for fault in scene.faults:
        if fault in immaterial:
            result.immaterial_links += 1
        elif fault.factor >= FACTOR:
            _score_fault(scene, fault, alarms, result)
        elif fault.kind != "link":
            result.mild += 1
            result.mild_found += _best(scene, fault, alarms) is not None
    return result


def _score_alarm(scene: Scene, report: Report, result: Score) -> None:
    active = [f for f in scene.faults if f.onset <= report.step < f.end + GRACE]
    where = f"seed {scene.seed} step {report.step}"
    if not active:
        result.false_alarms += 1
        result.notes.append(f"{where}: false alarm {report.suspects}")
    elif not report.suspects:
        result.unnamed_alarms += 1
        result.notes.append(f"{where}: nobody named")
    elif _culprits(report, active) <= {_culprit(f) for f in active}:
        result.right_alarms += 1
    else:
        result.wrong_alarms += 1
        result.notes.append(f"{where}: wrong culprits {report.suspects} for {active}")


def _culprits(report: Report, hosts: Sequence[Fault]) -> set[Culprit]:
    """Who is named; who names each device of a slow host names the host."""
    named = {(s.kind, frozenset(s.ranks)) for s in report.suspects}
    for host in hosts:
        single: set[Culprit] = {("device", frozenset([rank])) for rank in host.ranks}
        if host.kind == "host" and single <= named:
            named = named - single | {_culprit(host)}
    return named


def _culprit(fault: Fault) -> Culprit:
    return fault.kind, frozenset(fault.ranks)


def _names(report: Report, fault: Fault) -> bool:
    return _culprit(fault) in _culprits(report, [fault])


def _score_fault(scene: Scene, fault: Fault, alarms: Sequence[Report], result: Score) -> None:
    result.faults += 1
    result.links += fault.kind == "link"
    found = _best(scene, fault, alarms)
    if found is None:
        result.notes.append(f"seed {scene.seed}: missed {fault} noise {scene.noise:.3f}")
        return
    best, right = found
    result.found += 1
    result.links_found += fault.kind == "link"
    result.right += right
    result.delays.append(best.step - fault.onset)
    if not right:
        result.notes.append(f"seed {scene.seed}: {fault} not named: {best.suspects}")


def _best(scene: Scene, fault: Fault, alarms: Sequence[Report]) -> tuple[Report, bool] | None:
    """The alarm by which a fault is found, and whether it names the culprit."""
    during = [r for r in alarms if fault.onset <= r.step < fault.end]
    right = [r for r in during if _names(r, fault)]
    others = [f for f in scene.faults if f is not fault]
    loose = [r for r in during if not any(_names(r, f) for f in others)]
    best = next(iter(right or loose), None)
    return None if best is None else (best, bool(right))
