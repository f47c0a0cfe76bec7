"""What devices could do at most: the bound that no policy can pass.

The oracle knows everything at once, moves state in no time, and cuts work into any pieces: it is as
fast as all devices' throughputs together. Links do not bound it, nor does memory.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp_ext.simulator.happenings import Happening


def capacity_ratio(
    happenings: Sequence[Happening], devices: int, *, begin_s: float = 0.0, until_s: float
) -> float:
    """The mean of all devices' throughputs over a run: ``integral of sum(p) / (N * T)``.

    A goodput ratio at most this high is possible where the healthy job keeps every device as busy
    as it can be kept. A job with pipeline bubbles does not, so that a policy can come closer to the
    bound after a loss than its healthy layout was to all of its devices' worth, and even above.

    Args:
        happenings: In the order of time.
        devices: Of the job.
        begin_s: From when on it is asked for.
        until_s: When the run ends.
    """
    p: dict[int, float] = {}
    total, now_s = 0.0, begin_s
    for one in happenings:
        if one.at_s >= until_s:
            break
        if one.at_s > now_s:
            total += (one.at_s - now_s) * _sum(p, devices)
            now_s = one.at_s
        p.update(one.p)
    total += (until_s - now_s) * _sum(p, devices)
    return total / (devices * (until_s - begin_s))


def _sum(p: dict[int, float], devices: int) -> float:
    return devices + sum(value - 1 for value in p.values())
