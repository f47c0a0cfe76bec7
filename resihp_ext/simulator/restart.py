"""How long it takes to start a whole job anew from its last checkpoint, or to read that alone.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from resihp_ext.simulator.setting import Setting


def checkpoint_bytes(setting: Setting) -> int:
    """Parameters, masters and moments of the whole model."""
    memory = setting.memory
    element = memory.param_bytes + memory.master_bytes + 2 * memory.moment_bytes
    return element * setting.shape.parameters


def read_s(setting: Setting) -> float:
    """The checkpoint, read by all nodes at once."""
    nodes = len({one.node for one in setting.cluster.devices})
    return checkpoint_bytes(setting) / (nodes * setting.times.storage_bytes_per_s)


def restart_s(setting: Setting) -> float:
    """Processes, groups and model anew, and the checkpoint read."""
    return setting.times.restart_s + read_s(setting)
