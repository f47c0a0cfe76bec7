"""Do uneven layouts train the model of one process? Random plans, and deliberate errors.

    .venv/bin/python tools/bench/hetero_parity.py [--plans N] [--seed N] [--json]

Every plan is a real job of twenty steps through upstream's ``pretrain``, on up to eight ranks.
Features take turns, and so do the kinds of unevenness that a plan must have. Criteria:
``megatron/resilience/testing/parity.py``. The same criteria must catch each of the deliberate
errors of ``megatron/resilience/testing/mutants.py``.

With ``--json`` the last line is one JSON object. ``max_rel_diff``, ``max_rel_diff_grad_norm`` and
``max_weight_diff_ratio`` are those of the fp32 plans against one process, the last over the
deviation of upstream's own uniform run of eight ranks, which counts as at least one unit in the
last place of a weight near 1. ``half`` has the ratios of the bf16 plans over uniform runs,
``disagreements`` counts weights of which an owner has other bits. Further ``cases``, ``kinds`` (how
many plans have each), ``mutants_caught`` of ``mutants``, ``not_run`` (what did not get to its end),
``rows`` and ``ok``. Exit code 0 when everything was run and all of it holds, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.mutants import FLAGS, MUTANTS, PLAN
from megatron.resilience.testing.parity import (
    HALF_UNIFORM,
    MODEL,
    UNIFORM,
    Reference,
    Verdict,
    timetable,
)
from megatron.resilience.testing.random_layouts import LayoutKind, Wanted, kinds, random_layout
from megatron.resilience.testing.trial import Trial, run_trial
from resihp_ext.plan.plan import Plan
from resihp_ext.testing.ranks import RankError

STEPS, MUTANT_STEPS = 20, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Features:
    """Flags that go together, and what they say about plans."""

    flags: str = ""
    spread: str = ""
    """Flags that upstream refuses in one process, or that mean nothing there."""
    planned: str = ""
    """Flags that only plans know."""
    micro_batches: int = 8
    samples: int = 1
    """Micro-batch size."""
    layers: int = 4
    chunks: int = 1
    """Model chunks of a rank in the first replica of a plan."""

    @property
    def degrees(self) -> tuple[int, ...]:
        """Tensor-parallel degrees that divide the query groups."""
        return (1, 2, 3, 4, 6) if TWELVE_GROUPS in self.flags else (1, 2, 3, 6)

    @property
    def words(self) -> list[str]:
        """The part of the command line that one process understands."""
        size = ["--micro-batch-size", str(self.samples), "--num-layers", str(self.layers)]
        batch = ["--global-batch-size", str(self.samples * self.micro_batches)]
        return [*size, *batch, *self.flags.split()]


TWELVE_GROUPS = "--num-query-groups 12"
TIED = "--no-untie-embeddings-and-output-weights"
FEATURES = {
    "plain": Features(flags=TWELVE_GROUPS),
    "packed, sequence-parallel": Features(
        flags=f"{TWELVE_GROUPS} --packed-sequences", spread="--sequence-parallel"
    ),
    "tied, packed": Features(flags=f"{TIED} --packed-sequences"),
    "loss per token": Features(
        flags="--packed-sequences --calculate-per-token-loss --eod-mask-loss"
    ),
    "qk-layernorm, sequence-parallel": Features(
        flags="--qk-layernorm", spread="--sequence-parallel"
    ),
    "distributed optimizer": Features(
        flags=f"{TWELVE_GROUPS} --packed-sequences", spread="--use-distributed-optimizer"
    ),
    "distributed optimizer without a second copy, tied, sequence-parallel": Features(
        flags=TIED,
        spread="--use-distributed-optimizer --sequence-parallel",
        planned="--resilience-optimizer-redundancy checkpoint",
    ),
    "bf16": Features(flags=f"{TWELVE_GROUPS} --bf16"),
    "bf16, distributed optimizer, packed, sequence-parallel": Features(
        flags=f"{TWELVE_GROUPS} --bf16 --packed-sequences",
        spread="--use-distributed-optimizer --sequence-parallel",
    ),
    "micro-batches of 2, packed": Features(flags="--packed-sequences", samples=2, micro_batches=6),
    "biases, layer norm, GELU, tied, sequence-parallel, recomputed": Features(
        flags=f"{TIED} --no-disable-bias-linear --normalization LayerNorm --no-swiglu "
        "--position-embedding-type learned_absolute "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        spread="--sequence-parallel",
    ),
    "virtual stages": Features(chunks=2, layers=6),
}


@dataclass
class Jobs:
    """Runs jobs on one corpus, and tells of each."""

    folder: Path
    seed: int
    not_run: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._data = write_corpus(self.folder / "data", seed=self.seed)
        self._references: dict[str, Reference | None] = {}

    def run(self, what: str, steps: int, words: list[str], **settings: Any) -> Trial | None:
        """Runs a job; None, and a line that says why, when it does not get to its end."""
        argv = [*MODEL, "--data-path", str(self._data), "--seed", str(self.seed + 1)]
        started_s = time.perf_counter()
        try:
            trial = run_trial([*argv, "--train-iters", str(steps), *words], **settings)
        except (RankError, ValueError) as error:
            print(f"NOT RUN: {what}: {_reason(error)}", flush=True)
            self.not_run.append(what)
            return None
        print(f"{time.perf_counter() - started_s:5.1f} s  {what}", flush=True)
        return trial

    def reference(self, name: str, features: Features, steps: int) -> Reference | None:
        """What plans of these features are compared with; None when that does not run."""
        if name not in self._references:
            words = features.words
            one = self.run(f"{name}: one process", steps, words)
            half = "--bf16" in features.flags
            uniform = [
                self._uniform(name, features, steps, layout)
                for layout in (HALF_UNIFORM if half else UNIFORM)
            ]
            self._references[name] = None
            if one is not None and None not in uniform:
                self._references[name] = Reference(one=one, uniform=tuple(uniform), half=half)
        return self._references[name]

    def _uniform(
        self, name: str, features: Features, steps: int, layout: tuple[int, int, int]
    ) -> Trial | None:
        tp, pp, dp = layout
        words = [*features.words, *features.spread.split()]
        words += ["--tensor-model-parallel-size", str(tp)]
        words += ["--pipeline-model-parallel-size", str(pp)]
        return self.run(f"{name}: uniform {layout}", steps, words, world_size=tp * pp * dp)

    def planned(
        self,
        what: str,
        features: Features,
        plan: Plan,
        steps: int,
        before: Callable[[], None] | None = None,
    ) -> Trial | None:
        """Runs a job in a plan's layout."""
        extra = [*features.spread.split(), *features.planned.split()]
        words = [*features.words, *extra, *timetable(plan, self.folder)]
        return self.run(what, steps, words, world_size=len(plan.devices), before=before)


