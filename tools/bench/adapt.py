"""What is a job worth that changes its plan when devices become slow?

    .venv/bin/python tools/bench/adapt.py [--layout 2x2x2 1x4x2] [--steps 44] [--json] [--keep DIR]

Eight emulated ranks (docs/emulation.md) on this machine. From step 20 on one device works at 0.5 of
its speed and another at 0.25. For each layout (TP x PP x DP) the same job runs twice, with
``--resilience-detect act`` and ``observe``; and once, for the losses, without emulation, so in
peace. Keys with ``--json``, for each layout in ``layouts``:

* ``speedup_ratio``: throughput with adaptation over that without, of the steps at the end that both
  ran with slow devices and, with adaptation, under the last plan (``compared_steps``);
  ``speedup_whole_ratio``: of all steps from 20 on, with detection, waiting and the changes;
* ``of_capacity_ratio``: throughput with adaptation over the bound, that of the healthy job times
  the mean speed of all devices (0.84375);
* ``detect_s``: from the beginning of step 20 until the coordinator had weighed another plan;
  ``plan_s``: from then until the new plan ran; ``changed_after_step``; ``transition_s``: of the
  changes themselves;
* ``max_rel_diff``: of any loss from the job in peace; ``ledger_exact``; ``first_processes``;
* ``overrun_ratio``: part of the emulated actions that took longer than they should: above a few
  hundredths, figures are this machine's;
* ``changes``, ``reasons``; ``problems``: what went wrong.

Exit code 0 when there are no problems: jobs ended well, losses are equal to 1e-5, samples the same,
processes unchanged, and there was a change. Figures are emulated.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron.resilience.testing.chaos.ledger import compare, differences
from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.slow_job import Job, Outcome, run
from resihp_ext.faults.fault import Fault, Kind

ROOT = Path(__file__).resolve().parents[2]
RANKS, SLOW_FROM, LOSS_BOUND = 8, 20, 1e-5
SLOW = (
    Fault(at_step=SLOW_FROM, rank=5, kind=Kind.SLOW, factor=0.5),
    Fault(at_step=SLOW_FROM, rank=2, kind=Kind.SLOW, factor=0.25),
)
CAPACITY = (RANKS - len(SLOW) + sum(one.factor or 1.0 for one in SLOW)) / RANKS
TENSOR_SCALE = 3.0
HEALTHY = range(8, SLOW_FROM)
"""Steps that are taken for the healthy throughput."""


def flags(layout: str) -> list[str]:
    """Of the model, the batch and a layout TPxPPxDP.

    Raises:
        SystemExit: not eight ranks.
    """
    tp, pp, dp = (int(size) for size in layout.split("x"))
    if tp * pp * dp != RANKS:
        raise SystemExit(f"--layout {layout}: not {RANKS} ranks")
    words = ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    layers, batch = (8, 16) if tp == 1 else (4, 12)
    return [*words, "--num-layers", str(layers), "--global-batch-size", str(batch)]


def time_scale(layout: str, scale: float) -> float:
    """Of the emulation: collectives of tensor-parallel groups take this machine's cores longer than
    all else, so that there the devices must be slower."""
    return scale if layout.startswith("1x") else TENSOR_SCALE * scale


class Bench:
    """The jobs of one call."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._data = write_corpus(folder / "data", seed=options.seed)

    def job(self, layout: str, name: str, detect: str, *, emulated: bool) -> Outcome:
        """Runs one job."""
        options = self._options
        scene = {"model": "llama2-7b", "hardware": "a100", "noise": 0.01}
        job = Job(
            ranks=RANKS,
            steps=options.steps,
            detect=detect,
            slow=SLOW if emulated else (),
            scene={**scene, "time_scale": time_scale(layout, options.time_scale)}
            if emulated
            else None,
            flags=[*flags(layout), "--seed", str(1234 + options.seed)],
            limit_s=options.limit_s,
        )
        folder = self._folder / layout / name
        shutil.rmtree(folder, ignore_errors=True)
        found = run(job, tree=ROOT, data=self._data, folder=folder)
        print(f"{layout} {name}: exit {found.ended.exit_codes}, {found.ended.wall_s:.0f} s")
        sys.stdout.flush()
        return found

    def layout(self, layout: str) -> dict[str, Any]:
        """The figures of one layout."""
        peace = self.job(layout, "peace", "off", emulated=False)
        adapted = self.job(layout, "act", "act", emulated=True)
        without = self.job(layout, "observe", "observe", emulated=True)
        steps = self._options.steps
        problems = [
            f"{name}: {what}"
            for name, one in (("peace", peace), ("act", adapted), ("observe", without))
            for what in wrong(one, peace, steps)
        ]
        if not adapted.receipts:
            problems.append("act: the plan did not change")
        result = {"problems": problems, "max_rel_diff": max_rel_diff(adapted, without, peace)}
        if not problems:
            result |= figures(adapted, without, steps)
        return result


