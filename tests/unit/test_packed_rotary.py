"""Rotary embeddings of packed documents against upstream's own, document by document."""

from collections.abc import Iterator

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from packed_params import packed
from torch import distributed

from megatron.resilience.model.packed_rotary import PackedRotary, install, positions_in_segments
from megatron.resilience.patches.registry import PatchSet

pytestmark = pytest.mark.unit

HEADS, CHANNELS = 3, 8


@pytest.fixture(scope="module")
def group() -> Iterator[distributed.ProcessGroup]:
    # Upstream moves its frequencies to the current CUDA device, whatever it was told.
    patches = PatchSet()
    patches.apply_for("cpu")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()
    patches.undo_all()


def config(*, interleaved: bool = False) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * CHANNELS,
        num_attention_heads=HEADS,
        rotary_interleaved=interleaved,
        apply_rope_fusion=False,
    )


def rotary(group: distributed.ProcessGroup, percent: float = 1.0) -> RotaryEmbedding:
    return RotaryEmbedding(CHANNELS, percent, use_cpu_initialization=True, cp_group=group)


def table(module: PackedRotary, lengths: list[int] | None, tokens: int) -> torch.Tensor:
    """The table as the model asks for it: first the length, then the numbers."""
    params = None if lengths is None else packed(lengths)
    x_sbh = torch.zeros(tokens, 1, HEADS * CHANNELS)
    length = module.get_rotary_seq_len(None, None, x_sbh, config(), params)
    return module(length, packed_seq=params is not None)


@pytest.mark.parametrize("percent", [1.0, 0.5])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("lengths", [[12], [1, 1, 1], [5, 1, 9, 2]], ids=str)
def test_each_document_is_rotated_as_if_alone(group, lengths, interleaved, percent):
    settings, inner = config(interleaved=interleaved), rotary(group, percent)
    tokens = sum(lengths)
    random = torch.Generator().manual_seed(0)
    x_thd = torch.randn(tokens, HEADS, CHANNELS, generator=random, requires_grad=True)
    weights = torch.randn(x_thd.shape, generator=random)
    ours = apply_rotary_pos_emb(
        x_thd,
        table(PackedRotary(inner), lengths, tokens),
        settings,
        cu_seqlens=packed(lengths).cu_seqlens_q,
        cp_group=group,
    )
    alone = torch.cat(
        [
            apply_rotary_pos_emb(part[:, None], inner(len(part)), settings, cp_group=group)[:, 0]
            for part in x_thd.split(lengths)
        ]
    )
    assert torch.equal(ours, alone)
    (grad_ours,) = torch.autograd.grad((ours * weights).sum(), x_thd)
    (grad_alone,) = torch.autograd.grad((alone * weights).sum(), x_thd)
    assert torch.equal(grad_ours, grad_alone)


def test_a_plain_batch_after_a_packed_one_gets_upstreams_table(group):
    inner = rotary(group)
    module = PackedRotary(inner)
    assert not torch.equal(table(module, [4, 6], 10), inner(10))
    assert torch.equal(table(module, None, 10), inner(10))


def test_positions_start_again_at_every_document():
    edges = torch.tensor([0, 3, 3, 5, 6], dtype=torch.int32)
    assert positions_in_segments(edges).tolist() == [0, 1, 2, 0, 1, 0]


class Model(torch.nn.Module):
    def __init__(self, kind: str, rotary_pos_emb: torch.nn.Module | None) -> None:
        super().__init__()
        self.position_embedding_type = kind
        self.rotary_pos_emb = rotary_pos_emb


def test_only_rotary_models_are_wrapped(group):
    inner = rotary(group)
    rope, learned = install([Model("rope", inner), Model("learned_absolute", None)])
    assert isinstance(rope.rotary_pos_emb, PackedRotary)
    assert rope.rotary_pos_emb.inv_freq is inner.inv_freq, "other attributes are the inner one's"
    assert learned.rotary_pos_emb is None
