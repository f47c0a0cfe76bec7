"""Makes every action of this rank take as long as on the device that is emulated.

The work is really done, and what is left of the time is slept. A message says when it was sent: who
receives it waits until it would have arrived. So all ranks must be on one machine, whose clock they
share.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.resilience.timing.clock import OFF, StepClock
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.plan_cost import Workload
from resihp_ext.emulation.prices import Prices, Speed
from resihp_ext.emulation.scene import Scene
from resihp_ext.faults.fault import Fault
from resihp_ext.faults.lasting import device_left, link_left
from resihp_ext.packing import squared_lengths
from resihp_ext.plan.action import SENDS, Action, Kind
from resihp_ext.plan.plan import Instance, Plan

_STAMP = 1 << 28
"""Added to the tag of a message, for that of the time at which it was sent."""
NAME_BYTES = 64
"""Of a node's name in a message."""
_OVERRUNS = 0.01
"""Part of the actions that may take longer: a step as a whole is then hardly changed."""


@dataclass
class Account:
    """What was emulated."""

    actions: int = 0
    overruns: int = 0
    """Actions whose real work took longer than it should: they are not emulated."""
    late_s: float = 0.0
    needed: float = 0.0
    """The largest real over emulated time: by so much ``time_scale`` would have to grow."""

    def note(self, real_s: float, lasts_s: float) -> None:
        """An action was really done in ``real_s``, and is to last for ``lasts_s``."""
        self.actions += 1
        self.needed = max(self.needed, real_s / lasts_s if lasts_s else 0.0)
        if real_s > lasts_s:
            self.overruns += 1
            self.late_s += real_s - lasts_s

    def complaint(self) -> str | None:
        """What is to be said of it, if it was not as it should be."""
        if self.overruns <= _OVERRUNS * self.actions:
            return None
        return (
            f"emulation: {self.overruns} of {self.actions} actions took longer than they should, "
            f"by {self.late_s:.2f} s in all; the worst needs a time_scale {self.needed:.1f} times "
            "as large"
        )


class Pacer:
    """The clock of one emulated device."""

    def __init__(
        self,
        scene: Scene,
        *,
        rank: int,
        node: str,
        seq_length: int,
        faults: Sequence[Fault] = (),
        policy: MemoryPolicy,
        step: Callable[[], int],
    ) -> None:
        """Prepares it.

        Args:
            faults: Slow ones act on the emulated device; more may come, all others are somebody
                else's.
            policy: What the job does that costs time: recomputation, sequence parallelism.
            step: The number of the step that runs, from 1.
        """
        self.scene, self.node, self._rank = scene, node, rank
        self._seq_length, self._faults = seq_length, faults
        self._policy = policy
        self._step, self._speed = step, Speed(scene, rank)
        self._prices: tuple[Plan, Prices] | None = None
        self.account = Account()

    @contextmanager
    def pace(
        self,
        plan: Plan,
        mine: Instance,
        action: Action,
        workload: Callable[[], Workload] | None = None,
        clock: StepClock = OFF,
    ) -> Iterator[None]:
        """What is inside takes as long as on the emulated device.

        A tensor-parallel group begins together: who comes first waits for the others, as it would
        there. Later waits are for collectives of processes that share cores, and are slept over.

        Args:
            clock: That times the action.
            workload: Gives that of the micro-batch, once it is computed, where time depends on it.
        """
        begun_s = time.perf_counter()
        yield
        step = self._step()
        work = None if workload is None else workload()
        left = device_left(self._faults, self._rank, self.node, step)
        healthy_s = self._of(plan).seconds(mine, action, work)
        lasts_s = self._speed.seconds(healthy_s, step, action, left)
        # A reduction begins when the last one comes: who came before has waited, and is not late.
        self._sleep(begun_s + clock.meet(), lasts_s, counts=action.kind is not Kind.SYNC)

    def sent(self, peer: int, tag: int) -> tuple[Any, torch.Tensor]:
        """A message leaves; the time and from where go with it. Keep what is returned until it is
        complete."""
        name = self.node.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        raw = bytearray(struct.pack("<d", time.monotonic()) + name)
        stamp = torch.frombuffer(raw, dtype=torch.uint8)
        return dist.isend(stamp, peer, tag=tag + _STAMP), stamp

    def arrived(self, plan: Plan, mine: Instance, action: Action, peer: int, tag: int) -> None:
        """A message is here: waits until it would be.

        Args:
            action: The receive.
        """
        stamp = torch.zeros(8 + NAME_BYTES, dtype=torch.uint8)
        dist.recv(stamp, peer, tag=tag + _STAMP)
        raw = bytes(stamp.tolist())
        (sent_s,), there = struct.unpack("<d", raw[:8]), raw[8:].rstrip(b"\0").decode()
        assert action.peer is not None
        send = Action(kind=_SEND_OF[action.kind], micro_batch=action.micro_batch, peer=mine)
        wire_s = self._of(plan).seconds(action.peer, send)
        step = self._step()
        left = link_left(self._faults, self.node, there, step)
        until_s = sent_s + wire_s / left * self._speed.noise(step, action)
        if (rest_s := until_s - time.monotonic()) > 0:
            time.sleep(rest_s)

    def device_s(self, healthy_s: float, what: str) -> float:
        """How long this device now takes for what takes a healthy one ``healthy_s``.

        Args:
            what: Names the work, for its noise.
        """
        step = self._step()
        left = device_left(self._faults, self._rank, self.node, step)
        own = self.scene.speed.get(self._rank, 1.0) * left
        return healthy_s / own * self._speed.noise(step, what)

    def wire_s(self, healthy_s: float, there: str, what: str) -> float:
        """The same for a message from the node ``there``."""
        step = self._step()
        left = link_left(self._faults, self.node, there, step)
        return healthy_s / left * self._speed.noise(step, what)

    def _sleep(self, begun_s: float, lasts_s: float, *, counts: bool) -> None:
        real_s = time.perf_counter() - begun_s
        if counts:
            self.account.note(real_s, lasts_s)
        if real_s < lasts_s:
            time.sleep(lasts_s - real_s)

    def _of(self, plan: Plan) -> Prices:
        if self._prices is None or self._prices[0] is not plan:
            self._prices = plan, Prices(self.scene, plan, self._seq_length, self._policy)
        return self._prices[1]


_SEND_OF = {receive: send for send, receive in SENDS.items()}


def workload_of(batch: dict[str, torch.Tensor]) -> Workload:
    """Of the samples of a micro-batch: packed documents, or whole sequences."""
    rows, length = batch["tokens"].shape
    edges = batch.get("cu_seqlens")
    if edges is None:
        return Workload(tokens=rows * length, squared=rows * length**2)
    return Workload(tokens=rows * length, squared=sum(map(squared_lengths, edges.tolist())))
