"""One fault made on purpose: who is hit, how, and when.

The same words serve jobs, tests, demos and the simulator. Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from resihp_ext.errors import UserError


class Kind(StrEnum):
    """What happens."""

    KILL = "kill"
    """The process gets SIGKILL."""
    STOP = "stop"
    """The process gets SIGSTOP: it lives, and does nothing."""
    HANG = "hang"
    """The process goes round in a loop; unless ``holds_gil`` is false, no thread of it runs."""
    EXIT = "exit"
    """The process ends with ``exit_code``."""
    NODE = "node"
    """The agent and all processes of a node get SIGKILL."""
    CUT = "cut"
    """The network of a node, or between two, is cut."""
    SLOW = "slow"
    """A device, or all of a node, keeps only the part ``factor`` of its speed."""
    SLOW_LINK = "slow_link"
    """The network between two nodes keeps only the part ``factor`` of its bandwidth, or takes
    ``delay_ms`` longer for every message."""


class By(StrEnum):
    """What makes a device slow."""

    EMULATED = "emulated"
    """Nothing does: an emulated device waits longer."""
    QUOTA = "quota"
    """The system gives the process less time on the CPU."""
    LOAD = "load"
    """Another process competes for the same core."""
    KERNEL = "kernel"
    """Other kernels compete for the same GPU."""


class Phase(StrEnum):
    """Where in a step a fault can strike: always just before what the name says."""

    FORWARD = "forward"
    BACKWARD = "backward"
    P2P = "p2p"
    """A message over a stage boundary."""
    SYNC = "sync"
    """The reduction of gradients."""
    VOTE = "vote"
    """The reduction of the gradient norm."""
    OPTIMIZER = "optimizer"
    """The update, after the vote."""
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"
    RECOVERY = "recovery"
    """In the middle of the recovery from another fault."""
    PROBE = "probe"
    """A measurement of a device or link that is suspected of being slow."""


LASTING = frozenset({Kind.SLOW, Kind.SLOW_LINK})
"""Kinds that begin at a step and last, instead of striking once."""

HANG_S = 600.0
"""How long a hang lasts unless said otherwise: nothing is left behind for ever."""

_TARGETS = {
    Kind.KILL: {"rank"},
    Kind.STOP: {"rank"},
    Kind.HANG: {"rank"},
    Kind.EXIT: {"rank"},
    Kind.NODE: {"node"},
    Kind.CUT: {"node", "link"},
    Kind.SLOW: {"rank", "node"},
    Kind.SLOW_LINK: {"link"},
}
_BY_MICRO_BATCH = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.P2P})
_LONGEST_S = 86_400.0
_LONGEST_NAME = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault; refuses what cannot happen.

    A fault waits for the first time that its target comes to ``phase`` in step ``at_step``, or in a
    later one if the target does not pass there in that step.

    Raises:
        UserError: a field or a combination of fields makes no sense; names the field.
    """

    at_step: int
    """Step, from 1, as logs count them."""
    kind: Kind
    phase: Phase | None = None
    """None: whatever comes first."""
    rank: int | None = None
    node: str | None = None
    link: tuple[str, str] | None = None
    """Two nodes; neither comes first."""
    micro_batch: int | None = None
    """Of ``at_step``: this one or a later. Only for forward, backward and p2p."""
    delay_s: float = 0.0
    """From reaching the phase to the strike; the target goes on in between."""
    exit_code: int | None = None
    """Of an exit; 1 unless given."""
    lasts_s: float | None = None
    """How long a hang lasts; :data:`HANG_S` unless given."""
    holds_gil: bool = True
    """Whether a hang keeps the other threads of its process from running."""
    factor: float | None = None
    """Speed or bandwidth that is left, as a part of the healthy one: 0.5 is twice as slow. 1 ends
    what faults before this one do to the target."""
    until_step: int | None = None
    """The first step that is healthy again; None: never."""
    by: By | None = None
    """Of a slow device; None: what fits the job and the machine."""
    bandwidth_mib_s: float | None = None
    """Of a real link while it is healthy, in each direction: what ``factor`` is a part of."""
    delay_ms: float | None = None
    """By how much a real link holds back every message."""

    def __post_init__(self) -> None:
        self._check_values()
        targets = {"rank": self.rank, "node": self.node, "link": self.link}
        given = {name for name, value in targets.items() if value is not None}
        allowed = _TARGETS[self.kind]
        if len(given) != 1 or not given <= allowed:
            raise UserError(
                f"{self.kind} needs {' or '.join(sorted(allowed))}"
                f"{' and nothing else' if len(given) > 1 else ''}, got {_listed(given)}"
            )
        self._check_kind()
        if self.micro_batch is not None and self.phase not in _BY_MICRO_BATCH:
            raise UserError(f"micro_batch needs a phase of {_listed(_BY_MICRO_BATCH)}")

    def _check_values(self) -> None:
        _whole("at_step", self.at_step, 1)
        for name, value, least in (
            ("rank", self.rank, 0),
            ("micro_batch", self.micro_batch, 0),
            ("exit_code", self.exit_code, 0),
        ):
            if value is not None:
                _whole(name, value, least, most=255 if name == "exit_code" else None)
        for name in (*((self.node,) if self.node is not None else ()), *(self.link or ())):
            if not _is_name(name):
                raise UserError(f"node: expected a name without blanks, got {name!r}")
        if self.link is not None and len(set(self.link)) != 2:
            raise UserError(f"link: expected two different nodes, got {list(self.link)}")
        _number("delay_s", self.delay_s, lambda value: 0 <= value <= _LONGEST_S, "0 to 86400")
        if self.lasts_s is not None:
            _number("lasts_s", self.lasts_s, lambda value: 0 < value <= _LONGEST_S, "up to 86400")
        if not isinstance(self.holds_gil, bool):
            raise UserError(f"holds_gil: expected true or false, got {self.holds_gil!r}")

    def _check_lasting(self) -> None:
        if self.kind is Kind.SLOW and self.factor is None:
            raise UserError("slow needs factor: the part of the speed that is left")
        if self.kind is Kind.SLOW_LINK and self.factor is None and self.delay_ms is None:
            raise UserError("slow_link needs factor (the part of the bandwidth left) or delay_ms")
        if self.until_step is not None:
            _whole("until_step", self.until_step, self.at_step + 1)
        for name, value, most in (
            ("factor", self.factor, 1.0),
            ("bandwidth_mib_s", self.bandwidth_mib_s, 1e9),
            ("delay_ms", self.delay_ms, 1000 * _LONGEST_S),
        ):
            if value is not None:
                span = f"above 0, {most:.0f} at most"
                _number(name, value, partial(_within, most), span)
        if self.by is not None and not isinstance(self.by, By):
            raise UserError(f"by: expected one of {', '.join(By)}, got {self.by!r}")
        how = (self.until_step, self.by, self.bandwidth_mib_s, self.delay_ms)
        if self.ends_others and how != (None,) * len(how):
            raise UserError("factor 1 ends other faults: leave out how and until when")

    def _check_kind(self) -> None:
        lasting, link = self.kind in LASTING, self.kind is Kind.SLOW_LINK
        if lasting:
            self._check_lasting()
        for name, given, fits in (
            ("phase", self.phase is not None, not lasting),
            ("delay_s", self.delay_s != 0, not lasting),
            ("factor", self.factor is not None, lasting),
            ("until_step", self.until_step is not None, lasting),
            ("by", self.by is not None, self.kind is Kind.SLOW),
            ("bandwidth_mib_s", self.bandwidth_mib_s is not None, link and self.factor is not None),
            ("delay_ms", self.delay_ms is not None, link),
            ("exit_code", self.exit_code is not None, self.kind is Kind.EXIT),
            ("lasts_s", self.lasts_s is not None, self.kind is Kind.HANG),
            ("holds_gil", not self.holds_gil, self.kind is Kind.HANG),
        ):
            if given and not fits:
                raise UserError(f"{name} means nothing for {self.kind}; leave it out")

    def is_due(self, phase: str, step: int, micro_batch: int | None = None) -> bool:
        """Whether it strikes a target that has come here."""
        if step < self.at_step or self.phase not in (None, phase):
            return False
        early = step == self.at_step and self.micro_batch is not None
        return not early or (micro_batch or 0) >= (self.micro_batch or 0)

    def hits(self, rank: int, node: str) -> bool:
        """Whether a rank on a node is its target, or belongs to it."""
        return self.rank == rank or self.node == node or node in (self.link or ())

    @property
    def ends_others(self) -> bool:
        """Whether its target is healthy from ``at_step`` on, as far as faults before it go."""
        return self.factor == 1

    def lasts_at(self, step: int) -> bool:
        """Whether a lasting fault has begun, and is not over, in a step."""
        return self.at_step <= step and (self.until_step is None or step < self.until_step)

    @property
    def target(self) -> str:
        """As people read it: "rank 3", "node a", "link a to b"."""
        if self.link is not None:
            return f"link {self.link[0]} to {self.link[1]}"
        return f"node {self.node}" if self.rank is None else f"rank {self.rank}"


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME and not set(value) & _BLANKS


_BLANKS = frozenset(" \t\r\n\v\f")


def _listed(names: Any) -> str:
    return ", ".join(sorted(names)) or "none"


def _whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    # True is an int, too.
    fits = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if not fits or (most is not None and value > most):
        span = f"from {least}" if most is None else f"{least} to {most}"
        raise UserError(f"{name}: expected a whole number {span}, got {value!r}")


def _within(most: float, value: float) -> bool:
    return 0 < value <= most


def _number(name: str, value: Any, fits: Callable[[float], bool], span: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
        raise UserError(f"{name}: expected a number {span}, got {value!r}")
