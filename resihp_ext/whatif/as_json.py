"""An answer for programs: one JSON object.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from resihp_ext.plan.plan import Plan
from resihp_ext.whatif.answer import Answer, State
from resihp_ext.whatif.layout import layout, standby


def as_json(answer: Answer) -> str:
    """One line. ``plan`` is the chosen plan's canonical JSON; ``planning_s`` alone is measured."""
    decision, p_of = answer.decision, answer.scene.faulty.p_of
    before = answer.before.plan
    runners_up = [
        {
            "name": one.candidate.name,
            "iteration_s": one.candidate.iteration_s,
            "transition_s": one.candidate.transition_s,
            "moved_bytes": one.candidate.moved_bytes,
            "why": one.why,
        }
        for one in decision.runners_up
    ]
    fields = {
        "question": _question(answer),
        "before": {
            **_state(answer, answer.before),
            **_layout(before, dict.fromkeys(p_of, 1.0), before),
        },
        "nothing": _state(answer, answer.nothing),
        "after": {**_state(answer, answer.after), **_layout(decision.plan, p_of, before)},
        "stays": answer.stays,
        "chosen": decision.name,
        "reason": decision.reason,
        "transition_s": decision.transition_s,
        "moved_bytes": decision.moved_bytes,
        "effective_s": decision.effective_s if isfinite(decision.effective_s) else None,
        "planning_s": answer.planning_s,
        "runners_up": runners_up,
        "refused": [{"name": name, "why": why} for name, why in decision.refused],
        "digest": decision.plan.digest,
        "plan": json.loads(decision.plan.to_json()),
    }
    return json.dumps(fields, separators=(",", ":"), allow_nan=False)


def _question(answer: Answer) -> dict[str, Any]:
    scene = answer.scene
    problem = scene.faulty
    return {
        **asdict(scene.grid),
        "model": asdict(problem.shape),
        "micro_batches": problem.current.micro_batches,
        "hardware": scene.hardware,
        "memory_bytes": problem.cluster.memory_bytes,
        "policy": asdict(problem.policy),
        "planner": scene.planner,
        "lifetime_s": problem.options.expected_lifetime_s,
        "dead": [rank for rank, p in scene.damage.items() if p <= 0],
        "slow": {str(rank): p for rank, p in scene.damage.items() if p > 0},
    }


def _state(answer: Answer, state: State) -> dict[str, Any]:
    ranks = sorted(state.memory_bytes.items())
    return {
        "iteration_s": state.iteration_s,
        "throughput_ratio": answer.throughput_ratio(state),
        "tokens_per_s": answer.tokens_per_s(state),
        "memory_bytes": state.most_bytes,
        "memory_rank": state.fullest,
        "memory_bytes_of_rank": {str(rank): size for rank, size in ranks},
        "stopped_by": state.dead,
    }


def _layout(plan: Plan, p_of: Mapping[int, float], before: Plan) -> dict[str, Any]:
    replicas = [
        [
            {
                "ranks": cell.ranks,
                "tp": cell.tp,
                "layers": cell.depth,
                "first_layer": cell.layers[0],
                "micro_batches": cell.micro_batches,
                "p": cell.p,
                "changed": cell.changed,
            }
            for cell in cells
        ]
        for cells in layout(plan, p_of, before)
    ]
    return {
        "layout": replicas,
        "standby": standby(plan, p_of),
        "dead": [rank for rank, p in sorted(p_of.items()) if p <= 0],
    }
