"""Real jobs whose steps are timed, for ``predictor.py``: packed sequences of Python's own source.

A job runs one layout for ``LEARNED`` steps, which fits may learn from, then on in it, and then in
others that they have not seen. The same few sequences come again and again, in another order in
each epoch: how much their times differ is the noise of the machine.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.trial import run_trial
from resihp_ext.detector.timed import RankStep
from resihp_ext.plan.plan import Device, Plan
from resihp_ext.plan.timetable import Frame, plan_at, read_timetable
from resihp_ext.telemetry.trace import timed_steps

LAYERS = 4
FIRST_STEPS = 64
"""In the first layout: 2 to warm up, 12 to settle, 30 to learn from, 20 to judge."""
OTHER_STEPS = 8
"""In each other one: 2 to warm up, 6 to judge."""
LIMIT_S = 900.0

Step = tuple[int, Plan, Mapping[int, RankStep]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is run."""

    ranks: int
    layouts: Sequence[str]
    """Of a timetable, without their steps."""
    micro_batches: int
    flags: str
    """Megatron's, beyond the preset ``tiny``."""
    scene: str | None = None
    """Of emulated devices, YAML."""
    documents: int = 80


REAL = Job(
    ranks=2,
    layouts=(
        "uniform: {tp: 1, pp: 2, dp: 1}",
        "replicas: [[{ranks: [0], layers: 3}, {ranks: [1], layers: 1}]]",
        "uniform: {tp: 1, pp: 1, dp: 2}",
    ),
    micro_batches=6,
    flags="--hidden-size 128 --ffn-hidden-size 256 --seq-length 1024",
)
"""One process for each of two cores: pipeline, another split of the layers, one stage less."""

EMULATED = Job(
    ranks=8,
    layouts=(
        "uniform: {tp: 2, pp: 2, dp: 2}",
        "replicas: [[{ranks: [0, 1], layers: 3}, {ranks: [2, 3], layers: 1}], "
        "[{ranks: [4, 5], layers: 3}, {ranks: [6, 7], layers: 1}]]",
        "uniform: {tp: 4, pp: 2, dp: 1}",
        "uniform: {tp: 2, pp: 4, dp: 1}",
    ),
    micro_batches=8,
    flags="--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --num-query-groups 4 "
    "--seq-length 512 --sequence-parallel",
    scene="{model: llama2-13b, hardware: a100, seq_length: 8192, time_scale: %s, noise: %s, "
    "seed: %s}",
    documents=60,
)
"""Eight ranks of a large model: another split of the layers, another TP degree, another depth."""


def steps_of(job: Job, seed: int, scene: tuple[float, float] | None = None) -> list[Step]:
    """Runs a job; its steps in order.

    Args:
        seed: Of corpus, weights, order of the sequences, and noise.
        scene: Time scale and noise of emulated devices.

    Raises:
        RankError: a rank failed, or the job takes too long.
    """
    with tempfile.TemporaryDirectory(prefix="predictor-") as name:
        folder = Path(name)
        data = write_corpus(folder / "data", seed=seed, documents=job.documents)
        timetable = folder / "layouts.yaml"
        starts = [0, *(FIRST_STEPS + OTHER_STEPS * i for i in range(len(job.layouts)))]
        rows = zip(starts, job.layouts, strict=False)
        timetable.write_text("".join(f"- {{step: {at}, {text}}}\n" for at, text in rows))
        words = ["--preset", "tiny", "--device", "cpu", *job.flags.split(), "--packed-sequences"]
        words += ["--data-path", str(data), "--split", "100,0,0", "--eval-iters", "0"]
        words += ["--train-iters", str(starts[-1]), "--seed", str(1234 + seed)]
        words += ["--global-batch-size", str(job.micro_batches), "--num-layers", str(LAYERS)]
        words += ["--resilience-timings-steps", "1", "--resilience-plan-schedule", str(timetable)]
        if job.scene is not None and scene is not None:
            (folder / "scene.yaml").write_text(job.scene % (*scene, seed))
            words += ["--resilience-emulate", str(folder / "scene.yaml")]
        trial = run_trial(words, world_size=job.ranks, timeout_s=LIMIT_S)
        devices = tuple(Device(rank=rank, node=0) for rank in range(job.ranks))
        frame = Frame(num_layers=LAYERS, micro_batches=job.micro_batches, devices=devices)
        plans = read_timetable(timetable, frame)
    by_step: dict[int, dict[int, RankStep]] = defaultdict(dict)
    for one in timed_steps(trial.events):
        by_step[one.step][one.rank] = one
    return [(step, plan_at(plans, step - 1), of) for step, of in sorted(by_step.items())]
