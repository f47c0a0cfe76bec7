"""From series that have risen to suspects: a device, a link, or a whole host.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from resihp_ext.detector.slots import Array, Slots
from resihp_ext.detector.suspect import Suspect
from resihp_ext.detector.watch import MOST_BIAS, Rise, Watch
from resihp_ext.plan.plan import Plan

ALIKE = 0.5
"""Part of its worst device's excess that all others of a node must show, for it to be the node."""
MASKED = 0.7
"""A link that loses less than this part of what another one at the same rank loses is not named."""


def device_suspects(plan: Plan, slots: Slots, watch: Watch, rises: Sequence[Rise]) -> list[Suspect]:
    """Devices that have become slower; all of a node together are its host."""
    if not rises:
        return []
    node_of = {device.rank: device.node for device in plan.devices}
    at_node: dict[int, list[int]] = defaultdict(list)
    for i, rank in enumerate(slots.ranks):
        at_node[node_of[rank]].append(i)
    risen: dict[int, list[Rise]] = defaultdict(list)
    for rise in rises:
        risen[node_of[slots.ranks[rise.at]]].append(rise)
    suspects = []
    for node, mine in sorted(risen.items()):
        suspects += _of_node(node, mine, at_node[node], slots, watch)
    return suspects


def _of_node(
    node: int, rises: Sequence[Rise], members: Sequence[int], slots: Slots, watch: Watch
) -> list[Suspect]:
    # In a single step one of many devices is often odd; a median of steps is late on a ramp.
    for levels in (watch.levels(), watch.last()):
        if len(members) == 1 or not _alike(levels[members], watch.known[members], watch.over_ratio):
            continue
        level = float(np.median(levels[members]))
        # One level for all: an odd one of a device would have it named alone later.
        watch.know(members, level)
        ranks = tuple(sorted(slots.ranks[i] for i in members))
        since = min(rise.since_step for rise in rises)
        text = (
            f"all {len(ranks)} devices of node {node} take {level:.2f} times as long as predicted"
        )
        found = Suspect(kind="host", ranks=ranks, p=1 / level, since_step=since, evidence=text)
        return [found]
    suspects = []
    for rise in rises:
        rank = slots.ranks[rise.at]
        watch.know([rise.at], rise.level)
        text = f"rank {rank} takes {rise.level:.2f} times as long for its own work as predicted"
        suspects.append(
            Suspect(
                kind="device",
                ranks=(rank,),
                p=min(1 / rise.level, 1.0),
                since_step=rise.since_step,
                evidence=text,
            )
        )
    return suspects


def _alike(levels: Array, known: Array, over_ratio: float) -> bool:
    """Whether all devices of a node have become slower by much the same.

    What slows a host down slows its devices alike; one that is a little late is no witness.
    """
    # Who was as slow before does not join: one more device is one more device.
    excess = levels / known - 1
    if not (excess > (over_ratio - 1) / 2).all():
        return False
    # Devices that differ for ever still do.
    return bool(excess.min() + (MOST_BIAS - 1) / 2 >= ALIKE * excess.max())


def link_suspects(
    pairs: Sequence[tuple[int, int]], watch: Watch, rises: Sequence[Rise], healthy_s: Array
) -> list[Suspect]:
    """Links whose transfers have become longer, and not only because of another one."""
    suspects = []
    for rise in _leading(pairs, watch, rises, healthy_s):
        watch.know([rise.at], rise.level)
        usual_ms = 1e3 * healthy_s[rise.at]
        one, other = pairs[rise.at]
        text = (
            f"transfers between ranks {one} and {other} take {rise.level:.2f} times as long as "
            f"the usual {usual_ms:.2f} ms"
        )
        suspects.append(
            Suspect(
                kind="link",
                ranks=(min(one, other), max(one, other)),
                p=min(1 / rise.level, 1.0),
                since_step=rise.since_step,
                evidence=text,
            )
        )
    return suspects


def _leading(
    pairs: Sequence[tuple[int, int]], watch: Watch, rises: Sequence[Rise], healthy_s: Array
) -> list[Rise]:
    """Without links that share an end with a link that lost much more time.

    Who receives pieces of a message from several ranks waits for the last of them, so that all of
    these links look slow, in one direction of two, when one of them is.
    """
    if not rises:
        return []
    # One that has lost more counts before it is a rise of its own: on a ramp it may be the later.
    lost_s = (np.fmax(watch.known, watch.levels()) - 1) * healthy_s
    for rise in rises:
        lost_s[rise.at] = (rise.level - 1) * healthy_s[rise.at]
    ends = np.array(pairs)
    kept = []
    for rise in rises:
        beside = np.isin(ends, pairs[rise.at]).any(axis=1)
        if lost_s[rise.at] >= MASKED * float(np.nanmax(lost_s[beside])):
            kept.append(rise)
    return kept
