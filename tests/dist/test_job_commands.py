"""``resihp status``, ``drain`` and ``join``, typed while a small job of two nodes runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import test_resilient_launcher as launching
from test_resilient_launcher import LIMIT_S, Job, free_port, nodes

pytestmark = pytest.mark.dist

job = launching.job


def resihp(job: Job, verb: str, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    program = Path(sys.executable).with_name("resihp")
    done = subprocess.run(
        [program, verb, job.folder / "control", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_people_take_nodes_out_and_in(job: Job) -> None:
    flags = nodes(2, free_port())
    for _ in range(2):
        job.start(*flags)
    pids = job.running(4)
    code, out, _ = resihp(job, "status", "--json")
    found = json.loads(out)
    assert (code, found["phase"], found["members"]) == (0, "running", [0, 1, 2, 3])
    host = found["coordinator"]["node"]
    (guest,) = found["nodes"].keys() - {host}
    assert all(ago_s < 5.0 for ago_s in found["heard_ago_s"].values())

    code, out, err = resihp(job, "drain", guest, "--wait", "30")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"ranks 2-3 are away: node {guest} may be stopped"
    assert [len(job.events(k, "leaves")) for k in range(4)] == [0, 0, 1, 1]
    code, out, _ = resihp(job, "status")
    assert code == 0
    assert out.startswith("running: step ")
    rows = {line.split()[0]: line.split()[2] for line in out.splitlines() if "127.0.0.1  " in line}
    assert rows == {host: "takes", guest: "drained"}

    code, _, err = resihp(job, "drain", host)
    assert (code, "no other node would be left" in err) == (4, True)
    assert resihp(job, "join", host)[0] == 0
    code, out, err = resihp(job, "join", guest, "--wait", "30")
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"ranks 2-3 take part: node {guest} is in the job"
    assert all(job.events(k)[-1].pid not in pids for k in (2, 3))


def test_people_are_told_what_a_new_node_runs(job: Job) -> None:
    flags = nodes(2, free_port())
    for _ in range(2):
        job.start(*flags)
    job.running(4)
    code, line, notes = resihp(job, "join")
    assert (code, line.count("\n"), "localhost: nobody but" in notes) == (0, 1, True)
    code, again, err = resihp(job, "join", "nobody")
    assert (code, again, err.count("no node 'nobody' in this job")) == (2, line, 1)
    job.launch(["bash", "-c", line], {})
    job.wait(lambda: job.events(4, "Enter") and job.events(5, "Enter"))
    assert len(json.loads(resihp(job, "status", "--json")[1])["nodes"]) == 3

    folder = job.folder / "control"
    token = (folder / "coordinator.token").read_text()
    (folder / "coordinator.token").write_text("00" * 32)
    code, _, err = resihp(job, "status")
    assert (code, "not the token of the job that listens at" in err) == (2, True)
    (folder / "coordinator.token").write_text(token)
    (folder / "events.jsonl").touch()
    assert [code for code, _, _ in job.finish()] == [0, 0, 0]
    code, _, err = resihp(job, "status")
    assert (code, "the job is over" in err) == (3, True)
