"""Reads which devices are dead or slow: ``3,9-11`` and ``7:0.5``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from resihp_ext.whatif.settings import Settings, as_number

_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)


def damage(settings: Settings, devices: int) -> dict[int, float]:
    """Throughput of every device that is not healthy; 0.0 is dead.

    Raises:
        UserError: a rank that is not there, a speed that is none, or two for one device.
    """
    found: dict[int, float] = {}
    for text in settings.texts("dead"):
        for part in text.split(","):
            found.update(dict.fromkeys(_ranks(settings, "dead", part, devices), 0.0))
    for text in settings.texts("slow"):
        for part, p in _slow_parts(settings, text):
            for rank in _ranks(settings, "slow", part, devices):
                if found.setdefault(rank, p) != p:
                    other = f"at {found[rank]:g}" if found[rank] else "dead"
                    raise settings.error(
                        "slow", f"rank {rank} is at {p:g} here and {other} elsewhere; keep one"
                    )
    return {rank: p for rank, p in sorted(found.items()) if p < 1}


def _slow_parts(settings: Settings, text: str) -> Iterator[tuple[str, float]]:
    """``3,9-11:0.5,7:0.8``: a speed belongs to the ranks before it, up to the speed before."""
    waiting: list[str] = []
    for part in text.split(","):
        ranks, colon, speed = part.partition(":")
        waiting.append(ranks)
        if colon:
            p = as_number(speed)
            if p is None or not 0 < p <= 1:
                raise settings.error(
                    "slow",
                    f"{part.strip()!r}: a speed is above 0 and up to 1 (0.5: twice as slow); "
                    "a device that does nothing is dead",
                )
            yield from ((one, p) for one in waiting)
            waiting = []
    if waiting:
        raise settings.error("slow", f"{text!r}: expected ranks and a speed, such as 7:0.5")


def _ranks(settings: Settings, name: str, part: str, devices: int) -> range:
    match = _RANGE.fullmatch(part.strip())
    if match is None:
        raise settings.error(name, f"{part.strip()!r}: expected ranks such as 3 or 9-11")
    low, high = int(match[1]), int(match[2] or match[1])
    if high < low:
        raise settings.error(name, f"{part.strip()!r}: the range is empty")
    if high >= devices:
        raise settings.error(
            name, f"rank {high} is not there: the {devices} devices are 0 to {devices - 1}"
        )
    return range(low, high + 1)
