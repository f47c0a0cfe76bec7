"""All that a question about hours of faults may say: flags of ``resihp simulate``, keys of a file.

Imports nothing, so that ``resihp --help`` answers at once.
"""

from __future__ import annotations

from resihp_ext.whatif.keys import KEYS as PLAN_KEYS
from resihp_ext.whatif.keys import Key

NOT_OURS = ("planner", "dead", "slow", "lifetime-s")
"""Of ``resihp plan``: damage is drawn here, and planners are policies."""

KEYS = (
    *(key for key in PLAN_KEYS if key.name not in NOT_OURS),
    Key("policy", "NAME", "restart, progressive, joint", "A policy, or all.", many=True),
    Key("hours", "H", "24", "How long each run lasts."),
    Key("seeds", "N", "8", "Runs of each policy, each with other faults."),
    Key("seed", "N", "0", "Of the first run."),
    Key("device-mtbf-h", "H", "50000", "Of one device, between two deaths; 0: they never die."),
    Key("node-mtbf-h", "H", "0", "The same of a whole node."),
    Key("slow-mtbf-h", "H", "0", "Of one device, between two slow phases."),
    Key("link-mtbf-h", "H", "0", "Of one node's network, between two slow phases."),
    Key("fault-every-s", "S", "0", "A death of a device somewhere, this often at random."),
    Key("repair-h", "H", "4", "From a death to the device's return, in the mean."),
    Key("slow-h", "H", "1", "How long a slow phase lasts, in the mean."),
    Key("severity", "NAME", "medium", "Of slow phases: weak, medium or severe."),
    Key("checkpoint-every-s", "S", "best by Young and Daly", "Between two checkpoints."),
    Key("checkpoint-s", "S", "0", "By which a checkpoint holds training up."),
    Key("restart-s", "S", "120", "Of a whole job, without reading the checkpoint."),
    Key("goal", "PART", "none", "Of the goodput: how many spare nodes does it take?"),
)
"""Nodes that the layout does not need are spares."""

NAMES = tuple(key.name for key in KEYS)
