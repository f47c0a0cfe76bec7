"""The forward step of one micro-batch and its loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model, make_viewless_tensor
from megatron.training import get_timers

from megatron.resilience.upstream.arguments import current_args
from megatron.resilience.upstream.batch import MicroBatch, next_micro_batch
from megatron.resilience.upstream.rng import RngKeeper

_SPIKE_FACTOR = 10
"""A loss this many times the largest so far is reported as spiky, as upstream does."""

LossReport = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


class ForwardStep:
    """Megatron's ``forward_step_func``: reads a micro-batch, runs the model, returns the loss."""

    def __init__(
        self,
        device: torch.device,
        rng: RngKeeper,
        on_micro_batch: Callable[[MicroBatch], None] | None = None,
    ) -> None:
        """Prepares the step.

        Args:
            device: Where micro-batches go.
            rng: Restored before the first micro-batch.
            on_micro_batch: Called with every micro-batch of training before it is computed.
        """
        self._device = device
        self._rng = rng
        self._on_micro_batch = on_micro_batch
        self._stragglers = StragglerDetector()

    def __call__(
        self, data_iterator: Any, model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossReport]]:
        self._rng.restore()
        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        with self._timed(data=True):
            vp_stage = get_attr_wrapped_model(model, "vp_stage")
            batch = next_micro_batch(data_iterator, self._device, vp_stage)
        timers("batch-generator").stop()
        if self._on_micro_batch is not None and model.training:
            self._on_micro_batch(batch)
        with self._timed():
            output = _run(model, batch)
        return output, functools.partial(loss_of, batch.loss_mask)

    @contextmanager
    def _timed(self, *, data: bool = False) -> Iterator[None]:
        """Lets upstream's detector time what is inside.

        Its own context manager logs a traceback of whatever leaves it, also of what is survived.
        """
        detector = self._stragglers(bdata=data)
        detector.start()
        try:
            yield
        finally:
            detector.stop()


def _run(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Runs the model, between stages in the shape that the pipeline's buffers have.

    Upstream packs ``b`` samples into one sequence ``(b * s, 1, h)`` but allocates its receive
    buffers as ``(s, b, h)``: the same elements in the same order, so a view does.
    """
    inside = get_attr_wrapped_model(model, "decoder")
    received = inside.input_tensor
    flatten = batch.packed is not None and current_args().micro_batch_size > 1
    if flatten and received is not None:
        inside.input_tensor = received.view(-1, 1, received.size(-1))
    output = model(
        batch.tokens,
        batch.position_ids,
        batch.attention_mask,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.packed,
    )
    if flatten and not get_attr_wrapped_model(model, "post_process"):
        shape = (-1, current_args().micro_batch_size, output.size(-1))
        # The schedule frees a sent tensor's storage, which it refuses to do to a view.
        output = make_viewless_tensor(output.view(shape), output.requires_grad, keep_graph=True)
    return output


def loss_of(loss_mask: torch.Tensor | None, output: torch.Tensor) -> LossReport:
    """Sums the loss over the tokens that count.

    Returns:
        Sum of the token losses, number of tokens, and what the log shows: both in one tensor, so
        that the mean is over all tokens of the global batch.
    """
    assert loss_mask is not None, "only the last stage has a loss"
    mask = loss_mask.view(-1).float()
    loss = torch.sum(output.view(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    _check(loss)
    # The schedule divides the loss in place; the log must keep the undivided value.
    report = torch.cat([loss.detach().clone().view(1), tokens.view(1)])
    return loss, tokens, {"lm loss": report}


def _check(loss: torch.Tensor) -> None:
    """Upstream's checks of a local loss: NaN and infinity are fatal, a spike is reported."""
    args = current_args()
    machine = get_rerun_state_machine()
    checks: list[tuple[Callable[..., Any], str, bool]] = []
    if args.check_for_nan_in_loss_and_grad:
        checks.append((torch.isnan, "NaN in the local loss", True))
        checks.append((torch.isinf, "infinity in the local loss", True))
    if args.check_for_spiky_loss:
        spiky = functools.partial(
            machine.is_unexpectedly_large, threshold=_SPIKE_FACTOR, context="loss"
        )
        checks.append((spiky, "spiky loss", False))
    for rejects, message, fatal in checks:
        machine.validate_result(
            result=loss, rejection_func=rejects, message=message, tolerance=0.0, fatal=fatal
        )
