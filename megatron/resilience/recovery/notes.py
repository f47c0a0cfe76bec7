"""What the coordinator wants in the job's events; all else that it says goes on to the member."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from resihp_ext.control.messages import Message, Weighed
from resihp_ext.events import Event, EventLog


class Notes:
    """Called with every message, in the link's thread."""

    def __init__(self, events: EventLog | None, others: Callable[[Message], None]) -> None:
        self._events, self._others = events, others

    def __call__(self, message: Message) -> None:
        """Writes a note, or passes a message on."""
        if not isinstance(message, Weighed):
            self._others(message)
        elif self._events is not None:
            with contextlib.suppress(ValueError):  # closed: the job has just ended
                self._events.write(
                    Event.WEIGHED,
                    step=message.step,
                    verdict=message.verdict,
                    why=message.why,
                    gain=message.gain,
                    lost_s=message.lost_s,
                    cost_s=message.cost_s,
                )
