"""Does the simulator say what a real job does?

    .venv/bin/python tools/bench/sim_vs_real.py [--json] [--keep DIR] [--seed N]

Two jobs of eight emulated ranks on this machine (docs/emulation.md), with TP x PP x DP of 1x4x2 and
2x2x2: a rank is killed at step 8 and joins again, two devices become slow at step 22 and the job
adapts. Each is simulated from its own files: the scene, the plans that it ran, the documents in its
micro-batches, the faults. Keys with ``--json``:

* ``iteration_rel_err``: the worst of all phases of both jobs; a phase's figure is the median of
  ``|simulated / real - 1|`` over its steps. Phases: ``healthy``, ``after_death``, ``slow`` (before
  the plan changes), ``adapted``. Steps in which a plan changed, and two after them, are left out.
* ``transition_rel_err``: the median of the same over the changes of one job, with seconds
  calibrated on those of the other, both ways (``resihp_ext/simulator/calibrate.py``).
* ``jobs``: figures of each; ``detect_steps``: from the first slow step to the verdict, real, and of
  the engine with the same faults.

Exit code 0 when iterations are within 5 % and changes within 30 %. All figures are of emulated
devices; what is compared is real processes that wait and send against a walk of their programs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from adapt import SLOW as SLOW_AT_20
from adapt import flags

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.slow_job import Job, Outcome, run
from resihp_ext.emulation.scene import Scene, read_scene
from resihp_ext.emulation.simulated import layout_of, setting_of, squares_of
from resihp_ext.events import Event
from resihp_ext.faults.fault import Fault, Kind, Phase
from resihp_ext.plan.plan import Plan
from resihp_ext.report.run import read_run
from resihp_ext.simulator.calibrate import calibrated
from resihp_ext.simulator.engine import simulate
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.iteration import Iterations
from resihp_ext.simulator.policies.planned import Joint
from resihp_ext.simulator.traces import of_faults

ROOT = Path(__file__).resolve().parents[2]
SCALES = {"1x4x2": 0.5, "2x2x2": 0.75}
"""Time scale of each layout: what this machine does beside waiting, about 0.08 s a step, is to be a
few hundredths of it."""
LAYOUTS = tuple(SCALES)
STEPS, KILLED_AT, SLOW_FROM, SEQ_LENGTH = 46, 8, 24, 96
SLOW = tuple(
    Fault(at_step=SLOW_FROM, rank=one.rank, kind=Kind.SLOW, factor=one.factor) for one in SLOW_AT_20
)
KILL = Fault(at_step=KILLED_AT, rank=6, kind=Kind.KILL, phase=Phase.BACKWARD)
ITERATION_BOUND, TRANSITION_BOUND = 0.05, 0.30
FIRST = 4
"""Steps before it are the machine's: caches, imports, allocations."""


def job(layout: str, options: argparse.Namespace, folder: Path, data: Path) -> Outcome:
    """Runs one."""
    scene = {"model": "llama2-7b", "hardware": "a100", "noise": 0.01}
    asked = Job(
        ranks=8,
        steps=STEPS,
        detect="act",
        slow=(KILL, *SLOW),
        scene={**scene, "time_scale": SCALES[layout]},
        flags=[*flags(layout), "--seed", str(1234 + options.seed)],
        limit_s=options.limit_s,
    )
    found = run(asked, tree=ROOT, data=data, folder=folder / layout)
    print(f"{layout}: exit {found.ended.exit_codes}, {found.ended.wall_s:.0f} s", flush=True)
    if found.ended.exit_codes != (0,):
        raise SystemExit(f"{layout}: the job failed: {found.log[-2000:]}")
    return found


