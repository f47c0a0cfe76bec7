"""Do all layouts train the same model? Losses, gradient norms and weights against one process.

    .venv/bin/python tools/bench/layout_parity.py [--json] [--quick] [--seed N]

Every case is a real job: fp32, Adam, gradient clipping active in every step, initial weights and
data the same for all layouts. With ``--json`` the last line is one JSON object: ``max_rel_diff``,
``max_rel_diff_grad_norm``, ``max_weight_diff_ratio`` (largest deviation of a final weight from the
one-process run, over the same deviation of the (2, 2, 2) run of that variant), ``cases``.
Exit code 0 when losses agree to 1e-5 and gradient norms to 5e-5, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.trial import Trial, max_rel_diff, max_weight_diff, run_trial

LAYOUTS = ((1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 2))
"""(TP, PP, DP); the first is the reference, the last the floor of the weights' noise."""

VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "packed": ("--packed-sequences",),
    "sequence-parallel": ("--sequence-parallel",),
    "distributed-optimizer": ("--use-distributed-optimizer",),
    "tied": ("--tied",),
    "qk-layernorm, sequence-parallel": ("--qk-layernorm", "--sequence-parallel"),
    "packed, micro-batch of 2": ("--packed-sequences", "--micro-batch-size", "2"),
    "packed, all": ("--packed-sequences", "--sequence-parallel", "--use-distributed-optimizer"),
    "packed, all, tied": (
        "--packed-sequences",
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--tied",
    ),
}
QUICK = ("plain", "packed, all, tied")
STEPS = 10
LOSS_BOUND, NORM_BOUND = 1e-5, 5e-5


def flags(variant: str, layout: tuple[int, int, int], data: Path, seed: int) -> list[str]:
    """The command line of one case."""
    tp, pp, _ = layout
    extra = [word for word in VARIANTS[variant] if word != "--tied"]
    if tp == 1 and "--sequence-parallel" in extra:
        # Upstream refuses it at TP 1, where it has no meaning.
        extra.remove("--sequence-parallel")
    words = ["--preset", "tiny", "--data-path", str(data), "--split", "100,0,0"]
    words += ["--train-iters", str(STEPS), "--eval-iters", "0", "--clip-grad", "0.5"]
    words += ["--global-batch-size", "8", "--seed", str(seed), "--seq-length", "128"]
    words += ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    if "--tied" in VARIANTS[variant]:
        words.append("--no-untie-embeddings-and-output-weights")
    return [*words, *extra]


def compare(variant: str, data: Path, seed: int) -> list[dict[str, Any]]:
    """Runs all layouts of one variant; one row for each but the reference."""
    trials: dict[tuple[int, int, int], Trial] = {}
    rows = []
    for layout in LAYOUTS:
        started_s = time.perf_counter()
        tp, pp, dp = layout
        trials[layout] = run_trial(flags(variant, layout, data, seed), world_size=tp * pp * dp)
        seconds = time.perf_counter() - started_s
        print(f"{variant:28} {layout}  {seconds:5.1f} s", flush=True)
    reference = trials[LAYOUTS[0]]
    clipped = min(reference.grad_norms)
    if clipped <= 0.5:
        raise SystemExit(f"{variant}: gradient norm {clipped:.3f}: clipping at 0.5 is not active")
    floor = max_weight_diff(trials[LAYOUTS[-1]].weights, reference.weights)
    for layout, trial in list(trials.items())[1:]:
        weight_diff = max_weight_diff(trial.weights, reference.weights)
        rows.append(
            {
                "variant": variant,
                "layout": layout,
                "rel_diff": max_rel_diff(trial.losses, reference.losses),
                "rel_diff_grad_norm": max_rel_diff(trial.grad_norms, reference.grad_norms),
                "weight_diff": weight_diff,
                "weight_diff_ratio": weight_diff / floor,
            }
        )
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The keys that others read."""
    return {
        "max_rel_diff": max(row["rel_diff"] for row in rows),
        "max_rel_diff_grad_norm": max(row["rel_diff_grad_norm"] for row in rows),
        "max_weight_diff_ratio": max(row["weight_diff_ratio"] for row in rows),
        "max_weight_diff": max(row["weight_diff"] for row in rows),
        "steps": STEPS,
        "cases": len(rows),
        "rows": rows,
    }


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--quick", action="store_true", help=f"only {QUICK}")
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        data = write_corpus(Path(folder) / "data", seed=options.seed)
        chosen = QUICK if options.quick else tuple(VARIANTS)
        rows = [row for variant in chosen for row in compare(variant, data, options.seed)]
    for row in rows:
        print(
            f"{row['variant']:28} {row['layout']}  loss {row['rel_diff']:.1e}  "
            f"grad norm {row['rel_diff_grad_norm']:.1e}  weights {row['weight_diff']:.1e} "
            f"({row['weight_diff_ratio']:.2f} of the floor)"
        )
    result = summary(rows)
    if options.json:
        print(json.dumps(result))
    good = result["max_rel_diff"] <= LOSS_BOUND and result["max_rel_diff_grad_norm"] <= NORM_BOUND
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
