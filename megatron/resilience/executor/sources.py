"""Where the state for a new layout comes from: the living, else copies in memory, else disk.

All ranks come to the same answer from what all of them have told each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Protocol

from megatron.resilience.executor.layout import StateLayout
from megatron.resilience.executor.transition import Held


class KeptCopies(Protocol):
    """Copies of the state in memory."""

    @property
    def steps(self) -> tuple[int, ...]:
        """After how many updates this rank has a whole one."""
        ...

    def held(self, steps: int) -> Held:
        """One of them."""
        ...


class NoCopies:
    """For jobs without any."""

    steps: tuple[int, ...] = ()

    def held(self, steps: int) -> Held:
        """There is none."""
        raise KeyError(steps)


def newest_whole(
    copies: KeptCopies,
    rank: int,
    members: Sequence[int],
    exchange: Callable[[str], list[str]],
) -> tuple[int, Held] | None:
    """The newest copies that hold everything together; collective over the members.

    Args:
        exchange: Gives every member the text of every member.

    Returns:
        After how many updates, and this rank's side of them; None if there are none.
    """
    told = [json.loads(text) for text in exchange(json.dumps(copies.steps))]
    holders: dict[int, list[int]] = {}
    for member, steps in zip(members, told, strict=True):
        for step in steps:
            holders.setdefault(step, []).append(member)
    mine = {
        step: copies.held(step).layout.to_json() for step, who in holders.items() if who[0] == rank
    }
    layouts = {
        int(step): StateLayout.from_json(text)
        for one in exchange(json.dumps(mine))
        for step, text in json.loads(one).items()
    }
    for step in sorted(holders, reverse=True):
        if layouts[step].lost(holders[step]) is None:
            left = layouts[step].among(holders[step])
            if step in copies.steps:
                return step, copies.held(step).with_layout(left)
            return step, Held(version=-1, layout=left, buffers=(), pieces=())
    return None
