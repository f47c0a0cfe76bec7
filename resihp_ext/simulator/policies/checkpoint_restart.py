"""Checkpoint and restart: what most large jobs do today.

Source: Grattafiori et al. 2024 (arXiv 2407.21783, section 3.3.4) and the launchers of PyTorch and
SLURM: a death ends the job; it is started anew from its last checkpoint without what has died.

As strong as such a system can be: everything else of :class:`Restarting` holds. Replicas that have
lost devices are filled up with spare devices and with whole TP groups of each other, so that spares
bring the job back to full size at once; without them it goes on with fewer replicas, and a repair
stops it again for the larger layout, from a checkpoint saved for that, if this pays. Slow devices
are borne: nobody looks for them. Replicas get equal shares of the micro-batches.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp_ext.plan.plan import Plan, Replica
from resihp_ext.simulator.layout import Layout, Schedule
from resihp_ext.simulator.policies.restarting import Restarting
from resihp_ext.simulator.policy import Answer, View
from resihp_ext.simulator.pricing import Pricing


class CheckpointRestart(Restarting):
    """Starts anew on as many whole replicas as there are devices for."""

    name = "restart"

    def deal(self, pricing: Pricing, replicas: Sequence[Replica]) -> list[int]:
        return pricing.evenly(replicas)

    def schedule(self, pricing: Pricing, plan: Plan) -> Schedule:
        return Schedule()

    def about_slowness(self, view: View, pricing: Pricing, running: Layout) -> Answer:
        return Answer(layout=running, reason="all of the layout is alive")
