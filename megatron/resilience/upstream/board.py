"""TensorBoard's writer on every rank of a job whose ranks come and go: the last member writes.

That is the rank from which Megatron logs as well. All ranks have the same figures, so another one
can take over whenever the writer is lost: at once, and with the step that it may not have written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class Board:
    """Takes what upstream hands to its ``SummaryWriter``.

    Attributes:
        open_writer: Opens the real one; gives None where there is no TensorBoard.
    """

    def __init__(self, rank: int, members: Callable[[], Sequence[int]]) -> None:
        """Prepares a rank.

        Args:
            members: Ranks that train together, ascending; none as long as this one is alone.
        """
        self._rank, self._members = rank, members
        self.open_writer: Callable[[], Any] = lambda: None
        self._real: Any = None
        self._tried = False
        self._wrote = -1
        """The rank whose turn it was last."""
        self._kept: tuple[list[Call], list[Call]] = ([], [])
        """Scalars of the step before, and those since then."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Any method of a writer that gives nothing back."""
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> None:
            real = self._writer()
            if name == "add_scalar":
                self._kept[1].append((name, args, kwargs))
            if real is not None:
                getattr(real, name)(*args, **kwargs)

        return call

    def step_done(self) -> None:
        """What was written reaches the disk: the next step may be this rank's last."""
        self._kept = self._kept[1], []
        if self._real is not None:
            self._real.flush()

    def close(self) -> None:
        """Ends this rank's part."""
        real, self._real = self._real, None
        if real is not None:
            real.close()

    def _writer(self) -> Any:
        """The real writer, if it is this rank's turn."""
        members = self._members()
        turn = members[-1] if members else -1
        before, self._wrote = self._wrote, turn
        if turn != self._rank:
            self.close()
            self._tried = False
        elif not self._tried:
            self._tried, self._real = True, self.open_writer()
            if self._real is not None and before not in (-1, *members):
                for name, args, kwargs in (call for calls in self._kept for call in calls):
                    getattr(self._real, name)(*args, **kwargs)
        return self._real
