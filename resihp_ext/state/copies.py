"""Where copies of the state are kept: each rank's share on itself and on one other rank.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def partners(ranks: Sequence[int], nodes: Mapping[int, int]) -> dict[int, int]:
    """Who keeps the second copy of each rank's share: a permutation of the ranks.

    Ranks are put in a ring in which neighbours are on different nodes as far as possible: nodes are
    dealt out in turns. A rank alone has no partner.
    """
    by_node: dict[int, list[int]] = {}
    for rank in sorted(ranks):
        by_node.setdefault(nodes.get(rank, 0), []).append(rank)
    columns = [by_node[node] for node in sorted(by_node)]
    # With a shift of the largest node's size in the order of nodes, equal nodes never meet.
    order = [rank for column in columns for rank in column]
    if len(order) < 2:
        return {}
    shift = max(map(len, columns)) % len(order) or 1
    return {rank: order[(place + shift) % len(order)] for place, rank in enumerate(order)}
