"""One thing that the ranks of a stage instance do for a training step, with a text form.

``F3`` runs micro-batch 3 forward and ``B3`` backward; where the backward is split, ``B3`` gives the
gradient of the input and ``W3`` that of the weights. ``SF3>1.2`` sends the activations of
micro-batch 3 to replica 1, stage 2; ``RF3<1.0`` receives them from replica 1, stage 0; ``SB`` and
``RB`` are the same for gradients. ``SYNC`` reduces gradients over all owners, ``STEP`` updates the
weights.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from resihp_ext.plan.plan import Instance, PlanError


class Kind(StrEnum):
    """What is done."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"
    SYNC = "SYNC"
    STEP = "STEP"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT})
SENDS = {Kind.SEND_FORWARD: Kind.RECV_FORWARD, Kind.SEND_BACKWARD: Kind.RECV_BACKWARD}
"""Each send, and the receive that belongs to it."""
RECEIVES = {receive: send for send, receive in SENDS.items()}

_TEXT = re.compile(r"([FBW])(\d+)|(S[FB])(\d+)>(\d+)\.(\d+)|(R[FB])(\d+)<(\d+)\.(\d+)|SYNC|STEP")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Action:
    """One action of a stage instance."""

    kind: Kind
    micro_batch: int = -1
    """Number in the global batch; -1 for ``SYNC`` and ``STEP``."""
    peer: Instance | None = None
    """The other end of a transfer."""

    def __post_init__(self) -> None:
        for_all = self.kind in (Kind.SYNC, Kind.STEP)
        moves = self.kind in SENDS or self.kind in RECEIVES
        if for_all != (self.micro_batch < 0) or moves != (self.peer is not None):
            raise PlanError(f"action {self.kind}: micro-batch {self.micro_batch}, peer {self.peer}")

    def __str__(self) -> str:
        text = self.kind.value
        if self.micro_batch >= 0:
            text += str(self.micro_batch)
        if self.peer is not None:
            arrow = ">" if self.kind in SENDS else "<"
            text += f"{arrow}{self.peer}"
        return text

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of ``str(action)``.

        Raises:
            PlanError: not the text of an action.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise PlanError(f"{text!r} is not an action; examples: F3, B3, W3, SF3>1.2, RB3<1.2")
        kind, *numbers = [group for group in match.groups() if group is not None] or [text]
        peer = Instance(replica=int(numbers[1]), stage=int(numbers[2])) if numbers[1:] else None
        return cls(kind=Kind(kind), micro_batch=int(numbers[0]) if numbers else -1, peer=peer)


END = (Action(kind=Kind.SYNC), Action(kind=Kind.STEP))
"""What every instance does after its last micro-batch."""
