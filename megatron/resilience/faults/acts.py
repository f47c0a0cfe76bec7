"""What a fault does, from inside the process that it strikes."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from megatron.resilience.faults.processes import kill_tree
from resihp_ext.faults.fault import HANG_S, Fault, Kind


def carry_out(fault: Fault, *, agent_pid: int | None, request: Path) -> None:
    """Does it; comes back from what can be survived.

    Args:
        agent_pid: The launcher of this node, for the loss of a node.
        request: Where a cut is asked for.
    """
    if fault.kind is Kind.NODE:
        assert agent_pid is not None, "refused without a launcher"
        kill_tree(agent_pid)
    elif fault.kind is Kind.CUT:
        ask_for_cut(fault, request)
    else:
        _ALONE[fault.kind](fault)


def hold_the_gil(seconds: float) -> None:
    """Keeps every other Python thread of this process, and its signal handlers, from running.

    A loop in Python would hand the lock over every few milliseconds. This one is made of C
    functions that call each other: the interpreter, which hands over, is not entered in between.
    """
    until_s = time.monotonic() + seconds
    all(map(until_s.__gt__, iter(time.monotonic, None)))


def ask_for_cut(fault: Fault, request: Path) -> None:
    """Writes down which network to cut: the job itself may not, so whoever runs it has to."""
    told = {"node": fault.node, "link": fault.link, "time_s": time.time()}
    part = request.with_suffix(".part")
    part.write_text(json.dumps(told) + "\n")
    os.replace(part, request)


def _kill(_fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(_fault: Fault) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang(fault: Fault) -> None:
    seconds = HANG_S if fault.lasts_s is None else fault.lasts_s
    if fault.holds_gil:
        hold_the_gil(seconds)
    else:
        time.sleep(seconds)


def _exit(fault: Fault) -> NoReturn:
    os._exit(1 if fault.exit_code is None else fault.exit_code)


_ALONE: dict[Kind, Callable[[Fault], None]] = {
    Kind.KILL: _kill,
    Kind.STOP: _stop,
    Kind.HANG: _hang,
    Kind.EXIT: _exit,
}
