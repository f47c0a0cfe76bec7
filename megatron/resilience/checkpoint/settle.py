"""Leaves a checkpoint directory in the state that the choice made for it says.

After falling back to an older checkpoint, two leftovers would bite later: the tracker still names
the damaged one, and the next save at that iteration would write its shards among the old ones. If
that save is interrupted, the old ``.metadata`` describes a mixture of two runs in which every
checksum is right. So such directories are renamed and the tracker names what is really used. A
directory without ``.metadata`` cannot mislead anyone: it stays, and the next save replaces it.

Promise: changes nothing when nothing was skipped and the tracker is right. Never deletes.
Rank 0 calls it, once, before any rank loads.
"""

from pathlib import Path

from megatron.resilience.checkpoint.choose import Choice, iteration_directory
from megatron.resilience.checkpoint.metadata import METADATA_FILE
from megatron.resilience.checkpoint.tracker import read_tracker, write_tracker
from resihp_ext.errors import UserError

SET_ASIDE_SUFFIX = ".set-aside"


def settle(choice: Choice, load_directory: Path, save_directory: Path | None) -> tuple[str, ...]:
    """Make ``load_directory`` agree with ``choice``; return one line for each change.

    Skipped directories are renamed, and a tracker that names one is corrected, only where the job
    will save. Elsewhere only a garbled tracker is replaced, because upstream would stop on it with
    exit code 0. An explicit ``--ckpt-step`` skips nothing, so it leaves the tracker alone.

    Raises:
        UserError: a needed change is not possible (read-only, full); the line says what to do.
    """
    saves_here = save_directory is not None and load_directory.resolve() == save_directory.resolve()
    tracker = read_tracker(load_directory)
    named = iteration_directory(load_directory, tracker.iteration or 0)
    names_skipped = tracker.state == "iteration" and str(named) in choice.skipped
    lines: list[str] = []
    if saves_here:
        skipped = [Path(directory) for directory in choice.skipped]
        lines += [_set_aside(path) for path in skipped if (path / METADATA_FILE).exists()]
    wrong = tracker.state == "garbled" or (saves_here and names_skipped)
    if wrong and choice.iteration is not None:
        lines.append(_correct_tracker(load_directory, choice.iteration))
    return tuple(lines)


def _set_aside(directory: Path) -> str:
    for number in range(1, 1000):
        target = directory.with_name(f"{directory.name}{SET_ASIDE_SUFFIX}-{number}")
        if target.exists():
            continue
        try:
            directory.rename(target)
        except OSError as error:
            raise UserError(
                f"--save: {directory} is damaged and cannot be renamed ({error.strerror}); "
                "move it away so that new saves do not mix with it"
            ) from None
        return f"--save: renamed {directory} to {target.name}; delete it when not needed"
    raise UserError(f"--save: too many set-aside copies of {directory}; delete some")


def _correct_tracker(load_directory: Path, iteration: int) -> str:
    path = read_tracker(load_directory).path
    try:
        write_tracker(load_directory, iteration)
    except OSError as error:
        raise UserError(
            f"--load: {path} is wrong and cannot be rewritten ({error.strerror}); "
            f"write {iteration} into it"
        ) from None
    return f"--load: {path} now says {iteration}"
