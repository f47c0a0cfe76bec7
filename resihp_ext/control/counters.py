"""Counts what is wrong with the traffic of a job, and says it without flooding the log.

Whoever can reach a port can send garbage as fast as the network carries it: every piece is counted,
and one line per kind and period is logged.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

DETAIL_CHARACTERS = 200


class Counters:
    """How often each kind of trouble occurred; belongs to one thread, others may read."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        every_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._said_s: dict[str, float] = {}

    def count(self, kind: str, detail: object) -> None:
        """Counts one event; ``detail`` may come from a stranger and is quoted."""
        self._counts[kind] += 1
        now_s = self._clock()
        if now_s - self._said_s.get(kind, -self._every_s) < self._every_s:
            return
        self._said_s[kind] = now_s
        # A stranger's text must not be able to forge lines of the log.
        quoted = ascii(str(detail)[:DETAIL_CHARACTERS])
        self._logger.warning("dropped: %s: %s (%d so far)", kind, quoted, self._counts[kind])

    def as_dict(self) -> dict[str, int]:
        """Events of each kind so far."""
        return dict(self._counts)
