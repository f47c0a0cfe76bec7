"""All systems that are compared, by name.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from resihp_ext.errors import UserError
from resihp_ext.simulator.policies.checkpoint_restart import CheckpointRestart
from resihp_ext.simulator.policies.nothing import Nothing
from resihp_ext.simulator.policies.planned import Joint, Progressive
from resihp_ext.simulator.policy import Policy

POLICIES: dict[str, type[Policy]] = {
    one.name: one for one in (Nothing, CheckpointRestart, Progressive, Joint)
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
