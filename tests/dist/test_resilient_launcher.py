"""``resihp-run`` with workers that survive: deaths, replacements, nodes that go and come."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from resihp_ext.control.ask import ask, read_address
from resihp_ext.errors import ResiHPError
from resihp_ext.launcher.warm import WARM
from resihp_ext.launcher.watch import Watch

pytestmark = pytest.mark.dist

HERE = Path(__file__).parent
WORKER = HERE / "resilient_worker.py"
LIMIT_S = 60
IMPORT_S = 4.0


class Event(NamedTuple):
    """A line that a worker has written."""

    time_s: float
    pid: int
    words: list[str]


class Job:
    """Launchers of one job, and what its workers write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = f"RESIHP_TEST={uuid.uuid4()}"
        self.launchers: list[subprocess.Popen[str]] = []

    def start(
        self, *flags: str, words: Sequence[str] = (), **variables: str
    ) -> "subprocess.Popen[str]":
        script = [str(WORKER), str(self.folder), "--resilience-dir", str(self.folder / "control")]
        command = [sys.executable, str(HERE / "resilient_run.py"), *flags, *script, *words]
        return self.launch(command, variables)

    def launch(self, command: list[str], variables: dict[str, str]) -> "subprocess.Popen[str]":
        name, value = self.mark.split("=")
        environment = {k: v for k, v in os.environ.items() if k != "LOGLEVEL"}
        launcher = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=environment | {"TMPDIR": str(self.folder), name: value} | variables,
        )
        self.launchers.append(launcher)
        return launcher

    def events(self, rank: int, word: str = "") -> list[Event]:
        path = self.folder / f"rank{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        split = [line.split() for line in lines]
        events = [Event(float(at), int(pid), words) for at, pid, *words in split]
        return [event for event in events if not word or event.words[0] == word]

    def wait(self, what: Callable[[], object], timeout_s: float = LIMIT_S) -> None:
        until_s = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < until_s, self.story()
            time.sleep(0.02)

    def story(self) -> str:
        """What all workers have written."""
        files = sorted(self.folder.glob("rank?"))
        return "\n".join([self.status(), *(f"{file.name}:\n{file.read_text()}" for file in files)])

    def armed(self, ranks: int, times: int = 1) -> list[int]:
        """Waits until every rank trains; returns pids."""
        self.wait(lambda: all(len(self.events(k, "armed")) >= times for k in range(ranks)))
        return [self.events(k, "armed")[-1].pid for k in range(ranks)]

    def status(self) -> str:
        """What the coordinator says of the job, in JSON; nothing before there is one."""
        try:
            return ask(read_address(self.folder / "control"), "status").text
        except ResiHPError:
            return ""

    def running(self, ranks: int) -> list[int]:
        """Waits until a death is survived; returns pids."""
        pids = self.armed(ranks)
        self.wait(lambda: '"phase": "running"' in self.status())
        return pids

    def whole(self, ranks: int) -> None:
        """Waits until all ranks are members: what ends before is no end of the job."""

        def trains() -> bool:
            found = json.loads(self.status() or "{}")
            return found.get("phase") == "running" and found["members"] == list(range(ranks))

        self.wait(trains)

    def finish(self) -> list[tuple[int, str, str]]:
        """Lets all end; exit code, stdout and stderr of every launcher."""
        (self.folder / "stop").touch()
        ended = [(one, *one.communicate(timeout=LIMIT_S)) for one in self.launchers]
        return [(one.returncode, out, err) for one, out, err in ended]

    def processes(self) -> dict[int, str]:
        """Pids and command lines of everything that the job has started and that lives."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (folder / "environ").read_bytes():
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(folder.name)] = words.decode()
        return found

    def warm(self, *workers: int) -> list[int]:
        """Pids of warm processes: those of the script that are no workers."""
        return [
            pid
            for pid, words in self.processes().items()
            if f"-u {WORKER}" in words and pid not in workers
        ]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Whatever is left of it at the end is killed."""
    started = Job(tmp_path)
    yield started
    for pid in started.processes():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for launcher in started.launchers:
        launcher.communicate(timeout=LIMIT_S)


def kill(pid: int) -> float:
    at_s = time.time()
    os.kill(pid, signal.SIGKILL)
    return at_s


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def nodes(count: int, port: int) -> tuple[str, ...]:
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "j")
    return ("--nnodes", str(count), "--nproc-per-node", "2", *where)


