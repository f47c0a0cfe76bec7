"""Picks the checkpoint that a job starts from: the newest one that is whole.

Upstream follows the tracker file only. When the checkpoint that it names is damaged the job dies
with a traceback on every rank; when the tracker is absent training silently starts from random
weights; when it is empty upstream exits with code 0. Here each of these has a defined outcome and
one line that names the file.

Promise: reads only; the same directory content and verdicts give the same choice. Never chooses
"start fresh" when there is any trace of an earlier save. Imports neither torch nor Megatron.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from megatron.resilience.checkpoint.damage import Damage
from megatron.resilience.checkpoint.metadata import METADATA_FILE
from megatron.resilience.checkpoint.tracker import RELEASE, TRACKER_FILE, Tracker, read_tracker
from megatron.resilience.checkpoint.verify import CONFIG_FILE
from resihp_ext.errors import UserError

ITERATION_DIRECTORY = re.compile(r"iter_([0-9]{7,})")
REMOTE_PREFIX = "msc://"

type Verify = Callable[[Path], Sequence[Damage]]
"""Checks one checkpoint directory; an empty answer means that it is sound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What to load, and what was passed over on the way."""

    directory: str | None
    """Chosen checkpoint directory; None to start from fresh weights."""
    iteration: int | None
    """Its iteration; None for a release checkpoint or a fresh start."""
    skipped: tuple[str, ...] = ()
    """Directories that were newer but damaged or unfinished."""
    notices: tuple[str, ...] = ()
    """One line for people about each thing that was not as expected."""

    def to_json(self) -> dict[str, Any]:
        """Fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_json`."""
        tuples = {name: tuple(fields[name]) for name in ("skipped", "notices")}
        return cls(**{**fields, **tuples})


def choose_checkpoint(
    load_directory: Path | str,
    save_directory: Path | str | None,
    *,
    verify: Verify,
    ckpt_step: int | None = None,
) -> Choice:
    """Choose what a job with ``--load load_directory`` starts from.

    Args:
        load_directory: value of ``--load``.
        save_directory: value of ``--save``. Only when both are the same directory may the job
            start fresh, because then nothing has been saved yet (a job's first launch).
        verify: called for candidates, newest first, until one is sound.
        ckpt_step: value of ``--ckpt-step``: exactly this iteration or an error.

    Raises:
        UserError: nothing sound to load; the line names the newest damaged file.
    """
    if str(load_directory).startswith(REMOTE_PREFIX):
        raise UserError(
            f"--load {load_directory}: checkpoints behind {REMOTE_PREFIX} cannot be verified; "
            "load from a mounted file system"
        )
    load = Path(load_directory)
    tracker = _tracker(load)
    if ckpt_step is not None:
        return _exactly(load, ckpt_step, tracker, verify)
    if tracker.state == "release":
        return _release(load, verify)
    iterations = sorted(_iterations(load), reverse=True)
    if tracker.state == "absent" and not _was_ever_saved(load, iterations):
        return _fresh(load, save_directory, iterations)
    return _newest_sound(load, tracker, iterations, verify)


def iteration_directory(load_directory: Path, iteration: int) -> Path:
    """Megatron's name for the checkpoint of ``iteration``."""
    return load_directory / f"iter_{iteration:07d}"


def has_traces(load_directory: Path) -> bool:
    """Whether the directory holds a tracker or a checkpoint that finished writing.

    Raises:
        UserError: the directory exists but cannot be read.
    """
    iterations = list(_iterations(load_directory))
    return _tracker(load_directory).state != "absent" or _was_ever_saved(load_directory, iterations)


def _tracker(load: Path) -> Tracker:
    try:
        return read_tracker(load)
    except OSError as error:
        raise UserError(f"--load: {load / TRACKER_FILE} cannot be read: {_reason(error)}") from None


def _iterations(load: Path) -> Iterator[int]:
    try:
        for entry in load.iterdir():
            match = ITERATION_DIRECTORY.fullmatch(entry.name)
            if match and entry.is_dir():
                yield int(match[1])
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"--load: {load} cannot be listed: {_reason(error)}") from None


def _was_ever_saved(load: Path, iterations: list[int]) -> bool:
    """Whether a directory holds a marker file, which only a save that ended its writing leaves."""
    return any(
        (iteration_directory(load, iteration) / marker).exists()
        for iteration in iterations
        for marker in (METADATA_FILE, CONFIG_FILE)
    )


def _fresh(load: Path, save: Path | str | None, iterations: list[int]) -> Choice:
    state = "holds no checkpoint" if load.exists() else "does not exist"
    if save is None or not _same_directory(load, Path(save)):
        raise UserError(
            f"--load: {load} {state}; correct the path, or leave --load out to train from scratch"
        )
    notices = [f"--load: {load} {state} yet and is also --save: training starts from iteration 0"]
    notices += [
        f"--load: {iteration_directory(load, iteration)} is a save that was never finished: ignored"
        for iteration in iterations
    ]
    return Choice(
        directory=None,
        iteration=None,
        skipped=tuple(str(iteration_directory(load, iteration)) for iteration in iterations),
        notices=tuple(notices),
    )


def _exactly(load: Path, ckpt_step: int, tracker: Tracker, verify: Verify) -> Choice:
    if ckpt_step <= 0:
        raise UserError(f"--ckpt-step is {ckpt_step}: Megatron ignores it; give an iteration > 0")
    if tracker.state == "release":
        raise UserError(
            f"--ckpt-step {ckpt_step}: {tracker.path} says 'release', which Megatron loads "
            "whatever the step; leave --ckpt-step out or correct the tracker"
        )
    directory = iteration_directory(load, ckpt_step)
    damages = verify(directory)
    if damages:
        raise UserError(
            f"--ckpt-step {ckpt_step}: {damages[0]}{_more(damages)}; "
            "leave --ckpt-step out to use the newest sound checkpoint"
        )
    return Choice(directory=str(directory), iteration=ckpt_step)


def _release(load: Path, verify: Verify) -> Choice:
    directory = load / RELEASE
    damages = verify(directory)
    if damages:
        raise UserError(f"--load: {damages[0]}{_more(damages)}; restore it from a sound copy")
    return Choice(directory=str(directory), iteration=None)


def _newest_sound(load: Path, tracker: Tracker, iterations: list[int], verify: Verify) -> Choice:
    notices, candidates = _candidates(load, tracker, iterations)
    skipped = [
        str(iteration_directory(load, iteration))
        for iteration in iterations
        if iteration not in candidates
    ]
    newest_damage: str | None = None
    for iteration in candidates:
        directory = iteration_directory(load, iteration)
        damages = verify(directory)
        if not damages:
            return Choice(
                directory=str(directory),
                iteration=iteration,
                skipped=tuple(skipped),
                notices=(*notices, *_fallback(directory, newest_damage)),
            )
        line = f"{damages[0]}{_more(damages)}"
        newest_damage = newest_damage or line
        skipped.append(str(directory))
        notices.append(f"--load: skipped iteration {iteration}: {line}")
    raise UserError(
        f"--load: no sound checkpoint in {load}: {newest_damage or notices[0]}; restore a copy, "
        "or point --load and --save at a new directory to train from scratch"
    )


def _candidates(
    load: Path, tracker: Tracker, iterations: list[int]
) -> tuple[list[str], tuple[int, ...]]:
    """Notices about the tracker, and the iterations worth a check, newest first."""
    if tracker.state == "absent":
        return [f"{tracker.path} is missing: looking at every checkpoint"], tuple(iterations)
    if tracker.iteration is None:
        line = f"{tracker.path} is garbled (an interrupted save): looking at every checkpoint"
        return [line], tuple(iterations)
    newest = tracker.iteration
    notices = [
        f"{iteration_directory(load, iteration)} is newer than {TRACKER_FILE} ({newest}): "
        "an unfinished save or a run that was rolled back, ignored"
        for iteration in iterations
        if iteration > newest
    ]
    # The named one comes first even if its directory is gone: that must be reported, not passed by.
    older = [iteration for iteration in iterations if iteration < newest]
    return notices, (newest, *older)


def _fallback(directory: Path, newest_damage: str | None) -> Iterator[str]:
    if newest_damage is not None:
        yield f"--load: using the older {directory}, the newest sound checkpoint"


def _more(damages: Sequence[Damage]) -> str:
    return f" (and {len(damages) - 1} more findings)" if len(damages) > 1 else ""


def _same_directory(first: Path, second: Path) -> bool:
    # resolve() works for directories that do not exist yet, unlike samefile().
    return first.resolve() == second.resolve()


def _reason(error: OSError) -> str:
    return error.strerror or type(error).__name__
