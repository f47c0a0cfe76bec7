"""A launcher ends with the code that was meant, though a thread of torch's is in its store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

LIMIT_S = 60.0
BUSY = """
import atexit, pathlib, sys, threading, time
import torch.distributed as dist
from resihp_ext.launcher.leave import leave

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("state", "1")

def ask():
    while True:
        store.get("state")

for _ in range(3):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(0.05)
atexit.register(pathlib.Path(sys.argv[1]).touch)
print("the last line", end="")
leave(75)
"""


def test_the_exit_code_survives_threads_that_are_in_c(tmp_path: Path) -> None:
    """With ``sys.exit`` this aborted with 134 every time."""
    done = tmp_path / "done"
    words = [sys.executable, "-c", BUSY, str(done)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout) == (75, "the last line"), ended.stderr
    assert done.exists(), "what was registered for the end is done"
