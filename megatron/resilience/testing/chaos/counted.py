"""``pretrain_gpt.py`` in a form whose ranks can be asked, while they train, what they hold.

    resihp-run ... -m megatron.resilience.testing.chaos.counted --resilience-dir DIR ...

Whoever asks writes a number to ``DIR/counts/asked``; every rank answers in ``DIR/counts/RANK.json``
with that number. What only the process itself knows is in there as well: torch's groups, and its
memory after the C library has handed back what it keeps of freed memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.resilience.start import run_to_exit_code
from megatron.resilience.testing.chaos.holdings import Holdings, holdings, least
from resihp_ext.environment import RankEnvironment

POLL_S = 0.1
LOOKS, LOOK_S = 24, 0.05
"""How often a rank looks at itself for one answer, and how long after each other: longer than a
step. In the middle of one its activations are in memory, a fifth of all that it holds."""


def ask(folder: Path, number: int) -> None:
    """Asks all ranks.

    Args:
        folder: ``--resilience-dir``.
        number: Of the question; not that of an earlier one.
    """
    _write(folder / "counts" / "asked", str(number))


def answers(folder: Path, number: int) -> dict[int, dict[str, Any]]:
    """What was answered so far to a question, by rank."""
    found = {}
    for path in (folder / "counts").glob("*.json"):
        told = json.loads(path.read_text())
        if told["asked"] == number:
            found[int(path.stem)] = told
    return found


def inside() -> Holdings:
    """What this process holds, torch's groups and Python's threads among it."""
    # torch is here once the job runs; a warm process must not have more threads than without this.
    distributed: Any = sys.modules["torch.distributed.distributed_c10d"]
    ctypes.CDLL(None).malloc_trim(0)
    return {
        **holdings(),
        "python_threads": threading.active_count(),
        "groups": len(distributed._world.pg_map),
    }


def _looks() -> Iterator[Holdings]:
    yield inside()
    for _ in range(LOOKS - 1):
        time.sleep(LOOK_S)
        yield inside()


def _answer(folder: Path, rank: int) -> None:
    told = -1
    while True:
        time.sleep(POLL_S)
        try:
            asked = int((folder / "counts" / "asked").read_text())
        except FileNotFoundError:
            continue
        if asked == told:
            continue
        names = [thread.name for thread in threading.enumerate()]
        found = {"asked": asked, "pid": os.getpid(), "names": names, "held": least(_looks())}
        _write(folder / "counts" / f"{rank}.json", json.dumps(found))
        told = asked


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(text)
    os.replace(part, path)


def main(argv: Sequence[str]) -> None:
    """Trains; the thread that answers starts where a forked worker begins."""
    # Beside the launcher, not installed: who only asks need not be there.
    import pretrain_gpt

    words = list(argv)
    folder = Path(words[words.index("--resilience-dir") + 1])
    script: Any = pretrain_gpt
    wait = script.wait_if_warm

    def wait_and_answer() -> None:
        wait()
        args = (folder, RankEnvironment.from_environ(os.environ).rank)
        threading.Thread(target=_answer, args=args, name="counts", daemon=True).start()

    script.wait_if_warm = wait_and_answer
    script.main(words)


if __name__ == "__main__":
    sys.exit(run_to_exit_code(main, sys.argv[1:]))
