"""What runs in a rank: times the parts of a real model, and messages to another rank."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import distributed as dist

from megatron.resilience.patches.registry import PatchSet
from megatron.resilience.profile.model import build, packed
from megatron.resilience.profile.request import Mix, Request, Times
from resihp_ext.environment import RankEnvironment

WARM_UP_ROUNDS = 2
MIN_ROUNDS = 3
MAX_ROUNDS = 40

_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


@dataclass
class _Clock:
    """Collects durations by name, with the device's queue drained at both ends."""

    device: torch.device
    seconds: dict[Any, list[float]] = field(default_factory=dict)

    @contextmanager
    def time(self, name: Any) -> Iterator[None]:
        """Times the block."""
        self._drain()
        started_s = time.perf_counter()
        yield
        self._drain()
        self.seconds.setdefault(name, []).append(time.perf_counter() - started_s)

    def typical(self, name: Any) -> float:
        """Lower quartile of what was collected under a name: other processes only ever add."""
        return statistics.quantiles(self.seconds[name], n=4)[0]

    def _drain(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_model(request: Request) -> Times:
    """Runs in every rank of a tensor-parallel group of the size of the world."""
    with _rank(request) as device:
        bench = _Bench(request, device)
        for _ in range(WARM_UP_ROUNDS):
            bench.round()
        bench.clock.seconds.clear()
        started_s = time.perf_counter()
        for rounds in range(1, MAX_ROUNDS + 1):
            bench.round()
            over = rounds >= MIN_ROUNDS and time.perf_counter() - started_s > request.budget_s
            if _any(over, device):
                break
        return bench.times(rounds)


def measure_link(request: Request, sizes_bytes: Sequence[int]) -> list[float]:
    """Runs in two ranks: seconds of a message of each size, one way, as half of there and back."""
    with _rank(request) as device:
        clock = _Clock(device)
        for size in sizes_bytes:
            message = torch.zeros(size, dtype=torch.uint8, device=device)
            for attempt in range(25):
                with clock.time(size if attempt >= 5 else None):
                    _there_and_back(message)
        return [clock.typical(size) / 2 for size in sizes_bytes]


def _there_and_back(message: torch.Tensor) -> None:
    other = 1 - dist.get_rank()
    for sender in (0, 1):
        if dist.get_rank() == sender:
            dist.send(message, other)
        else:
            dist.recv(message, other)


@contextmanager
def _rank(request: Request) -> Iterator[torch.device]:
    """Joins the other ranks, on this rank's own device, with Megatron's patches."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if request.kind == "cuda":
        device = torch.device("cuda", RankEnvironment.from_environ(os.environ).local_rank)
        torch.cuda.set_device(device)
    patches = PatchSet()
    patches.apply_for(request.kind)
    dist.init_process_group(request.backend)
    try:
        yield device
        dist.barrier()
    finally:
        dist.destroy_process_group()
        patches.undo_all()


def _any(mine: bool, device: torch.device) -> bool:
    """Whether it holds on any rank: all must stop in the same round."""
    flag = torch.tensor([float(mine)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())


class _Bench:
    """A model of one layer, and the inputs of its parts."""

    def __init__(self, request: Request, device: torch.device) -> None:
        self.clock = _Clock(device)
        self._request, self._device = request, device
        dtype = _DTYPES[request.kind]
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        self._model = build(
            replace(request.shape, num_layers=1),
            group=dist.group.WORLD,
            alone=alone[dist.get_rank()],
            device=device,
            dtype=dtype,
        )
        self._batches = [self._inputs(mix, dtype) for mix in request.batches]
        self._step = _optimizer_step(self._model.decoder.layers[0], device)

    def _inputs(self, mix: Mix, dtype: torch.dtype) -> dict[str, Any]:
        tokens = sum(mix)
        segments = packed(mix, self._device)
        hidden = torch.randn(tokens, 1, self._request.shape.hidden_size)
        rotary = self._model.rotary_pos_emb
        length = rotary.get_rotary_seq_len(
            None, self._model.decoder, hidden, self._model.config, segments
        )
        with torch.no_grad():
            table = rotary(length, packed_seq=True)
        return {
            "hidden": hidden.to(self._device, dtype),
            "table": table,
            "segments": segments,
            "labels": torch.zeros(1, tokens, dtype=torch.int64, device=self._device),
        }

    def round(self) -> None:
        """Everything once."""
        for index, batch in enumerate(self._batches):
            self._layer(index, batch)
        # Only the largest: embedding, head and loss are linear in the tokens.
        self._embedding(self._batches[0])
        self._head(self._batches[0])
        with self.clock.time("step"):
            self._step()

    def times(self, rounds: int) -> Times:
        """What all rounds gave."""
        tokens = sum(self._request.batches[0])
        parameters = sum(p.numel() for p in self._model.decoder.layers[0].parameters())
        indices = range(len(self._batches))
        return Times(
            forward_s=tuple(self.clock.typical(("forward", index)) for index in indices),
            backward_s=tuple(self.clock.typical(("backward", index)) for index in indices),
            head_forward_s=self.clock.typical("head forward") / tokens,
            head_backward_s=self.clock.typical("head backward") / tokens,
            embedding_s=self.clock.typical("embedding") / tokens,
            step_parameter_s=self.clock.typical("step") / parameters,
            rounds=rounds,
        )

    def _layer(self, index: int, batch: dict[str, Any]) -> None:
        hidden = batch["hidden"].detach().requires_grad_()
        gradient = torch.ones_like(hidden)
        dist.barrier()
        with self.clock.time(("forward", index)):
            output, _ = self._model.decoder.layers[0](
                hidden,
                None,
                rotary_pos_emb=batch["table"],
                packed_seq_params=batch["segments"],
            )
        with self.clock.time(("backward", index)):
            torch.autograd.backward(output, gradient)

    def _embedding(self, batch: dict[str, Any]) -> None:
        dist.barrier()
        with self.clock.time("embedding"):
            self._model.embedding(batch["labels"], batch["labels"])

    def _head(self, batch: dict[str, Any]) -> None:
        hidden = batch["hidden"].detach().requires_grad_()
        weight = None
        if self._request.shape.tied:
            weight = self._model.shared_embedding_or_output_weight()
        dist.barrier()
        with self.clock.time("head forward"):
            normed = self._model.decoder.final_layernorm(hidden)
            logits, _ = self._model.output_layer(normed, weight=weight)
            loss = self._model.compute_language_model_loss(batch["labels"], logits).sum()
        with self.clock.time("head backward"):
            loss.backward()


def _optimizer_step(layer: torch.nn.Module, device: torch.device) -> Callable[[], None]:
    """One step of Adam on copies of a layer's parameters in 32 bits, as masters are."""
    masters = [torch.zeros_like(p, dtype=torch.float32) for p in layer.parameters()]
    for master in masters:
        master.grad = torch.zeros_like(master)
    adam = torch.optim.AdamW(masters, fused=device.type == "cuda")
    return lambda: adam.step() and None
