"""Random scenarios of faults for chaos tests; the same seed gives the same bytes.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from resihp_ext.errors import UserError
from resihp_ext.faults.fault import LASTING, Fault, Kind, Phase

MOST = 4
"""Faults of one scenario."""

_BY_MICRO_BATCH = (Phase.FORWARD, Phase.BACKWARD, Phase.P2P)
_EXIT_CODES = (1, 7, 255)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A job, as far as drawing faults needs to know it."""

    nodes: tuple[str, ...]
    """Node of each rank."""
    steps: int
    """Faults strike in steps 1 to this."""
    micro_batches: int = 1
    feasible: Callable[[frozenset[int]], bool] = bool
    """Whether these ranks alone can train; asked as if nothing that is hit ever came back."""
    kinds: tuple[Kind, ...] = (Kind.KILL, Kind.STOP, Kind.HANG, Kind.EXIT, Kind.NODE)
    """A cut needs a job on several networks, so it has to be asked for."""
    phases: tuple[Phase, ...] = tuple(one for one in Phase if one is not Phase.PROBE)
    """Leave out what the job never does, such as evaluation: a fault would wait in vain."""
    spared: frozenset[str] = frozenset()
    """Nodes that must not be lost whole, such as the one with the coordinator."""
    longest_delay_s: float = 0.5

    def __post_init__(self) -> None:
        if not self.kinds or set(self.kinds) & LASTING:
            raise UserError(f"kinds: expected some that strike once, got {list(self.kinds)}")
        if not set(self.phases) - {Phase.RECOVERY}:
            raise UserError("phases: the first fault needs another phase than recovery")


def draw(seed: int, scene: Scene) -> tuple[Fault, ...]:
    """Draws 1 to :data:`MOST` faults, in the order of their steps.

    No target is hit twice, and what is left after all of them is feasible. Where the number drawn
    would not leave enough, there are fewer.

    Raises:
        UserError: not even one fault leaves enough.
    """
    random = Random(seed)
    live = frozenset(range(len(scene.nodes)))
    faults: list[Fault] = []
    count = random.randint(1, MOST)
    for step in sorted(random.randint(1, scene.steps) for _ in range(count)):
        options = _options(scene, live)
        if not options:
            break
        kind = random.choice([kind for kind in scene.kinds if kind in options])
        target, victims = random.choice(options[kind])
        live -= victims
        faults.append(_fault(random, scene, kind, target, step, faults))
    if not faults:
        raise UserError(f"{len(live)} ranks: no fault leaves enough of them; give more ranks")
    return tuple(faults)


type Option = tuple[dict[str, Any], frozenset[int]]
"""A target as a fault names it, and the ranks that are lost with it."""


def _options(scene: Scene, live: frozenset[int]) -> dict[Kind, list[Option]]:
    found = {}
    for kind in scene.kinds:
        every = _nodes(scene, live) if kind in (Kind.NODE, Kind.CUT) else _ranks(live)
        fit = [one for one in every if scene.feasible(live - one[1])]
        if fit:
            found[kind] = fit
    return found


def _ranks(live: frozenset[int]) -> list[Option]:
    return [({"rank": rank}, frozenset({rank})) for rank in sorted(live)]


def _nodes(scene: Scene, live: frozenset[int]) -> list[Option]:
    options: list[Option] = []
    for name in dict.fromkeys(scene.nodes):
        here = frozenset(rank for rank, node in enumerate(scene.nodes) if node == name)
        # A node with nobody left would never come to the phase.
        if here & live and name not in scene.spared:
            options.append(({"node": name}, here))
    return options


def _fault(
    random: Random,
    scene: Scene,
    kind: Kind,
    target: dict[str, Any],
    step: int,
    before: list[Fault],
) -> Fault:
    causes = [one for one in before if one.phase is not Phase.RECOVERY]
    phase = random.choice([one for one in scene.phases if causes or one is not Phase.RECOVERY])
    more: dict[str, Any] = {}
    if phase is Phase.RECOVERY:
        # A recovery is only there when something else has struck.
        step = causes[-1].at_step
    elif phase in _BY_MICRO_BATCH and random.random() < 0.5:
        more["micro_batch"] = random.randrange(scene.micro_batches)
    if random.random() < 0.5:
        more["delay_s"] = random.randint(1, int(1000 * scene.longest_delay_s)) / 1000
    if kind is Kind.EXIT:
        more["exit_code"] = random.choice(_EXIT_CODES)
    return Fault(at_step=step, phase=phase, kind=kind, **target, **more)
