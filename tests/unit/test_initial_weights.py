"""Initial weights: the same element for every layout, with upstream's distribution."""

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.resilience.model.initial_weights import (
    fill,
    initialise,
    logical_tensors,
    normals,
    standard_deviation,
    tensor_key,
)
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit


def drawn(
    shape: Sequence[int],
    offset: Sequence[int],
    whole: Sequence[int],
    *,
    name: str = "w",
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The slice of a logical tensor of shape ``whole`` that starts at ``offset``."""
    lead = len(whole) - len(shape)
    tensor = ShardedTensor(
        key=name,
        data=torch.full(tuple(shape), float("nan"), dtype=dtype),
        dtype=dtype,
        local_shape=tuple(shape),
        global_shape=tuple(whole),
        global_offset=tuple(offset),
        axis_fragmentations=None,
        prepend_axis_num=lead,
    )
    fill(tensor, seed=seed, std=0.02)
    return tensor.data


def cuts(size: int, degree: int) -> list[tuple[int, int]]:
    """Start and stop of ``degree`` parts as even as they can be."""
    edges = [size * k // degree for k in range(degree + 1)]
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 7, 12])
def test_a_slice_is_a_slice_of_the_whole(degree, axis):
    """Bitwise, also where the degree does not divide the axis (24 and 26)."""
    whole = drawn((24, 26), (0, 0), (24, 26))
    for start, stop in cuts(whole.shape[axis], degree):
        shape, offset = [24, 26], [0, 0]
        shape[axis], offset[axis] = stop - start, start
        expected = whole.narrow(axis, start, stop - start)
        assert torch.equal(drawn(shape, offset, (24, 26)), expected)


def test_a_layer_is_a_slice_of_all_layers():
    """Layers are stacked in front of the tensor (``prepend_axis_num``); stages hold some."""
    whole = drawn((6, 8, 10), (0, 0, 0), (6, 8, 10))
    for layer in range(6):
        assert torch.equal(drawn((4, 10), (layer, 4, 0), (6, 8, 10)), whole[layer, 4:])
    assert len({whole[layer].numpy().tobytes() for layer in range(6)}) == 6


def test_three_dimensional_weights_of_experts():
    whole = drawn((4, 6, 10), (0, 0, 0), (4, 6, 10))
    assert torch.equal(drawn((2, 3, 10), (2, 3, 0), (4, 6, 10)), whole[2:, 3:])


def test_chunks_do_not_show(monkeypatch):
    whole = drawn((37, 11), (0, 0), (37, 11))
    for chunk in (1, 50, 110):
        monkeypatch.setattr("megatron.resilience.model.initial_weights._CHUNK", chunk)
        assert torch.equal(drawn((37, 11), (0, 0), (37, 11)), whole)


def test_seed_and_name_decide_and_nothing_else():
    first = drawn((8, 8), (0, 0), (8, 8))
    torch.manual_seed(999)
    assert torch.equal(drawn((8, 8), (0, 0), (8, 8)), first)
    assert not torch.equal(drawn((8, 8), (0, 0), (8, 8), name="v"), first)
    assert not torch.equal(drawn((8, 8), (0, 0), (8, 8), seed=2), first)
    keys = {tensor_key(seed, f"{n}") for seed in range(20) for n in range(20)}
    assert len(keys) == 400


def splitmix(key: int, counter: int) -> float:
    """SplitMix64's output for a counter, in exact integers, as a number in [0, 1)."""
    mask = (1 << 64) - 1
    bits = (key + (counter + 1) * 0x9E3779B97F4A7C15) & mask
    bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & mask
    return ((bits ^ bits >> 31) >> 11) / 2**53


def test_the_numbers_are_splitmix_and_box_muller():
    """Frozen: a job that starts elsewhere or later has to start from the same model."""
    assert tensor_key(1234, "decoder.layers.mlp.linear_fc1.weight") == 6377940272812649869
    for key in (6377940272812649869, -3, 0, -(2**63)):
        index = [0, 1, 17, 10**12]
        expected = [
            math.sqrt(-2 * math.log1p(-splitmix(key, 2 * i)))
            * math.cos(2 * math.pi * splitmix(key, 2 * i + 1))
            for i in index
        ]
        numbers = normals(key, torch.tensor(index))
        assert numbers.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_half_precision_is_the_rounded_full_precision():
    exact = drawn((9, 9), (0, 0), (9, 9))
    rounded = drawn((9, 9), (0, 0), (9, 9), dtype=torch.bfloat16)
    torch.testing.assert_close(rounded, exact.bfloat16(), rtol=2**-7, atol=0)


def test_a_view_with_gaps_is_filled_in_place():
    """GLU weights are two views of one parameter."""
    base = torch.zeros(8, 12)
    view = base[2:5, 3:9]
    tensor = ShardedTensor("w", view, view.dtype, (3, 6), (3, 6), (0, 0), None)
    fill(tensor, seed=1, std=0.02)
    assert torch.equal(base[2:5, 3:9], drawn((3, 6), (0, 0), (3, 6)))
    assert base.count_nonzero() == 18


def test_the_numbers_are_standard_normal_and_independent():
    """Every bound is six standard errors of its statistic or more."""
    count = 400_000
    x = normals(tensor_key(3, "w"), torch.arange(count))
    error = count**-0.5
    assert x.isfinite().all()
    assert abs(x.mean()) < 6 * error
    assert abs(x.var() - 1) < 6 * error * 2**0.5
    assert abs((x**3).mean()) < 6 * error * 15**0.5
    assert abs((x**4).mean() - 3) < 6 * error * 96**0.5
    for lag in (1, 2, 64, 1000):
        assert abs((x[lag:] * x[:-lag]).mean()) < 6.1 * error
    other = normals(tensor_key(3, "v"), torch.arange(count))
    assert abs((x * other).mean()) < 6 * error
    cdf = 0.5 * (1 + torch.erf(x.sort().values / 2**0.5))
    distance = (cdf - (torch.arange(count) + 0.5) / count).abs().max()
    assert distance < 2.2 * error, "Kolmogorov-Smirnov"


# Whole models of upstream, one rank at a time: building one needs groups but no message.


def config(tp: int = 1, **extra: object) -> TransformerConfig:
    settings: dict[str, object] = {
        "num_layers": 2,
        "hidden_size": 48,
        "ffn_hidden_size": 96,
        "num_attention_heads": 12,
        "num_query_groups": 6,
        "init_method_std": 0.02,
        "embedding_init_method_std": 0.07,
        "tensor_model_parallel_size": tp,
        "use_cpu_initialization": True,
        "gated_linear_unit": True,
        "add_bias_linear": False,
    }
    return TransformerConfig(**(settings | extra))


@contextmanager
def rank_of(tp: int, rank: int) -> Iterator[None]:
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=tp)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def model(settings: TransformerConfig) -> GPTModel:
    return GPTModel(
        settings,
        get_gpt_layer_local_spec(),
        vocab_size=96,
        max_sequence_length=32,
        share_embeddings_and_output_weights=False,
    )


