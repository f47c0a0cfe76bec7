"""How well a healthy job is predicted: errors of micro-batches' and iterations' times.

The detector learns from the first steps and no more; what comes after them is judged.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from resihp_ext.detector.detector import Detector
from resihp_ext.detector.slots import Array, Role
from resihp_ext.detector.timed import RankStep
from resihp_ext.plan.plan import Plan

FIT_STEPS = 30
NEW_STEPS = 4
"""Of a new layout that count as unseen."""
Errors = dict[str, list[float]]
Step = tuple[int, Plan, Mapping[int, RankStep]]
"""Its number, what it ran, and what ranks measured."""


class Frozen(Detector):
    """Learns from the first steps and no more."""

    learning = True

    def _learn(self, *args: Any) -> None:
        if self.learning:
            super()._learn(*args)


def errors_of(steps: Iterable[Step], hints: dict[Role, Array] | None = None) -> Errors:
    """Relative errors of one job, which may change its layout; "unseen LAYOUT" by layout."""
    errors: Errors = defaultdict(list)
    detector: Frozen | None = None
    judged = 0
    unseen = False
    for step, plan, records in steps:
        if detector is None:
            detector = Frozen(plan, hints=hints)
        elif plan.version != detector.plan.version:
            detector.adopt(plan)
            judged, unseen = 0, True
        detector.learning = not unseen and judged < FIT_STEPS
        report = detector.observe(step, records)
        if not np.isfinite(report.ratio):
            continue
        judged += 1
        error = abs(1 / report.ratio - 1)
        if unseen and judged <= NEW_STEPS:
            errors["unseen_layout"].append(error)
            errors[f"unseen {shape_of(plan)}"].append(error)
            errors["unseen_mtp"] += micro_batch_errors(detector, records)
        elif not unseen and judged > FIT_STEPS:
            errors["itp"].append(error)
            errors["mtp"] += micro_batch_errors(detector, records)
    return errors


def shape_of(plan: Plan) -> str:
    """Degree and layers of the first replica's stages, and how many replicas: ``2x3 2x1, DP 2``."""
    stages = " ".join(f"{one.tp}x{one.depth}" for one in plan.replicas[0].stages)
    return f"{stages}, DP {len(plan.replicas)}"


def micro_batch_errors(detector: Detector, records: Mapping[int, RankStep]) -> list[float]:
    """Of every computation of every rank, with the rank's usual pace."""
    slots = detector.slots
    sample = detector.reader.read(records)
    predicted = detector.mtp.predict_s(slots, sample)[slots.node_of]
    predicted *= detector.paces()[slots.rank_of]
    own = sample.own_s[slots.compute]
    errors = np.abs(predicted[slots.compute] / own - 1)
    return list(errors[np.isfinite(errors)])
