"""Does a resumed job go on as if it had never stopped?

    .venv/bin/python tools/bench/resume_parity.py [--json] [--quick] [--seed N]

A job of ten steps is compared with one that stops after five, saves, and is resumed: in the same
layout, where losses and gradient norms must be equal to the last bit, and in other layouts, where
losses must agree to 1e-5 and gradient norms to 5e-5. Keys with ``--json``:
``same_layout_bitwise``, ``max_rel_diff``, ``max_rel_diff_grad_norm``, ``cases``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.trial import Trial, max_rel_diff, run_trial

Layout = tuple[int, int, int]
STEPS, STOP = 10, 5
LOSS_BOUND, NORM_BOUND = 1e-5, 5e-5

CASES: tuple[tuple[str, Layout, tuple[Layout, ...], tuple[str, ...]], ...] = (
    ("plain", (2, 2, 2), ((2, 2, 2), (1, 1, 1), (2, 1, 2)), ()),
    (
        "packed, sequence-parallel, distributed optimizer",
        (2, 2, 2),
        ((2, 2, 2), (1, 2, 2), (2, 1, 1)),
        ("--packed-sequences", "--sequence-parallel", "--use-distributed-optimizer"),
    ),
    (
        "packed, async save",
        (1, 2, 1),
        ((1, 2, 1), (2, 1, 1)),
        ("--packed-sequences", "--async-save"),
    ),
    (
        "dropout",
        (2, 1, 1),
        ((2, 1, 1),),
        ("--attention-dropout", "0.1", "--hidden-dropout", "0.1"),
    ),
)
"""Variant, layout that saves, layouts that resume, flags. With dropout only the same layout counts:
masks come from generators that belong to a rank's place."""


def flags(layout: Layout, data: Path, seed: int, extra: tuple[str, ...]) -> list[str]:
    """The command line of one job."""
    tp, pp, _ = layout
    kept = [word for word in extra if tp > 1 or word != "--sequence-parallel"]
    words = ["--preset", "tiny", "--data-path", str(data), "--split", "100,0,0"]
    words += ["--train-iters", str(STEPS), "--eval-iters", "0", "--clip-grad", "0.5"]
    words += ["--global-batch-size", "8", "--seed", str(seed), "--seq-length", "128"]
    words += ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    if "--use-distributed-optimizer" in kept:
        # Upstream's other formats of this optimizer's state can only be loaded at the same TP, PP.
        words.append("--dist-ckpt-optim-fully-reshardable")
    return [*words, *kept]


def trial(layout: Layout, words: list[str]) -> Trial:
    """Runs one job."""
    tp, pp, dp = layout
    return run_trial(words, world_size=tp * pp * dp)


def compare(data: Path, seed: int, case: int) -> list[dict[str, Any]]:
    """Runs one variant: straight through, stopped, and resumed in every layout."""
    variant, layout, others, extra = CASES[case]
    words = flags(layout, data, seed, extra)
    straight = trial(layout, words)
    rows = []
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        save = ["--save", folder, "--save-interval", str(STOP), "--exit-interval", str(STOP)]
        stopped = trial(layout, [*words, *save])
        for other in others:
            resumed = trial(other, [*flags(other, data, seed, extra), "--load", folder])
            losses, norms = stopped.losses + resumed.losses, stopped.grad_norms + resumed.grad_norms
            equal = losses == straight.losses and norms == straight.grad_norms
            rows.append(
                {
                    "variant": variant,
                    "from": layout,
                    "to": other,
                    "bitwise": equal,
                    "rel_diff": max_rel_diff(losses, straight.losses),
                    "rel_diff_grad_norm": max_rel_diff(norms, straight.grad_norms),
                }
            )
            print(
                f"{variant:50} {layout} -> {other}  bitwise {equal}  loss "
                f"{rows[-1]['rel_diff']:.1e}  grad norm {rows[-1]['rel_diff_grad_norm']:.1e}",
                flush=True,
            )
    return rows


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--quick", action="store_true", help="only the second variant")
    parser.add_argument("--case", type=int, action="append", help="only this variant, by number")
    parser.add_argument("--seed", type=int, default=1234)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="parity-") as folder:
        data = write_corpus(Path(folder) / "data", seed=options.seed)
        chosen = (1,) if options.quick else options.case or range(len(CASES))
        rows = [row for case in chosen for row in compare(data, options.seed, case)]
    result = {
        "same_layout_bitwise": all(row["bitwise"] for row in rows if row["from"] == row["to"]),
        "max_rel_diff": max(row["rel_diff"] for row in rows),
        "max_rel_diff_grad_norm": max(row["rel_diff_grad_norm"] for row in rows),
        "cases": len(rows),
        "rows": rows,
    }
    if options.json:
        print(json.dumps(result))
    good = (
        result["same_layout_bitwise"]
        and result["max_rel_diff"] <= LOSS_BOUND
        and result["max_rel_diff_grad_norm"] <= NORM_BOUND
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
