"""All tables and figures, in the order of the report.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp_ext.errors import UserError
from resihp_ext.reproduce.ablation import ABLATION
from resihp_ext.reproduce.alarms import ALARMS
from resihp_ext.reproduce.amplification import AMPLIFICATION
from resihp_ext.reproduce.figure import Part
from resihp_ext.reproduce.frequency import FREQUENCY
from resihp_ext.reproduce.ladder import LADDER
from resihp_ext.reproduce.losses import LOSSES
from resihp_ext.reproduce.predictor import PREDICTOR
from resihp_ext.reproduce.sweep import SWEEP
from resihp_ext.reproduce.throughput import FAIL_SLOW, FAIL_STOP, MIXED_PART

PARTS = {
    one.name: one
    for one in (
        *(PREDICTOR, ALARMS, FAIL_STOP, FAIL_SLOW, MIXED_PART, FREQUENCY, ABLATION),
        *(AMPLIFICATION, LOSSES, LADDER, SWEEP),
    )
}
"""By name."""


def chosen(names: Sequence[str] | None) -> tuple[Part, ...]:
    """Parts by name; None: all.

    Raises:
        UserError: there is none of this name.
    """
    if names is None:
        return tuple(PARTS.values())
    if unknown := [name for name in names if name not in PARTS]:
        raise UserError(f"--only {','.join(unknown)}: choose of {', '.join(PARTS)}")
    return tuple(one for name, one in PARTS.items() if name in names)