class Compared:
    """One job beside its simulation."""

    def __init__(self, folder: Path, found: Outcome) -> None:
        self._found = found
        self._scene: Scene = read_scene(folder / "scene.yaml")
        kept = read_run(folder / "resilience")
        self._plans: Mapping[int, Plan] = kept.plans
        self._setting = setting_of(self._scene, kept.plans[0])
        squared = squares_of(kept.events, kept.plans, self._scene, SEQ_LENGTH)
        self._iterations = Iterations(self._setting, squared)

    def version(self, step: int) -> int:
        """Of the plan that a step ran on."""
        versions = [0]
        versions += [one["to_version"] for one in self._found.receipts if one["step"] < step]
        return int(versions[-1])

    def truth(self, step: int) -> Health:
        """How fast devices were in a step."""
        slow = {one.rank: one.factor for one in SLOW if one.at_step <= step}
        return Health.of({rank: p for rank, p in slow.items() if rank is not None and p})

    def simulated_s(self, step: int) -> float:
        """Of a step."""
        layout = layout_of(self._plans[self.version(step)], self._scene)
        look = self._iterations.look(layout, self.truth(step))
        return float(look.iteration_s[step - 1])

    def phases(self) -> dict[str, list[int]]:
        """Steps that are compared."""
        changed = {one["step"] for one in self._found.receipts}
        near = {step + more for step in changed for more in (0, 1, 2)}
        found: dict[str, list[int]] = {"healthy": [], "after_death": [], "slow": [], "adapted": []}
        dead = next((one["to_version"] for one in self._found.receipts if one["losses"]), None)
        last = max(self._plans)
        for step in range(FIRST, STEPS + 1):
            if step in near or step not in self._found.ledger.ended_s:
                continue
            version = self.version(step)
            if step >= SLOW_FROM:
                name = "adapted" if version == last else "slow"
            else:
                name = "after_death" if version == dead else "healthy"
            found[name].append(step)
        return found

    def figures(self) -> dict[str, Any]:
        """Of all phases."""
        found = {}
        for name, steps in self.phases().items():
            pairs = [(self._found.step_s(step), self.simulated_s(step)) for step in steps]
            if pairs:
                found[name] = {
                    "steps": len(pairs),
                    "real_s": median(real for real, _ in pairs),
                    "simulated_s": median(simulated for _, simulated in pairs),
                    "rel_err": median(abs(simulated / real - 1) for real, simulated in pairs),
                }
        return found

    def detected(self) -> dict[str, float | None]:
        """Steps from the first slow one to the verdict."""
        verdicts = [
            one["step"] - SLOW_FROM + 1
            for one in self._found.events
            if one["event"] == Event.VALIDATION and one["verdict"] == "slow"
        ]
        healthy = self._iterations.look(
            layout_of(self._plans[0], self._scene), Health()
        ).iteration_s[:STEPS]
        mean_s = float(healthy[healthy > 0].mean())
        faults = of_faults(SLOW, self._setting.cluster, iteration_s=mean_s)
        record = simulate(
            self._setting, Joint(), faults, until_s=STEPS * 4 * mean_s, iterations=self._iterations
        )
        steps = [one.step - SLOW_FROM + 1 for one in record.changes]
        return {
            "real": verdicts[0] if verdicts else None,
            "engine": steps[0] if steps else None,
        }


def transitions(own: Outcome, other: Outcome) -> list[dict[str, float]]:
    """The changes of a job, by what those of the other one took."""
    known = calibrated(other.receipts)
    return [
        {
            "step": one["step"],
            "real_s": one["total_s"],
            "simulated_s": known.seconds(one["moved_bytes"]),
            "rel_err": abs(known.seconds(one["moved_bytes"]) / one["total_s"] - 1),
        }
        for one in own.receipts
    ]


def bench(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both jobs."""
    data = write_corpus(folder / "data", seed=options.seed)
    outcomes = {one: job(one, options, folder, data) for one in LAYOUTS}
    jobs: dict[str, Any] = {}
    for layout, other in zip(LAYOUTS, reversed(LAYOUTS), strict=True):
        compared = Compared(folder / layout, outcomes[layout])
        jobs[layout] = {
            "phases": compared.figures(),
            "transitions": transitions(outcomes[layout], outcomes[other]),
            "detect_steps": compared.detected(),
        }
    phases = [one for mine in jobs.values() for one in mine["phases"].values()]
    changes = [one["rel_err"] for mine in jobs.values() for one in mine["transitions"]]
    return {
        "iteration_rel_err": max(one["rel_err"] for one in phases),
        "transition_rel_err": median(changes),
        "jobs": jobs,
        "measured_on": "emulated A100s, CPU, gloo",
    }


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=400.0, help="for each job")
    parser.add_argument("--keep", type=Path, help="folder for all files; they stay")
    options = parser.parse_args()
    if options.keep is not None:
        options.keep.mkdir(parents=True, exist_ok=True)
        found = bench(options, options.keep)
    else:
        with tempfile.TemporaryDirectory(prefix="sim-vs-real-") as folder:
            found = bench(options, Path(folder))
    for layout, mine in found["jobs"].items():
        for name, one in mine["phases"].items():
            print(
                f"{layout} {name}: real {one['real_s']:.3f} s, simulated "
                f"{one['simulated_s']:.3f} s, {one['rel_err']:.2%} apart, {one['steps']} steps"
            )
        for one in mine["transitions"]:
            print(
                f"{layout} change after step {one['step']}: real {one['real_s']:.3f} s, simulated "
                f"{one['simulated_s']:.3f} s, {one['rel_err']:.0%} apart"
            )
        print(f"{layout} steps to the verdict: {mine['detect_steps']}")
    if options.json:
        print(json.dumps(found))
    good = found["iteration_rel_err"] <= ITERATION_BOUND
    return 0 if good and found["transition_rel_err"] <= TRANSITION_BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
