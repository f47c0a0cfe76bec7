"""How many nodes can one coordinator watch?

    .venv/bin/python tools/bench/heartbeats.py [--nodes 2048] [--seconds 20] [--clients 2] [--json]

One process runs a real ``CoordinatorServer``; ``--clients`` other processes hold one real,
authenticated TCP connection for every node and send its beat once a second, at evenly spread times.
Latency is from the moment before a beat is packed until the rules of membership get it, so
both sides of the code and the wait for the coordinator's core are in it.

With ``--json`` the last line is one JSON object: ``nodes`` that were connected to the end,
``cpu_percent`` of one core that the coordinator used, ``queued_percent`` of the time that it
wanted a core which other programs had (latencies are this code's only where that is small),
``latency_ms_p50``, ``latency_ms_p95``, ``latency_ms_p99``, ``latency_ms_max``, ``rss_mb`` and
``rss_growth_mb`` of the coordinator (the second since before the first node came), ``connect_s``
until all nodes were there, ``beats`` counted and ``beats_sent``. Exit code 0 when no node and no
beat was lost, else 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import multiprocessing
import sys
import time
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import quantiles
from typing import Any

import psutil

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, NeedPlan
from resihp_ext.control.channel import Channel, open_channel
from resihp_ext.control.counters import Counters
from resihp_ext.control.frames import new_token
from resihp_ext.control.server import CoordinatorServer, Planned, raise_descriptors
from resihp_ext.control.traffic import AGENT
from resihp_ext.control.uplink import RETRY_S
from resihp_ext.errors import ResiHPError

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
RANKS_PER_NODE = 8
BEAT_S = 1.0
START_S = 300.0
CONNECTS_AT_ONCE = 64
"""Of one client process."""


class Listening:
    """Rules that only note when beats arrive."""

    def __init__(self) -> None:
        self.joined = 0
        self.lost = 0
        self.measuring = False
        self.latencies_s: list[float] = []

    def node_joined(self, hello: say.NodeHello) -> list[Action]:
        self.joined += 1
        return []

    def node_lost(self, node: str, cause: str, now_s: float) -> list[Action]:
        self.lost += 1
        return []

    def handle(self, message: say.Message, node: str, now_s: float) -> list[Action]:
        if self.measuring and isinstance(message, say.NodeBeat):
            # One machine, hence one monotonic clock for all processes.
            self.latencies_s.append(now_s - message.sent_s)
        return []

    def planned(self, request: str, plan: str | None, why: str, version: int = 0) -> list[Action]:
        return []

    def stuck(self, cause: str) -> list[Action]:
        return []

    def tick(self, now_s: float) -> list[Action]:
        return []

    def drain(self, node: str) -> list[Action]:
        return []

    def readmit(self, node: str) -> list[Action]:
        return []

    def status(self) -> dict[str, Any]:
        return {}


def no_plan(_needed: NeedPlan) -> Future[Planned]:
    """Is not called."""
    raise AssertionError("nobody asks for plans here")


def coordinate(pipe: Connection, token: bytes) -> None:
    """The coordinator's process: answers "joined", "begin" and "end" of the one that measures."""
    rules, me = Listening(), psutil.Process()
    server = CoordinatorServer(token=token, host=HOST, membership=rules, planner=no_plan)
    pipe.send(server.start()[1])
    before_bytes = me.memory_info().rss
    cpu_s = queued_s = began_s = 0.0
    while (asked := pipe.recv()) != "end":
        if asked == "begin":
            cpu_s, queued_s, began_s = time.process_time(), queued(), time.monotonic()
            rules.measuring = True
        pipe.send(rules.joined)
    rules.measuring = False
    used_s, took_s = time.process_time() - cpu_s, time.monotonic() - began_s
    found_bytes = me.memory_info().rss
    pipe.send(
        {
            "nodes": rules.joined - rules.lost,
            "cpu_percent": 100 * used_s / took_s,
            "queued_percent": 100 * (queued() - queued_s) / took_s,
            "rss_mb": found_bytes / 1e6,
            "rss_growth_mb": (found_bytes - before_bytes) / 1e6,
            "latencies_s": rules.latencies_s,
        }
    )
    pipe.recv()
    server.close()


def queued() -> float:
    """Seconds that threads of this process have waited for a core, as Linux counts them."""
    files = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[1]) for file in files) / 1e9


def simulate(pipe: Connection, token: bytes, port: int, numbers: range) -> None:
    """A client process: connects its nodes, then sends their beats until it is told to stop."""
    raise_descriptors()
    asyncio.run(_simulate(pipe, token, port, numbers))


