"""Messages of a move: in one piece and packed, more than there are buffers for, and damaged."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.resilience.executor import move
from megatron.resilience.executor.checksum import checksum
from megatron.resilience.executor.store import Store
from megatron.resilience.executor.world import World
from megatron.resilience.testing.trial import PRELOAD
from resihp_ext.state.slab import Slab
from resihp_ext.state.transfer import Transfer
from resihp_ext.testing.ranks import preload, run_ranks

pytestmark = pytest.mark.dist

RANKS, TENSORS, ROWS, COLUMNS = 3, 12, 96, 128
WORLD = World(members=tuple(range(RANKS)))
KINDS = {"master": torch.float32, "half": torch.bfloat16}


def transfers() -> list[Transfer]:
    """Everybody gets halves of the tensors of the others: rows lie in one piece, columns do not;
    the last columns are small enough to be packed together."""
    found = []
    for source in range(RANKS):
        for destination in range(RANKS):
            if source == destination:
                continue
            for number in range(TENSORS):
                whole = Slab.whole(f"t{source}.{number}", (ROWS, COLUMNS))
                axis, high = ((0, ROWS // 2), (1, COLUMNS // 2), (1, 3))[number % 3]
                slab = whole.cut(axis, 0, high)
                found.append(Transfer(source=source, destination=destination, slab=slab))
    return found


def values_of(source: int, number: int) -> torch.Tensor:
    """What a tensor is made of."""
    random = np.random.default_rng([source, number])
    return torch.from_numpy(random.standard_normal((ROWS, COLUMNS)).astype(np.float32))


def in_rank(damage: bool) -> list[str]:
    """Moves everything, compares it, and returns what the move has to say."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    move._ALONE_BYTES, move._BUFFER_BYTES = 1 << 12, 1 << 16
    whole = {(s, n): values_of(s, n) for s in range(RANKS) for n in range(TENSORS)}
    slabs = {key: Slab.whole(f"t{key[0]}.{key[1]}", (ROWS, COLUMNS)) for key in whole}
    here = {key: torch.zeros(ROWS, COLUMNS) for key in whole if key[0] != rank}
    sources = {
        kind: Store([(slabs[k], v.to(t)) for k, v in whole.items() if k[0] == rank], t)
        for kind, t in KINDS.items()
    }
    places = {kind: {k: v.to(t) for k, v in here.items()} for kind, t in KINDS.items()}
    targets = {
        kind: Store([(slabs[k], v) for k, v in places[kind].items()], t)
        for kind, t in KINDS.items()
    }
    todo = move.messages({kind: transfers() for kind in KINDS}, KINDS)
    moving = move.Move(
        todo, rank=rank, sources=sources, targets=targets, device=torch.device("cpu"), world=WORLD
    )
    moving.run()
    for transfer in transfers():
        if transfer.destination != rank:
            continue
        source, number = map(int, transfer.slab.tensor[1:].split("."))
        place = transfer.slab.inside(slabs[source, number])
        for kind, dtype in KINDS.items():
            sent = whole[source, number].to(dtype)[place]
            assert torch.equal(places[kind][source, number][place], sent), transfer
            places[kind][source, number][place] = 0
            assert not places[kind][source, number].any(), "nothing else has changed"
            places[kind][source, number][place] = sent
    if damage and rank == 1:
        # One bit of what came from rank 2, where it lies.
        places["master"][2, 0].view(torch.int32)[0, 0] ^= 1
    found = moving.damaged()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("damage", [False, True])
def test_everything_arrives_once_and_a_wrong_bit_is_named(damage: bool) -> None:
    preload(PRELOAD)
    told = run_ranks(RANKS, in_rank, damage, timeout_s=60)
    assert told[0] == told[2] == []
    assert len(told[1]) == damage
    if damage:
        assert "master of t2.0[0:48, 0:128] from rank 2 to rank 1" in told[1][0]


def odd_in_rank() -> bool:
    """Rank 0 sends columns of odd sizes in halves, then fp32 that must use a buffer of theirs."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    move._ALONE_BYTES, move._BUFFER_BYTES = 1 << 12, 2 * 95 * 65 * 2
    whole = Slab.whole("t", (95, 129))
    kept = {kind: torch.arange(95 * 129).view(95, 129).to(t) for kind, t in KINDS.items()}
    got = {kind: torch.zeros_like(values) for kind, values in kept.items()}
    cut = {
        "half": [whole.cut(1, 0, 65), whole.cut(1, 64, 129)],
        "master": [whole.cut(1, 0, 3)],
    }
    moving = move.Move(
        move.messages(
            {k: [Transfer(source=0, destination=1, slab=one) for one in v] for k, v in cut.items()},
            KINDS,
        ),
        rank=rank,
        sources={kind: Store([(whole, kept[kind])], t) for kind, t in KINDS.items()},
        targets={kind: Store([(whole, got[kind])], t) for kind, t in KINDS.items()},
        device=torch.device("cpu"),
        world=World(members=(0, 1)),
    )
    moving.run()
    assert moving.damaged() == []
    high = {"half": 129, "master": 3}
    expected = [kept[kind][:, :end] for kind, end in high.items()]
    found = [got[kind][:, :end] for kind, end in high.items()]
    dist.destroy_process_group()
    return rank == 0 or all(map(torch.equal, found, expected))


def test_buffers_of_odd_sizes_take_wide_elements() -> None:
    preload(PRELOAD)
    assert run_ranks(2, odd_in_rank, timeout_s=60) == [True, True]


def test_a_checksum_sees_any_bit_and_exchanged_blocks() -> None:
    for dtype, size in ((torch.float32, 5000), (torch.bfloat16, 4099), (torch.bfloat16, 1)):
        values = torch.from_numpy(np.random.default_rng(1).standard_normal(size)).to(dtype)
        before = checksum(values)
        assert checksum(values.clone()) == before
        for place in {0, size // 2, size - 1}:
            changed = values.clone()
            changed.view(torch.uint8)[place * changed.element_size()] ^= 1
            assert checksum(changed) != before
    values = torch.arange(4096, dtype=torch.float32)
    assert checksum(torch.cat([values[2048:], values[:2048]])) != checksum(values)
    assert checksum(values[1:]) == checksum(values[1:].clone()), "alignment does not count"
