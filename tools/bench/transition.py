"""Live transitions of one job: do they keep the state, how much do they move, what do they leave?

    .venv/bin/python tools/bench/transition.py [--json] [--sequence random:12] [--seed N]
        [--variant fp32|bf16]

Each variant is one job on eight ranks that changes its layout before every step: random plans, with
ranks that stand by and come back; the first and the last transition lead to the same layout. After
each transition every element of parameters, masters and moments of every owner is compared, bit by
bit, with what it was before. Keys with ``--json``:

* ``bitwise_equal``;
* ``moved_over_lower_bound``: bytes sent, over those that ranks lacked, counted element by element;
* ``bandwidth_ratio``: speed of the move, with packing and without the checksums of what lies in
  place, over that of the bare messages (median of the job; the worse variant);
* ``bandwidth_ratio_verified``: the same, of the move and the whole phase ``verify``, in which
  checksums and the digest of all state are taken as well;
* ``phases_s``: median of each phase, on the slowest rank;
* ``growth``: what the job holds on to after the last transition, beyond that after the first: open
  files, threads and groups of all ranks, and the ratio of their resident memory, after the C
  library has handed back what it keeps of freed memory (``untrimmed_ratio``: as it is);
* ``variants``: all of this for each variant, with ``transitions``.

Exit code 0 when the state was kept, moved/bound <= 1.05, bandwidth >= 0.6, and nothing has grown
(memory: by no more than 5 %).
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import yaml

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.random_layouts import Wanted, random_layout
from megatron.resilience.testing.trial import run_trial
from megatron.resilience.testing.watch import records, watch
from resihp_ext.plan.plan import Plan

RANKS = 8
VARIANTS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "bf16": ("--bf16", "--use-distributed-optimizer"),
}
MODEL = {
    "num-layers": 6,
    "hidden-size": 768,
    "ffn-hidden-size": 1536,
    "num-attention-heads": 12,
    "num-query-groups": 12,
    "seq-length": 32,
    "global-batch-size": 8,
}
"""35 million parameters: moves that take longer than their overhead. Divides by 1, 2, 3 and 4."""
DEGREES = (1, 2, 3, 4)
SHARED = "/dev/shm"


def plans(sequence: str, seed: int) -> list[Plan]:
    """The plans of a job: one to start with, and one a transition.

    Raises:
        SystemExit: a sequence of another form.
    """
    kind, _, count = sequence.partition(":")
    if kind != "random" or not count.isdigit() or int(count) < 2:
        raise SystemExit(f"--sequence {sequence}: expected random:N with N of 2 or more")
    random = Random(seed)
    wanted = Wanted(
        num_layers=MODEL["num-layers"],
        micro_batches=MODEL["global-batch-size"],
        degrees=DEGREES,
        fewest=RANKS,
        most=RANKS,
    )
    drawn: list[Plan] = []
    while len(drawn) < int(count):
        plan = random_layout(random, wanted)
        # Every third plan leaves somebody standing by, those around it nobody.
        if bool(plan.standby) == (len(drawn) % 3 == 1):
            drawn.append(plan)
    return [*drawn, drawn[1]]


def run(variant: str, sequence: list[Plan], data: Path, folder: Path) -> dict[str, Any]:
    """Runs the job of one variant."""
    rows = []
    for step, plan in enumerate(sequence):
        (folder / f"plan-{step}.json").write_text(plan.to_json())
        rows.append({"step": step, "plan": f"plan-{step}.json"})
    timetable = folder / "timetable.yaml"
    timetable.write_text(yaml.safe_dump(rows))
    # One step more than plans: what a transition leaves is looked at a step later.
    words = ["--preset", "tiny", "--data-path", str(data), "--split", "100,0,0"]
    words += ["--train-iters", str(len(sequence) + 1), "--eval-iters", "0"]
    words += [word for name, size in MODEL.items() for word in (f"--{name}", str(size))]
    words += ["--max-position-embeddings", str(MODEL["seq-length"])]
    words += [*VARIANTS[variant], "--resilience-plan-schedule", str(timetable)]
    run_trial(
        words,
        world_size=RANKS,
        timeout_s=120.0 * len(sequence),
        before=functools.partial(watch, folder, raw=True),
    )
    return summary(records(folder))


def summary(transitions: list[dict[str, Any]]) -> dict[str, Any]:
    """The keys of one variant."""
    first, last = transitions[0]["left"], transitions[-1]["left"]
    names = list(transitions[0]["phases_s"])
    return {
        "bitwise_equal": all(one["bitwise_equal"] for one in transitions),
        "moved_over_lower_bound": max(
            one["moved_bytes"] / max(one["lower_bound_bytes"], 1) for one in transitions
        ),
        "bandwidth_ratio": median(one["raw_s"] / one["phases_s"]["move"] for one in transitions),
        "bandwidth_ratio_verified": median(
            one["raw_s"] / (one["phases_s"]["move"] + one["phases_s"]["verify"])
            for one in transitions
        ),
        "phases_s": {
            name: round(median(one["phases_s"][name] for one in transitions), 4) for name in names
        },
        "growth": {
            **{name: last[name] - first[name] for name in ("fds", "threads", "groups")},
            "rss_ratio": last["rss_bytes"] / first["rss_bytes"],
            "untrimmed_ratio": last["untrimmed_bytes"] / first["untrimmed_bytes"],
        },
        "transitions": transitions,
    }


def worst(variants: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The keys over all variants."""
    found = list(variants.values())
    return {
        "bitwise_equal": all(one["bitwise_equal"] for one in found),
        "moved_over_lower_bound": max(one["moved_over_lower_bound"] for one in found),
        **{
            name: min(one[name] for one in found)
            for name in ("bandwidth_ratio", "bandwidth_ratio_verified")
        },
        "phases_s": {
            name: max(one["phases_s"][name] for one in found) for name in found[0]["phases_s"]
        },
        "growth": {name: max(one["growth"][name] for one in found) for name in found[0]["growth"]},
    }


