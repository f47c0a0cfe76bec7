"""What is wrong with one file of a checkpoint, said in one line.

Promise: plain frozen data that survives a trip through JSON, so that ranks can exchange it
through a store without pickles. Imports neither torch nor Megatron.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

type DamageKind = Literal["missing", "truncated", "content", "unreadable", "inconsistent"]

LONGEST_NAME_CHARACTERS = 255
LONGEST_PROBLEM_CHARACTERS = 400
"""Longer texts are cut by whoever makes a finding: names come from files that may be corrupt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """One finding about one file of a checkpoint directory."""

    kind: DamageKind
    """What sort of damage; ``missing`` and ``truncated`` often mean an interrupted copy."""
    directory: str
    """Checkpoint directory (``.../iter_0000010``)."""
    file: str
    """Name of the damaged file inside ``directory``."""
    problem: str
    """What is wrong, as the rest of a sentence about the file."""
    tensor: str | None = None
    """Logical tensor or object that the damaged bytes belong to, when known."""

    def __str__(self) -> str:
        subject = str(Path(self.directory) / self.file)
        if self.tensor is not None:
            subject = f"{subject}: {self.tensor}"
        return " ".join(f"{subject} {self.problem}".split())

    def to_json(self) -> dict[str, Any]:
        """Fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        """Inverse of :meth:`to_json`."""
        return cls(**fields)
