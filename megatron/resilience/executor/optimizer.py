"""Megatron's optimizer interface over sync domains: one gradient norm, flat masters, torch's Adam.

The base optimizer, its parameter groups and their rules for decay and learning rate are upstream's;
only what it updates is replaced: flat fp32 masters of this rank's share of each domain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron.resilience.executor import optimizer_checkpoint
from megatron.resilience.executor.buffers import MASTER, DomainBuffer
from megatron.resilience.executor.guard import Figures, Guard, NoGuard
from megatron.resilience.executor.manifest import Piece
from megatron.resilience.timing.clock import OFF, StepClock
from resihp_ext.plan.action import Kind

Groups = list[list[torch.nn.Parameter]]


def base_optimizer(
    config: Any, models: Sequence[torch.nn.Module], overrides: Any, pg_collection: Any
) -> torch.optim.Optimizer:
    """Upstream's optimizer for these settings, over the modules' parameters, without any state.

    Collective over all live ranks.
    """
    plain = dataclasses.replace(config, bf16=False, use_distributed_optimizer=False)
    built = get_megatron_optimizer(
        plain,
        list(models),
        config_overrides=overrides,
        use_gloo_process_groups=False,
        pg_collection=pg_collection,
    )
    inner = getattr(built, "chained_optimizers", [built])[0]
    if inner.optimizer is None:
        # A newcomer is alone and holds nothing: upstream has nothing to make groups of.
        return torch.optim.SGD([torch.zeros(0)])
    assert isinstance(inner.optimizer, torch.optim.Optimizer)
    return inner.optimizer


def groups_of(base: torch.optim.Optimizer, pieces: Sequence[Piece]) -> dict[str, int]:
    """Number of the parameter group of every logical tensor that a rank holds."""
    number = {
        id(parameter): k
        for k, group in enumerate(base.param_groups)
        for parameter in group["params"]
    }
    return {piece.slab.tensor: number[id(piece.parameter)] for piece in pieces}


def kinds_of(config: Any) -> tuple[str, ...]:
    """The moments that the base optimizer keeps of a weight."""
    if config.optimizer == "adam":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.sgd_momentum else ()


class DomainOptimizer(MegatronOptimizer):
    """Steps every domain that this rank owns a part of.

    Attributes:
        parameters: The modules' parameters in upstream's groups.
        pieces: What the modules hold.
        steps: Updates so far, as Adam's bias correction counts them; also known on a standby.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        """Prepares an optimizer; :meth:`attach` gives it something to update.

        Args:
            device: Where the backend wants its tensors.
        """
        super().__init__(torch.optim.SGD([torch.zeros(0)]), config)
        self.is_stub_optimizer = False
        self.buffers: list[DomainBuffer] = []
        self.parameters: Groups = []
        self.pieces: list[Piece] = []
        self._device = device
        self._scale = torch.ones(1, device=device)
        self._masters_loaded = False
        self.loaded = False
        """Whether a checkpoint has brought the state."""
        self.steps = 0
        self.sharded = False
        """Whether owners of a weight share its state, and gather the weight after a step."""
        self.guard: Guard = NoGuard()
        self.clock: StepClock = OFF
        self.ready: Callable[[], Any] = lambda: None
        """Makes the gradients again, if the layout has changed since; collective."""
        self.paced: Callable[[], AbstractContextManager[None]] = nullcontext
        """Around an update: lets it take longer than it does."""
        self.ballot: Callable[[], Figures] = lambda: ()
        """Further figures of this rank, whose sums over all ranks go to :attr:`counted`."""
        self.counted: Callable[[Figures], None] = lambda _sums: None

    def attach(
        self,
        base: torch.optim.Optimizer,
        buffers: Sequence[DomainBuffer],
        groups: Mapping[str, int],
        pieces: Sequence[Piece],
    ) -> None:
        """Puts the masters in the place of the parameters that ``base`` was built over.

        Args:
            groups: Parameter group of each tensor.
            pieces: What this rank's modules hold.
        """
        self.buffers, self.pieces = list(buffers), list(pieces)
        self.parameters = [list(group["params"]) for group in base.param_groups]
        flat: list[list[torch.Tensor]] = [[] for _ in base.param_groups]
        for buffer in self.buffers:
            for section in buffer.sections(groups):
                cut = slice(section.at, section.at + section.elements)
                masters = buffer.state[MASTER][cut]
                masters.grad = buffer.gradient[section.low : section.low + section.elements]
                flat[section.group].append(masters)
                base.state[masters] = {
                    kind: state[cut] for kind, state in buffer.state.items() if kind != MASTER
                }
        for group, masters_of_group in zip(base.param_groups, flat, strict=True):
            group["params"] = masters_of_group
        self.optimizer = base
        self.set_steps(0)

    def set_steps(self, steps: int) -> None:
        """Sets the count, where the base optimizer keeps it: torch with the state of each tensor,
        fused ones with the group."""
        self.steps = steps
        if not isinstance(self.optimizer, torch.optim.Adam):
            for group in self.param_groups:
                if "bias_correction" in group:
                    group["step"] = steps
            return
        for state in self.optimizer.state.values():
            # Each its own: torch counts in place.
            state["step"] = torch.tensor(float(steps), dtype=torch.float32)

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Clips by the norm over all logical elements and updates the weights.

        The norm's reduction comes after every domain is reduced: whoever has it knows that all
        live ranks hold final gradients. So a rank that has missed it takes it from another one.
        """
        late: list[Figures] = []

        def take(figures: Figures) -> None:
            late.append(figures)
            self._update(figures[0])

        norm, zeros = self.guard.run("vote", self._vote, late=take)[:2]
        if not late:
            self._update(norm)
        self.clock.finish()
        self.guard.look("between")
        return True, norm, int(zeros) if self.config.log_num_zeros_in_grad else None

    def _vote(self) -> Figures:
        with torch.enable_grad():
            self.ready()
        self.clock.begin(Kind.STEP)
        return self.gradient_norm()

    def _update(self, norm: float) -> None:
        self.guard.look("optimizer")
        with self.paced():
            self.clip(norm)
            self.optimizer.step()
        self.steps += 1
        if not self.sharded:
            self._give_weights()
            return
        # Masters are where they belong: after a change of layout the weights follow from them.
        with self.clock.waiting():
            self.guard.run("weights", self._give_weights, redo=False)

    def _give_weights(self) -> Figures:
        for buffer in self.buffers:
            buffer.parameters_from_masters()
        return ()

    def gradient_norm(self) -> Figures:
        """Norm, and if it is logged the number of zeros; the same bits on every rank."""
        self.guard.look("vote", waiting=True)
        further = self.ballot()
        sums = torch.zeros(2 + len(further), dtype=torch.float64, device=self._device)
        for buffer in self.buffers:
            sums[0] += buffer.square_sum()
            if self.config.log_num_zeros_in_grad:
                sums[1] += buffer.zeros()
        sums[2:] = torch.tensor(further, dtype=torch.float64)
        with self.clock.waiting():
            dist.all_reduce(sums)
        squared, zeros, *counted = sums.tolist()
        self.counted(tuple(counted))
        return squared**0.5, zeros

    def settings(self) -> list[dict[str, float]]:
        """What the schedule changes of each parameter group in the course of training."""
        return [
            {name: group[name] for name in ("lr", "weight_decay") if name in group}
            for group in self.param_groups
        ]

    def set_settings(self, settings: list[dict[str, float]]) -> None:
        """Inverse of :meth:`settings`."""
        for group, found in zip(self.param_groups, settings, strict=True):
            group.update(found)

    def clip(self, norm: float) -> None:
        """Scales all gradients so that their norm is at most ``--clip-grad``."""
        limit = self.config.clip_grad
        factor = limit / (norm + 1.0e-6)
        if limit > 0.0 and factor < 1.0:
            for group in self.param_groups:
                for masters in group["params"]:
                    masters.grad.mul_(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: a step overwrites the gradients."""

    def get_loss_scale(self) -> torch.Tensor:
        return self._scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Bf16 and fp32 need no scale."""
        return loss

    def prepare_grads(self) -> bool:
        return False

    def step_with_ready_grads(self) -> bool:
        return self.step()[0]

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Takes the modules' weights as the masters."""
        for buffer in self.buffers:
            buffer.masters_from_parameters()

    def adopt_parameters(self) -> None:
        """Before the first step: masters of weights that are fp32 are these weights; collective.

        Half-precision weights have masters of their own, which a checkpoint brings; without one,
        they start from the weights as well.
        """
        if not self._masters_loaded:
            self.reload_model_params()
        for buffer in self.buffers:
            buffer.tell_guest()

    def state_dict(self, is_loading: bool = False) -> Any:
        return {"state": {"common_step": self.steps}, "param_groups": self._plain_groups()}

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> Any:
        return optimizer_checkpoint.sharded(self, model_sharded_state_dict, is_loading)

    def load_state_dict(self, state_dict: Any) -> None:
        self._masters_loaded = optimizer_checkpoint.load(self, state_dict)
        self.loaded = True

    def forget_loaded(self) -> None:
        """The state begins anew, from the modules' weights."""
        self.loaded = self._masters_loaded = False
        self.set_steps(0)

    def _plain_groups(self) -> list[dict[str, Any]]:
        """Hyperparameters of each group, and numbers in the place of the modules' parameters."""
        groups, first = [], 0
        for group, parameters in zip(self.param_groups, self.parameters, strict=True):
            numbers = list(range(first, first + len(parameters)))
            first += len(parameters)
            groups.append({**group, "params": numbers})
        return groups
