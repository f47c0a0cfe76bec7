"""Stretches of work that all ranks do together, each ended by an exchange of a few figures.

A rank that has finished a stretch proves that all others have begun it. So after a failure the
ranks differ by one stretch at most: those ahead hand the figures to those behind, and nothing is
done twice on one rank and once on another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from resihp_ext.errors import CheckpointError

Figures = tuple[float, ...]


class SpoiledError(CheckpointError):
    """This rank cannot finish a stretch of work that others wait for it in: all break off."""


class Guard(Protocol):
    """Runs stretches of work, whatever happens to other ranks meanwhile."""

    def run(
        self,
        phase: str,
        attempt: Callable[[], Figures],
        *,
        ends: bool = True,
        late: Callable[[Figures], None] | None = None,
        redo: bool = True,
    ) -> Figures:
        """Attempts it until it is done, in whatever layout there is then.

        Args:
            phase: For reports.
            attempt: Does the work of this rank; collective.
            ends: Whether a stretch ends here; otherwise the next attempt belongs to the same one.
            late: Called when all others have finished the stretch, with their figures, before the
                layout changes.
            redo: Whether the work must be done again after a change of layout.

        Returns:
            The figures of the stretch.
        """
        ...

    def look(self, phase: str, micro_batch: int = 0, *, waiting: bool = False) -> None:
        """Says what comes next; inside an attempt, raises if it must not begin."""
        ...


class NoGuard:
    """For jobs that end with the first rank that dies."""

    def run(
        self,
        phase: str,
        attempt: Callable[[], Figures],
        *,
        ends: bool = True,
        late: Callable[[Figures], None] | None = None,
        redo: bool = True,
    ) -> Figures:
        """Does the work."""
        return attempt()

    def look(self, phase: str, micro_batch: int = 0, *, waiting: bool = False) -> None:
        """Nothing to say."""
