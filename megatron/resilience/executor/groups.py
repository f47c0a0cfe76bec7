"""Process groups of a plan: built once, kept while a later plan still wants them.

Every rank makes every group in the same order, also those it is no member of: that costs a member
a rendezvous and the others nothing, and keeps torch's names for the groups equal everywhere. The
form that only members call derives the name from how many groups a process holds, which differs
from rank to rank in an uneven layout, and hangs.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.resilience.executor.world import World
from resihp_ext.plan.plan import Plan
from resihp_ext.state.keepers import Keepers

Members = tuple[int, ...]
"""Global ranks in the order of their ranks in the group."""


def members_of(plan: Plan, domains: Iterable[Keepers], ranks: Iterable[int]) -> tuple[Members, ...]:
    """Every group that a plan needs, in one global order: one a stage, a domain and a rank.

    Args:
        ranks: The live ranks.
    """
    wanted: set[Members] = {(rank,) for rank in ranks}
    wanted |= {stage.ranks for replica in plan.replicas for stage in replica.stages}
    wanted |= {keepers.members for keepers in domains}
    return tuple(sorted(wanted))


class GroupPool:
    """The groups of this process, by members."""

    def __init__(self, world: World, timeout: timedelta) -> None:
        self.world = world
        self._timeout = timeout
        self._groups: dict[Members, Any] = {}

    def __getitem__(self, members: Members) -> Any:
        return self._groups[members]

    def __len__(self) -> int:
        """Groups that are alive in this process and have it as a member."""
        return sum(group is not None for group in self._groups.values())

    def add(self, wanted: Iterable[Members]) -> int:
        """Makes what is missing; collective over all live ranks.

        Returns:
            How many groups were made, the same on all ranks.
        """
        new = [members for members in wanted if members not in self._groups]
        for members in new:
            self._groups[members] = self._make(members)
        return len(new)

    def keep(self, wanted: Iterable[Members]) -> int:
        """Ends what is not wanted.

        Returns:
            How many groups were ended, the same on all ranks.
        """
        kept = set(wanted)
        old = [members for members in self._groups if members not in kept]
        for members in old:
            group = self._groups.pop(members)
            if group is not None and group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        return len(old)

    def _make(self, members: Members) -> Any:
        if members == self.world.members:
            return dist.group.WORLD
        numbers = self.world.numbers(members)
        group = dist.new_group(numbers, timeout=self._timeout, sort_ranks=False)
        return None if group is dist.GroupMember.NON_GROUP_MEMBER else group
