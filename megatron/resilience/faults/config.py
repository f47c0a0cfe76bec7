"""Setting of faults made on purpose, and what a job refuses of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.resilience.faults.refusal import refusal
from resihp_ext.errors import UserError
from resihp_ext.faults.fault import LASTING, Fault
from resihp_ext.faults.read import read_faults


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFaults:
    """The faults of a job, by what they act on."""

    real: tuple[Fault, ...] = ()
    """What strikes processes."""
    emulated: list[Fault] | None = None
    """What the emulated device of this rank looks at, and may be added to; None where none is."""
    tagged: bool = True
    """Whether the backend tells messages apart by tags, so that one can be held back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultsConfig:
    """Faults on purpose."""

    faults: str | None = None
    """YAML file of faults that the job does to itself, each once, to try out how it recovers."""

    def read(
        self, world_size: int, *, emulated: bool = False, tagged: bool = True
    ) -> tuple[Fault, ...]:
        """Reads the file; nothing when none is given.

        Args:
            emulated: Whether devices are emulated.
            tagged: Whether the backend tells messages apart by tags.

        Raises:
            UserError: the file, or an entry that this job cannot carry out.
        """
        if self.faults is None:
            return ()
        found = read_faults(Path(self.faults))
        for number, fault in enumerate(found):
            problem = None
            if fault.kind in LASTING:
                problem = refusal(fault, emulated=emulated, tagged=tagged)
            if problem is None and fault.rank is not None and fault.rank >= world_size:
                problem = f"rank {fault.rank}: the job has ranks 0 to {world_size - 1}"
            if problem is not None:
                raise UserError(f"{self.faults}: entry {number}: {problem}")
        return found