def weights(tp: int, seed: int) -> dict[str, torch.Tensor]:
    """All logical tensors of a model, put together from its tensor-parallel ranks."""
    whole: dict[str, torch.Tensor] = {}
    for rank in range(tp):
        with rank_of(tp, rank):
            (built,) = initialise([model(config(tp))], seed=seed)
            for part in logical_tensors(built):
                target = whole.setdefault(part.key, torch.full(part.global_shape, float("nan")))
                target[part.global_slice()] = part.data.detach()
    return whole


def test_every_tensor_parallel_degree_starts_from_the_same_model():
    one = weights(1, seed=5)
    assert not any(tensor.isnan().any() for tensor in one.values())
    for tp in (2, 3, 6):
        other = weights(tp, seed=5)
        assert other.keys() == one.keys()
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    changed = {name for name, tensor in weights(1, seed=6).items() if (tensor != one[name]).any()}
    assert changed == {name for name in one if "norm" not in name}


def test_deviations_are_those_of_upstreams_own_initialisation():
    """Measured on a model that upstream drew, compared with ours tensor by tensor."""
    with rank_of(1, 0):
        torch.manual_seed(0)
        built = model(config(num_layers=8))
        upstream = {t.key: t.data.detach().clone() for t in logical_tensors(built)}
        initialise([built], seed=7)
        ours = {t.key: t.data.detach() for t in logical_tensors(built)}
        names = [name for name, tensor in ours.items() if tensor.ndim > 1]
        expected = {name: standard_deviation(name, built.config) for name in names}
    assert sorted(set(expected.values())) == pytest.approx([0.005, 0.02, 0.07])
    for name, std in expected.items():
        count = ours[name].numel()
        for drawn_by in (upstream[name], ours[name]):
            # Six standard errors of a mean and of a standard deviation.
            assert abs(drawn_by.mean()) < 6 * std / count**0.5, name
            assert drawn_by.std() == pytest.approx(std, rel=6 / (2 * count) ** 0.5), name


def test_norms_keep_their_constants():
    with rank_of(1, 0):
        built = model(config())
        initialise([built], seed=7)
        norms = [p for name, p in built.named_parameters() if "norm" in name and "weight" in name]
    assert norms
    assert all((parameter == 1).all() for parameter in norms)


def test_other_distributions_are_refused_by_their_flag():
    settings = config(init_method=torch.nn.init.xavier_uniform_)
    with pytest.raises(UserError, match="--init-method-xavier-uniform"):
        standard_deviation("decoder.layers.mlp.linear_fc1.weight", settings)
