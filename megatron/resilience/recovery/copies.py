"""Copies of the state in host memory, for the case that all owners of something are lost.

Every so many steps each rank copies its share of the state, in which every element is once, and
sends it to one other rank while training goes on. The last whole copy is kept until the next one is
whole, so there are two of each buffer. A copy is whole on a rank when what was sent to it has
arrived with the checksum with which it left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron.resilience.executor.buffers import MASTER
from megatron.resilience.executor.checksum import checksum
from megatron.resilience.executor.layout import StateLayout
from megatron.resilience.executor.optimizer import kinds_of
from megatron.resilience.executor.store import state_stores
from megatron.resilience.executor.transition import Held
from resihp_ext.state.copies import partners
from resihp_ext.state.slab import Slab

if TYPE_CHECKING:
    from megatron.resilience.executor.executor import Executor

logger = logging.getLogger(__name__)

_TAG = 1 << 30
"""Above all tags of boundaries and of moves."""


class Share:
    """State of some slabs, one kind after the other in one flat buffer; looks like the buffer of a
    sync domain to those who read state."""

    def __init__(self, slabs: Sequence[Slab], kinds: Sequence[str], flat: torch.Tensor) -> None:
        self.slabs = slabs
        self.flat = flat
        size = sum(slab.elements for slab in slabs)
        self.state = {
            kind: flat[place * size : (place + 1) * size] for place, kind in enumerate(kinds)
        }

    def entries(self, kind: str) -> Iterator[tuple[Slab, torch.Tensor]]:
        """Every slab, with its state in the slab's shape."""
        low = 0
        for slab in self.slabs:
            yield slab, self.state[kind][low : low + slab.elements].view(slab.shape)
            low += slab.elements


@dataclass(kw_only=True)
class Copy:
    """The state after some updates, as far as it is on this rank."""

    steps: int
    layout: StateLayout
    """Of whom has which copies."""
    own: Share
    other: Share | None
    works: list[Any] = field(default_factory=list)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Checksums: of what was sent, and what the sender says of what arrives."""
    whole: bool = False

    def held(self) -> Held:
        """As the source of a transition."""
        shares = [one for one in (self.own, self.other) if one is not None]
        return Held(version=-1, layout=self.layout, buffers=shares, pieces=())  # type: ignore[arg-type]

    def sound(self) -> bool:
        """Whether what came from the other rank is what it had sent."""
        if self.other is None or not len(self.other.flat):
            return True
        return checksum(self.other.flat) == int(self.sums["told"])


class Copies:
    """This rank's copies."""

    def __init__(self, executor: Executor, every: int) -> None:
        """Prepares for copies.

        Args:
            every: Steps between two copies; 0 for none.
        """
        self._executor = executor
        self._every = every
        self._whole: Copy | None = None
        self._pending: Copy | None = None
        self._spare: dict[tuple[str, int], torch.Tensor] = {}

    @property
    def steps(self) -> tuple[int, ...]:
        """After how many updates there is a whole copy."""
        return () if self._whole is None else (self._whole.steps,)

    def held(self, steps: int) -> Held:
        """The whole copy of the state after so many updates, as the source of a transition.

        Raises:
            KeyError: there is none.
        """
        if self._whole is None or self._whole.steps != steps:
            raise KeyError(steps)
        return self._whole.held()

    def between_steps(self) -> None:
        """Looks after the copy that is on its way, and begins the next one if it is time."""
        optimizer = self._executor.optimizer
        if self._pending is not None and self._arrived(self._pending):
            self._finish()
        if not self._every or optimizer is None or optimizer.steps % self._every:
            return
        latest = self._pending or self._whole
        if latest is None or latest.steps != optimizer.steps:
            self._begin(optimizer.steps)

    def drop_pending(self) -> None:
        """After connections were broken off: what was on its way will not arrive."""
        self._pending = None

    def _arrived(self, pending: Copy) -> bool:
        """Ends the exchange, which has had a whole step for itself: gloo's works are not complete
        before somebody waits for them."""
        try:
            for work in pending.works:
                work.wait()
        except RuntimeError as error:
            # Whose connection is lost is found out in the step that begins now.
            logger.debug("a copy did not arrive", exc_info=error)
            self._pending = None
            return False
        return True

    def _finish(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        if not pending.sound():
            logger.warning("the copy after step %d has arrived damaged: dropped", pending.steps)
            return
        pending.whole, pending.works = True, []
        if self._whole is not None:
            self._keep_memory(self._whole)
        self._whole = pending

    def _keep_memory(self, copy: Copy) -> None:
        for name, share in (("own", copy.own), ("other", copy.other)):
            if share is not None:
                self._spare[name, len(share.flat)] = share.flat

    def _memory(self, name: str, elements: int) -> torch.Tensor:
        kept = self._spare.pop((name, elements), None)
        self._spare = {key: flat for key, flat in self._spare.items() if key[0] != name}
        if kept is not None:
            return kept
        return torch.zeros(elements, dtype=torch.float32, pin_memory=torch.cuda.is_available())

    def _begin(self, steps: int) -> None:
        executor = self._executor
        assert executor.layout is not None
        assert executor.optimizer is not None
        layout, rank = executor.layout, executor.seat.rank
        members = executor.world.members
        kinds = (MASTER, *kinds_of(executor.optimizer.config))
        to = partners(members, layout.nodes)
        source = next((one for one, partner in to.items() if partner == rank), None)
        own = self._share("own", layout.counted.get(rank, ()), kinds)
        stores = state_stores(executor.buffers, dict.fromkeys(kinds, torch.float32))
        for kind in kinds:
            for slab, view in own.entries(kind):
                stores[kind].read(slab, view.view(-1))
        other = None
        if source is not None:
            other = self._share("other", layout.counted.get(source, ()), kinds)
        copy = Copy(
            steps=steps, layout=_layout_of_copies(layout, members, to), own=own, other=other
        )
        if source is not None:
            self._send(copy, to[rank], source)
        self._pending = copy

    def _share(self, name: str, slabs: Sequence[Slab], kinds: Sequence[str]) -> Share:
        elements = len(kinds) * sum(slab.elements for slab in slabs)
        return Share(slabs, kinds, self._memory(name, elements))

    def _send(self, copy: Copy, to: int, source: int) -> None:
        """Begins the exchange; gloo moves it along in a thread of its own."""
        world, group = self._executor.world, self._executor.host_group()
        assert copy.other is not None
        copy.sums = {
            "sent": torch.tensor([checksum(copy.own.flat)] if len(copy.own.flat) else [0]),
            "told": torch.zeros(1, dtype=torch.int64),
        }
        for turn, (mine, theirs) in enumerate(
            ((copy.own.flat, copy.other.flat), (copy.sums["sent"], copy.sums["told"]))
        ):
            if len(theirs):
                number = world.number(source)
                copy.works.append(dist.irecv(theirs, number, group=group, tag=_TAG + turn))
            if len(mine):
                copy.works.append(dist.isend(mine, world.number(to), group=group, tag=_TAG + turn))


def _layout_of_copies(
    layout: StateLayout, members: Sequence[int], to: Mapping[int, int]
) -> StateLayout:
    """Who has copies of what."""
    held: dict[int, list[Slab]] = {rank: list(layout.counted.get(rank, ())) for rank in members}
    for rank, partner in to.items():
        held[partner] += layout.counted.get(rank, ())
    return StateLayout.of_state(held, groups=layout.groups, nodes=layout.nodes)
