"""The end of a job that cannot go on: what the survivors hold is saved before they leave."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from torch import distributed
from torch.distributed.checkpoint import CheckpointException

from megatron.resilience.checkpoint.choose import iteration_directory
from megatron.resilience.checkpoint.verify import CONFIG_FILE
from megatron.resilience.executor.manifest import exchange_texts
from megatron.resilience.executor.saving import forget_results, why_failed
from megatron.resilience.patches.training_loop import GROUPS_OF_A_SAVE
from megatron.resilience.recovery.loop_state import LoopState
from megatron.resilience.recovery.member import StoppedError
from megatron.resilience.recovery.shards import Shards
from megatron.resilience.upstream.arguments import current_args
from megatron.resilience.upstream.state_files import save_state
from resihp_ext.control import messages as say

if TYPE_CHECKING:
    from megatron.resilience.executor.executor import Executor

logger = logging.getLogger(__name__)


def leave_saved(
    executor: Executor,
    shards: Shards,
    loop: LoopState | None,
    go: say.Go,
    rebuild: Callable[[], None],
) -> None:
    """Saves the newest whole state, if there is one and somewhere to save it, and ends this rank.

    Args:
        rebuild: Moves the state into the layout to save it from.

    Raises:
        StoppedError: always.
    """
    if current_args().save is not None and loop is not None:
        try:
            rebuild()
            _save(executor, shards, loop)
        except (Exception, CheckpointException) as error:
            logger.warning("there is no last checkpoint: %s", why_failed(error))
            logger.debug("there is no last checkpoint", exc_info=error)
    raise StoppedError(go.exit_code, go.last)


def _save(executor: Executor, shards: Shards, loop: LoopState) -> None:
    args, optimizer = current_args(), executor.optimizer
    assert optimizer is not None
    mine = json.dumps(executor.history.place(optimizer.steps, args.micro_batch_size))
    known = [json.loads(text) for text in exchange_texts(mine, executor.device)]
    place = next((one for one in known if one is not None), None)
    if place is None or shards.has_all(optimizer.steps):
        return
    step, samples = place
    folder = iteration_directory(Path(args.save), step)
    new = executor.seat.rank == executor.world.members[0] and not folder.exists()
    forget_results()
    try:
        save_state(
            executor.models,
            optimizer,
            loop.scheduler,
            step=step,
            samples=samples,
            groups={
                name: getattr(executor.groups, group) for name, group in GROUPS_OF_A_SAVE.items()
            },
        )
    except (Exception, CheckpointException):
        if new and not (folder / CONFIG_FILE).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shards.saved(step)
    # The first who leaves ends the connections of all.
    with suppress(RuntimeError):
        distributed.barrier()
