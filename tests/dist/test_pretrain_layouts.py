"""Layouts train the same model; samples do not depend on who asks for them.

The whole matrices are benchmarks (tools/bench/layout_parity.py, resume_parity.py); here are the
hardest rows of each.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from jobs import command, exit_code_and_words

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.trial import (
    PRELOAD,
    max_rel_diff,
    max_weight_diff,
    run_trial,
)
from resihp_ext.events import Event
from resihp_ext.testing.ranks import preload, run_ranks

pytestmark = pytest.mark.dist

HARDEST = ("--packed-sequences", "--sequence-parallel", "--use-distributed-optimizer")
TIED = "--no-untie-embeddings-and-output-weights"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "data", documents=150)


@pytest.mark.timeout(300)
def test_eight_ranks_train_the_model_of_one(data: Path) -> None:
    one = run_trial(command(data, "--packed-sequences", TIED, steps=5))
    eight = run_trial(command(data, *HARDEST, TIED, tp=2, pp=2, steps=5), world_size=8)
    assert min(one.grad_norms) > 0.5, "clipping must be active, or it hides nothing"
    assert max_rel_diff(eight.losses, one.losses) <= 1e-5
    assert max_rel_diff(eight.grad_norms, one.grad_norms) <= 5e-5
    assert max_weight_diff(eight.weights, one.weights) <= 1e-5
    assert "output_layer.weight" not in one.weights, "tied embeddings have no output weight"


@pytest.mark.timeout(300)
def test_several_packed_samples_in_a_micro_batch_cross_stages(data: Path) -> None:
    words = ["--packed-sequences", "--micro-batch-size", "2"]
    one = run_trial(command(data, *words))
    four = run_trial(command(data, *words, "--sequence-parallel", tp=2, pp=2), world_size=4)
    assert max_rel_diff(four.losses, one.losses) <= 1e-5
    assert max_rel_diff(four.grad_norms, one.grad_norms) <= 5e-5


@pytest.mark.timeout(300)
def test_resumed_in_the_same_layout_bitwise_with_dropout(data: Path, tmp_path: Path) -> None:
    words = ["--packed-sequences", "--attention-dropout", "0.1", "--hidden-dropout", "0.1"]
    straight = run_trial(command(data, *words, tp=2, steps=4), world_size=2)
    folder = str(tmp_path / "checkpoint")
    save = ["--save", folder, "--save-interval", "2", "--exit-interval", "2"]
    stopped = run_trial(command(data, *words, *save, tp=2, steps=4), world_size=2)
    resumed = run_trial(command(data, *words, "--load", folder, tp=2, steps=4), world_size=2)
    assert stopped.losses + resumed.losses == straight.losses
    assert stopped.grad_norms + resumed.grad_norms == straight.grad_norms


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_resumed_distributed_optimizer_in_another_layout(data: Path, tmp_path: Path) -> None:
    words = [*HARDEST, "--dist-ckpt-optim-fully-reshardable"]
    straight = run_trial(command(data, *words, tp=2, pp=2, steps=4), world_size=4)
    folder = str(tmp_path / "checkpoint")
    save = ["--save", folder, "--save-interval", "2", "--exit-interval", "2"]
    stopped = run_trial(command(data, *words, *save, tp=2, pp=2, steps=4), world_size=4)
    other = [word for word in words if word != "--sequence-parallel"]
    resumed = run_trial(command(data, *other, "--load", folder, steps=4), world_size=2)
    assert max_rel_diff(stopped.losses + resumed.losses, straight.losses) <= 1e-5
    assert max_rel_diff(stopped.grad_norms + resumed.grad_norms, straight.grad_norms) <= 5e-5


def test_workload_of_every_micro_batch_is_recorded(data: Path) -> None:
    trial = run_trial(command(data, "--packed-sequences", tp=1, pp=2), world_size=4)
    seen = [event for event in trial.events if event["event"] == Event.MICRO_BATCHES]
    assert sorted((event["step"], event["replica"]) for event in seen) == [
        (step, replica) for step in (1, 2, 3) for replica in (0, 1)
    ]
    for event in seen:
        assert len(event["micro_batches"]) == 4, "8 samples, 2 replicas, micro-batches of one"
        for micro_batch in event["micro_batches"]:
            assert sum(micro_batch["segments"]) == micro_batch["tokens"] == 128
    lengths = {n for event in seen for m in event["micro_batches"] for n in m["segments"]}
    assert len(lengths) > 10, "documents of the corpus vary in length"


def record(argv: list[str]) -> dict[str, Any]:
    """Runs in a rank: trains, then fetches every micro-batch by address; checksums of both."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    from megatron.resilience.data.samples import SampleSource
    from megatron.resilience.job import Job
    from megatron.resilience.start import command_line
    from megatron.resilience.upstream import parallel
    from megatron.resilience.upstream.batch import MicroBatch

    trained: list[int] = []

    def on_micro_batch(batch: MicroBatch) -> None:
        if batch.tokens is not None:
            trained.append(checksum(batch.tokens))

    with Job(command_line(argv)) as job:
        job.forward_step._on_micro_batch = on_micro_batch
        kind = ModelType.encoder_or_decoder
        pretrain(job.config, job.datasets, kind, job.forward_step, store=job.store)
        source = SampleSource(dataset=job.datasets.train, micro_batch_size=1)
        fetched = [
            [checksum(source.micro_batch(step * 8, number)["tokens"]) for number in range(8)]
            for step in range(3)
        ]
        place = parallel.place()
    return {"replica": place.replica, "trained": trained, "fetched": fetched}


