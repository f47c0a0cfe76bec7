"""The planner's answer as the coordinator's server takes it.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from resihp_ext.control.actions import NeedPlan
from resihp_ext.control.planning import plan_for


def answer(need: NeedPlan) -> tuple[str | None, str, int, float, float]:
    """The plan, what speaks against any, its version, seconds of a step as it is and with it."""
    found = plan_for(need)
    return found.plan, found.why or found.reason, found.version, found.now_s, found.then_s
