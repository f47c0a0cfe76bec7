"""Does a layout train the model of one process? The criteria, the same for benchmarks and tests.

Losses alone do not show it: Adam and clipping hide wrong scales of gradients. So gradient norms
are compared as well, with clipping active in every step, and the logical weights after the last;
and all owners of a weight must hold the same bits.

In fp32 the deviations are those of rounding. In bf16 layouts differ by more: partial sums are
rounded at other places. Then the measure is how far upstream's own uniform layouts of eight ranks,
of degrees 2 and 4, are from one process, in the median step: a single steep step takes the largest
deviation of a norm to anything between 1e-3 and 5e-2, for upstream as for us, and even the median
of one layout can be half of another's (4.8e-5 and 9.7e-5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from megatron.resilience.testing.trial import (
    Trial,
    Weights,
    max_rel_diff,
    max_weight_diff,
)
from resihp_ext.plan.plan import Plan

CLIP = 0.3
MODEL = tuple(
    "--preset tiny --hidden-size 96 --num-attention-heads 12 --num-query-groups 6 "
    "--ffn-hidden-size 288 --seq-length 96 --split 100,0,0 --eval-iters 0 "
    # Gentle, and with an epsilon above the noise of a gradient that is nearly 0: what is left after
    # twenty steps is rounding, not chaos. A larger epsilon makes Adam less blind to scales, too.
    f"--clip-grad {CLIP} --lr 1e-3 --min-lr 1e-4 --adam-eps 1e-6".split()
)
"""Heads, query groups, FFN and vocabulary divide by 2, 3 and 6."""

UNIFORM = ((2, 2, 2),)
"""``(tp, pp, dp)`` of upstream's own layout of eight ranks, for the noise of fp32 weights."""
HALF_UNIFORM = ((2, 2, 2), (4, 2, 1))
"""The same for bf16."""

_ULP = float(np.finfo(np.float32).eps)
_BOUNDS = {
    "rel_diff": 1e-5,
    "rel_diff_grad_norm": 5e-5,
    "weight_diff_ratio": 2.0,
    "disagreements": 0.0,
}
_HALF_BOUNDS = {
    "rel_diff_ratio": 2.0,
    "rel_diff_grad_norm_ratio": 2.0,
    "weight_diff_ratio": 2.0,
    "disagreements": 0.0,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How far a job was from the reference, by criterion."""

    figures: dict[str, float]
    bounds: dict[str, float]

    @property
    def broken(self) -> list[str]:
        """Criteria that do not hold; a figure that is no number breaks its own."""
        return [name for name, bound in self.bounds.items() if not self.figures[name] <= bound]

    def __str__(self) -> str:
        text = "  ".join(f"{name} {value:.1e}" for name, value in self.figures.items())
        return f"{text}  BROKEN: {', '.join(self.broken)}" if self.broken else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What one process and upstream's uniform layouts make of the same settings."""

    one: Trial
    uniform: tuple[Trial, ...] = ()
    """Without any, weights may differ by two units in the last place of a weight near 1."""
    half: bool = False
    """Whether weights are bf16, with fp32 masters."""

    def __post_init__(self) -> None:
        least = min(self.one.grad_norms)
        if not least > CLIP:
            raise ValueError(f"gradient norm {least:.3f}: clipping at {CLIP} is not active")

    def verdict(self, trial: Trial) -> Verdict:
        """Compares a job of any layout.

        Raises:
            ValueError: another number of steps.
        """
        if self.half:
            return self._half_verdict(trial)
        noise = [max_weight_diff(trial.weights, self.one.weights) for trial in self.uniform]
        floor = max([*noise, _ULP])
        figures = {
            "rel_diff": max_rel_diff(trial.losses, self.one.losses),
            "rel_diff_grad_norm": max_rel_diff(trial.grad_norms, self.one.grad_norms),
            "weight_diff_ratio": _weight_diff(trial.weights, self.one.weights) / floor,
            "disagreements": float(trial.disagreements),
        }
        return Verdict(figures=figures, bounds=_BOUNDS)

    def _half_verdict(self, trial: Trial) -> Verdict:
        noise = [self._half_deviations(one) for one in self.uniform]
        figures = {
            f"{name}_ratio": value / max(one[name] for one in noise)
            for name, value in self._half_deviations(trial).items()
        }
        figures["disagreements"] = float(trial.disagreements)
        return Verdict(figures=figures, bounds=_HALF_BOUNDS)

    def _half_deviations(self, trial: Trial) -> dict[str, float]:
        return {
            "rel_diff": _median_rel_diff(trial.losses, self.one.losses),
            "rel_diff_grad_norm": _median_rel_diff(trial.grad_norms, self.one.grad_norms),
            "weight_diff": _rms_diff(trial.weights, self.one.weights),
        }


def _weight_diff(found: Weights, expected: Weights) -> float:
    """Infinity where the two do not even hold the same tensors."""
    try:
        return max_weight_diff(found, expected)
    except ValueError:
        return math.inf


def _median_rel_diff(found: Sequence[float], expected: Sequence[float]) -> float:
    differences = [abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else median(differences)


def _rms_diff(found: Weights, expected: Weights) -> float:
    squares = sum(float(((found[name] - expected[name]) ** 2).sum()) for name in expected)
    return math.sqrt(squares / sum(whole.size for whole in expected.values()))


def timetable(plan: Plan, folder: Path) -> list[str]:
    """Writes a plan as a timetable of its own into a folder; returns the flags that use it."""
    name = plan.digest[:16]
    (folder / f"{name}.json").write_text(plan.to_json())
    path = folder / f"{name}.yaml"
    path.write_text(f"- {{step: 0, plan: {name}.json}}\n")
    return ["--resilience-plan-schedule", str(path)]
