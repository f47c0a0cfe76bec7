"""Turn text into a dataset for ``pretrain_gpt.py``: ``--data-path PREFIX`` reads what this writes.

    python tools/preprocess_data.py --stdlib --output-prefix data/stdlib
    python tools/preprocess_data.py --input shards/ --glob '*.jsonl.zst' --output-prefix data/web \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model m.model

Exit codes: 0 the dataset is complete; 2 the input, the flags or the disk (also a full one) do not
allow it; 1 a worker died or hangs, or a defect; 128 + n stopped by signal n. In every case but 0
no dataset is left, and standard error ends with one line ``error: ...``.
"""

import os
import sys

# One thread in each of many processes; and numpy must start no threads before we fork.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import click  # noqa: E402

from megatron.resilience.data.preprocess.config import (  # noqa: E402
    InputFormat,
    OnBadInput,
    PreprocessConfig,
)
from megatron.resilience.data.preprocess.encoders import BYTES  # noqa: E402
from megatron.resilience.data.preprocess.run import preprocess  # noqa: E402
from megatron.resilience.data.preprocess.stopping import Stopped  # noqa: E402
from resihp_ext.errors import EXIT_FAILURE, EXIT_OK, EXIT_USAGE, ResiHPError, UserError  # noqa: E402

_MB = 10**6


def _megabytes_to_bytes(value: float | None) -> int | None:
    return None if value is None else int(value * _MB)


@click.command(
    context_settings={"ignore_unknown_options": True, "max_content_width": 100},
    epilog="All of Megatron's tokenizer flags are understood too, under their own names: "
    "--tokenizer-model, --vocab-file, --merge-file, --vocab-size, ...",
)
@click.option("--input", "inputs", multiple=True, metavar="PATH", help="File or directory; repeat.")
@click.option("--stdlib", is_flag=True, help="Read the source code of Python's standard library.")
@click.option("--output-prefix", required=True, metavar="P", help="Write P.bin and P.idx.")
@click.option("--overwrite", is_flag=True, help="Replace P.bin and P.idx if they exist.")
@click.option(
    "--format", "input_format", type=click.Choice([f.value for f in InputFormat]),
    default=InputFormat.AUTO.value, show_default=True,
    help="auto: .jsonl, .ndjson and .json are JSONL, other files one document each; "
    "python: each top-level function or class of a source file is a document.",
)  # fmt: skip
@click.option(
    "--glob", "globs", multiple=True, metavar="GLOB",
    help="Which files of a directory to read, e.g. '*.py' or 'src/*.c'; repeat. "
    "Default: source code, prose and JSONL shards.",
)  # fmt: skip
@click.option("--json-key", default="text", show_default=True, help="JSONL key of the document.")
@click.option(
    "--append-eod/--no-append-eod", default=True, show_default=True,
    help="End each document with the end-of-document token.",
)  # fmt: skip
@click.option(
    "--tokenizer-type", default=BYTES, show_default=True, metavar="TYPE",
    help="bytes (ids 0-255, end of document 256, pad 257), or any type that Megatron knows.",
)  # fmt: skip
@click.option(
    "--workers", type=int, default=lambda: len(os.sched_getaffinity(0)),
    help="Processes that encode; the output does not depend on it.  [default: all cores]",
)  # fmt: skip
@click.option(
    "--on-bad-input", type=click.Choice([o.value for o in OnBadInput]),
    default=OnBadInput.SKIP.value, show_default=True,
    help="Bad documents: leave them out, or fail at the first. Empty ones are always left out.",
)  # fmt: skip
@click.option(
    "--max-bad-fraction", type=float, default=0.01, show_default=True,
    help="Fail when more than this part of the documents, or of the files, is bad.",
)  # fmt: skip
@click.option("--max-documents", type=int, help="Stop after this many documents.")
@click.option("--limit-mb", type=float, help="Stop before the text exceeds this many 10^6 bytes.")
@click.option(
    "--max-document-mb", type=float, default=256, show_default=True,
    help="A larger document is bad.",
)  # fmt: skip
@click.option(
    "--worker-timeout-s", type=float, default=600, show_default=True,
    help="Give up when all workers are silent for this long.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Last line of output: one JSON object.")
@click.argument("tokenizer_flags", nargs=-1, type=click.UNPROCESSED, metavar="")
def cli(
    *,
    tokenizer_type: str,
    tokenizer_flags: tuple[str, ...],
    as_json: bool,
    input_format: str,
    on_bad_input: str,
    limit_mb: float | None,
    max_document_mb: float,
    **options: object,
) -> None:
    """Turn text files, JSONL (.gz, .zst) and source trees into Megatron's P.bin and P.idx."""
    config = PreprocessConfig(
        input_format=InputFormat(input_format),
        on_bad_input=OnBadInput(on_bad_input),
        limit_bytes=_megabytes_to_bytes(limit_mb),
        max_document_bytes=int(max_document_mb * _MB),
        **options,  # type: ignore[arg-type]
    )
    report = preprocess(config, tokenizer_type=tokenizer_type, tokenizer_flags=tokenizer_flags)
    print(report.to_text())
    if as_json:
        print(report.to_json())


def main() -> int:
    """Run the command line; return the exit code."""
    try:
        return cli(standalone_mode=False) or EXIT_OK
    except click.ClickException as error:
        return _fail(error.format_message(), EXIT_USAGE)
    except UserError as error:
        return _fail(str(error), EXIT_USAGE)
    except ResiHPError as error:
        return _fail(str(error), EXIT_FAILURE)
    except Stopped as stopped:
        return _fail(f"stopped by {stopped}; no dataset was written", 128 + stopped.signum)


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