def checksum(tokens: Any) -> int:
    return zlib.crc32(tokens.reshape(-1).numpy().tobytes())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "running text"])
def test_samples_do_not_depend_on_who_asks(data: Path, packed: bool, tmp_path: Path) -> None:
    from megatron.resilience.data.samples import micro_batch_number

    preload(PRELOAD)
    extra = ["--packed-sequences"] if packed else []
    extra += ["--resilience", "--resilience-observe-only", "--resilience-dir", str(tmp_path)]
    reference = None
    for tp, pp, dp in ((1, 1, 1), (1, 1, 2), (1, 1, 4), (2, 2, 1)):
        ranks = run_ranks(tp * pp * dp, record, command(data, *extra, tp=tp, pp=pp))
        reference = reference or ranks[0]["fetched"]
        for rank in ranks:
            assert rank["fetched"] == reference, "any rank fetches the same samples"
            if rank["trained"]:
                expected = [
                    reference[step][micro_batch_number(rank["replica"], turn, dp)]
                    for step in range(3)
                    for turn in range(8 // dp)
                ]
                assert rank["trained"] == expected, "and trains what the address says"
    assert len({crc for step in reference for crc in step}) == 24, "24 different samples"


@pytest.mark.timeout(300)
def test_asynchronous_saves_are_asynchronous_and_whole(data: Path, tmp_path: Path) -> None:
    words = command(data, "--packed-sequences", tp=2, steps=4)
    save = ["--save", str(tmp_path / "ck"), "--save-interval", "2", "--async-save"]
    codes, said = exit_code_and_words([*words, *save], world_size=2)
    assert codes == [0, 0], said
    assert said.count("scheduled an async checkpoint save at iteration") == 2
    assert "successfully saved checkpoint from iteration       4" in said
    straight = run_trial(words, world_size=2)
    resumed = run_trial([*words, "--load", str(tmp_path / "ck"), "--ckpt-step", "2"], world_size=2)
    assert resumed.losses == straight.losses[2:]
    assert resumed.grad_norms == straight.grad_norms[2:]
    start = next(event for event in resumed.events if event["event"] == Event.JOB_START)
    assert start["step"] == 2
    codes, said = exit_code_and_words([*words, "--load", str(tmp_path / "ck")], world_size=2)
    assert codes == [0, 0], said
    assert "nothing to do: step 4 of 4 is already done" in said
