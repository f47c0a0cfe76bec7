"""Patch: resume a distributed optimizer whose Adam is torch's.

Symbol: ``megatron.core.optimizer.distrib_optimizer.DistributedOptimizer``, its methods
``state_dict``, ``load_state_dict`` and ``_set_main_param_and_optimizer_states``.
Versions: megatron-core 0.19.x, on every device, without Transformer Engine and Apex.
Reason: three faults of upstream without fused optimizers. It asks a fresh optimizer for its step
before it has any state (an assertion at every resume); it does not expect the step among a
parameter's loaded state (a KeyError); and it loads one and the same step tensor into the state of
all parameters, which torch's Adam then increments once a parameter.
Delete when: upstream resumes a distributed optimizer with torch's Adam in its own tests.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from megatron.resilience.patches.base import Patch, signature_drift, upstream_module

_MODULE = "megatron.core.optimizer.distrib_optimizer"


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Creates the state that torch's Adam would create in its first step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def separate_steps(optimizer: torch.optim.Optimizer) -> None:
    """Gives every parameter a step tensor of its own."""
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


class DistributedAdam(Patch):
    """Makes checkpoints of the distributed optimizer loadable with torch's Adam."""

    symbol = f"{_MODULE}.DistributedOptimizer state methods"
    reason = "resuming a distributed optimizer with torch's Adam fails, and would share one step"
    delete_when = "upstream tests that case"
    devices = frozenset({"cpu", "cuda"})

    def drift(self) -> str | None:
        kind = upstream_module(_MODULE).DistributedOptimizer
        return (
            signature_drift(kind.state_dict, "self")
            or signature_drift(kind.load_state_dict, "self, state_dict")
            or signature_drift(
                kind._set_main_param_and_optimizer_states, "self, model_param, tensors"
            )
        )

    def install(self) -> None:
        module = upstream_module(_MODULE)
        if module.HAVE_APEX_OR_TE:
            return
        kind = module.DistributedOptimizer
        original_get, original_load = kind.state_dict, kind.load_state_dict

        @functools.wraps(original_get)
        def state_dict(self: Any) -> Any:
            if isinstance(self.optimizer, torch.optim.Adam):
                create_state(self.optimizer)
            return original_get(self)

        @functools.wraps(original_load)
        def load_state_dict(self: Any, state: Any) -> None:
            original_load(self, state)
            if isinstance(self.optimizer, torch.optim.Adam):
                separate_steps(self.optimizer)

        original_set = kind._set_main_param_and_optimizer_states

        @functools.wraps(original_set)
        def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
            # None means "keep": the step was loaded with the parameter groups.
            original_set(self, model_param, {"step": None, **tensors})

        self.replace(kind, "_set_main_param_and_optimizer_states", set_states)
        self.replace(kind, "state_dict", state_dict)
        self.replace(kind, "load_state_dict", load_state_dict)
