"""One job whose ranks are killed one after the other, each coming back before the next one goes.

The script of a job is the one of ``counted.py``, so that every rank can be asked what it holds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from megatron.resilience.faults.register import Worker, read_workers
from megatron.resilience.testing.chaos.counted import answers, ask
from megatron.resilience.testing.chaos.holdings import Holdings, holdings, least
from megatron.resilience.testing.chaos.processes import Command, Ended, Processes, children_of
from megatron.resilience.testing.chaos.scenario import RANKS, common_flags
from megatron.resilience.testing.chaos.steps import Steps
from resihp_ext.errors import UserError
from resihp_ext.plan.plan import Plan

SPARED = 3
"""Ranks that are never killed: those that are looked at."""
SETTLE_STEPS = 2
"""After a change, before anybody is asked: what a step makes anew is there then."""
LOOKS, LOOK_S = 3, 0.4
"""How often each process is looked at, and how long after each other."""
START_S, CYCLE_S, END_S = 120.0, 60.0, 30.0
MOST_DELAY_S = 0.5
"""Of a kill, drawn anew each time: any moment of a step."""
STEPS_A_CYCLE = 400
"""More than fit: the job is ended when the cycles are done."""
# Else the node would get no new processes after the third death.
_CONTROL = "deaths=100000"


class StalledError(Exception):
    """The job did not get where it should in time."""


@dataclass(kw_only=True, slots=True)
class Cycle:
    """A kill, the recovery, and the return."""

    victim: int
    recovery_s: float
    """From the kill until the survivors had done again what it had broken off."""
    rejoin_s: float
    """From the kill until all ranks trained again."""
    prepared_s: float
    """How much of that until the newcomer's process was written down."""
    changes: int
    """Of the layout: two, unless something else happened."""
    ranks: dict[int, Holdings]
    """Of those that are spared."""
    others: dict[str, Holdings]
    """Launcher, planner and warm process."""


@dataclass(slots=True)
class Story:
    """Everything that was seen of one job."""

    cycles: list[Cycle] = field(default_factory=list)
    spared: tuple[int, ...] = ()
    pids: dict[int, int] = field(default_factory=dict)
    """Of the spared ranks, at the first look."""
    problem: str = ""
    ended: Ended | None = None


def run(count: int, seed: int, *, tree: Path, data: Path, folder: Path) -> Story:
    """Runs the job."""
    folder.mkdir(parents=True)
    words = [sys.executable, "-m", "resihp_ext.launcher.run", "--control-conf", _CONTROL]
    words += ["--nproc-per-node", str(RANKS), "-m", "megatron.resilience.testing.chaos.counted"]
    words += [*common_flags(data), "--train-iters", str(STEPS_A_CYCLE * (count + 1))]
    words += ["--eval-iters", "0", "--resilience"]
    words += ["--resilience-dir", str(folder / "resilience")]
    with Processes([Command(words=words, log=folder / "log")], tree=tree) as job:
        teller = _Teller(folder / "resilience", Random(seed), count)
        tale = teller.tell()

        def look() -> None:
            try:
                next(tale, None)
            except StalledError as error:
                teller.story.problem = str(error)

        def over() -> bool:
            return bool(teller.story.problem)

        limit_s = START_S + count * CYCLE_S + END_S
        teller.story.ended = job.wait(limit_s, look, over)
    return teller.story