async def _simulate(pipe: Connection, token: bytes, port: int, numbers: range) -> None:
    counters = Counters(logger)
    turn = asyncio.Semaphore(CONNECTS_AT_ONCE)
    sent = [0]

    async def node(number: int) -> None:
        async with turn:
            name = f"node {number}"
            channel = await _connected(port, token, name, counters)
            ranks = tuple(range(number * RANKS_PER_NODE, (number + 1) * RANKS_PER_NODE))
            channel.send(say.NodeHello(node=name, address=HOST, ranks=ranks, slots=len(ranks)))
        tasks.append(asyncio.create_task(_listen(channel)))
        tasks.append(asyncio.create_task(_beat(channel, name, ranks, number, sent)))

    tasks: list[asyncio.Task[None]] = []
    await asyncio.gather(*map(node, numbers))
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, pipe.recv) == "count":
        pipe.send(sent[0])


async def _connected(port: int, token: bytes, name: str, counters: Counters) -> Channel:
    while True:  # as an agent does; the one that measures gives up some day
        try:
            return await open_channel((HOST, port), token, AGENT, name, counters)
        except ResiHPError as error:
            logger.warning("%s; once more", error)
            await asyncio.sleep(RETRY_S)


async def _listen(channel: Channel) -> None:
    while True:
        await channel.receive()


async def _beat(
    channel: Channel, name: str, ranks: tuple[int, ...], number: int, sent: list[int]
) -> None:
    # Agents of a real job have started at different moments.
    due_s = time.monotonic() + (number * 0.618) % BEAT_S
    while True:
        await asyncio.sleep(due_s - time.monotonic())
        due_s += BEAT_S
        now_s = time.monotonic()
        channel.send(say.NodeBeat(node=name, step=1, alive=ranks, sent_s=now_s))
        sent[0] += 1


def measure(nodes: int, seconds: float, clients: int) -> dict[str, float]:
    """One run."""
    spawn = multiprocessing.get_context("spawn")
    token = new_token()
    server, there = spawn.Pipe()
    processes = [spawn.Process(target=coordinate, args=(there, token), daemon=True)]
    processes[0].start()
    port = server.recv()
    pipes: list[Connection] = []
    others: list[Connection] = []
    for k in range(clients):
        mine, theirs = spawn.Pipe()
        numbers = range(k, nodes, clients)
        args = (theirs, token, port, numbers)
        processes.append(spawn.Process(target=simulate, args=args, daemon=True))
        pipes.append(mine)
        others.append(theirs)
    began_s = time.monotonic()
    for process in processes[1:]:
        process.start()
    for theirs in (there, *others):  # or the death of a process would not close its pipe
        theirs.close()
    try:
        return _measured(server, pipes, nodes, seconds, began_s)
    except EOFError:
        raise SystemExit("a process of the benchmark has died") from None
    finally:
        for process in processes:
            process.kill()
            process.join()


def _measured(
    server: Connection, pipes: list[Connection], nodes: int, seconds: float, began_s: float
) -> dict[str, float]:
    while asked(server, "joined") < nodes:
        if time.monotonic() - began_s > START_S:
            raise SystemExit(f"not all of {nodes} nodes were connected within {START_S:g} s")
        time.sleep(0.05)
    connect_s = time.monotonic() - began_s
    time.sleep(2 * BEAT_S)
    before = sum(asked(pipe, "count") for pipe in pipes)
    asked(server, "begin")
    time.sleep(seconds)
    found = asked(server, "end")
    sent = sum(asked(pipe, "count") for pipe in pipes) - before
    latencies_ms = [1e3 * one for one in found.pop("latencies_s")]
    cuts = quantiles(latencies_ms, n=100)
    return {
        **found,
        "latency_ms_p50": cuts[49],
        "latency_ms_p95": cuts[94],
        "latency_ms_p99": cuts[98],
        "latency_ms_max": max(latencies_ms),
        "connect_s": connect_s,
        "beats": len(latencies_ms),
        "beats_sent": sent,
    }


def asked(pipe: Connection, what: str) -> Any:
    """Asks another process, which answers within a minute."""
    pipe.send(what)
    if not pipe.poll(60):
        raise SystemExit(f"no answer to {what!r}")
    return pipe.recv()


def main() -> int:
    """Parse, run, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--seconds", type=float, default=20.0, help="of measurement")
    parser.add_argument("--clients", type=int, default=2, help="processes that play the nodes")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.nodes, args.seconds, args.clients)
    for key, value in found.items():
        print(f"{key:16} {value:10.2f}")
    # What was under way at the beginning and at the end may be counted on one side only.
    missing = abs(found["beats_sent"] - found["beats"])
    if args.json:
        print(json.dumps({key: round(value, 3) for key, value in found.items()}))
    return 0 if found["nodes"] == args.nodes and missing <= 0.01 * args.nodes + 10 else 1


if __name__ == "__main__":
    sys.exit(main())
