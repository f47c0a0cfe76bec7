"""One run: a real job, with faults or without, and the verdict on it."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.resilience.faults.register import read_workers
from megatron.resilience.testing.chaos.ledger import Ledger, compare, differences, read_ledger
from megatron.resilience.testing.chaos.network import INTERFACE, PORT, Network
from megatron.resilience.testing.chaos.processes import Command, Ended, Processes
from megatron.resilience.testing.chaos.receipts import (
    Recovery,
    first_recovery,
    read_receipts,
    strikes,
)
from megatron.resilience.testing.chaos.scenario import NODES, RANKS, STEPS, Scenario, flags
from resihp_ext.errors import UserError
from resihp_ext.faults.read import faults_to_yaml

LIMIT_S = 240.0
"""For a job; one that takes longer has failed."""
LOSS_BOUND, NORM_BOUND = 1e-5, 5e-5
"""Largest relative differences from the job without faults."""
LIMITS = (
    "silence_s=4,patient_silence_s=12,floor_s=12,arrive_s=12,lease_s=4,node_silence_s=6,stop_s=20"
)
"""Of the control plane: users wait longer before they call a process hung; here it is time lost."""
_NODE_GAP_S = 2.0
"""The first launcher is there first: it hosts the rendezvous, and takes the first name."""


@dataclass(slots=True)
class Verdict:
    """What came of a run."""

    problems: list[str] = field(default_factory=list)
    max_rel_diff: float = 0.0
    max_rel_diff_grad_norm: float = 0.0
    ledger_exact: bool = False
    pids_unchanged: bool = False
    kinds: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    recovery: Recovery | None = None
    wall_s: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Workers:
    """Which processes had which rank, looked up again and again while the job runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen_ns: dict[Path, int] = {}
        self.of: dict[int, list[tuple[int, int]]] = {}
        """Pid and start of the processes of each rank, in order."""

    def look(self) -> None:
        """Notes what is new."""
        fresh = False
        for path in (self._folder / "workers").glob("*.json"):
            changed_ns = path.stat().st_mtime_ns
            fresh |= self._seen_ns.get(path) != changed_ns
            self._seen_ns[path] = changed_ns
        if not fresh:
            return
        for rank, worker in read_workers(self._folder).items():
            before = self.of.setdefault(rank, [])
            here = worker.pid, worker.start_ticks
            if not before or before[-1] != here:
                before.append(here)

    def changed(self, hit: frozenset[int]) -> list[int]:
        """Ranks that no fault has hit and that do not have just their first process."""
        return [r for r in range(RANKS) if r not in hit and len(self.of.get(r, ())) != 1]


def launcher(tree_flags: Sequence[str], script_flags: Sequence[str]) -> list[str]:
    """Words of a launcher of ours."""
    words = [sys.executable, "-m", "resihp_ext.launcher.run", "--control-conf", LIMITS]
    return [*words, *tree_flags, "pretrain_gpt.py", *script_flags]


def commands(
    run: Scenario | None, network: Network | None, *, data: Path, folder: Path
) -> list[Command]:
    """The launchers of a run, the coordinator's first."""
    script = flags(run, data=data, folder=folder)
    if run is None or run.nodes == 1:
        return [
            Command(words=launcher(["--nproc-per-node", str(RANKS)], script), log=folder / "log")
        ]
    found = []
    endpoint = f"{network.address(0)}:{PORT}" if network else f"127.0.0.1:{free_port()}"
    for node in range(2):
        words = ["--nnodes", "2", "--nproc-per-node", str(RANKS // 2), "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", endpoint, "--rdzv-id", f"chaos-{run.number}"]
        words += ["--rdzv-conf", f"is_host={int(node == 0)}"]
        words += ["--local-addr", network.address(node) if network else "127.0.0.1"]
        inside = network.inside(node) if network else []
        found.append(
            Command(
                words=[*inside, *launcher(words, script)],
                log=folder / f"log.{NODES[node]}",
                environment={"GLOO_SOCKET_IFNAME": INTERFACE} if network else {},
            )
        )
    return found


def execute(
    run: Scenario | None, *, tree: Path, data: Path, folder: Path, separate: bool
) -> tuple[Ended, Workers]:
    """Runs the job to its end, or to the end of its time.

    Args:
        tree: Where the program lies.
        separate: Whether nodes get networks of their own.
    """
    folder.mkdir(parents=True)
    if run is not None:
        names = {node: node if separate else _plain_name(node) for node in NODES}
        text = faults_to_yaml(run.faults)
        (folder / "faults.yaml").write_text(_renamed(text, names))
    workers = Workers(folder / "resilience")
    with ExitStack() as stack:
        network = None
        if run is not None and run.nodes == 2 and separate:
            network = stack.enter_context(Network(NODES))
        todo = commands(run, network, data=data, folder=folder)
        job = stack.enter_context(Processes(todo, tree=tree, gap_s=_NODE_GAP_S))
        cuts: set[Path] = set()

        def look() -> None:
            workers.look()
            for path in (folder / "resilience" / "faults").glob("*.cut"):
                if network is not None and path not in cuts:
                    cuts.add(path)
                    network.cut(json.loads(path.read_text())["node"])

        return job.wait(LIMIT_S, look), workers


def _plain_name(node: str) -> str:
    """As launchers are named that share a host name: in the order in which they start."""
    host = socket.gethostname()[:56]
    number = NODES.index(node)
    return f"{host}.{number}" if number else host


def _renamed(text: str, names: dict[str, str]) -> str:
    for name, other in names.items():
        text = text.replace(f"node: {name},", f"node: {other},")
    return text


def judge(
    run: Scenario, ended: Ended, workers: Workers, reference: Ledger, folder: Path
) -> Verdict:
    """Whether a run has gone as if there had been no faults."""
    records = folder / "resilience"
    verdict = Verdict(wall_s=ended.wall_s)
    if ended.timed_out:
        verdict.problems.append(f"not done after {LIMIT_S:.0f} s")
    elif ended.exit_codes[0] != 0:
        verdict.problems.append(f"exit codes {ended.exit_codes}, expected 0 of the first")
    verdict.problems += [f"left behind: {one}" for one in ended.leftovers]
    ledger = read_ledger(records)
    wrong = compare(ledger, reference, STEPS)
    verdict.ledger_exact = not wrong
    verdict.max_rel_diff = differences(ledger.losses, reference.losses)
    verdict.max_rel_diff_grad_norm = differences(ledger.grad_norms, reference.grad_norms)
    changed = workers.changed(run.hit)
    verdict.pids_unchanged = not changed
    verdict.problems += wrong
    if verdict.max_rel_diff > LOSS_BOUND:
        verdict.problems.append(f"loss differs by {verdict.max_rel_diff:.1e}")
    if verdict.max_rel_diff_grad_norm > NORM_BOUND:
        verdict.problems.append(f"gradient norm differs by {verdict.max_rel_diff_grad_norm:.1e}")
    if changed:
        verdict.problems.append(f"ranks {changed} were not hit and have other processes")
    receipts, bad = read_receipts(records)
    verdict.problems += bad
    try:
        struck = strikes(records)
    except (UserError, ValueError) as error:
        verdict.problems.append(f"faults/: {error}")
        return verdict
    if not struck:
        verdict.problems.append("no fault has struck")
    verdict.kinds = [one.fault.kind.value for one in struck]
    verdict.phases = [one.phase for one in struck]
    verdict.recovery = first_recovery(struck, receipts, ledger)
    return verdict


def free_port() -> int:
    """A port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
