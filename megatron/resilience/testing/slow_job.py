"""A job of emulated devices of which some become slow, by ``resihp-run``, and what it left."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.resilience.faults.register import read_workers
from megatron.resilience.testing.chaos.ledger import Ledger, read_ledger
from megatron.resilience.testing.chaos.processes import Command, Ended, Processes
from megatron.resilience.testing.parity import MODEL
from resihp_ext.commands.receipts import read_receipts
from resihp_ext.events import Event, read_events
from resihp_ext.faults.fault import Fault
from resihp_ext.faults.read import faults_to_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is to run."""

    ranks: int
    steps: int
    detect: str
    """``off``, ``observe`` or ``act``."""
    slow: Sequence[Fault] = ()
    """Which of its devices are, and when."""
    scene: Mapping[str, object] | None = None
    """Of emulated devices; None: as fast as this machine is."""
    flags: Sequence[str] = ()
    """Layout, batch, model."""
    limit_s: float = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of it."""

    ended: Ended
    ledger: Ledger
    receipts: list[dict[str, Any]]
    events: list[dict[str, Any]] = field(repr=False)
    first_processes: bool
    """Whether every rank still had its first process at the end."""
    log: str = field(repr=False)

    def step_s(self, step: int) -> float:
        """How long a step took, with all that was done before it since the one before."""
        return self.ledger.ended_s[step] - self.ledger.ended_s[step - 1]

    def weighed(self, verdict: str = "") -> list[dict[str, Any]]:
        """Decisions about other plans, of one kind or all."""
        found = [one for one in self.events if one["event"] == Event.WEIGHED]
        return [one for one in found if one["verdict"] == verdict or not verdict]


def run(job: Job, *, tree: Path, data: Path, folder: Path) -> Outcome:
    """Runs a job to its end, or to the end of its time.

    Args:
        tree: Where the program lies.
        data: Prefix of the dataset.
        folder: A new one, for everything that the job writes.
    """
    folder.mkdir(parents=True)
    kept, log = folder / "resilience", folder / "log"
    words = [sys.executable, "-m", "resihp_ext.launcher.run", "--nproc-per-node", str(job.ranks)]
    words += ["pretrain_gpt.py", *MODEL, "--device", "cpu", "--packed-sequences"]
    words += ["--data-path", str(data), "--train-iters", str(job.steps), "--resilience"]
    words += ["--resilience-dir", str(kept), "--resilience-detect", job.detect]
    words += [*_files(job, folder), *job.flags]
    with Processes([Command(words=words, log=log)], tree=tree) as running:
        ended = running.wait(job.limit_s)
    events, receipts, first = kept / "events.jsonl", [], False
    if (kept / "plans").is_dir():
        receipts = read_receipts(kept)
    if (kept / "workers").is_dir():
        first = all(one.incarnation == 0 for one in read_workers(kept).values())
    return Outcome(
        ended=ended,
        ledger=read_ledger(kept),
        receipts=receipts,
        events=read_events(events) if events.exists() else [],
        first_processes=first,
        log=log.read_text(errors="replace"),
    )


def _files(job: Job, folder: Path) -> list[str]:
    """Flags that name the files of the emulation, which are written here."""
    if job.scene is None:
        return []
    words = ["--resilience-emulate", str(folder / "scene.yaml")]
    (folder / "scene.yaml").write_text(json.dumps(job.scene) + "\n")  # which is YAML, too
    if job.slow:
        words += ["--resilience-faults", str(folder / "faults.yaml")]
        (folder / "faults.yaml").write_text(faults_to_yaml(job.slow))
    return words
