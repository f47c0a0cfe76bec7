"""Setting of emulated devices."""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.emulation.scene import Scene, read_scene


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulationConfig:
    """Emulation."""

    emulate: str | None = None
    """YAML file of a large model and its devices: every action waits until it has taken as long as
    it would there, so that a tiny job on a few cores shows what slow devices do to a large one."""

    def read(self) -> Scene | None:
        """Reads the file; None when none is given.

        Raises:
            UserError: the file cannot be used.
        """
        return None if self.emulate is None else read_scene(self.emulate)
