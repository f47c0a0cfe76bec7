"""What can hold a process back.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from typing import Protocol


class Brake(Protocol):
    """One way to make the device of this process slow; for one thread."""

    def keep(self, left: float) -> None:
        """From now on the device keeps this part of its speed; 1 lets it go.

        Raises:
            BrakeError: the system does not let it.
        """
