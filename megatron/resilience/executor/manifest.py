"""What a rank's modules hold of the logical model, and the exchange of this between ranks.

A parameter is one or more slabs of logical tensors (a gated MLP's first matrix is two), named as
Megatron's checkpoints name them, so that any layout's names agree: layers carry their global
number, tied output weights the embedding's name.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from megatron.resilience.model.initial_weights import logical_tensors
from resihp_ext.state.slab import Slab


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Piece:
    """A slab, and where it lies in a parameter of this rank."""

    slab: Slab
    parameter: torch.nn.Parameter
    shape: tuple[int, ...]
    """Local shape; may lack leading axes of the slab that have one element."""
    stride: tuple[int, ...]
    offset: int
    """First element, counted from the parameter's first."""
    copies: int
    """How many ranks of the same stage instance contribute the same gradient of it: the degree for
    what is replicated, 1 for what is cut and for partial sums."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The slab's part of a tensor that is laid out as the parameter, in the slab's shape."""
        whole = tensor if tensor.is_contiguous() else tensor.contiguous()
        part = whole.as_strided(self.shape, self.stride, whole.storage_offset() + self.offset)
        return part.view(self.slab.shape)


def pieces_of(models: Sequence[torch.nn.Module], tp: int) -> list[Piece]:
    """Lists everything that the model chunks of a rank hold.

    Args:
        tp: Tensor-parallel degree of the rank's stage.
    """
    found = []
    for model in unwrap_model(list(models)):
        owners = _Addresses(model)
        for tensor in logical_tensors(model):
            data = tensor.data
            found_at = None if data is None else owners.find(data)
            if found_at is None:
                continue
            name, parameter, offset = found_at
            low = tuple(tensor.global_offset)
            lead = len(low) - data.ndim
            size = (1,) * lead + tuple(data.shape)
            found.append(
                Piece(
                    slab=Slab(
                        tensor=tensor.key,
                        low=low,
                        high=tuple(a + n for a, n in zip(low, size, strict=True)),
                    ),
                    parameter=parameter,
                    shape=tuple(data.shape),
                    stride=tuple(data.stride()),
                    offset=offset,
                    copies=_copies(name, parameter, model.config, tp),
                )
            )
    return found


class _Addresses:
    """Parameters of a model by where they are in memory; several may be in one storage."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._entries = sorted(
            ((one.data_ptr(), name, one) for name, one in model.named_parameters()),
            key=lambda entry: entry[0],
        )
        self._starts = [start for start, _, _ in self._entries]

    def find(self, part: torch.Tensor) -> tuple[str, torch.nn.Parameter, int] | None:
        """The parameter that a tensor is a view of, and the view's first element in it."""
        place = bisect_right(self._starts, part.data_ptr()) - 1
        if place < 0:
            return None
        start, name, parameter = self._entries[place]
        offset = (part.data_ptr() - start) // parameter.element_size()
        return (name, parameter, offset) if offset < parameter.numel() else None


def _copies(name: str, parameter: torch.nn.Parameter, config: object, tp: int) -> int:
    """How many ranks of a tensor-parallel group hold the same gradient of a parameter."""
    if getattr(parameter, "tensor_model_parallel", False):
        return 1
    partial = getattr(config, "sequence_parallel", False) and getattr(
        parameter, "sequence_parallel", False
    )
    # Each rank normalises the queries and keys of its own heads.
    partial = partial or "q_layernorm" in name or "k_layernorm" in name
    return 1 if partial else tp


def exchange_texts(text: str, device: torch.device) -> list[str]:
    """Gives every live rank the text of every one, in the order of ranks; collective.

    Args:
        device: Where the backend wants its tensors.
    """
    mine = _bytes(text).to(device)
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    sizes[dist.get_rank()] = len(mine)
    dist.all_reduce(sizes)
    most = int(sizes.max())
    padded = torch.zeros(most, dtype=torch.uint8, device=device)
    padded[: len(mine)] = mine
    whole = torch.empty(most * len(sizes), dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(whole, padded)
    raw = whole.cpu().numpy().tobytes()
    return [
        raw[rank * most : rank * most + size].decode() for rank, size in enumerate(sizes.tolist())
    ]


def _bytes(text: str) -> torch.Tensor:
    # ``frombuffer`` takes no empty buffer.
    raw = bytearray(text.encode())
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
