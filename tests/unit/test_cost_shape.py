"""Sizes of models, and links: what seconds and bytes are computed from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resihp_ext.cost.cluster import uniform_cluster, usable_memory_bytes
from resihp_ext.cost.link import Link
from resihp_ext.cost.model_shape import MODELS, padded_vocabulary

pytestmark = pytest.mark.unit

SHAPE = replace(MODELS["llama2-7b"], num_layers=8, seq_length=4096)


def test_tp_degrees_that_divide() -> None:
    assert MODELS["llama2-13b"].valid_tps(8) == (1, 2, 4, 8)
    assert MODELS["tiny"].valid_tps(8) == (1, 2, 4)
    assert MODELS["qwen2.5-7b"].valid_tps(8) == (1, 2, 4)
    three = replace(SHAPE, attention_heads=6, query_groups=6, hidden_size=384, ffn_hidden_size=768)
    assert three.valid_tps(8) == (1, 2, 3, 6)


@pytest.mark.parametrize(
    ("changes", "tp", "words"),
    [
        ({}, 3, "32 attention heads do not divide by 3"),
        ({"query_groups": 8}, 16, "8 query groups do not divide by 16"),
        ({"ffn_hidden_size": 11009}, 2, "11009 FFN channels do not divide by 2"),
        ({"vocab_size": 32001}, 2, "32001 words of the vocabulary do not divide by 2"),
        ({}, 0, "TP degree 0 is not positive"),
    ],
)
def test_problem_with_tp_names_the_size(changes: dict[str, int], tp: int, words: str) -> None:
    assert replace(SHAPE, **changes).problem_with_tp(tp) == words


def test_sequence_parallelism_divides_the_sequence_too() -> None:
    odd = replace(SHAPE, seq_length=4098)
    assert odd.problem_with_tp(4) is None
    assert odd.problem_with_tp(4, sequence_parallel=True) == (
        "4098 tokens of a sequence do not divide by 4"
    )
    assert odd.valid_tps(4, sequence_parallel=True) == (1, 2)


@pytest.mark.parametrize(
    "changes", [{"num_layers": 0}, {"attention_heads": 31}, {"query_groups": 5}]
)
def test_impossible_shapes_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="llama2-7b"):
        replace(SHAPE, **changes)


def test_ranks_of_a_stage_hold_the_model_between_them() -> None:
    """Norms are whole on every rank; all else is divided."""
    norms = SHAPE.num_layers * 2 * SHAPE.hidden_size + SHAPE.hidden_size
    held = 4 * SHAPE.rank_parameters(depth=8, tp=4, first=True, last=True)
    assert held == SHAPE.parameters + 3 * norms


def test_tied_embeddings_count_once_in_one_stage_and_in_both_of_two() -> None:
    tied = replace(SHAPE, tied=True)
    matrix = SHAPE.embedding_parameters
    both = {"depth": 8, "tp": 1, "first": True, "last": True}
    assert SHAPE.rank_parameters(**both) - tied.rank_parameters(**both) == matrix
    ends = {"depth": 4, "tp": 1, "first": False, "last": True}
    assert tied.rank_parameters(**ends) == SHAPE.rank_parameters(**ends)


def test_padded_vocabulary() -> None:
    assert [padded_vocabulary(words) for words in (1, 384, 385, 152_064)] == [
        *(384, 384, 768, 152_064)
    ]


def test_collectives_are_rings() -> None:
    link = Link(latency_s=1.0, bytes_per_s=10.0)
    assert link.message_s(20) == 3.0
    assert link.message_s(0) == 0.0
    assert link.all_gather_s(40, 4) == 3 * (1.0 + 1.0)
    assert link.all_reduce_s(40, 4) == 2 * link.all_gather_s(40, 4)
    assert link.all_reduce_s(40, 1) == 0.0


@pytest.mark.parametrize(("latency_s", "bytes_per_s"), [(-1.0, 1.0), (0.0, 0.0), (0.0, -1.0)])
def test_impossible_links_are_refused(latency_s: float, bytes_per_s: float) -> None:
    with pytest.raises(ValueError, match="link"):
        Link(latency_s=latency_s, bytes_per_s=bytes_per_s)


def test_clusters() -> None:
    cluster = uniform_cluster(nodes=2, devices_per_node=4, memory_bytes=10)
    assert cluster.node_of[5] == 1
    devices = (*cluster.devices[:-1], replace(cluster.devices[-1], p=0.0))
    assert len(replace(cluster, devices=devices).alive) == 7


def test_a_tenth_of_a_device_is_left_free() -> None:
    assert usable_memory_bytes("a100") == 72 * 2**30
    assert usable_memory_bytes("h200") > usable_memory_bytes("h100")
