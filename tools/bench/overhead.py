"""What does the executor cost when nothing fails? Its iterations against Megatron's own, in pairs.

    .venv/bin/python tools/bench/overhead.py [--json] [--pairs 7] [--seed N]

Both run the same uniform layout, model, data and flags; once with Megatron's schedule and
optimizer and once under a plan. Runs alternate, and which of a pair comes first alternates too; a
run's figure is the median time of its iterations after the first few. With ``--json`` the last line
is one JSON object: ``median_ratio`` (plan over Megatron), ``ratios`` of all pairs, ``iteration_s``
of both. Exit code 0 when the median ratio is at most 1.01, else 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.trial import run_trial

BOUND = 1.01
WARM_UP, ITERATIONS = 3, 12
LAYOUT = {"tp": 1, "pp": 2, "dp": 2}
SIZES = ("--num-layers", "8", "--hidden-size", "256", "--ffn-hidden-size", "768")


def flags(data: Path, seed: int, extra: list[str]) -> list[str]:
    """The command line that both share."""
    words = ["--preset", "tiny", *SIZES, "--data-path", str(data), "--split", "100,0,0"]
    words += ["--train-iters", str(WARM_UP + ITERATIONS + 1), "--eval-iters", "0"]
    words += ["--seq-length", "256", "--global-batch-size", "16", "--seed", str(seed)]
    words += ["--tensor-model-parallel-size", str(LAYOUT["tp"])]
    words += ["--pipeline-model-parallel-size", str(LAYOUT["pp"])]
    return [*words, *extra]


def iteration_s(words: list[str]) -> float:
    """Median seconds of an iteration, from one iteration's event to the next."""
    trial = run_trial(words, world_size=LAYOUT["tp"] * LAYOUT["pp"] * LAYOUT["dp"])
    times = [event["time_s"] for event in trial.events if event["event"] == "iteration"]
    return statistics.median(b - a for a, b in pairwise(times[WARM_UP:]))


def measure(data: Path, folder: Path, pairs: int, seed: int, extra: list[str]) -> dict[str, Any]:
    """Runs the pairs."""
    timetable = folder / "uniform.yaml"
    timetable.write_text(json.dumps([{"step": 0, "uniform": LAYOUT}]))
    ways = {"upstream": [], "plan": ["--resilience-plan-schedule", str(timetable)]}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for pair in range(pairs):
        for name in sorted(ways, reverse=pair % 2 == 0):
            seconds[name].append(iteration_s([*flags(data, seed, extra), *ways[name]]))
        ratio = seconds["plan"][-1] / seconds["upstream"][-1]
        print(
            f"pair {pair}: upstream {seconds['upstream'][-1]:.3f} s, plan "
            f"{seconds['plan'][-1]:.3f} s, ratio {ratio:.4f}",
            flush=True,
        )
    ratios = [a / b for a, b in zip(seconds["plan"], seconds["upstream"], strict=True)]
    return {
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
        "iteration_s": {name: statistics.median(values) for name, values in seconds.items()},
        "layout": LAYOUT,
        "measured_on": "real CPU, gloo",
    }


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("extra", nargs="*", help="further Megatron flags, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name)
        data = write_corpus(folder / "data", seed=options.seed)
        result = measure(data, folder, options.pairs, options.seed, options.extra)
    print(
        f"median ratio {result['median_ratio']:.4f} "
        f"(from {min(result['ratios']):.4f} to {max(result['ratios']):.4f})"
    )
    if options.json:
        print(json.dumps(result))
    return 0 if result["median_ratio"] <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
