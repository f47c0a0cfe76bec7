"""Attention over packed documents against a dense block-diagonal mask, and its cost."""

import logging
import math
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from packed_params import packed
from torch import distributed

from megatron.resilience.model.segment_attention import SegmentAttention

pytestmark = pytest.mark.unit

CHANNELS = 16


@pytest.fixture(scope="module")
def groups() -> Iterator[ProcessGroupCollection]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield ProcessGroupCollection(tp=distributed.group.WORLD)
    distributed.destroy_process_group()


def attention(groups: ProcessGroupCollection, heads: int, kv: int, **extra: object):
    layer_number = int(extra.pop("layer_number", 1))
    config = TransformerConfig(
        num_layers=4,
        hidden_size=heads * CHANNELS,
        num_attention_heads=heads,
        num_query_groups=kv,
        attention_dropout=0.0,
        **extra,
    )
    return SegmentAttention(config, layer_number, AttnMaskType.causal, "self", pg_collection=groups)


def tensors(tokens: int, heads: int, kv: int, seed: int = 0) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [
        torch.randn(tokens, n, CHANNELS, generator=random, requires_grad=True)
        for n in (heads, kv, kv)
    ]


def dense(qkv: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """Softmax over all tokens under a mask, in float64: the definition, at full cost."""
    query, key, value = (tensor.double().transpose(0, 1) for tensor in qkv)
    key, value = (t.repeat_interleave(len(query) // len(t), 0) for t in (key, value))
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = (document[:, None] == document[None, :]).tril()
    scores = query @ key.transpose(1, 2) / math.sqrt(CHANNELS)
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return (weights @ value).transpose(0, 1).reshape(sum(lengths), -1)


@pytest.mark.parametrize("heads_and_groups", [(4, 4), (4, 2), (6, 1)], ids=str)
@pytest.mark.parametrize(
    "lengths", [[48], [1], [1] * 9, [7, 1, 20, 1, 3], [1, 30], [30, 1], [16, 16]], ids=str
)
def test_values_and_gradients_equal_the_dense_reference(groups, lengths, heads_and_groups):
    heads, kv = heads_and_groups
    qkv = tensors(sum(lengths), heads, kv)
    output = attention(groups, heads, kv)(*qkv, None, packed_seq_params=packed(lengths))
    expected = dense(qkv, lengths)
    assert output.shape == (sum(lengths), heads * CHANNELS)
    torch.testing.assert_close(output.double(), expected, rtol=1e-6, atol=1e-6)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    ours = torch.autograd.grad((output * weights).sum(), qkv)
    theirs = torch.autograd.grad((expected * weights).sum(), qkv)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=3e-6)


def test_a_document_is_deaf_to_its_neighbours(groups):
    """Bitwise: another text before and after changes nothing inside."""
    module, lengths = attention(groups, 4, 2), [9, 14, 6]
    one, other = tensors(29, 4, 2), tensors(29, 4, 2, seed=5)
    mixed = [torch.cat([b[:9], a[9:23], b[23:]]) for a, b in zip(one, other, strict=True)]
    first = module(*one, None, packed_seq_params=packed(lengths))
    second = module(*mixed, None, packed_seq_params=packed(lengths))
    assert torch.equal(first[9:23], second[9:23])
    assert not torch.equal(first[:9], second[:9])


def test_query_key_layer_scaling_leaves_the_result_alone(groups):
    """Upstream divides scores by the layer's number and multiplies them again in its softmax."""
    lengths = [11, 5]
    module = attention(groups, 4, 4, layer_number=3, apply_query_key_layer_scaling=True)
    qkv = tensors(16, 4, 4)
    output = module(*qkv, None, packed_seq_params=packed(lengths))
    torch.testing.assert_close(output.double(), dense(qkv, lengths), rtol=1e-6, atol=1e-6)


def least_s(module: torch.nn.Module, cases: list[list[int]]) -> np.ndarray:
    """Processor time of one forward and backward pass; the wall's would count other processes.

    The least of several rounds over all cases: who shares the machine's caches for a while slows
    down a round of each, and not all rounds of one.
    """
    inputs = [(tensors(sum(lengths), 4, 4), packed(lengths)) for lengths in cases]
    times = np.empty((5, len(cases)))
    for round_s in times:
        for at, (qkv, params) in enumerate(inputs):
            started = time.thread_time()
            output = module(*qkv, None, packed_seq_params=params)
            torch.autograd.grad(output.sum(), qkv)
            round_s[at] = time.thread_time() - started
    return times.min(axis=0)


def test_cost_is_linear_in_tokens_and_quadratic_in_documents_only(groups):
    """Fits ``alpha * N + beta * sum(l ** 2)``; with a mask, only N ** 2 would count."""
    module = attention(groups, 4, 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cases = [[size] * (tokens // size) for tokens in (2048, 4096) for size in (32, 512, 1024, 2048)]
    cases += [[2048, *[32] * 64], [1024, 1024, *[64] * 32]]
    try:
        measured_s = least_s(module, cases)
    finally:
        torch.set_num_threads(threads)
    terms = np.array([[sum(lengths), sum(n * n for n in lengths)] for lengths in cases], float)
    fit, *_ = np.linalg.lstsq(terms, measured_s, rcond=None)
    left = measured_s - terms @ fit
    explained = 1 - left.var() / measured_s.var()
    told = f"alpha {fit[0]:.3g} s/token, beta {fit[1]:.3g} s/token**2, R**2 {explained:.4f}"
    logging.getLogger(__name__).info(told)
    assert explained > 0.9, told
    assert (fit > 0).all(), told
