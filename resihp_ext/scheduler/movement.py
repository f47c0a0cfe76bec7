"""How much state each rank lacks after a change of plans, and the order of ranks that lacks least.

A rank holds a run of layers and, of every matrix, one of ``tp`` equal parts. What it lacks is its
new part less the overlap with its old one. Without a sharded optimizer this is what the slabs say,
too; a test compares. With one, where shares lie is not looked at: each element counts with its part
of the optimizer's state.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable

from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.plan.plan import Plan, Stage
from resihp_ext.scheduler.held import Held
from resihp_ext.scheduler.problem import Problem


def lacking_bytes(problem: Problem, plan: Plan) -> dict[int, int]:
    """Bytes of parameters and optimizer state that ranks need and do not hold now; only ranks that
    lack something are listed."""
    unchanged = {stage for one in problem.current.replicas for stage in one.stages}
    before, shards = problem.held, len(plan.replicas)
    found = {}
    for one in plan.replicas:
        for stage in one.stages:
            if stage in unchanged:
                continue
            for tp_rank, rank in enumerate(stage.ranks):
                lacking = _lacking(problem, before.get(rank), Held(stage, tp_rank), shards)
                if lacking:
                    found[rank] = lacking
    return found


def _lacking(problem: Problem, old: Held | None, new: Held, shards: int) -> int:
    shape, policy, whole = problem.shape, problem.policy, problem.shape.num_layers
    tp = new.stage.tp
    low, high = new.stage.layers
    kept = max(0, min(high, old.stage.layers[1]) - max(low, old.stage.layers[0])) if old else 0
    each = shape.rank_parameters(depth=1, tp=tp, first=False, last=False)
    # Of kept layers and matrices everything is in place but what the old part does not cover.
    missing = 1 / tp - _overlap(old.part, new.part) if old else 1 / tp
    cut = shape.layer_matrix_parameters + (shape.qkv_size if shape.qkv_bias else 0)
    elements = (high - low - kept) * each + kept * missing * cut
    for ends, had in _vocabularies(old.stage if old else None, new.stage, whole, shape.tied):
        if ends:
            elements += shape.embedding_parameters * (missing if had else 1 / tp)
    if high == whole and (old is None or old.stage.layers[1] < whole):
        # The norm before the output layer.
        elements += shape.hidden_size
    return round(elements * _element_bytes(policy, shards))


def _element_bytes(policy: MemoryPolicy, shards: int) -> float:
    """What moves of an element; weights are made from masters where a rank has all of these."""
    optimizer = policy.master_bytes + 2 * policy.moment_bytes
    if policy.sharded:
        return policy.param_bytes + optimizer / shards
    return optimizer if policy.master_bytes else policy.param_bytes + optimizer


def _vocabularies(
    old: Stage | None, new: Stage, num_layers: int, tied: bool
) -> list[tuple[bool, bool]]:
    """For each vocabulary matrix whether it is needed, and whether a part of it is there."""

    def ends(stage: Stage | None) -> list[bool]:
        if stage is None:
            return [False, False]
        first, last = stage.layers[0] == 0, stage.layers[1] == num_layers
        return [first or last, False] if tied else [first, last]

    return list(zip(ends(new), ends(old), strict=True))


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def arranged(problem: Problem, ranks: Iterable[int], layers: tuple[int, int]) -> tuple[int, ...]:
    """Orders the ranks of a stage so that they keep as much as they can of what they hold.

    The pair of rank and place with the largest overlap is settled first; ranks that hold nothing of
    the layers fill the gaps in ascending order.
    """
    members = sorted(ranks)
    tp, before = len(members), problem.held
    overlaps = []
    for rank in members:
        old = before.get(rank)
        if old is None or old.stage.layers[0] >= layers[1] or layers[0] >= old.stage.layers[1]:
            continue
        for place in range(tp):
            shared = _overlap(old.part, (place / tp, (place + 1) / tp))
            if shared > 0:
                overlaps.append((-shared, place, rank))
    places: dict[int, int] = {}
    taken: set[int] = set()
    for _, place, rank in sorted(overlaps):
        if place not in places and rank not in taken:
            places[place] = rank
            taken.add(rank)
    rest = iter(rank for rank in members if rank not in taken)
    return tuple(places[place] if place in places else next(rest) for place in range(tp))
