"""Random scenarios: repeatable, always survivable, all of the language."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from resihp_ext.errors import UserError
from resihp_ext.faults.draw import MOST, Scene, draw
from resihp_ext.faults.fault import Fault, Kind, Phase
from resihp_ext.faults.read import faults_from_yaml, faults_to_yaml

pytestmark = pytest.mark.unit

NODES = ("n0",) * 3 + ("n1",) * 3 + ("n2",) * 2
SCENE = Scene(
    nodes=NODES,
    steps=20,
    micro_batches=8,
    feasible=lambda live: len(live) >= 3,
    kinds=(Kind.KILL, Kind.STOP, Kind.HANG, Kind.EXIT, Kind.NODE, Kind.CUT),
)
SEEDS = range(400)


def lost(faults: tuple[Fault, ...]) -> list[int]:
    return [rank for one in faults for rank, node in enumerate(NODES) if one.hits(rank, node)]


def test_the_same_seed_gives_the_same_bytes() -> None:
    """Also from one release to the next: a failed run is repeated by its seed."""
    text = "".join(faults_to_yaml(draw(seed, SCENE)) for seed in range(50))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "40b0d1ad93d4a72c"
    assert len({faults_to_yaml(draw(seed, SCENE)) for seed in SEEDS}) > 390


def test_enough_is_always_left() -> None:
    for seed in SEEDS:
        faults = draw(seed, SCENE)
        assert 1 <= len(faults) <= MOST
        assert len(set(range(len(NODES))) - set(lost(faults))) >= 3
        by_rank = [one.rank for one in faults if one.rank is not None]
        assert len(by_rank) == len(set(by_rank))


def test_all_of_the_language_occurs() -> None:
    every = [one for seed in SEEDS for one in draw(seed, SCENE)]
    assert {one.kind for one in every} == set(SCENE.kinds)
    assert {one.phase for one in every} == set(Phase) - {Phase.PROBE}
    assert {one.rank for one in every} >= set(range(len(NODES)))
    assert {one.at_step for one in every} == set(range(1, 21))
    assert {one.micro_batch for one in every} == {None, *range(8)}
    assert {one.delay_s > 0 for one in every} == {True, False}
    assert {len(draw(seed, SCENE)) for seed in SEEDS} == set(range(1, MOST + 1))


def test_what_is_drawn_can_be_written_down() -> None:
    for seed in range(100):
        faults = draw(seed, SCENE)
        assert faults_from_yaml(faults_to_yaml(faults), "f.yaml") == faults


def test_a_recovery_has_a_cause_in_its_step() -> None:
    seen = 0
    for seed in SEEDS:
        faults = draw(seed, SCENE)
        assert [one.at_step for one in faults] == sorted(one.at_step for one in faults)
        for number, one in enumerate(faults):
            if one.phase is Phase.RECOVERY:
                seen += 1
                causes = [x for x in faults[:number] if x.phase is not Phase.RECOVERY]
                assert one.at_step in [x.at_step for x in causes]
    assert seen > 20


def test_spared_nodes_lose_single_ranks_only() -> None:
    every = [one for seed in SEEDS for one in draw(seed, replace(SCENE, spared=frozenset({"n0"})))]
    assert {one.node for one in every} == {None, "n1", "n2"}
    assert 0 in {one.rank for one in every}


def test_a_clever_rule_is_obeyed() -> None:
    """One rank of every node: more than a number of survivors."""

    def every_node(live: frozenset[int]) -> bool:
        return {NODES[rank] for rank in live} == set(NODES)

    scene = replace(SCENE, feasible=every_node)
    for seed in SEEDS:
        assert every_node(frozenset(range(8)) - set(lost(draw(seed, scene))))


def test_nothing_to_spare_is_refused() -> None:
    with pytest.raises(UserError, match="8 ranks: no fault leaves enough"):
        draw(1, replace(SCENE, feasible=lambda live: len(live) == 8))
    with pytest.raises(UserError, match="strike once"):
        replace(SCENE, kinds=(Kind.SLOW,))
    with pytest.raises(UserError, match="another phase than recovery"):
        replace(SCENE, phases=(Phase.RECOVERY,))
