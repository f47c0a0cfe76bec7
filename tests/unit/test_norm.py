"""Norms under sequence parallelism against torch's functions."""

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import layer_norm, rms_norm

from megatron.resilience.model.norm import SequenceParallelNorm
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit

HIDDEN = 24


def config(normalization: str, **extra: object) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        normalization=normalization,
        **extra,
    )


@pytest.mark.parametrize("eps", [1e-5, 0.3])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_values_and_gradients(kind, eps):
    norm = SequenceParallelNorm(config(kind), HIDDEN, eps=eps)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(HIDDEN, generator=random))
    x_sbh = torch.randn(5, 2, HIDDEN, generator=random, requires_grad=True)
    if kind == "LayerNorm":
        expected = layer_norm(x_sbh, (HIDDEN,), norm.weight, norm.bias, eps)
    else:
        expected = rms_norm(x_sbh, (HIDDEN,), norm.weight, eps)
    weights = torch.randn(x_sbh.shape, generator=random)
    inputs = [x_sbh, *norm.parameters()]
    output = norm(x_sbh)
    assert torch.equal(output, expected)
    ours = torch.autograd.grad((output * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("kind", "names"), [("LayerNorm", 2), ("RMSNorm", 1)])
@pytest.mark.parametrize("parallel", [True, False])
def test_parameters_say_whether_their_gradients_are_partial_sums(kind, names, parallel):
    extra = {"sequence_parallel": True, "tensor_model_parallel_size": 2} if parallel else {}
    norm = SequenceParallelNorm(config(kind, **extra), HIDDEN)
    marks = [parameter.sequence_parallel for parameter in norm.parameters()]
    assert marks == [parallel] * names


def test_a_fresh_norm_starts_at_one_and_zero():
    norm = SequenceParallelNorm(config("LayerNorm"), HIDDEN)
    assert (norm.weight == 1).all()
    assert (norm.bias == 0).all()


def test_norms_that_torch_lacks_are_refused_by_their_flag():
    with pytest.raises(UserError, match="--normalization LayerNorm --apply-layernorm-1p: only"):
        SequenceParallelNorm(config("LayerNorm", layernorm_zero_centered_gamma=True), HIDDEN)
    unknown = config("LayerNorm")
    unknown.normalization = "BatchNorm"
    with pytest.raises(UserError, match="--normalization BatchNorm: only RMSNorm and LayerNorm"):
        SequenceParallelNorm(unknown, HIDDEN)
