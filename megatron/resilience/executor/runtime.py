"""Executes a rank's actions of a program on Megatron's own forward and backward steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from megatron.core.pipeline_parallel.schedules import (
    backward_step,
    deallocate_output_tensor,
    forward_step,
)
from megatron.core.utils import get_model_config

from megatron.resilience.emulation.pacer import Pacer, workload_of
from megatron.resilience.executor.migration import Course
from megatron.resilience.executor.wire import Boundary, Wire
from megatron.resilience.timing.clock import OFF, StepClock
from resihp_ext.cost.plan_cost import Workload
from resihp_ext.plan.action import COMPUTE, Action, Kind
from resihp_ext.plan.plan import Instance, Plan, neighbours

Look = Callable[..., None]
_NAMES = {
    Kind.RECV_FORWARD: ("recv", True),
    Kind.FORWARD: ("forward", False),
    Kind.SEND_FORWARD: ("send", False),
    Kind.RECV_BACKWARD: ("recv", True),
    Kind.BACKWARD: ("backward", False),
    Kind.SEND_BACKWARD: ("send", False),
}
"""How reports call each action, and whether it waits for another rank."""

FetchMicroBatch = Callable[[int], dict[str, torch.Tensor]]
"""Gives the samples of a micro-batch by its number in the global batch."""


@dataclass
class Step:
    """One pass over a program: what is in flight between its actions."""

    plan: Plan
    wire: Wire
    boundary: Boundary
    models: Sequence[torch.nn.Module]
    chunks: Sequence[Instance]
    """The instance of each model chunk."""
    forward_step_func: Callable[..., Any]
    fetch: FetchMicroBatch
    look: Look
    """Told before every action what it is; may stop the pass."""
    clock: StepClock = OFF
    pacer: Pacer | None = None
    course: Course | None = None
    """Where the program may change while it runs."""
    forward_only: bool = False
    collect_non_loss_data: bool = False
    reports: list[Any] = field(default_factory=list)
    """What the loss function reported of each micro-batch that ends here, in order."""
    tokens: torch.Tensor | int = 0
    """Tokens that count in the loss of those; left where it is computed, for asking waits."""
    _inputs: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    _outputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _gradients: dict[tuple[int, int], torch.Tensor | None] = field(default_factory=dict)
    _workloads: dict[int, Workload] = field(default_factory=dict)
    """Of the micro-batches that were read here, where devices are emulated."""
    _begun: bool = False

    def run(self, actions: Sequence[Action]) -> None:
        """Executes the actions of this rank up to SYNC."""
        try:
            self._run(actions)
        finally:
            self.wire.close()

    def _run(self, actions: Sequence[Action]) -> None:
        index = 0
        while index < len(actions):
            actions = self._heard(index, actions)
            action = actions[index]
            if action.kind is Kind.SYNC:
                break
            name, waits = _NAMES[action.kind]
            self.clock.begin(action.kind, action.micro_batch, action.chunk)
            self.look(name, action.micro_batch, waiting=waits)
            with self._paced(action):
                self._handlers[action.kind](self, action)
            index += 1
        self.clock.begin(Kind.SYNC)
        with self.clock.waiting():
            self.look("send", waiting=True)
            self.wire.finish(lambda: self.look("send", waiting=True))

    def _heard(self, index: int, actions: Sequence[Action]) -> Sequence[Action]:
        """The actions, with what has been agreed since."""
        course = self.course
        if course is None:
            return actions
        course.before(index)
        self.plan = self.wire.plan = course.plan
        return course.actions

    def _paced(self, action: Action) -> AbstractContextManager[None]:
        if self.course is None:
            return self._emulated(action)
        return self._told(self.course, action)

    @contextmanager
    def _told(self, course: Course, action: Action) -> Iterator[None]:
        with course.around(action), self._emulated(action):
            yield

    def _emulated(self, action: Action) -> AbstractContextManager[None]:
        if self.pacer is None or action.kind not in COMPUTE:
            return nullcontext()

        def workload() -> Workload:
            # Only one rank of a tensor-parallel group is asked for samples.
            if action.micro_batch not in self._workloads:
                self._read(action.micro_batch)
            return self._workloads[action.micro_batch]

        mine = self.chunks[action.chunk]
        return self.pacer.pace(self.plan, mine, action, workload, self.clock)

    def _receive_forward(self, action: Action) -> None:
        tensor = self.wire.receive(action, self.boundary)
        self._inputs[_key(action)] = tensor.requires_grad_(not self.forward_only)

    def _forward(self, action: Action) -> None:
        key, model, mine = _key(action), self.models[action.chunk], self.chunks[action.chunk]
        config = get_model_config(model)
        last = self.plan.stage(mine).layers[1] == self.plan.num_layers
        self._take_over(key, mine)
        output, tokens = forward_step(
            self.forward_step_func,
            self._samples(action.micro_batch),
            model,
            self.plan.micro_batches,
            self._inputs.setdefault(key, None),
            self.reports,
            config,
            1,
            self.collect_non_loss_data,
            is_first_microbatch=not self._begun,
            current_microbatch=action.micro_batch,
            vp_stage=getattr(model, "vp_stage", None) if len(self.models) > 1 else None,
            is_last_stage=last,
        )
        self._begun = True
        if last:
            self.tokens = self.tokens + tokens
        self._outputs[key] = output
        if self.forward_only:
            del self._inputs[key]
            if last:
                del self._outputs[key]

    def _take_over(self, key: tuple[int, int], mine: Instance) -> None:
        """Takes the output of the chunk before as input, when both are on the same ranks."""
        before, _ = neighbours(self.plan.routes[key[1]], mine)
        if key not in self._inputs and before in self.chunks:
            chunk = self.chunks.index(before)
            output = self._outputs[chunk, key[1]]
            self._inputs[key] = output.detach().requires_grad_(not self.forward_only)
            self._release(output, chunk)
            if self.forward_only:
                del self._outputs[chunk, key[1]]

    def _send_forward(self, action: Action) -> None:
        key, mine = _key(action), self.chunks[action.chunk]
        output = self._outputs[key]
        self.wire.send(output, action, mine, self.boundary)
        if self.forward_only:
            del self._outputs[key]
        else:
            self._release(output, action.chunk)

    def _release(self, output: torch.Tensor, chunk: int) -> None:
        """Frees what a stage has handed on; its backward needs the graph, not the values."""
        config = get_model_config(self.models[chunk])
        if not self.forward_only:
            deallocate_output_tensor(output, config.deallocate_pipeline_outputs)

    def _receive_backward(self, action: Action) -> None:
        self._gradients[_key(action)] = self.wire.receive(action, self.boundary)

    def _backward(self, action: Action) -> None:
        key, mine = _key(action), self.chunks[action.chunk]
        config = get_model_config(self.models[action.chunk])
        gradient = backward_step(
            self._inputs.pop(key), self._outputs.pop(key), self._gradients.pop(key, None), config
        )
        before, _ = neighbours(self.plan.routes[key[1]], mine)
        if before in self.chunks:
            key = self.chunks.index(before), key[1]
        self._gradients[key] = gradient

    def _send_backward(self, action: Action) -> None:
        gradient = self._gradients.pop(_key(action))
        assert gradient is not None, "a stage that received its input has a gradient for it"
        self.wire.send(gradient, action, self.chunks[action.chunk], self.boundary)

    def _samples(self, micro_batch: int) -> Iterator[dict[str, torch.Tensor]]:
        """Reads the samples only where upstream asks for them."""
        yield self._read(micro_batch)

    def _read(self, micro_batch: int) -> dict[str, torch.Tensor]:
        batch = self.fetch(micro_batch)
        if self.pacer is not None:
            self._workloads[micro_batch] = workload_of(batch)
        return batch

    _handlers: ClassVar[dict[Kind, Callable[[Step, Action], None]]] = {
        Kind.RECV_FORWARD: _receive_forward,
        Kind.FORWARD: _forward,
        Kind.SEND_FORWARD: _send_forward,
        Kind.RECV_BACKWARD: _receive_backward,
        Kind.BACKWARD: _backward,
        Kind.SEND_BACKWARD: _send_backward,
    }


def _key(action: Action) -> tuple[int, int]:
    return action.chunk, action.micro_batch