def test_an_exit_is_seen_at_once() -> None:
    watch = Watch()
    latencies_s = []
    for _ in range(10):
        process = subprocess.Popen(["sleep", "60"])
        watch.add_process("it", process.pid)
        assert watch.wait(0.05) == set()
        began_s = time.perf_counter()
        process.kill()
        assert watch.wait(5.0) == {"it"}
        latencies_s.append(time.perf_counter() - began_s)
        assert process.wait() == -signal.SIGKILL
    watch.close()
    assert sorted(latencies_s)[5] < 0.02, latencies_s


def test_others_go_on_and_a_fork_takes_the_place(job: Job) -> None:
    job.start("--nproc-per-node", "4", "--log-dir", "logs", "-r", "3", IMPORT_S=str(IMPORT_S))
    pids = job.running(4)
    job.wait((job.folder / "warm").exists)
    time.sleep(0.5)  # from there to the socket
    killed_s = kill(pids[2])
    job.wait(lambda: job.events(2, "start")[-1].words[1:] == ["1", "1", "0"])
    job.wait(lambda: all(job.events(k, "Propose") for k in (0, 1, 3)))
    job.whole(4)
    ended = job.finish()
    for survivor in (0, 1, 3):
        assert {event.pid for event in job.events(survivor)} == {pids[survivor]}
        # From the signal to a worker's thread: launcher, coordinator and two links lie between.
        assert job.events(survivor, "View")[0].time_s - killed_s < 0.5
    assert job.events(2, "start")[-1].time_s - killed_s < 1.0 < IMPORT_S
    assert [code for code, _, _ in ended] == [0]
    assert ended[0][2] == (
        f"resihp-run: rank 2 (pid {pids[2]}) was killed by signal 9 (SIGKILL); the others go on\n"
    )
    (log,) = job.folder.glob("logs/*/attempt_0/2/stdout.log")
    assert log.read_text() == "rank 2 process 0\nrank 2 process 1\n"


def test_without_a_warm_process_a_place_is_taken_cold(job: Job) -> None:
    job.start("--nproc-per-node", "2", "--tee", "1", IMPORT_S="1.0")
    pids = job.running(2)
    job.wait(lambda: job.warm(*pids))
    kill(job.warm(*pids)[0])
    killed_s = kill(pids[1])
    job.wait(lambda: len(job.events(1, "armed")) == 2)
    assert job.events(1, "start")[-1].time_s - killed_s > 1.0
    ((code, out, _),) = job.finish()
    assert code == 0
    assert sorted(out.splitlines()) == [
        "[default0]:rank 0 process 0",
        "[default1]:rank 1 process 0",
        "[default1]:rank 1 process 1",
    ]


def forked(pid: int) -> bool:
    """Whether a process comes of a warm one: what it was started with is what that was."""
    return f"{WARM}=".encode() in (Path("/proc") / str(pid) / "environ").read_bytes()


def test_the_first_workers_are_forked_where_the_script_is_known_to_allow_it(job: Job) -> None:
    job.start("--nproc-per-node", "3", "--tee", "3", words=["--resilience"], IMPORT_S="1.0")
    pids = job.running(3)
    assert all(forked(pid) for pid in pids)
    assert len(job.warm(*pids)) == 1
    kill(pids[2])
    # Until the coordinator hears of the death, all three are still its members.
    job.wait(lambda: len(job.events(2, "armed")) == 2)
    job.whole(3)
    ((code, out, err),) = job.finish()
    assert code == 0, err
    assert sorted(out.splitlines()) == [
        "[default0]:rank 0 process 0",
        "[default1]:rank 1 process 0",
        "[default2]:rank 2 process 0",
        "[default2]:rank 2 process 1",
    ]
    assert job.processes() == {}


def test_a_script_that_does_not_wait_starts_cold(job: Job) -> None:
    words = ["--resilience", "--never-waits"]
    job.start("--nproc-per-node", "2", words=words)
    pids = job.running(2)
    assert not any(forked(pid) for pid in pids)
    ((code, _, err),) = job.finish()
    assert (code, err) == (0, "")


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=lambda s: s.name)
def test_a_signal_to_the_launcher_leaves_nothing(job: Job, signum: signal.Signals) -> None:
    launcher = job.start("--nproc-per-node", "2")
    pids = job.running(2)
    job.wait(lambda: job.warm(*pids))
    kill(pids[1])
    job.wait(lambda: len(job.events(1, "armed")) == 2)
    launcher.send_signal(signum)
    _, err = launcher.communicate(timeout=LIMIT_S)
    if signum == signal.SIGTERM:
        assert launcher.returncode == 128 + signum
        assert err.splitlines()[-1] == "error: stopped by SIGTERM"
        assert job.processes() == {}
    # Killed, it cannot end anything: workers and warm process notice that it is gone.
    job.wait(lambda: not job.processes())


