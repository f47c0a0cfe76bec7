"""What the preprocessor's tests share: ways to run the tool, and ways to look at what it left.

Runs that must load Megatron take seconds to start. Where only the behaviour after that matters,
the tool's ``main`` runs in a fork of this process, which has loaded it once (:func:`forked`);
everything else, and one run of each kind of failure, is a real command line (:func:`command`).
"""

import hashlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.resilience.data.byte_tokenizer import BYTE_EOD, ids_to_bytes
from megatron.resilience.data.preprocess.encoders import quiet_imports

with quiet_imports():
    from megatron.core.datasets.indexed_dataset import IndexedDataset

TOOL = Path(__file__).parents[2] / "tools" / "preprocess_data.py"
LIMIT_S = 60


def command(*args, prefix=()):
    """Run the real command line to its end."""
    return subprocess.run(
        [*prefix, sys.executable, str(TOOL), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def started(*args):
    """Start the real command line."""
    return subprocess.Popen(
        [sys.executable, str(TOOL), *map(str, args)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


class Forked:
    """The tool's ``main`` in a fork of this process."""

    def __init__(self, tmp_path, *args, before=lambda: None):
        self._out = tmp_path / "forked.out"
        self._err = tmp_path / "forked.err"
        context = multiprocessing.get_context("fork")
        self.process = context.Process(target=self._run, args=(list(map(str, args)), before))
        self.process.start()

    def _run(self, args, before):
        for path, descriptor in ((self._out, 1), (self._err, 2)):
            os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), descriptor)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115
        sys.argv = [str(TOOL), *args]
        before()
        runpy.run_path(str(TOOL), run_name="__main__")

    def wait(self):
        """Return (exit code, standard output, standard error)."""
        self.process.join(LIMIT_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
            pytest.fail(f"still running after {LIMIT_S} s: {self._err.read_text()}")
        return self.process.exitcode, self._out.read_text(), self._err.read_text()


def forked(tmp_path, *args, **options):
    return Forked(tmp_path, *args, **options).wait()


def summary_of(stdout):
    return json.loads(stdout.splitlines()[-1])


def texts_of(prefix):
    """Return the documents as bytes, checking that each is one sequence that ends with EOD."""
    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    assert all(dataset[i][-1] == BYTE_EOD for i in range(len(dataset)))
    return [ids_to_bytes(dataset[i]) for i in range(len(dataset))]


def digests(prefix):
    return [
        hashlib.sha256(Path(f"{prefix}{end}").read_bytes()).digest() for end in (".bin", ".idx")
    ]


def wait_for(condition, what):
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {LIMIT_S} s: {what}"
        time.sleep(0.02)


def size_of(path):
    return path.stat().st_size if path.exists() else 0


def children_of(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def one_line(stderr, *words):
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, stderr
    assert stderr.splitlines()[-1] == errors[0]
    assert "Traceback" not in stderr
    for word in words:
        assert word in errors[0]


def jsonl(texts):
    return "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)).encode()
