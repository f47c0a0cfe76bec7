"""One thing that a rank group does for a training step, with a text form.

``F3`` runs micro-batch 3 forward and ``B3`` backward; where the backward is split, ``B3`` gives the
gradient of the input and ``W3`` that of the weights. ``SF3>1.2`` sends the activations of
micro-batch 3 to replica 1, stage 2; ``RF3<1.0`` receives them from replica 1, stage 0; ``SB`` and
``RB`` are the same for gradients. ``SYNC`` reduces gradients over all owners, ``STEP`` updates the
weights.

Where a group holds several chunks of the model (interleaved pipelines), ``#`` names the one that
an action is for, unless it is the first: ``F3#1``, ``SF3#1>1.2``.

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

_TEXT = re.compile(
    r"(?P<kind>[FBW]|[SR][FB])(?P<micro_batch>\d+)(#(?P<chunk>\d+))?"
    r"((?P<arrow>[<>])(?P<replica>\d+)\.(?P<stage>\d+))?|(?P<for_all>SYNC|STEP)"
)
_ARROWS = {**dict.fromkeys(SENDS, ">"), **dict.fromkeys(RECEIVES, "<")}


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Action:
    """One action of a rank group."""

    kind: Kind
    micro_batch: int = -1
    """Number in the global batch; -1 for ``SYNC`` and ``STEP``."""
    peer: Instance | None = None
    """The other end of a transfer."""
    chunk: int = 0
    """Which of the group's chunks it is for, in the order of their layers."""

    def __post_init__(self) -> None:
        for_all = self.kind in (Kind.SYNC, Kind.STEP)
        wrong = for_all != (self.micro_batch < 0) or self.chunk < 0 or (for_all and self.chunk)
        if wrong or (self.kind in _ARROWS) != (self.peer is not None):
            raise PlanError(
                f"action {self.kind}: micro-batch {self.micro_batch}, chunk {self.chunk}, "
                f"peer {self.peer}"
            )

    def __str__(self) -> str:
        text = self.kind.value
        if self.micro_batch >= 0:
            text += str(self.micro_batch)
        if self.chunk:
            text += f"#{self.chunk}"
        if self.peer is not None:
            text += f"{_ARROWS[self.kind]}{self.peer}"
        return text

    @classmethod
    def parse(cls, text: str) -> Self:
        """Inverse of ``str(action)``.

        Raises:
            PlanError: not the text of an action.
        """
        match = _TEXT.fullmatch(text)
        found = match.groupdict() if match else {}
        kind = found.get("kind") or found.get("for_all")
        if kind is None or found["arrow"] != _ARROWS.get(Kind(kind)):
            raise PlanError(
                f"{text!r} is not an action; examples: F3, B3#1, W3, SF3>1.2, RB3#1<1.2"
            )
        if found["for_all"]:
            return cls(kind=Kind(kind))
        peer = None
        if found["arrow"]:
            peer = Instance(replica=int(found["replica"]), stage=int(found["stage"]))
        return cls(
            kind=Kind(kind),
            micro_batch=int(found["micro_batch"]),
            peer=peer,
            chunk=int(found["chunk"] or 0),
        )


END = (Action(kind=Kind.SYNC), Action(kind=Kind.STEP))
"""What every group does after its last micro-batch."""