def test_a_death_before_the_first_step_restarts_all(job: Job) -> None:
    (job.folder / "die1").write_text("1 7")
    job.start("--nproc-per-node", "2")
    job.armed(2)
    ((code, _, _),) = job.finish()
    assert code == 0
    assert [event.words[1] for event in job.events(0, "start")] == ["0", "1"]
    assert [event.words[1] for event in job.events(1, "start")] == ["0", "1"]


@pytest.mark.parametrize(
    ("die", "flags", "variables", "exit_code", "cause"),
    [
        ("99 7", ("--max-restarts", "1"), {}, 1, "rank 1 exited with code 7 before the first step"),
        ("99 2", (), {}, 2, ""),
        ("", (), {"NO_PLAN": "1"}, 75, "no layout fits what is left (rank 1 was killed"),
    ],
    ids=["restarts", "usage", "no plan"],
)
def test_the_end_has_one_line_and_an_exit_code(
    job: Job,
    die: str,
    flags: tuple[str, ...],
    variables: dict[str, str],
    exit_code: int,
    cause: str,
) -> None:
    if die:
        (job.folder / "die1").write_text(die)
    launcher = job.start("--nproc-per-node", "2", *flags, **variables)
    if not die:
        kill(job.running(2)[1])
    _, err = launcher.communicate(timeout=LIMIT_S)
    assert launcher.returncode == exit_code
    lines = [line for line in err.splitlines() if not line.startswith("resihp-run: rank")]
    assert len(lines) == bool(cause), err
    assert cause in err
    starts = 2 if flags else 1
    assert len(job.events(0, "start")) == starts
    assert job.processes() == {}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("store", [0, 1], ids=["store stays", "store goes"])
def test_a_node_goes_and_comes_back(job: Job, store: int) -> None:
    """The first to come has the rendezvous' store; the lowest address has the coordinator."""
    port = free_port()
    flags = [(*nodes(2, port), "--local-addr", f"127.0.0.{k}") for k in (1, 2)]
    job.start(*flags[store])
    job.wait(lambda: listens(port))
    job.start(*flags[1 - store])
    pids = job.running(4)
    host, guest = parent(pids[0]), parent(pids[2])
    assert [host, guest] == [job.launchers[k].pid for k in (store, 1 - store)]
    kill(pids[3])
    job.wait(lambda: len(job.events(3, "armed")) == 2 and job.events(3, "Enter"))
    killed_s = kill(guest)
    job.wait(lambda: len(job.events(0, "Go")) == len(job.events(1, "Go")) == 2)
    assert job.events(0, "View")[-1].time_s - killed_s < 1.0
    orphans = {pids[2], job.events(3)[-1].pid}
    job.wait(lambda: not orphans & job.processes().keys())
    back = job.start(*flags[1])
    job.wait(lambda: len(job.events(2, "Enter")) == 1 and len(job.events(3, "Enter")) == 2)
    assert {parent(job.events(k)[-1].pid) for k in (2, 3)} == {back.pid}
    said = job.finish()
    ended = dict(
        zip((one.pid for one in job.launchers), [code for code, _, _ in said], strict=True)
    )
    assert ended == {host: 0, guest: -signal.SIGKILL, back.pid: 0}, said
    assert {event.pid for event in job.events(0)} == {pids[0]}
    assert job.processes() == {}


def test_one_node_more_than_fit_joins_later(job: Job) -> None:
    flags = nodes(2, free_port())
    for _ in range(3):
        job.start(*flags)
    pids = job.armed(4)
    job.armed(6)
    job.wait(lambda: job.events(4, "Enter") and job.events(5, "Enter"))
    assert [code for code, _, _ in job.finish()] == [0, 0, 0]
    assert [{event.pid for event in job.events(k)} for k in range(4)] == [{pid} for pid in pids]


def test_the_host_of_the_rendezvous_becomes_the_first_node(job: Job) -> None:
    """Neither the order of addresses decides, nor who comes first: two others fill a round."""
    flags = nodes(2, free_port())
    for k, is_host in ((1, 0), (2, 0), (3, 1)):
        address = ("--local-addr", f"127.0.0.{k}", "--rdzv-conf", f"is_host={is_host}")
        job.start(*flags, *address)
    pids = job.armed(6)
    assert [parent(pid) == job.launchers[2].pid for pid in pids] == [True] * 2 + [False] * 4
    assert read_address(job.folder / "control").address == "127.0.0.3"
    assert [code for code, _, _ in job.finish()] == [0, 0, 0]