def wrong(one: Outcome, peace: Outcome, steps: int) -> list[str]:
    """What speaks against a job."""
    found = [] if one.ended.exit_codes == (0,) else [f"exit codes {one.ended.exit_codes}"]
    found += [f"left behind: {name}" for name in one.ended.leftovers]
    found += compare(one.ledger, peace.ledger, steps)
    found += [] if one.first_processes else ["a rank has another process"]
    if (worst := differences(one.ledger.losses, peace.ledger.losses)) > LOSS_BOUND:
        found.append(f"a loss differs by {worst:.1e}")
    return found


def max_rel_diff(adapted: Outcome, without: Outcome, peace: Outcome) -> float:
    """Of all losses."""
    return max(differences(one.ledger.losses, peace.ledger.losses) for one in (adapted, without))


def figures(adapted: Outcome, without: Outcome, steps: int) -> dict[str, Any]:
    """Of two jobs that went well."""
    changed = adapted.receipts[-1]["step"]
    # The first step under a plan does what is done once.
    late = range(changed + 2, steps + 1)
    healthy_s = fmean(adapted.step_s(step) for step in HEALTHY)
    ended = adapted.ledger.ended_s
    noticed_s = adapted.weighed()[0]["time_s"]
    with_s, without_s = (fmean(one.step_s(step) for step in late) for one in (adapted, without))
    whole = [
        one.ledger.ended_s[steps] - one.ledger.ended_s[SLOW_FROM - 1] for one in (adapted, without)
    ]
    ends = [e["emulation"] for one in (adapted, without) for e in one.events if "emulation" in e]
    return {
        "overrun_ratio": sum(e["overruns"] for e in ends) / sum(e["actions"] for e in ends),
        "compared_steps": [late[0], late[-1]],
        "healthy_step_s": healthy_s,
        "adapted_step_s": with_s,
        "slow_step_s": without_s,
        "speedup_ratio": without_s / with_s,
        "speedup_whole_ratio": whole[1] / whole[0],
        "of_capacity_ratio": healthy_s / with_s / CAPACITY,
        "detect_s": noticed_s - ended[SLOW_FROM - 1],
        "plan_s": adapted.receipts[0]["resumed_s"] - noticed_s,
        "changed_after_step": [one["step"] for one in adapted.receipts],
        "transition_s": median(one["total_s"] for one in adapted.receipts),
        "changes": len(adapted.receipts),
        "reasons": [one["reason"] for one in adapted.receipts],
        "ledger_exact": True,
        "first_processes": True,
    }


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--layout", nargs="+", default=["2x2x2", "1x4x2"], help="TPxPPxDP")
    parser.add_argument("--steps", type=int, default=42, help="more than 34")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--time-scale",
        type=float,
        default=0.25,
        help="of layouts without TP; see docs/emulation.md",
    )
    parser.add_argument("--limit-s", type=float, default=400.0, help="for each job")
    parser.add_argument("--keep", help="folder for all files; they stay")
    options = parser.parse_args()
    if options.steps <= SLOW_FROM + 14:
        parser.error(f"--steps {options.steps}: give more than {SLOW_FROM + 14}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and the job is ended
    folder = Path(options.keep or tempfile.mkdtemp(prefix="adapt-"))
    folder.mkdir(parents=True, exist_ok=True)
    bench = Bench(options, folder)
    found = {layout: bench.layout(layout) for layout in options.layout}
    problems = [f"{name}: {what}" for name, one in found.items() for what in one["problems"]]
    for line in problems:
        print(f"PROBLEM {line}")
    if problems:
        print(f"see {folder}")
    elif not options.keep:
        shutil.rmtree(folder)
    result = {
        "layouts": found,
        "capacity": CAPACITY,
        "max_rel_diff": max(one["max_rel_diff"] for one in found.values()),
        "measured_on": "emulated A100s, CPU, gloo",
    }
    print(json.dumps(result, indent=1))
    if options.json:
        print(json.dumps(result))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
