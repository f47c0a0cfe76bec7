"""What the job tests share: a small corpus, command lines, and jobs in preloaded ranks."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron.resilience.testing.trial import PRELOAD
from resihp_ext.testing.ranks import preload, start_ranks

ROOT = Path(__file__).resolve().parents[2]
ENTRY = ROOT / "pretrain_gpt.py"


def command(data: Path | str, *extra: str, tp: int = 1, pp: int = 1, steps: int = 3) -> list[str]:
    """A short job on ``data``; later flags win."""
    words = ["--preset", "tiny", "--data-path", str(data), "--split", "100,0,0"]
    words += ["--train-iters", str(steps), "--eval-iters", "0", "--clip-grad", "0.5"]
    words += ["--global-batch-size", "8", "--seq-length", "128"]
    words += ["--tensor-model-parallel-size", str(tp), "--pipeline-model-parallel-size", str(pp)]
    return [*words, *extra]


def enter(argv: Sequence[str]) -> int:
    """Runs in a rank: ``pretrain_gpt.py`` as a script, giving its exit code."""
    sys.argv = [str(ENTRY), *argv]
    code: object = 0
    with contextlib.suppress(KeyboardInterrupt):
        try:
            runpy.run_path(str(ENTRY), run_name="__main__")
        except SystemExit as end:
            code = end.code
    return code if isinstance(code, int) else 0 if code is None else 1


def exit_code_and_words(argv: Sequence[str], world_size: int = 1) -> tuple[list[int], str]:
    """Exit codes of all ranks of a job, and what they wrote, rank after rank."""
    preload(PRELOAD)
    with start_ranks(world_size, enter, list(argv)) as ranks:
        codes = ranks.join(120)
        return codes, "".join(ranks.log(rank) for rank in range(world_size))


def error_lines(words: str) -> list[str]:
    """The lines that tell the user what is wrong."""
    return [line for line in words.splitlines() if line.startswith("error: ")]
