"""What all ranks have measured of a step, as arrays.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from resihp_ext.detector.slots import Array, Sample, Slots
from resihp_ext.detector.timed import PackedStep, RankStep, pack_times

ACTION_BYTES = 24
"""Three doubles."""
BATCH_BYTES = 24
"""Three integers."""
Step = RankStep | PackedStep
Found = bytes | tuple[int, int, int]
"""Micro-batches, packed, or one."""


class Reader:
    """Reads the steps of one plan."""

    def __init__(self, slots: Slots) -> None:
        self._index_of = slots.index_of
        self._micro_batches = slots.plan.micro_batches
        self._keys = [slots.keys[slots.host_of_rank[rank]] for rank in slots.ranks]
        nothing = np.full(3, np.nan, dtype="<f8").tobytes()
        self._blank = [nothing * len(keys) for keys in self._keys]
        self._ranks, self._lengths = slots.ranks, [len(blank) for blank in self._blank]

    def read(self, steps: Mapping[int, Step]) -> Sample:
        """Records of a step; ranks and actions that the plan does not have are left.

        A packed record whose length is not that of the rank's program tells how long the step
        took, and nothing of its actions.
        """
        return self._of_all(steps) or self._of_some(steps)

    def _of_all(self, steps: Mapping[int, Step]) -> Sample | None:
        """The usual case, with as little as can be for each rank: all are there, packed."""
        found = list(map(steps.get, self._ranks))
        if set(map(type, found)) != {PackedStep}:
            return None
        packed = cast(list[PackedStep], found)
        times = [step.times for step in packed]
        if list(map(len, times)) != self._lengths:
            return None
        # Ranks of a stage and its neighbours have the same micro-batches.
        work: dict[Found, None] = dict.fromkeys([step.micro_batches for step in packed])
        total_s, begun_s = [step.total_s for step in packed], [step.begun_s for step in packed]
        return self._sample(times, total_s, begun_s, work)

    def _of_some(self, steps: Mapping[int, Step]) -> Sample:
        times = list(self._blank)
        work: dict[Found, None] = {}
        total_s, begun_s = [np.nan] * len(times), [np.nan] * len(times)
        for rank, step in steps.items():
            if (i := self._index_of.get(rank)) is None:
                continue
            total_s[i], begun_s[i] = step.total_s, step.begun_s
            if isinstance(step, PackedStep):
                if len(step.times) == len(times[i]):
                    times[i] = step.times
                work[step.micro_batches] = None
            else:
                times[i] = pack_times(step.actions, self._keys[i])
                for m in step.micro_batches:
                    work[m.number, m.tokens, m.squared] = None
        return self._sample(times, total_s, begun_s, work)

    def _sample(
        self,
        times: Sequence[bytes],
        total_s: Sequence[float],
        begun_s: Sequence[float],
        work: Mapping[Found, None],
    ) -> Sample:
        read = np.frombuffer(b"".join(times), dtype="<f8").reshape(-1, 3)
        start_s, own_s, wait_s = np.ascontiguousarray(read.T, dtype=np.float64)
        tokens, squared = self._work(work)
        return Sample(
            start_s=start_s,
            own_s=own_s,
            wait_s=wait_s,
            total_s=_array(total_s),
            begun_s=_array(begun_s),
            tokens=tokens,
            squared=squared,
        )

    def _work(self, found: Mapping[Found, None]) -> Array:
        packed = b"".join(f for f in found if isinstance(f, bytes) and not len(f) % BATCH_BYTES)
        rows = np.frombuffer(packed, dtype="<i8").reshape(-1, 3)
        plain = [f for f in found if not isinstance(f, bytes)]
        rows = np.concatenate((rows, np.array(plain, dtype=np.int64).reshape(-1, 3)))
        work = np.full((2, self._micro_batches), np.nan)
        rows = rows[(rows[:, 0] >= 0) & (rows[:, 0] < self._micro_batches)]
        work[:, rows[:, 0]] = rows[:, 1:].T
        return work


def _array(values: Sequence[float]) -> Array:
    """In a third of the time that numpy takes for a list."""
    return np.frombuffer(array("d", values), dtype=np.float64)
