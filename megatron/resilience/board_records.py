"""What this project adds to a job's TensorBoard: who trains, what recoveries cost, where time goes.

Written through upstream's writer, so only with ``--tensorboard-dir``. Every rank says it all; the
board lets one of them write.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from megatron.resilience.upstream.board import Board
from resihp_ext.detector.timed import RankStep
from resihp_ext.plan.action import RECEIVES

if TYPE_CHECKING:
    from megatron.resilience.executor.executor import Executor
    from megatron.resilience.recovery.survive import Survivor


class BoardRecords:
    """Scalars of one rank."""

    def __init__(
        self, board: Board | None, args: argparse.Namespace, executor: Executor | None
    ) -> None:
        """Listens to the clock of the executor's steps, if there is anything to write into.

        Args:
            board: None without a plan: upstream's own writer is left alone.
            args: Megatron's.
        """
        wanted = board is not None and executor is not None and bool(args.tensorboard_dir)
        self._board, self._executor = (board, executor) if wanted else (None, None)
        self._whole_board = board
        self._every = int(args.tensorboard_log_interval)
        if self._executor is not None:
            self._executor.clock.on_step.append(self._timed)

    def done(self, step: int, survivor: Survivor | None) -> None:
        """A step is done, and upstream has written what it has to say of it."""
        if self._board is not None and self._executor is not None:
            if step % self._every == 0:
                world = self._executor.world
                self._board.add_scalar("resihp/epoch", world.epoch, step)
                self._board.add_scalar("resihp/ranks", len(world.members), step)
            recovered_s = None if survivor is None else survivor.recovery.recovered_s()
            if recovered_s is not None:
                self._board.add_scalar("resihp/recovery_s", recovered_s, step)
        if self._whole_board is not None:
            self._whole_board.step_done()

    def _timed(self, times: RankStep) -> None:
        if self._board is None or times.step % self._every:
            return
        for name, seconds in shares_s(times).items():
            self._board.add_scalar(f"resihp/{name}", seconds, times.step)


def shares_s(times: RankStep) -> dict[str, float]:
    """Where the seconds of a rank's step went.

    ``bubble_s`` was spent waiting for messages of other stages, ``wait_s`` waiting for partners in
    collectives; what is left of ``step_s`` beside these and ``own_s`` lies between the actions.
    """
    received = sum(one.wait_s for one in times.actions if one.kind in RECEIVES)
    waited = sum(one.wait_s for one in times.actions)
    return {
        "step_s": times.total_s,
        "own_s": sum(one.own_s for one in times.actions),
        "wait_s": waited - received,
        "bubble_s": received,
    }