def _reason(error: Exception) -> str:
    """The most telling line of what went wrong."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or line.startswith("error: ")]
    return (telling or lines)[-1].strip()


def describe(plan: Plan) -> str:
    """Degree and layers of each stage: ``2x3+1x1 | 1x4, 1 standby``."""
    replicas = ("+".join(f"{s.tp}x{s.depth}" for s in one.stages) for one in plan.replicas)
    standby = f", {len(plan.standby)} standby" if plan.standby else ""
    return " | ".join(replicas) + standby


def draw(count: int, seed: int) -> list[tuple[str, Plan]]:
    """Names of feature sets and plans for them; every plan has the kind whose turn it is."""
    random = Random(seed)
    names, all_kinds = list(FEATURES), list(LayoutKind)
    drawn = []
    for number in range(count):
        name = names[number % len(names)]
        features = FEATURES[name]
        wanted = Wanted(
            num_layers=features.layers,
            micro_batches=features.micro_batches,
            degrees=features.degrees,
            kinds={all_kinds[number % len(all_kinds)], random.choice(all_kinds)},
            chunks=features.chunks,
        )
        drawn.append((name, random_layout(random, wanted)))
    return sorted(drawn, key=lambda one: names.index(one[0]))


def run_plans(jobs: Jobs, drawn: list[tuple[str, Plan]]) -> list[tuple[dict[str, Any], Verdict]]:
    """Runs every plan; those that do not run are missing."""
    found = []
    for name, plan in drawn:
        reference = jobs.reference(name, FEATURES[name], STEPS)
        trial = jobs.planned(f"{name}: {describe(plan)}", FEATURES[name], plan, STEPS)
        if reference is None or trial is None:
            continue
        verdict = reference.verdict(trial)
        print(f"         {verdict}", flush=True)
        row = {"features": name, "layout": describe(plan), "kinds": sorted(kinds(plan))}
        row |= {"half": reference.half, **verdict.figures, "broken": verdict.broken}
        found.append((row, verdict))
    return found


def run_mutants(jobs: Jobs) -> dict[str, list[str]]:
    """Runs every deliberate error, and the sound job beside it.

    Returns:
        What each breaks; the sound job under the name ``sound``.
    """
    found: dict[str, list[str]] = {}
    base = Features(flags=FLAGS)
    reference = jobs.reference("mutants", base, MUTANT_STEPS)
    for name, mutant in [("sound", None), *((one.name, one) for one in MUTANTS)]:
        spread = mutant.flags if mutant else "--sequence-parallel"
        features = Features(flags=base.flags, spread=spread)
        trial = jobs.planned(
            f"mutant: {name}", features, PLAN, MUTANT_STEPS, mutant.apply if mutant else None
        )
        if reference is not None and trial is not None:
            verdict = reference.verdict(trial)
            found[name] = verdict.broken
            print(f"         {verdict}", flush=True)
    return found


def summary(
    jobs: Jobs,
    drawn: list[tuple[str, Plan]],
    found: list[tuple[dict[str, Any], Verdict]],
    broken: dict[str, list[str]],
) -> dict[str, Any]:
    """The keys that others read."""
    rows = [row for row, _ in found]
    exact, half = ([row for row in rows if row["half"] is which] for which in (False, True))
    has = [kind for row in rows for kind in row["kinds"]]
    caught = {name: what for name, what in broken.items() if what and name != "sound"}
    result: dict[str, Any] = {
        "max_rel_diff": _most(exact, "rel_diff"),
        "max_rel_diff_grad_norm": _most(exact, "rel_diff_grad_norm"),
        "max_weight_diff_ratio": _most(exact, "weight_diff_ratio"),
        "half": {
            name: _most(half, name)
            for name in ("rel_diff_ratio", "rel_diff_grad_norm_ratio", "weight_diff_ratio")
        },
        "disagreements": _most(rows, "disagreements"),
        "cases": len(rows),
        "kinds": {kind: has.count(kind) for kind in LayoutKind},
        "mutants": len(MUTANTS),
        "mutants_caught": len(caught),
        "caught": caught,
        "steps": STEPS,
        "not_run": jobs.not_run,
        "rows": rows,
    }
    result["ok"] = (
        not jobs.not_run
        and len(rows) == len(drawn)
        and not any(row["broken"] for row in rows)
        and len(caught) == len(MUTANTS)
        and broken["sound"] == []
        and (len(drawn) < len(LayoutKind) or all(result["kinds"].values()))
    )
    return result


def _most(rows: list[dict[str, Any]], name: str) -> float | None:
    return max((row[name] for row in rows), default=None)


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plans", type=int, default=24, help="how many random plans")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hetero-") as folder:
        jobs = Jobs(Path(folder), options.seed)
        drawn = draw(options.plans, options.seed)
        found = run_plans(jobs, drawn)
        broken = run_mutants(jobs)
    result = summary(jobs, drawn, found, broken)
    for kind, count in result["kinds"].items():
        print(f"{count:3} plans: {kind}")
    print(f"{result['mutants_caught']} of {result['mutants']} deliberate errors caught")
    for name in result["not_run"]:
        print(f"NOT RUN: {name}")
    print("OK" if result["ok"] else "NOT OK")
    if options.json:
        print(json.dumps(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