def show(variant: str, result: dict[str, Any]) -> None:
    """One line a transition."""
    for number, one in enumerate(result["transitions"]):
        total = sum(one["phases_s"].values())
        print(
            f"{variant} {number:2}: {'equal' if one['bitwise_equal'] else 'NOT EQUAL'}  "
            f"{one['compared'] / 1e6:.0f} M elements  {total:6.2f} s  "
            f"moved {one['moved_bytes'] / 2**20:6.1f} MiB in {one['messages']} messages, "
            f"{one['phases_s']['move']:.2f} s (bare {one['raw_s']:.2f} s)  "
            f"standby {one['standby']}",
            flush=True,
        )
    print(variant, {key: value for key, value in result.items() if key != "transitions"})


def good(result: dict[str, Any]) -> bool:
    """Whether all bounds hold."""
    growth = result["growth"]
    return (
        result["bitwise_equal"]
        and result["moved_over_lower_bound"] <= 1.05
        and result["bandwidth_ratio"] >= 0.6
        and max(growth["fds"], growth["threads"], growth["groups"]) <= 0
        and growth["rss_ratio"] <= 1.05
    )


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--sequence", default="random:12", help="random:N, N transitions")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sequence = plans(options.sequence, options.seed)
    variants = {}
    for variant in options.variant or VARIANTS:
        shared = SHARED if Path(SHARED).is_dir() else None
        with tempfile.TemporaryDirectory(prefix="transition-", dir=shared) as name:
            folder = Path(name)
            data = write_corpus(folder / "data", seed=options.seed)
            variants[variant] = run(variant, sequence, data, folder)
        show(variant, variants[variant])
    result = {**worst(variants), "variants": variants}
    if options.json:
        print(json.dumps(result))
    return 0 if good(result) else 1


if __name__ == "__main__":
    sys.exit(main())
