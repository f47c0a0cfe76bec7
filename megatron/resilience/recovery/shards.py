"""The third source of state: checkpoints on disk, when all owners and all copies are lost.

Only checkpoints that this job has saved or begun with count: what else may lie in a directory need
not lie on the way that this job has come. The newest that is sound, as all members find together,
is loaded into the layout that is being made; the steps since then are done again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from megatron.core.utils import unwrap_model

from megatron.resilience.checkpoint.choose import iteration_directory
from megatron.resilience.checkpoint.tracker import RELEASE
from megatron.resilience.checkpoint.verify import Level, verify_checkpoint
from megatron.resilience.executor.manifest import exchange_texts
from megatron.resilience.executor.transition import StateLostError
from megatron.resilience.upstream.arguments import current_args
from megatron.resilience.upstream.state_files import load_state
from resihp_ext.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.resilience.executor.executor import Executor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A state that can be made again."""

    updates: int
    """Done in it."""
    step: int
    """Of the training loop."""
    directory: str
    """Of the checkpoint; empty for the initial weights."""
    holds: Literal["all", "weights", "nothing"]
    """In the files; the rest is as it is before the first step."""

    def __str__(self) -> str:
        return self.directory or "the initial weights"


class Shards:
    """States that this rank knows how to find again."""

    def __init__(
        self,
        executor: Executor,
        *,
        level: Level,
        initialise: Callable[[list[torch.nn.Module]], object],
    ) -> None:
        """Prepares the list.

        Args:
            level: How thoroughly checkpoints are verified.
            initialise: Draws the initial weights of modules, the same in every layout.
        """
        self._executor = executor
        self._level: Level = level
        self._initialise = initialise
        self._known: dict[int, Saved] = {}
        self.loaded: Saved | None = None
        """What was loaded last."""

    def begin(self) -> None:
        """Remembers what the job begins with; before its first step."""
        args, optimizer = current_args(), self._executor.optimizer
        assert optimizer is not None
        step = int(args.iteration)
        if args.load is not None:
            folder = Path(args.load)
            loaded = args.ckpt_step
            path = iteration_directory(folder, loaded) if loaded else folder / RELEASE
            holds: Literal["all", "weights"] = "all" if optimizer.loaded else "weights"
            self._note(Saved(updates=optimizer.steps, step=step, directory=str(path), holds=holds))
        elif args.pretrained_checkpoint is None:
            self._note(Saved(updates=0, step=step, directory="", holds="nothing"))

    def saved(self, step: int) -> None:
        """A checkpoint was saved under ``--save``."""
        args, optimizer = current_args(), self._executor.optimizer
        assert optimizer is not None
        if not args.no_save_optim:
            path = iteration_directory(Path(args.save), step)
            self._note(Saved(updates=optimizer.steps, step=step, directory=str(path), holds="all"))

    def has_all(self, updates: int) -> bool:
        """Whether any member knows a sound checkpoint of just this state; collective."""
        return any(
            one.updates == updates and one.holds == "all" and self._damage(one) is None
            for one in self._candidates()
        )

    @property
    def newest(self) -> str:
        """Where the job can go on from, as far as this rank knows; for people."""
        for _, one in sorted(self._known.items(), reverse=True):
            # Names alone are looked at: what is asynchronous may never have been finished.
            if one.directory and not verify_checkpoint(Path(one.directory), level="off").damages:
                return f"the newest checkpoint is {one.directory}"
        return "there is no checkpoint"

    def _note(self, one: Saved) -> None:
        self._known[one.updates] = one

    def restore(self, models: list[torch.nn.Module]) -> tuple[int, str]:
        """Loads the newest sound state that any member knows into their layout; collective.

        Returns:
            The updates done in it, and what it is.

        Raises:
            StateLostError: there is none, on all members alike.
        """
        damaged: list[str] = []
        for one in self._candidates():
            damage = self._damage(one)
            if damage is None:
                self._load(one, models)
                return one.updates, str(one)
            logger.warning("%s is passed over: %s", one, damage)
            damaged.append(damage)
        why = (
            f"no checkpoint of this job is sound: {damaged[0]}"
            if damaged
            else ("this job has no checkpoint yet")
        )
        raise StateLostError(
            f"a part of the state is lost with all its owners and all copies in memory, and {why}"
        )

    def _candidates(self) -> list[Saved]:
        """Of all members, the newest first; newcomers know only what came after them."""
        mine = json.dumps([asdict(one) for one in self._known.values()])
        told = [Saved(**one) for text in self._exchange(mine) for one in json.loads(text)]
        return sorted({one.updates: one for one in told}.values(), key=lambda one: -one.updates)

    def _damage(self, one: Saved) -> str | None:
        """What is wrong with a checkpoint, as the first member has found it in its part."""
        if one.holds == "nothing":
            return None
        world, rank = self._executor.world, self._executor.seat.rank
        part = world.number(rank), len(world.members)
        found = verify_checkpoint(Path(one.directory), level=self._level, part=part).damages
        texts = self._exchange(str(found[0]) if found else "")
        return next(filter(None, texts), None)

    def _load(self, one: Saved, models: list[torch.nn.Module]) -> None:
        optimizer = self._executor.optimizer
        assert optimizer is not None
        settings = optimizer.settings()
        optimizer.forget_loaded()
        with torch.no_grad():
            if one.holds == "nothing":
                self._initialise(unwrap_model(models))
            else:
                holder = optimizer if one.holds == "all" else None
                load_state(models, holder, Path(one.directory), self._executor.groups)
            # The schedule is where it was before the loss, and the step that runs is of there.
            optimizer.set_settings(settings)
            optimizer.adopt_parameters()
        if optimizer.steps != one.updates:
            raise CheckpointError(
                f"{one}: holds the state after {optimizer.steps} updates, not {one.updates}"
            )
        self.loaded = one

    def _exchange(self, text: str) -> list[str]:
        return exchange_texts(text, self._executor.device)
