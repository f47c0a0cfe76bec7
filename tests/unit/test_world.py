"""Worlds that follow each other in one store."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.resilience.executor.world import World

pytestmark = pytest.mark.unit

LIMIT = timedelta(seconds=20)


def test_members_are_numbered_in_order() -> None:
    world = World(members=(1, 3, 6))
    assert world.number(3) == 1
    assert world.numbers((6, 1)) == [2, 0]


def test_the_store_forgets_earlier_worlds_and_nothing_else() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
    others = ["world", "worlds/0/a", "world/a/0", "resihp/said/1"]
    for key in others:
        store.set(key, "kept")
    for epoch in (0, 9, 10):
        world = World(members=(5,), epoch=epoch)
        world.connect(5, backend="gloo", store=store, timeout=LIMIT)
        try:
            dist.new_group([0])
            world.forget_earlier(store)
            keys = set(store.list_keys())
        finally:
            dist.destroy_process_group()
        assert set(others) <= keys
        left = {key for key in keys - set(others) if key.startswith("world/")}
        assert left, "members of this world may still be on their way"
        assert all(key.startswith(f"world/{epoch}/") for key in left)
