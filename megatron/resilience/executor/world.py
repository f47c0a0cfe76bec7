"""The processes that are connected now.

torch numbers the members of its default group from 0; a job's global ranks have gaps once a rank is
gone. Whatever speaks to torch asks here for the number.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_PLACE = "world"
"""Under which members of all epochs leave their addresses in the store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Global ranks of the default group, in the order of torch's numbers."""

    members: tuple[int, ...]
    epoch: int = 0
    """How often the group has been made anew."""

    def number(self, rank: int) -> int:
        """What torch calls a global rank."""
        return self.members.index(rank)

    def numbers(self, ranks: tuple[int, ...]) -> list[int]:
        """The same of several."""
        place = {rank: number for number, rank in enumerate(self.members)}
        return [place[rank] for rank in ranks]

    def connect(self, rank: int, *, backend: str, store: Any, timeout: timedelta) -> None:
        """Makes the default group; collective over the members.

        Args:
            rank: This process's global rank.
            store: Where the members of all epochs meet.
        """
        # torch names groups by a count, which begins anew when the groups before are destroyed; but
        # not on a rank that was still making the first of them: it would wait under another name.
        dist.distributed_c10d._world.group_count = 0
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"{_PLACE}/{self.epoch}", store),
            rank=self.number(rank),
            world_size=len(self.members),
            timeout=timeout,
        )

    def forget_earlier(self, store: Any) -> None:
        """Clears the store of the addresses that earlier worlds have left there, which nobody asks
        for once all members are in this one; for one of them to call."""
        for key in store.list_keys():
            place, _, rest = key.partition("/")
            epoch = rest.partition("/")[0]
            if place == _PLACE and epoch.isdigit() and int(epoch) < self.epoch:
                store.delete_key(key)
