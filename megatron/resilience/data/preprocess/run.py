"""The whole run: check, discover, fork, stream results in order into the writer, judge, publish.

Promise: returns a :class:`Report` of a dataset that is complete on disk, or raises and leaves none.
"""

import time
from collections.abc import Sequence

from megatron.resilience.data.preprocess.chunks import plan_chunks
from megatron.resilience.data.preprocess.config import PreprocessConfig
from megatron.resilience.data.preprocess.encoders import Encoder, build_encoder, dtype_for
from megatron.resilience.data.preprocess.pool import WorkerPool
from megatron.resilience.data.preprocess.progress import ProgressDisplay
from megatron.resilience.data.preprocess.report import Report, Tally, length_percentiles
from megatron.resilience.data.preprocess.sources import Sources, discover
from megatron.resilience.data.preprocess.stopping import StopRequest, stop_on_signals
from megatron.resilience.data.preprocess.work import ChunkEncoder
from megatron.resilience.data.preprocess.writer import DatasetWriter
from resihp_ext.errors import UserError


def preprocess(
    config: PreprocessConfig, *, tokenizer_type: str, tokenizer_flags: Sequence[str]
) -> Report:
    """Turn the text that ``config`` names into a dataset of Megatron's.

    Must run in the main thread of a process that has no other threads: it forks and takes signals.

    Raises:
        UserError: the input, the tokenizer or the disk does not allow it; nothing is written.
        WorkerError: a worker died or hangs; nothing is written.
        Stopped: a signal asked to stop; nothing is written.
    """
    with stop_on_signals() as stop:
        encoder = build_encoder(tokenizer_type, tokenizer_flags)
        if config.append_eod and encoder.eod is None:
            raise UserError(
                f"--tokenizer-type {tokenizer_type} has no end-of-document id; choose another "
                "tokenizer or add --no-append-eod"
            )
        start_s = time.monotonic()
        dtype = dtype_for(encoder.vocab_size)
        writer = DatasetWriter(config.output_prefix, dtype=dtype, overwrite=config.overwrite)
        sources = discover(config)
        with writer:
            tally = _stream(config, encoder, sources, writer, stop)
            tally.judge()
            writer.finish()
            stop.check()
            with stop.held():
                writer.publish()
        return _report(config, encoder, tally, writer, time.monotonic() - start_s)


def _stream(
    config: PreprocessConfig,
    encoder: Encoder,
    sources: Sources,
    writer: DatasetWriter,
    stop: StopRequest,
) -> Tally:
    """Encode all sources in the workers and append them to ``writer`` in order."""
    work = ChunkEncoder(
        encoder=encoder,
        json_key=config.json_key,
        append_eod=config.append_eod,
        max_document_bytes=config.max_document_bytes,
    )
    pool = WorkerPool(work, workers=config.workers, silence_timeout_s=config.worker_timeout_s)
    tally = Tally(config)
    chunks = plan_chunks(sources, max_document_bytes=config.max_document_bytes)
    # The pool first: it forks, and the display may start a thread.
    with pool, ProgressDisplay(sources.total_bytes) as display:
        for result in pool.ordered_map(chunks):
            stop.check()
            accepted, is_full = tally.take(result)
            if accepted:
                lengths = result.lengths[:accepted]
                writer.add(result.tokens[: lengths.sum()], lengths)
            display.advance(result.source_bytes, documents=tally.documents)
            if is_full:
                break
    return tally


def _report(
    config: PreprocessConfig,
    encoder: Encoder,
    tally: Tally,
    writer: DatasetWriter,
    elapsed_s: float,
) -> Report:
    return Report(
        output_prefix=config.output_prefix,
        documents=tally.documents,
        tokens=tally.tokens,
        bytes=tally.text_bytes,
        files=tally.files,
        seconds=elapsed_s - writer.import_s,
        import_seconds=writer.import_s,
        bad=tally.bad,
        examples=tuple(tally.examples),
        length_tokens=length_percentiles(tally.lengths),
        workers=config.workers,
        tokenizer=encoder.name,
        vocab_size=encoder.vocab_size,
        eod=encoder.eod,
        dtype=dtype_for(encoder.vocab_size).__name__,
        training_flags=encoder.training_flags,
    )