class _Teller:
    """Drives the job from outside; every ``yield`` is a moment later."""

    def __init__(self, folder: Path, random: Random, count: int) -> None:
        self._folder, self._random, self._count = folder, random, count
        self._steps = Steps(folder / "events.jsonl")
        self._asked = 0
        self._launcher = 0
        self.story = Story()
        self.story.spared = tuple(sorted(random.sample(range(RANKS), SPARED)))

    def tell(self) -> Iterator[None]:
        """The whole story.

        Raises:
            StalledError: it does not go on.
        """
        yield from self._until(lambda: self._steps.done_after(0.0) > SETTLE_STEPS, START_S, "start")
        workers = read_workers(self._folder)
        self._launcher = workers[0].agent_pid or 0
        self.story.pids = {rank: workers[rank].pid for rank in self.story.spared}
        for number in range(1, self._count + 1):
            yield from self._cycle(number)
            _show(number, self.story.cycles[-1])
        os.kill(self._launcher, signal.SIGTERM)

    def _cycle(self, number: int) -> Iterator[None]:
        victims = sorted(set(range(RANKS)) - set(self.story.spared))
        victim = self._random.choice(victims)
        begun_s, delay_s = time.monotonic(), self._random.uniform(0.0, MOST_DELAY_S)
        yield from self._until(lambda: time.monotonic() - begun_s >= delay_s, CYCLE_S, "delay")
        known, before = self._workers()[victim], len(self._receipts())
        killed_s = time.time()
        os.kill(known.pid, signal.SIGKILL)

        def whole() -> bool:
            found = self._receipts()[before:]
            return bool(found) and self._is_whole(found[-1])

        def restarted() -> bool:
            return self._workers().get(victim, known).pid != known.pid or whole()

        what = f"cycle {number}, rank {victim} (pid {known.pid})"
        yield from self._until(restarted, CYCLE_S, f"{what}: a new process")
        prepared_s = time.time() - killed_s
        yield from self._until(whole, CYCLE_S, f"{what}: all ranks in one layout")
        whole_s = max(one["resumed_s"] for one in self._receipts())
        yield from self._until(
            lambda: self._steps.done_after(whole_s) >= SETTLE_STEPS, CYCLE_S, f"{what}: steps"
        )
        found = self._receipts()[before:]
        looks: list[tuple[dict[int, Holdings], dict[str, Holdings]]] = []
        for _ in range(LOOKS):
            yield from self._look(looks, what)
        self.story.cycles.append(
            Cycle(
                victim=victim,
                recovery_s=found[0].get("repeated_s", found[0]["resumed_s"]) - killed_s,
                rejoin_s=whole_s - killed_s,
                prepared_s=prepared_s,
                changes=len(found),
                ranks={rank: least(one[rank] for one, _ in looks) for rank in self.story.spared},
                others={name: least(one[name] for _, one in looks) for name in looks[0][1]},
            )
        )

    def _look(
        self, looks: list[tuple[dict[int, Holdings], dict[str, Holdings]]], what: str
    ) -> Iterator[None]:
        self._asked += 1
        number, begun_s = self._asked, time.monotonic()
        ask(self._folder, number)
        spared = set(self.story.spared)
        yield from self._until(
            lambda: spared <= answers(self._folder, number).keys(), CYCLE_S, f"{what}: answers"
        )
        told = answers(self._folder, number)
        looks.append(({rank: told[rank]["held"] for rank in spared}, self._others()))
        yield from self._until(lambda: time.monotonic() - begun_s > LOOK_S, CYCLE_S, "a moment")

    def _others(self) -> dict[str, Holdings]:
        """The processes of a job that are no ranks; the coordinator is a thread of the launcher."""
        ranks = {worker.pid for worker in self._workers().values()}
        found = {"launcher": holdings(self._launcher)}
        for pid in set(children_of(self._launcher)) - ranks:
            with suppress(OSError):  # it may end at any moment
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                name = "planner" if b"planner_worker" in words else "warm"
                found[name] = holdings(pid)
        return found

    def _is_whole(self, receipt: dict[str, Any]) -> bool:
        path = self._folder / "plans" / f"{receipt['to_version']:03d}.json"
        plan = Plan.from_json(path.read_text())
        stages = (stage for replica in plan.replicas for stage in replica.stages)
        return {rank for stage in stages for rank in stage.ranks} == set(range(RANKS))

    def _workers(self) -> dict[int, Worker]:
        try:
            return read_workers(self._folder)
        except UserError:
            return {}

    def _receipts(self) -> list[dict[str, Any]]:
        paths = sorted((self._folder / "receipts").glob("*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def _until(self, come: Callable[[], bool], limit_s: float, what: str) -> Iterator[None]:
        until_s = time.monotonic() + limit_s
        while not come():
            if time.monotonic() > until_s:
                raise StalledError(f"{what}: not within {limit_s:.0f} s")
            yield


def _show(number: int, cycle: Cycle) -> None:
    held = cycle.ranks[min(cycle.ranks)]
    launcher = cycle.others["launcher"]
    print(  # noqa: T201 - the progress of a benchmark
        f"cycle {number:2}: rank {cycle.victim}, survivors on after {cycle.recovery_s:.2f} s, "
        f"whole after {cycle.rejoin_s:.2f} s; a survivor holds {_text(held)}; "
        f"launcher {_text(launcher)}",
        flush=True,
    )


def _text(held: Holdings) -> str:
    groups = f", {held['groups']} groups" if "groups" in held else ""
    return (
        f"{held['fds']} files, {held['threads']} threads{groups}, "
        f"{held['rss_bytes'] / 2**20:.0f} MiB"
    )


def unchanged(story: Story, folder: Path) -> bool:
    """Whether the spared ranks have the processes with which they began."""
    now = read_workers(folder / "resilience")
    return all(now[rank].pid == pid for rank, pid in story.pids.items())
