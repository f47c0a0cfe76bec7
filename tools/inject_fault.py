"""Does harm to a job that runs, to see how it recovers.

    .venv/bin/python tools/inject_fault.py DIR --rank 3 --kind kill
    .venv/bin/python tools/inject_fault.py DIR --rank 3 --kind hang --at-step 20 --phase backward
    .venv/bin/python tools/inject_fault.py DIR --node n1 --kind node
    .venv/bin/python tools/inject_fault.py DIR --rank 3 --kind slow --factor 0.5
    .venv/bin/python tools/inject_fault.py DIR --rank 3 --kind slow --factor 1
    .venv/bin/python tools/inject_fault.py DIR --link n0 n1 --kind slow_link --delay-ms 20

DIR is the job's ``--resilience-dir``. Without ``--at-step``, ``--phase`` and ``--delay-s`` kill,
stop and node strike at once, by pid, on the machine of the target. All else is left in DIR for the
job's workers, which look for it at every step. What is slow stays so until ``--until-step``, or
until a factor of 1. Exit code 0: done, or left; 2: it cannot be done,
with one line ``error: ...``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.resilience.faults.dropped import drop
from megatron.resilience.faults.processes import kill_tree
from megatron.resilience.faults.register import Worker, agent_is_alive, is_alive, read_workers
from resihp_ext.errors import EXIT_OK, EXIT_USAGE, UserError
from resihp_ext.faults.fault import By, Fault, Kind, Phase

SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.STOP: signal.SIGSTOP}


def parse(argv: Sequence[str] | None) -> tuple[Path, Fault, bool]:
    """The job's folder, what to do, and whether at once."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--kind", choices=[kind.value for kind in Kind], required=True)
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--rank", type=int)
    target.add_argument("--node", help="name of a node, as in DIR/workers/*.json")
    target.add_argument("--link", nargs=2, metavar="NODE", help="two nodes")
    parser.add_argument("--at-step", type=int, help="this step or the first one after it")
    parser.add_argument("--phase", choices=[phase.value for phase in Phase])
    parser.add_argument("--delay-s", type=float, help="from the phase to the strike")
    parser.add_argument("--lasts-s", type=float, help="of a hang")
    parser.add_argument("--exit-code", type=int, help="of an exit")
    parser.add_argument("--factor", type=float, help="of slow, slow_link: what is left; 1 ends it")
    parser.add_argument("--until-step", type=int, help="the first step that is healthy again")
    parser.add_argument("--by", choices=[by.value for by in By], help="of slow: what makes it so")
    parser.add_argument("--bandwidth-mib-s", type=float, help="of slow_link: the healthy link's")
    parser.add_argument("--delay-ms", type=float, help="of slow_link: of every message")
    told = parser.parse_args(argv)
    when = (told.at_step, told.phase, told.delay_s)
    fault = Fault(
        at_step=1 if told.at_step is None else told.at_step,
        kind=Kind(told.kind),
        phase=None if told.phase is None else Phase(told.phase),
        rank=told.rank,
        node=told.node,
        delay_s=told.delay_s or 0.0,
        lasts_s=told.lasts_s,
        exit_code=told.exit_code,
        link=None if told.link is None else tuple(told.link),
        factor=told.factor,
        until_step=told.until_step,
        by=None if told.by is None else By(told.by),
        bandwidth_mib_s=told.bandwidth_mib_s,
        delay_ms=told.delay_ms,
    )
    by_pid = fault.kind in SIGNALS or fault.kind is Kind.NODE
    return told.directory, fault, by_pid and when == (None, None, None)


def inject(directory: Path, fault: Fault, *, at_once: bool) -> str:
    """Does it, or leaves it for the workers; returns a line that says which.

    Raises:
        UserError: the target is not there, or cannot be reached from here.
    """
    workers = read_workers(directory)
    hit = [one for one in workers.values() if fault.hits(one.rank, one.node)]
    if not hit:
        names = sorted({one.node for one in workers.values()})
        there = f"there are ranks {sorted(workers)} on nodes {names}"
        raise UserError(f"{directory}: no {fault.target}; {there}")
    if at_once:
        return _by_pid(fault, hit)
    name = drop(directory / "faults", fault)
    return f"left for the workers of {fault.target} as {name}"


def _by_pid(fault: Fault, hit: Sequence[Worker]) -> str:
    if fault.kind is Kind.NODE:
        agents = {one.agent_pid for one in hit if one.agent_pid and agent_is_alive(one)}
        if not agents:
            raise UserError(f"{fault.target}: {_absence(hit[0], 'launcher')}")
        for pid in agents:
            kill_tree(pid)
        return f"{fault.target}: launcher {_listed(agents)} and all below have got SIGKILL"
    (worker,) = hit
    if not is_alive(worker):
        raise UserError(f"{fault.target}: {_absence(worker, f'process {worker.pid}')}")
    os.kill(worker.pid, SIGNALS[fault.kind])
    return f"{fault.target}: process {worker.pid} has got {SIGNALS[fault.kind].name}"


def _listed(pids: set[int]) -> str:
    return " and ".join(map(str, sorted(pids)))


def _absence(worker: Worker, what: str) -> str:
    return f"no {what} of it runs on this machine; it ran on {worker.host}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tool; returns the exit code."""
    try:
        directory, fault, at_once = parse(argv)
        print(f"resihp: {inject(directory, fault, at_once=at_once)}")
    except (UserError, PermissionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
