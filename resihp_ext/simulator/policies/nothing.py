"""No mitigation: what a job does that nobody has prepared.

Source: the lowest line of the paper's figures ("no mitigation").

Slow devices are borne. A death ends the job; somebody starts it anew from the last checkpoint once
all devices are there again.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from resihp_ext.simulator.layout import Layout
from resihp_ext.simulator.policy import Answer, Policy, Undone, View
from resihp_ext.simulator.restart import restart_s
from resihp_ext.simulator.setting import Setting


class Nothing(Policy):
    """Waits for repair."""

    name = "none"

    def begin(self, setting: Setting) -> Layout:
        return Layout(plan=setting.nominal)

    def answer(self, view: View) -> Answer:
        used = {rank for one in view.setting.nominal.replicas for rank in one.ranks}
        if view.health.dead & used:
            return Answer(layout=None, undone=Undone.CHECKPOINT, reason="waits for repair")
        if view.layout is not None:
            return Answer(layout=view.layout, reason="all of the layout is alive")
        return Answer(
            layout=Layout(plan=view.setting.nominal),
            pause_s=restart_s(view.setting),
            reason="repaired: started anew from the last checkpoint",
        )
