"""Between two steps: the moment at which a job is armed, and at which its members may change.

A proposal is taken up once all members know of it. Whether they do is found out on the side: each
says in the reduction of the gradient norm which proposal it knows, as numbers whose sums show
whether all said the same. The change itself comes a step later, so that newcomers are there already
and nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.resilience.executor.guard import Figures
from megatron.resilience.recovery.ballot import FIGURES, unanimous, vote
from megatron.resilience.recovery.loop_state import LoopState
from megatron.resilience.recovery.recovery import Recovery
from megatron.resilience.upstream.arguments import current_args
from megatron.resilience.validation.validator import Validator
from resihp_ext.control import messages as say

STEPS_AHEAD = 2
"""From the step in whose vote a proposal was seen by all to the one before which it is done."""


class Boundary:
    """Called before every training step; collective when something changes."""

    def __init__(
        self,
        recovery: Recovery,
        *,
        describe: Callable[[], str],
        also: Callable[[list[torch.nn.Module]], None] | None,
        joins: bool,
        validator: Validator | None = None,
        recheck_steps: int = 0,
    ) -> None:
        """Prepares the boundary.

        Args:
            describe: JSON of what the coordinator needs to plan.
            also: A further change of plans that is due by itself.
            joins: Whether this worker comes to a job that already runs.
            validator: Does measurements; as all members or none have it.
            recheck_steps: Told to the coordinator.
        """
        self._recovery = recovery
        self._describe = describe
        self._also = also
        self._joins = joins
        self._validator, self._recheck_steps = validator, recheck_steps
        self._armed = False
        self._due: tuple[int, int] | None = None
        """The step, and the number of the proposal."""
        self.loop: LoopState | None = None
        """What the training loop of this rank keeps."""

    def __call__(self, models: list[torch.nn.Module]) -> None:
        """Does what is due before the step that is about to begin."""
        member, step = self._recovery.member, int(current_args().curr_iteration)
        self._recovery.pace_step(step + 1)
        if self._joins:
            self._joins = False
            self._armed = True
            self._recovery.take_up(self.loop, newcomer=True)
            return
        if not self._armed:
            self._armed = True
            if member.rank == 0:
                plan = self._recovery.plan.to_json()
                member.tell(
                    say.Described(
                        rank=0,
                        problem=self._describe(),
                        plan=plan,
                        recheck_steps=self._recheck_steps,
                    )
                )
            member.tell(say.Armed(rank=member.rank))
        self._recovery.copies.between_steps()
        if self._due is not None and step >= self._due[0]:
            number, self._due = self._due[1], None
            # A loss in between makes void what was agreed.
            if member.proposal is not None and member.proposal.number == number:
                self._recovery.take_up(self.loop, newcomer=False)
                return
        if self._validator is not None:
            self._validator.between_steps(step + 1)
        if self._also is not None and not self._recovery.has_changed:
            self._also(models)

    def ballot(self) -> Figures:
        """Which proposal this rank knows: one, its number, and its square."""
        proposal = self._recovery.member.proposal
        mine = vote(0 if proposal is None or self._pending(proposal) else proposal.number)
        return mine if self._validator is None else (*mine, *self._validator.ballot())

    def counted(self, sums: Figures) -> None:
        """Takes the sums over all members."""
        everyone = len(self._recovery.world.members)
        if self._validator is not None:
            self._validator.counted(sums[FIGURES:], everyone)
        member = self._recovery.member
        proposal = member.proposal
        if proposal is None or self._pending(proposal):
            return
        if not unanimous(sums[:FIGURES], everyone):
            return
        args = current_args()
        step = int(args.curr_iteration)
        if step + STEPS_AHEAD >= int(args.train_iters):
            return  # nobody comes to that boundary
        self._due = step + STEPS_AHEAD, proposal.number
        if member.rank == min(self._recovery.world.members):
            loop = LoopState.ahead(STEPS_AHEAD)
            member.tell(
                say.Agreed(rank=member.rank, number=proposal.number, step=self._due[0], loop=loop)
            )

    def _pending(self, proposal: say.Propose) -> bool:
        return self._due is not None and self._due[1] == proposal.number
