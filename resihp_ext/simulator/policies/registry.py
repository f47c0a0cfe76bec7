"""All systems that are compared, by name.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from resihp_ext.errors import UserError
from resihp_ext.simulator.policies.adaptra import Adaptra
from resihp_ext.simulator.policies.checkpoint_restart import CheckpointRestart
from resihp_ext.simulator.policies.greyhound import Greyhound
from resihp_ext.simulator.policies.malleus import Malleus
from resihp_ext.simulator.policies.nothing import Nothing
from resihp_ext.simulator.policies.oobleck import Oobleck
from resihp_ext.simulator.policies.planned import Joint, Progressive
from resihp_ext.simulator.policies.recycle import ReCycle
from resihp_ext.simulator.policies.strengthened import OobleckPlus, ReCyclePlus
from resihp_ext.simulator.policy import Policy

POLICIES: dict[str, type[Policy]] = {
    one.name: one
    for one in (
        Nothing,
        CheckpointRestart,
        ReCycle,
        Oobleck,
        ReCyclePlus,
        OobleckPlus,
        Adaptra,
        Greyhound,
        Malleus,
        Progressive,
        Joint,
    )
}
"""From the weakest to the strongest, about; each makes an object a run."""


def policy_named(name: str) -> Policy:
    """A new object of a policy.

    Raises:
        UserError: there is none of this name.
    """
    if name not in POLICIES:
        raise UserError(f"policy {name!r}: choose one of {', '.join(POLICIES)}")
    return POLICIES[name]()
