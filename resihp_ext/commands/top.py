"""``resihp top``: a running job in the terminal, anew every second.

The coordinator is asked in a thread, so that a key is obeyed also while nobody answers. What ends
the view (no job, no answer) is raised once the terminal is as it was.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue

from rich.console import Console, Group
from rich.live import Live

from resihp_ext.commands.frame import frame
from resihp_ext.commands.job import EXIT_OVER, OVER, JobOverError, RunningJob
from resihp_ext.commands.look import Look, Watcher
from resihp_ext.errors import EXIT_OK, ResiHPError, UserError
from resihp_ext.whatif.report import console

EVERY_S = 1.0
KEY_S = 0.1
"""Between two looks at the keyboard."""
LEAVE = ("q", "Q", "\x03")

Found = Look | Exception
Looker = Callable[[], Look]


def once(directory: Path) -> int:
    """Prints one frame; returns the exit code.

    Raises:
        UserError: it is no job's directory.
        JobOverError, UnreachableError: there is no coordinator to ask.
    """
    look = Watcher(RunningJob.find(directory)).look()
    out = console()
    for line in frame(look, width=out.width):
        out.print(line)
    return EXIT_OVER if look.status["phase"] in OVER else EXIT_OK


def top(directory: Path) -> int:
    """Draws until a key ends it; returns the exit code.

    Raises:
        UserError: it is no job's directory, or there is no terminal.
        JobOverError, UnreachableError: there is no coordinator to ask, or not any more.
    """
    job = RunningJob.find(directory)
    out = Console(highlight=False, emoji=False, markup=False)
    if not out.is_terminal:
        raise UserError("resihp top draws in a terminal; --once prints one frame anywhere")
    with contextlib.suppress(KeyboardInterrupt):
        poller = Poller(Watcher(job).look)
        first = poller.first()  # what is wrong from the start leaves the screen alone
        with keys() as pressed:
            view(first, poller, out, pressed)
    return EXIT_OK


def view(first: Look, poller: Poller, out: Console, pressed: Callable[[float], str]) -> None:
    """Draws what is found until a key says to leave.

    Args:
        first: To be drawn at once.
        poller: Of the rest.
        out: The terminal.
        pressed: Waits for a key for so many seconds; nothing if there was none.

    Raises:
        JobOverError, UnreachableError: there is no coordinator any more.
    """
    look, size = first, out.size
    with Live(_drawn(look, out), console=out, screen=True, auto_refresh=False) as live:
        live.refresh()
        while pressed(KEY_S) not in LEAVE:
            found = poller.next()
            if isinstance(found, Exception):
                raise ended(found, look)
            if found is not None or out.size != size:
                look, size = found or look, out.size
                live.update(_drawn(look, out), refresh=True)


def _drawn(look: Look, out: Console) -> Group:
    width, height = out.size
    return Group(*frame(look, width=width, height=height))


def ended(error: Exception, last: Look) -> Exception:
    """A coordinator that has said that its job ends, and is gone, is not missed."""
    if not isinstance(error, ResiHPError) or last.status["phase"] not in OVER:
        return error
    cause = last.status["cause"]
    return JobOverError(f"the job is over{f': {cause}' if cause else ''}")


class Poller:
    """A thread that looks every second, until a look fails."""

    def __init__(self, look: Looker, every_s: float = EVERY_S) -> None:
        self._look, self._every_s = look, every_s
        self._found: SimpleQueue[Found] = SimpleQueue()
        # Of a look that nobody waits for any more nothing is left to be done.
        threading.Thread(target=self._run, name="resihp top", daemon=True).start()

    def first(self) -> Look:
        """Waits for the first look.

        Raises:
            Exception: it has failed.
        """
        found = self._found.get()
        if isinstance(found, Exception):
            raise found
        return found

    def next(self) -> Found | None:
        """The latest that nobody has taken yet, or what has ended it."""
        found: Found | None = None
        with contextlib.suppress(Empty):
            while True:
                found = self._found.get_nowait()
        return found

    def _run(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                self._found.put(self._look())
            except Exception as error:  # noqa: BLE001 - the boundary of the thread: it is raised
                self._found.put(error)
                return
            time.sleep(max(0.0, began_s + self._every_s - time.monotonic()))


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Single keys of the terminal; afterwards it is as it was.

    Where standard input is no terminal there are none, and waiting is all that is done.
    """
    try:
        descriptor = sys.stdin.fileno()
        before = termios.tcgetattr(descriptor)
    except (OSError, ValueError, termios.error):
        yield _no_key
        return
    tty.setcbreak(descriptor)
    try:
        yield lambda wait_s: _key(descriptor, wait_s)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _no_key(wait_s: float) -> str:
    time.sleep(wait_s)
    return ""


def _key(descriptor: int, wait_s: float) -> str:
    ready, _, _ = select.select([descriptor], [], [], wait_s)
    if not ready:
        return ""
    pressed = os.read(descriptor, 64)
    if not pressed:  # the terminal is gone: nobody looks any more
        return LEAVE[0]
    return pressed[:1].decode(errors="replace")
