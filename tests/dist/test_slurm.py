"""``scripts/slurm/pretrain.sbatch`` under a real Slurm: exit codes, requeueing, lost nodes.

The jobs of a test are submitted together, because what they mostly do is wait.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing())),
]

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "slurm" / "pretrain.sbatch"

SURVIVOR = Path(__file__).with_name("resilient_worker.py")

WORKER = """
import os, sys
words = sys.argv[1].split(",")  # what to do in the first run, and when queued again
here, again = os.environ["SLURMD_NODENAME"], int(os.environ.get("SLURM_RESTART_COUNT") or 0)
line = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} on {here} run {again}\\n"
os.write(1, line.encode())
sys.exit(int(words[again]))
"""

# In the place of resihp-run, where only the script is on trial: each node has a word of its own.
LAUNCHER = """#!/bin/bash
shift 4  # the script's own flags
shift "$SLURM_PROCID"
touch "$SLURM_JOB_ID.$SLURM_PROCID"
case $1 in
after-loss:*) until [ -e lost ]; do sleep 0.1; done; exit "${1#*:}" ;;
tick) while :; do touch "tick-$SLURMD_NODENAME"; sleep 0.1; done ;;
until-term) trap 'exit 143' TERM; while :; do sleep 0.1; done ;;
*) exit "$1" ;;
esac
"""


class Desk:
    """Where a user sits: a folder, and the cluster behind it."""

    def __init__(self, cluster: slurm.Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "worker.py").write_text(WORKER)
        (folder / "bin").mkdir()
        (folder / "bin" / "resihp-run").write_text(LAUNCHER)
        (folder / "bin" / "resihp-run").chmod(0o755)

    def submit(self, *words: str, flags: tuple[str, ...] = (), stand_in: bool = False) -> str:
        """A job of the script; with ``stand_in`` of a launcher that does as its words say."""
        path = self.cluster.environ["PATH"]
        return self.cluster.submit(
            SCRIPT,
            *words,
            flags=("--oversubscribe", "-D", str(self.folder), "-o", "%j.log", *flags),
            PATH=f"{self.folder}/bin:{path}" if stand_in else path,
        )

    def train(self, words: str, *flags: str, launcher: tuple[str, ...] = ()) -> str:
        """A job with the real launcher and one worker a node."""
        return self.submit(*launcher, "--nproc-per-node", "1", "worker.py", words, flags=flags)

    def log(self, job: str) -> list[str]:
        return sorted((self.folder / f"{job}.log").read_text().splitlines())


@pytest.fixture(scope="module")
def cluster() -> Iterator[slurm.Cluster]:
    with slurm.Cluster(nodes=6) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def desk(cluster: slurm.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    return Desk(cluster, tmp_path_factory.mktemp("desk"))


@pytest.fixture(scope="module")
def trained(desk: Desk) -> dict[str, str]:
    """Jobs of the real launcher, by what they are to show."""
    return {
        "success": desk.train("0", "-w", "node[1-2]"),
        "requeue": desk.train("75,0", "-w", "node3", "-N1", "--array=5") + "_5",
        "give up": desk.train("3", "-w", "node2", "-N1"),
        "usage": desk.train("2", "-w", "node3", "-N1"),
    }


def test_a_job_of_two_nodes_runs(desk: Desk, trained: dict[str, str]) -> None:
    job = desk.cluster.wait(trained["success"])
    assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", 0, 0)
    said = [line for line in desk.log(trained["success"]) if line.startswith("rank")]
    # The first node has all that a job cannot lose: rank 0's node hosts the coordinator.
    assert said == ["rank 0 of 2 on node1 run 0", "rank 1 of 2 on node2 run 0"]


@pytest.mark.parametrize(("name", "exit_code"), [("give up", 3), ("usage", 2)])
def test_what_would_fail_again_is_not_requeued(
    desk: Desk, trained: dict[str, str], name: str, exit_code: int
) -> None:
    job = desk.cluster.wait(trained[name])
    assert (job.state, job.exit_code, job.restarts) == ("FAILED", exit_code, 0)


def test_exit_code_75_is_requeued_and_the_second_run_succeeds(
    desk: Desk, trained: dict[str, str]
) -> None:
    job = desk.cluster.wait(trained["requeue"])
    assert (job.state, job.exit_code, job.restarts) == ("COMPLETED", 0, 1)
    (log,) = desk.folder.glob(f"{trained['requeue'].removesuffix('_5')}.log")
    runs = [line for line in log.read_text().splitlines() if line.startswith("rank")]
    assert runs == ["rank 0 of 1 on node3 run 0", "rank 0 of 1 on node3 run 1"]


def test_a_spare_node_stays_outside_until_the_job_runs(desk: Desk) -> None:
    words = ("--nnodes", "2:2", "--nproc-per-node", "1", str(SURVIVOR), str(desk.folder))
    number = desk.submit(*words, flags=("-N3",))
    spare = desk.folder / "rank2"
    desk.cluster.until(lambda: spare.exists() and "armed" in spare.read_text(), "it comes")
    _, _, word, _incarnation, joins, _ = spare.read_text().splitlines()[0].split()
    assert (word, joins) == ("start", "1"), "it was in the first round"
    (desk.folder / "stop").touch()
    job = desk.cluster.wait(number)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), desk.log(number)


# Exit codes of several nodes


OUTCOMES = {
    "0 0": ("COMPLETED", 0),
    "0 75": ("COMPLETED", 0),  # one was cut off, the others finished
    "0 137": ("COMPLETED", 0),
    "0 7": ("FAILED", 7),
    "3 75": ("FAILED", 3),  # one was cut off, the others gave up
    "75 3": ("FAILED", 3),
    "1 2": ("FAILED", 2),
    "1 143": ("FAILED", 143),
    "137 75": ("PENDING", 0),
}


@pytest.fixture(scope="module")
def outcomes(desk: Desk) -> dict[str, str]:
    return {w: desk.submit(*w.split(), flags=("-N2",), stand_in=True) for w in OUTCOMES}


@pytest.mark.parametrize("words", OUTCOMES)
def test_codes_of_all_nodes_become_one(desk: Desk, outcomes: dict[str, str], words: str) -> None:
    state, exit_code = OUTCOMES[words]
    number = outcomes[words]
    if state == "PENDING":
        desk.cluster.until(lambda: desk.cluster.job(number).restarts == 1, "it is queued again")
        desk.cluster.run("scancel", number)
        return
    job = desk.cluster.wait(number)
    assert (job.state, job.exit_code, job.restarts) == (state, exit_code, 0)
    assert not list(desk.folder.glob(f".resihp-{number}.*")), "a folder was left behind"


def test_time_limit_ends_the_launchers_and_requeues(desk: Desk) -> None:
    number = desk.submit("until-term", "until-term", flags=("-N2",), stand_in=True)
    started = [desk.folder / f"{number}.{node}" for node in (0, 1)]
    desk.cluster.until(lambda: all(file.exists() for file in started), "the launchers run")
    desk.cluster.run("scancel", "--batch", "--signal=USR1", number)  # as Slurm does
    desk.cluster.until(lambda: desk.cluster.job(number).restarts == 1, "it is queued again")
    desk.cluster.run("scancel", number)
    assert [line for line in desk.log(number) if "exit code 143" in line]


# Lost nodes. They are lost together, because Slurm takes a while to notice.


@pytest.fixture(scope="module")
def bereft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Desk, dict[str, str]]]:
    """Jobs that have lost a node, in a cluster of their own; Slurm knows it."""
    with slurm.Cluster(nodes=6) as cluster:
        desk = Desk(cluster, tmp_path_factory.mktemp("bereft"))
        jobs = {}
        for name, nodes, words in (
            ("second", "node[1-2]", ("tick", "tick")),
            ("first", "node[3-4]", ("tick", "after-loss:75")),
            ("first, failed", "node[5-6]", ("tick", "after-loss:1")),
        ):
            jobs[name] = desk.submit(*words, flags=("-w", nodes), stand_in=True)
        started = [desk.folder / f"{job}.{node}" for job in jobs.values() for node in (0, 1)]
        cluster.until(lambda: all(file.exists() for file in started), "the launchers run")
        for node in ("node2", "node3", "node5"):
            cluster.kill_node(node)
        (desk.folder / "lost").touch()
        cluster.until(lambda: cluster.job(jobs["second"]).nodes == "node1", "node2 is missed")
        yield desk, jobs


def test_a_lost_node_does_not_end_the_job_on_the_other(
    bereft: tuple[Desk, dict[str, str]],
) -> None:
    desk, jobs = bereft
    missed_s = time.time()

    def last_tick_s(node: str) -> float:
        return (desk.folder / f"tick-{node}").stat().st_mtime

    desk.cluster.until(lambda: last_tick_s("node1") > missed_s + 1.0, "node1 goes on")
    assert desk.cluster.job(jobs["second"]).state == "RUNNING"
    assert last_tick_s("node2") < missed_s
    desk.cluster.run("scancel", jobs["second"])


def test_a_job_without_its_first_node_is_requeued(bereft: tuple[Desk, dict[str, str]]) -> None:
    desk, jobs = bereft
    desk.cluster.until(lambda: desk.cluster.job(jobs["first"]).restarts == 1, "it is queued again")
    desk.cluster.until(lambda: desk.cluster.job(jobs["first"]).state == "PENDING", "node4 is free")


def test_a_failed_job_without_its_first_node_is_ended(
    bereft: tuple[Desk, dict[str, str]],
) -> None:
    desk, jobs = bereft
    assert desk.cluster.wait(jobs["first, failed"]).state == "CANCELLED"
