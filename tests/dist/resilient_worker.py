"""A worker without torch that survives others: ``resilient_worker.py FOLDER``, under resihp-run.

It writes what happens to it into ``FOLDER/rankN``, one line an event: time, pid, words. It trains
until ``FOLDER/stop`` exists. ``FOLDER/dieN`` holds with how many processes rank N fails before its
first step, and with which exit code.
"""

import os
import sys
import threading
import time
from pathlib import Path

from resihp_ext.control import messages as say
from resihp_ext.control.client import WorkerLink
from resihp_ext.control.worker_environment import WorkerEnvironment
from resihp_ext.launcher.warm import WARM, refuse_if_warm, wait_if_warm

time.sleep(float(os.environ.get("IMPORT_S", "0")))  # stands for more imports

ADOPT_S = 0.1


class SmallWorker:
    """Obeys the coordinator; has no state to rescue."""

    def __init__(self, folder: Path) -> None:
        here = WorkerEnvironment.from_environ(os.environ)
        assert here is not None
        self.here, self.folder = here, folder
        self.rank = int(os.environ["RANK"])
        self.ticks = 0
        self.exit_code: int | None = None
        self.epoch = 0
        self.entered = not here.joins
        self.link = WorkerLink(
            here.socket,
            here.token,
            self.rank,
            on_message=self.hear,
            progress=self.progress,
            on_lost=lambda: os._exit(9),
        )

    def note(self, *words: object) -> None:
        line = " ".join(map(str, (f"{time.time():.4f}", os.getpid(), *words)))
        with (self.folder / f"rank{self.rank}").open("a") as file:
            file.write(line + "\n")

    def progress(self) -> say.Progress:
        return say.Progress(
            rank=self.rank,
            step=self.ticks,
            micro_batch=0,
            phase="step",
            waiting=False,
            ticks=self.ticks,
        )

    def hear(self, message: say.Message) -> None:
        self.note(type(message).__name__)
        match message:
            case say.View(epoch=epoch):
                self.link.send(
                    say.Arrived(
                        rank=self.rank,
                        epoch=epoch,
                        region=self.ticks,
                        result=(),
                        versions=(1,),
                        phase="step",
                    )
                )
            case say.Go(epoch=epoch):
                self.link.send(say.Adopted(rank=self.rank, epoch=epoch, version=2))
            case say.Propose(number=number, epoch=epoch, members=members):
                self.epoch = epoch
                if self.rank == min(members):
                    self.link.send(
                        say.Agreed(rank=self.rank, number=number, step=self.ticks, loop="{}")
                    )
                if self.rank not in members:
                    threading.Timer(ADOPT_S, self.leave).start()
                elif self.entered:
                    self.adopt_soon()
            case say.Enter():
                self.entered = True
                self.adopt_soon()
            case say.Stop(exit_code=exit_code):
                self.exit_code = exit_code

    def adopt_soon(self) -> None:
        """A real worker gets there only once all have agreed."""
        adopted = say.Adopted(rank=self.rank, epoch=self.epoch, version=2)
        threading.Timer(ADOPT_S, self.link.send, [adopted]).start()

    def leave(self) -> None:
        """Its node is drained."""
        self.exit_code = 0

    def run(self) -> int:
        self.note("start", self.here.incarnation, int(self.here.joins), os.nice(0))
        print(f"rank {self.rank} process {self.here.incarnation}", flush=True)  # noqa: T201
        self.link.start()
        self.link.send(
            say.Hello(
                rank=self.rank,
                incarnation=self.here.incarnation,
                pid=os.getpid(),
                joins=self.here.joins,
            )
        )
        self.die_if_told()
        ready = say.Ready(rank=self.rank) if self.here.joins else say.Armed(rank=self.rank)
        self.link.send(ready)
        self.note("armed")
        while self.exit_code is None and not (self.folder / "stop").exists():
            self.ticks += 1
            time.sleep(0.02)
        self.exit_code = self.exit_code or 0
        self.link.send(say.Leaving(rank=self.rank, exit_code=self.exit_code))
        self.link.close()
        self.note("leaves")
        return self.exit_code

    def die_if_told(self) -> None:
        told = self.folder / f"die{self.rank}"
        if told.exists():
            processes, exit_code = map(int, told.read_text().split())
            if self.here.incarnation < processes:
                time.sleep(0.3)
                os._exit(exit_code)


if __name__ == "__main__":
    place = Path(sys.argv[1])
    if WARM in os.environ:
        (place / "warm").touch()
    if "--never-waits" in sys.argv:
        refuse_if_warm()  # as every job of ours does
    wait_if_warm()
    sys.exit(SmallWorker(place).run())
