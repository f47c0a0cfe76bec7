"""A real Slurm on this machine: a controller and nodes on loopback addresses, in one folder.

Every node is a ``slurmd`` of its own (``slurmd -N``), and what runs on it are its descendants, so
that a node can be lost as a whole. Needs Debian's packages ``slurm-wlm`` and ``munge``; no root,
nothing outside the folder, no fixed ports.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from resihp_ext.launcher.orphans import adopt_orphans

PROGRAMS = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "munged": "munge"}
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

LIMIT_S = 60.0
"""Far more than anything takes here, unless the machine is busy."""
COMMAND_S = 60.0

FIRST_PORT, LAST_PORT = 30000, 32767
"""Also outside of the launchers' ports for Slurm jobs."""

CONF = """
ClusterName=resihp
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller_port}
AuthType=auth/munge
CredType=cred/munge
# A requeued job may start this many seconds later; Slurm takes no less than 5.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
JobRequeue=1
KillWait=5
MinJobAge=3600
ReturnToService=2
SlurmdTimeout={slurmd_timeout_s}
MessageTimeout=5
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there is no Slurm here, or None."""
    absent = sorted({p for name, p in PROGRAMS.items() if shutil.which(name, path=PATH) is None})
    return f"needs a real Slurm: apt-get install {' '.join(absent)}" if absent else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the controller says about a job."""

    state: str
    exit_code: int
    restarts: int
    nodes: str
    """Those that it still has, as Slurm abbreviates them; empty while it waits."""

    @property
    def is_over(self) -> bool:
        return self.state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED")


class Cluster:
    """Started by ``with``; at its end no process is left and the folder is gone."""

    def __init__(self, nodes: int = 3, *, cpus: int = 8, slurmd_timeout_s: int = 3) -> None:
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        # Not pytest's folder: munged wants one that others could enter, and sockets short paths.
        self.folder = Path(tempfile.mkdtemp(prefix="resihp-slurm-", dir="/tmp"))
        self._cpus, self._slurmd_timeout_s = cpus, slurmd_timeout_s
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))}
        programs = Path(sys.executable).parent  # resihp-run of this environment
        self.environ = clean | {
            "PATH": f"{programs}:{PATH}",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        folder = self.folder
        folder.chmod(0o755)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "munge.key").touch(0o600)
        (folder / "munge.key").write_bytes(os.urandom(128))
        self._write_conf()
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
        options = [f"--{option}={folder}/munge.{end}" for option, end in files.items()]
        self._daemon("munged", "--foreground", f"--seed-file={folder}/munge.seed", *options)
        self.until(lambda: (folder / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "-D", "-c")
        for node in self.nodes:
            self.start_node(node)
        self.until(lambda: self.idle() == self.nodes, "all nodes are idle")

    def _write_conf(self) -> None:
        controller_port, *ports = free_ports(len(self.nodes) + 1)
        nodes = [
            f"NodeName={node} NodeHostname=localhost NodeAddr=127.0.0.{number} Port={port} "
            f"CPUs={self._cpus}"
            for number, (node, port) in enumerate(zip(self.nodes, ports, strict=True), start=2)
        ]
        conf = CONF.format(
            folder=self.folder,
            controller_port=controller_port,
            user=psutil.Process().username(),
            slurmd_timeout_s=self._slurmd_timeout_s,
            nodes="\n".join(nodes),
        )
        (self.folder / "slurm.conf").write_text(conf)

    def _daemon(self, program: str, *options: str, name: str | None = None) -> None:
        name = name or program
        with (self.folder / f"{name}.out").open("ab") as out:
            # As reaper of orphans it keeps what runs on a node below that node's slurmd.
            self._daemons[name] = subprocess.Popen(
                [program, *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environ,
                preexec_fn=adopt_orphans,
            )

    def start_node(self, node: str) -> None:
        """Start the node's slurmd, for the first time or after it was lost."""
        self._daemon("slurmd", "-D", "-N", node, name=node)

    def kill_node(self, node: str) -> None:
        """SIGKILL for the node's slurmd and everything that runs on it, as by a power cut."""
        kill_tree(self._daemons[node])

    def close(self) -> None:
        with contextlib.ExitStack() as ends:  # whatever fails, the others are ended too
            ends.callback(shutil.rmtree, self.folder, ignore_errors=True)
            for daemon in self._daemons.values():  # the last one first: nodes before controller
                ends.callback(kill_tree, daemon)

    # What a user does

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command with this cluster as its Slurm."""
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, env=self.environ
        )
        assert not check or done.returncode == 0, (command, done.stderr, self.log())
        return done

    def submit(self, script: Path, *words: str, flags: tuple[str, ...] = (), **env: str) -> str:
        """``sbatch FLAGS SCRIPT WORDS`` with ``env`` in the environment; the job's number."""
        export = ",".join(["ALL", *(f"{name}={value}" for name, value in env.items())])
        command = ("sbatch", "--parsable", f"--export={export}", *flags, str(script), *words)
        return self.run(*command).stdout.strip()

    def job(self, number: str) -> Job:
        text = self.run("scontrol", "show", "job", "--oneliner", number).stdout

        def field(name: str) -> str:
            found = re.search(rf"(?:^|\s){name}=(\S*)", text)
            assert found, (name, text)
            return found[1]

        code, _, signum = field("ExitCode").partition(":")
        return Job(
            state=field("JobState"),
            exit_code=128 + int(signum) if signum != "0" else int(code),
            restarts=int(field("Restarts")),
            nodes=field("NodeList").replace("(null)", ""),
        )

    def wait(self, number: str, limit_s: float = LIMIT_S) -> Job:
        """The job when it is over."""
        self.until(lambda: self.job(number).is_over, f"job {number} is over", limit_s)
        return self.job(number)

    def idle(self) -> list[str]:
        done = self.run("sinfo", "-N", "-h", "-t", "idle", "-o", "%N", check=False)
        return sorted(done.stdout.split())

    def until(self, condition: Callable[[], bool], what: str, limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}\n{self.log()}"
            time.sleep(0.1)

    def log(self) -> str:
        """The ends of all daemons' logs."""
        logs = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(
            f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            for log in logs
        )


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody has, outside of what Linux gives away by itself.

    Else a process could get the port of a node that is lost, and answer in its place.
    """
    ports: list[int] = []
    for port in random.sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise AssertionError("no free ports")


def kill_tree(daemon: subprocess.Popen[bytes], limit_s: float = 10.0) -> None:
    """Kill a daemon and all its descendants, also those that are born meanwhile."""
    deadline = time.monotonic() + limit_s
    if daemon.poll() is not None:
        return
    top = psutil.Process(daemon.pid)
    top.send_signal(signal.SIGSTOP)  # it starts nothing more, and stays the orphans' parent
    while left := living(top.children(recursive=True)):
        assert time.monotonic() < deadline, f"cannot kill {left}"
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    daemon.kill()
    daemon.wait(timeout=limit_s)


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those of them that are neither gone nor zombies."""
    kept = []
    for process in processes:
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                kept.append(process)
        except psutil.NoSuchProcess:
            continue
    return kept
