"""Do jobs with random faults end as if there had been none, and how long do recoveries take?

    .venv/bin/python tools/bench/chaos.py [--runs 40] [--seed 0] [--json] [--only RUN] [--out FILE]

Each run is a real job of eight ranks (TP 2 x PP 2 x DP 2) on packed sequences, started by
``resihp-run``, with checkpoints and evaluations, and with one to four random faults at random
moments. Every fourth run has two nodes, as root each with a network of its own. Compared with one
job without faults: every step exactly once, with the same samples, loss to 1e-5 and gradient norm
to 5e-5; ranks that were not hit keep their processes; nothing is left behind; exit code 0.

The same job with upstream's schedules under torchrun, which starts all ranks anew from the last
checkpoint when one is killed, is what recoveries are compared with. Keys with ``--json``:

* ``runs``, ``failed_runs``;
* ``max_rel_diff`` of the loss, ``max_rel_diff_grad_norm``, ``ledger_exact``, ``pids_unchanged``;
* ``recovery_median_s``, ``recovery_p95_s``: from the first kill of a run, where that is its first
  fault, to the end of the step that it had interrupted, without what such a step takes anyway;
  ``recoveries``: how many; ``notice_median_s``: how much of it until the coordinator knew;
  ``phases_error``: how far a receipt's phases are from adding up to all of it, at worst;
  ``phases_error_from_notice``: the same, of both without the time until the coordinator knew;
* ``restart_ratio``: torchrun's median over ours; ``restart_s``: all of torchrun's;
* ``kinds``, ``phases``: how often what has struck, and where.

Exit code 0 when no run has failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from megatron.resilience.testing.chaos.ledger import Ledger, compare, read_ledger
from megatron.resilience.testing.chaos.network import can_separate
from megatron.resilience.testing.chaos.restart import restart_s
from megatron.resilience.testing.chaos.run import Verdict, execute, judge
from megatron.resilience.testing.chaos.scenario import NODES_EVERY, STEPS, Scenario, scenario
from megatron.resilience.testing.corpus import write_corpus
from resihp_ext.faults.fault import LASTING, Kind
from resihp_ext.faults.read import faults_to_yaml

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Runs the benchmark."""
    options = _options()
    folder = Path(options.keep or tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(options, folder)
    reference = bench.reference()
    numbers = range(options.runs) if options.only is None else [options.only]
    verdicts = {number: bench.run(number, reference) for number in numbers}
    restarts = bench.restarts() if options.only is None else []
    result = summary(list(verdicts.values()), restarts)
    if options.out:
        rows = {number: one.as_json() for number, one in verdicts.items()}
        Path(options.out).write_text(json.dumps({**result, "records": rows}, indent=1) + "\n")
    if not result["failed_runs"] and options.only is None and not options.keep:
        shutil.rmtree(folder)
    print(result)
    if options.json:
        print(json.dumps(result))
    return 0 if not result["failed_runs"] else 1


class Bench:
    """The jobs of one call."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        """Prepares the data.

        Args:
            folder: Of all jobs; those that fail leave their files there.
        """
        self._options, self._folder = options, folder
        self._tree = Path(options.tree).resolve()
        self._separate = can_separate()
        self._data = write_corpus(folder / "data", seed=options.seed)

    def reference(self) -> Ledger:
        """The job without faults.

        Raises:
            SystemExit: it has failed.
        """
        kept = self._folder / "reference"
        if kept.exists() and not compare(found := read_ledger(kept / "resilience"), found, STEPS):
            return found
        folder = self._fresh("reference")
        ended, _ = execute(
            None, tree=self._tree, data=self._data, folder=folder, separate=self._separate
        )
        ledger = read_ledger(folder / "resilience")
        wrong = compare(ledger, ledger, STEPS)
        if any(ended.exit_codes) or wrong:
            raise SystemExit(f"the job without faults has failed, see {folder}: {ended} {wrong}")
        print(f"without faults: {ended.wall_s:.0f} s", flush=True)
        return ledger

    def run(self, number: int, reference: Ledger) -> Verdict:
        """One run with faults."""
        options = self._options
        drawn = scenario(
            number,
            options.seed,
            kinds=[Kind(one) for one in options.kinds],
            separate=self._separate,
            nodes_every=options.nodes_every,
        )
        folder = self._fresh(f"run-{number:03d}")
        ended, workers = execute(
            drawn, tree=self._tree, data=self._data, folder=folder, separate=self._separate
        )
        verdict = judge(drawn, ended, workers, reference, folder)
        _show(drawn, verdict, folder)
        if not verdict.problems and options.only is None and not options.keep:
            shutil.rmtree(folder)
        return verdict

    def restarts(self) -> list[float]:
        """torchrun's recoveries."""
        found = []
        for number in range(self._options.restarts):
            folder = self._fresh(f"restart-{number}")
            seconds = restart_s(
                seed=self._options.seed + number, tree=self._tree, data=self._data, folder=folder
            )
            print(f"torchrun {number}: {seconds}", flush=True)
            if seconds is not None:
                found.append(seconds)
        return found

    def _fresh(self, name: str) -> Path:
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder


def summary(verdicts: Sequence[Verdict], restarts: Sequence[float]) -> dict[str, Any]:
    """The keys of the benchmark."""
    recoveries = [one.recovery for one in verdicts if one.recovery is not None]
    seconds = sorted(one.recovery_s for one in recoveries)
    middle = median(seconds) if seconds else None
    return {
        "runs": len(verdicts),
        "failed_runs": sum(bool(one.problems) for one in verdicts),
        "max_rel_diff": max((one.max_rel_diff for one in verdicts), default=0.0),
        "max_rel_diff_grad_norm": max(
            (one.max_rel_diff_grad_norm for one in verdicts), default=0.0
        ),
        "ledger_exact": all(one.ledger_exact for one in verdicts),
        "pids_unchanged": all(one.pids_unchanged for one in verdicts),
        "recovery_median_s": middle,
        "recovery_p95_s": seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))]
        if seconds
        else None,
        "recoveries": len(seconds),
        "notice_median_s": median(one.notice_s for one in recoveries) if recoveries else None,
        "phases_error": max((one.phases_error for one in recoveries), default=None),
        "phases_error_from_notice": max(
            (one.phases_error_from_notice for one in recoveries), default=None
        ),
        "restart_ratio": median(restarts) / middle if restarts and middle else None,
        "restart_s": list(restarts),
        "kinds": dict(Counter(kind for one in verdicts for kind in one.kinds)),
        "phases": dict(Counter(phase for one in verdicts for phase in one.phases)),
        "measured_on": "real CPU, gloo",
    }


