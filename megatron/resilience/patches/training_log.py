"""Patch: hand every iteration's loss and gradient norm to an observer, in full precision.

Symbol: ``megatron.training.training.training_log``.
Versions: megatron-core 0.19.x, on every device.
Reason: upstream only prints them, rounded, or hands them to TensorBoard.
Delete when: upstream's training loop takes a callback for finished iterations.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.resilience.patches.base import Patch, upstream_module

_MODULE = "megatron.training.training"
_NEEDED = ("loss_dict", "learning_rate", "iteration", "skipped_iter", "grad_norm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One finished iteration as this rank saw it."""

    step: int
    """Counted from 1, as in Megatron's log."""
    losses: dict[str, float]
    """Means over the global batch; empty on ranks without the last pipeline stage."""
    grad_norm: float | None
    learning_rate: float | None
    skipped: bool


class TrainingLog(Patch):
    """Calls ``observer(Iteration)`` after upstream's own logging."""

    symbol = f"{_MODULE}.training_log"
    reason = "loss and gradient norm of each iteration, unrounded"
    delete_when = "upstream's loop takes a callback for finished iterations"
    devices = frozenset({"cpu", "cuda"})

    def __init__(self) -> None:
        super().__init__()
        self.observer: Callable[[Iteration], None] | None = None

    def drift(self) -> str | None:
        found = inspect.signature(upstream_module(_MODULE).training_log).parameters
        missing = [name for name in _NEEDED if name not in found]
        return f"training_log has no {missing}" if missing else None

    def install(self) -> None:
        module = upstream_module(_MODULE)
        original = module.training_log
        bind = inspect.signature(original).bind

        @functools.wraps(original)
        def logged(*args: Any, **kwargs: Any) -> Any:
            # The first call of a run logs iteration 0 before anything was trained.
            iteration = _iteration(bind(*args, **kwargs).arguments)
            result = original(*args, **kwargs)
            if self.observer is not None:
                self.observer(iteration)
            return result

        self.replace(module, "training_log", logged)


def _iteration(call: dict[str, Any]) -> Iteration:
    norm, rate = call["grad_norm"], call["learning_rate"]
    return Iteration(
        step=int(call["iteration"]),
        losses={key: float(value) for key, value in call["loss_dict"].items()},
        grad_norm=None if norm is None else float(norm),
        learning_rate=None if rate is None else float(rate),
        skipped=bool(call["skipped_iter"]),
    )
