"""What ranks need of each kind of state under a new layout, and who sends it to them.

Under "weight" goes the value of a weight, wherever it is kept: in modules, as a master, or both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from megatron.resilience.executor.buffers import MASTER
from megatron.resilience.executor.layout import StateLayout
from megatron.resilience.executor.store import WEIGHT
from resihp_ext.state.slab import segments
from resihp_ext.state.transfer import Lack, Transfer, spread

Kinds = Mapping[str, torch.dtype]
"""Kinds of state that travel, and in which elements."""


def kinds_that_travel(moments: Sequence[str], *, half: bool) -> Kinds:
    """Kinds that travel; masters of fp32 weights are these weights.

    Args:
        half: Whether the modules' weights are bf16.
    """
    masters = (MASTER,) if half else ()
    weight = torch.bfloat16 if half else torch.float32
    return {WEIGHT: weight, **dict.fromkeys((*masters, *moments), torch.float32)}


class Needs:
    """What ranks lack of every kind, the same on all of them."""

    def __init__(self, old: StateLayout, new: StateLayout, kinds: Kinds) -> None:
        """Finds out who has and who needs what."""
        self._kinds = kinds
        self._weights: list[Lack] = []
        self._state: list[Lack] = []
        cut = segments(old.parameters, old.state, new.parameters, new.state)
        for slab, (holders, keepers, users, users_of_state) in cut.items():
            owners = holders | keepers
            # A rank that has a bf16 weight's master rounds it; fp32 weights and masters are one.
            rounds = MASTER in kinds
            wanted = users - users_of_state if rounds else users | users_of_state
            self._weights.append(Lack(slab=slab, owners=owners, ranks=wanted - owners))
            self._state.append(Lack(slab=slab, owners=keepers, ranks=users_of_state - keepers))

    def transfers(self) -> dict[str, tuple[Transfer, ...]]:
        """Who sends what to whom, of every kind."""
        # Masters and moments of an element are in the same places.
        state = spread(self._state)
        return {kind: spread(self._weights) if kind == WEIGHT else state for kind in self._kinds}

    def lower_bound_bytes(self) -> int:
        """Bytes of all that ranks lack, however it is sent."""
        weights, state = (
            sum(one.slab.elements * len(one.ranks) for one in lacks)
            for lacks in (self._weights, self._state)
        )
        return sum(
            dtype.itemsize * (weights if kind == WEIGHT else state)
            for kind, dtype in self._kinds.items()
        )
