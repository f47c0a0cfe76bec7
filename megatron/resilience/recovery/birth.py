"""Makes process groups so that the making can be broken off.

A group is made in a thread of its own. When work is broken off meanwhile, the thread is left
behind: it holds nothing that is used again, and ends when the group's timeout does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from megatron.resilience.recovery.abort import Abort
from resihp_ext.errors import ResiHPError

_POLL_S = 0.02


class AbortedError(ResiHPError):
    """What was being done is not wanted any more."""


def guarded_birth(abort: Abort) -> Callable[[Callable[[], Any]], Any]:
    """A guard for :class:`~megatron.resilience.patches.group_birth.GroupBirth`."""

    def make(create: Callable[[], Any]) -> Any:
        check(abort)
        done = threading.Event()
        found: list[Any] = []
        failed: list[BaseException] = []

        def run() -> None:
            try:
                found.append(create())
            except BaseException as error:  # noqa: BLE001 - raised again by the one who waits
                failed.append(error)
            done.set()

        with abort.watching():
            threading.Thread(target=run, name="resihp-birth", daemon=True).start()
            while not done.wait(_POLL_S):
                check(abort)
        check(abort)
        if failed:
            raise failed[0]
        return found[0]

    return make


def check(abort: Abort) -> None:
    """Raises if work is to stop.

    Raises:
        AbortedError: it is.
    """
    if abort.raised:
        raise AbortedError("broken off: another rank is lost")