def _show(drawn: Scenario, verdict: Verdict, folder: Path) -> None:
    recovery = "" if verdict.recovery is None else f", recovery {verdict.recovery.recovery_s:.2f} s"
    print(
        f"run {drawn.number}: {'FAILED' if verdict.problems else 'ok'} in {verdict.wall_s:.0f} s, "
        f"{drawn.nodes} node(s), loss {verdict.max_rel_diff:.1e}, "
        f"norm {verdict.max_rel_diff_grad_norm:.1e}{recovery}"
    )
    for line in faults_to_yaml(drawn.faults).splitlines():
        print(f"    {line}")
    print(f"    struck: {list(zip(verdict.kinds, verdict.phases, strict=True))}")
    for problem in verdict.problems:
        print(f"    PROBLEM {problem}")
    if verdict.problems:
        print(f"    see {folder}")
    sys.stdout.flush()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="a run's own is this plus its number")
    parser.add_argument("--only", type=int, help="this run alone; its folder is kept")
    parser.add_argument("--out", help="JSON file for the record of every run")
    parser.add_argument(
        "--keep",
        help="folder for all files; they stay, and the job without faults is not repeated",
    )
    parser.add_argument("--tree", default=str(ROOT), help="where the program lies that is run")
    parser.add_argument("--restarts", type=int, default=3, help="repetitions under torchrun")
    parser.add_argument("--nodes-every", type=int, default=NODES_EVERY, help="0: one node always")
    kinds = [kind.value for kind in Kind if kind not in LASTING]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
