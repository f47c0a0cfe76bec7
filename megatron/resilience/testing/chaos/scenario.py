"""What is done to the job of one run: its nodes and its faults, drawn from a seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from resihp_ext.faults.draw import Scene, draw
from resihp_ext.faults.fault import Fault, Kind

RANKS, TP, PP = 8, 2, 2
STEPS, INTERVAL = 24, 8
"""Steps of a job, and between two checkpoints and two evaluations."""
LEARNING_RATE = "3e-4"
NODES_EVERY = 4
"""Every so many runs the ranks are on two nodes."""
NODES = ("n0", "n1")
"""The first one has the coordinator."""
ONE_NODE = (Kind.KILL, Kind.STOP, Kind.HANG, Kind.EXIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One run."""

    number: int
    seed: int
    nodes: int
    faults: tuple[Fault, ...]

    @property
    def hit(self) -> frozenset[int]:
        """Ranks whose processes the faults may end."""
        here = RANKS // self.nodes
        ranks = {fault.rank for fault in self.faults if fault.rank is not None}
        for fault in self.faults:
            if fault.node is not None:
                first = NODES.index(fault.node) * here
                ranks |= set(range(first, first + here))
        return frozenset(ranks)


def scenario(
    number: int, base_seed: int, *, kinds: Sequence[Kind], separate: bool, nodes_every: int
) -> Scenario:
    """Draws a run; the same numbers give the same faults.

    Args:
        kinds: Allowed ones; those of nodes are left out where there is just one.
        separate: Whether nodes have networks of their own, so that one can be cut off.
        nodes_every: Every so many runs there are two nodes; 0: never.
    """
    nodes = 2 if nodes_every and number % nodes_every == nodes_every - 1 else 1
    possible = set(ONE_NODE)
    if nodes == 2:
        possible |= {Kind.NODE, Kind.CUT} if separate else {Kind.NODE}
    allowed = tuple(kind for kind in Kind if kind in possible and kind in kinds)
    scene = Scene(
        nodes=tuple(NODES[rank * nodes // RANKS] for rank in range(RANKS)),
        # Not the first step: a death before it restarts all, as torchrun does; nor the last.
        steps=STEPS - 2,
        micro_batches=2,
        feasible=lambda live: _keeps_state(live, nodes),
        kinds=allowed,
        spared=frozenset({NODES[0]}),
    )
    seed = base_seed + number
    faults = tuple(replace(one, at_step=one.at_step + 1) for one in draw(seed, scene))
    return Scenario(number=number, seed=seed, nodes=nodes, faults=faults)


def _keeps_state(live: frozenset[int], nodes: int) -> bool:
    """Whether every shard of the first layout is left, even if all are lost at once."""
    return {_shard(rank, nodes) for rank in live} == {
        (stage, tp) for stage in range(PP) for tp in range(TP)
    }


def _shard(rank: int, nodes: int) -> tuple[int, int]:
    """Stage and place in it; with two nodes each has a replica, with one Megatron decides."""
    stage = rank // 4 if nodes == 1 else rank % 4 // 2
    return stage, rank % TP


def flags(run: Scenario | None, *, data: Path, folder: Path) -> list[str]:
    """The job's command line, behind the script.

    Args:
        run: None for the job without faults.
        folder: Of the run.
    """
    words = [*common_flags(data), "--save", str(folder / "checkpoints"), "--resilience"]
    words += ["--resilience-dir", str(folder / "resilience")]
    if run is not None and run.nodes == 2:
        layout = [
            [
                {"ranks": [4 * k, 4 * k + 1], "layers": 2},
                {"ranks": [4 * k + 2, 4 * k + 3], "layers": 2},
            ]
            for k in range(2)
        ]
        timetable = folder / "layout.yaml"
        timetable.write_text(json.dumps([{"step": 0, "replicas": layout}]))
        words += ["--resilience-plan-schedule", str(timetable)]
    if run is not None:
        words += ["--resilience-faults", str(folder / "faults.yaml")]
    return words


def common_flags(data: Path) -> list[str]:
    """Of every job here, also of those of torchrun."""
    words = ["--preset", "tiny", "--device", "cpu", "--data-path", str(data), "--split", "98,2,0"]
    words += ["--packed-sequences", "--train-iters", str(STEPS)]
    words += ["--tensor-model-parallel-size", str(TP), "--pipeline-model-parallel-size", str(PP)]
    words += ["--save-interval", str(INTERVAL), "--eval-interval", str(INTERVAL)]
    # A rate at which other orders of summation do not grow into other figures in so many steps.
    return [*words, "--eval-iters", "1", "--lr", LEARNING_RATE, "--min-lr", LEARNING_RATE]
