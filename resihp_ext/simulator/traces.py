"""Faults of a run from files: the project's own language, and Greyhound's injection traces.

The project's language counts steps. Here a step is as long as a healthy iteration: what lasts holds
from the beginning of step ``at_step`` to that of ``until_step``, what strikes does so in the middle
of its step, and after ``delay_s``. Processes that die, hang, or are stopped do not come back; a
node whose network is cut is as good as dead.

Greyhound's traces (BASELINES 3.9), a line each, in seconds:

    start;end;[ranks];delay
    comm;start;duration;[a,b]

``delay`` seconds are added to every iteration of these ranks. A rank that needs ``T + d`` where a
healthy iteration takes ``T`` has ``p = T / (T + d)``: taken over the whole iteration, since a trace
does not say how busy the rank is. ``a`` and ``b`` are nodes; what a competing flow leaves of the
bandwidth between them is not in the trace: half, the fair share of one of two flows, unless said
otherwise. Empty lines and those that begin with ``#`` are skipped.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import combinations, pairwise
from math import inf
from pathlib import Path
from typing import Any

from resihp_ext.cost.cluster import Cluster
from resihp_ext.errors import UserError
from resihp_ext.faults.fault import LASTING, Fault, Kind
from resihp_ext.faults.lasting import device_left, link_left
from resihp_ext.faults.read import read_faults
from resihp_ext.simulator.happenings import Happening
from resihp_ext.simulator.health import Link
from resihp_ext.simulator.spells import Spell, happenings_of

COMPETING_LEFT = 0.5
"""Of the bandwidth of a link with a competing flow."""


def read_fault_file(
    path: str | Path, cluster: Cluster, *, iteration_s: float, names: Sequence[str] = ()
) -> tuple[Happening, ...]:
    """A file in the project's language.

    Args:
        names: Of the nodes, ascending; default: ``n0``, ``n1``, ... by their numbers.

    Raises:
        UserError: names the file, the entry (from 0), and what is wrong.
    """
    faults = read_faults(path)
    scene = _Scene(cluster, names)
    for number, one in enumerate(faults):
        if why := scene.refusal(one):
            raise UserError(f"{path}: entry {number}: {why}")
    return of_faults(faults, cluster, iteration_s=iteration_s, names=names)


def of_faults(
    faults: Sequence[Fault], cluster: Cluster, *, iteration_s: float, names: Sequence[str] = ()
) -> tuple[Happening, ...]:
    """The same, of faults that were read already.

    Raises:
        UserError: what is wrong, with the number of the fault.
    """
    scene = _Scene(cluster, names)
    for number, one in enumerate(faults):
        if why := scene.refusal(one):
            raise UserError(f"fault {number}: {why}")
    slow = [one for one in faults if one.kind in LASTING]
    spells = [scene.death(one, iteration_s) for one in faults if one.kind not in LASTING]
    return happenings_of([*spells, *scene.slowness(slow, iteration_s)])


class _Scene:
    """Who is where in a cluster, by the names that faults use."""

    def __init__(self, cluster: Cluster, names: Sequence[str]) -> None:
        nodes = sorted({one.node for one in cluster.devices})
        self._names = dict(zip(nodes, names or [f"n{node}" for node in nodes], strict=True))
        self._node_of = cluster.node_of
        self._number = {name: node for node, name in self._names.items()}

    def refusal(self, fault: Fault) -> str | None:
        """What the simulator cannot do of it."""
        if fault.rank is not None and fault.rank not in self._node_of:
            return f"rank {fault.rank} is not one of {len(self._node_of)} in the cluster"
        for name in (fault.node, *(fault.link or ())):
            if name is not None and name not in self._number:
                known = ", ".join(self._number)
                return f"node {name!r} is not in the cluster: {known}"
        if fault.kind is Kind.CUT and fault.link is not None:
            return "a cut between two nodes is not simulated; cut one node, or make the link slow"
        if fault.delay_ms is not None:
            return "delay_ms is not simulated: give the factor of the bandwidth that is left"
        return None

    def death(self, fault: Fault, iteration_s: float) -> Spell:
        """What strikes once."""
        ranks = tuple(r for r in self._node_of if fault.hits(r, self._names[self._node_of[r]]))
        begin_s = (fault.at_step - 0.5) * iteration_s + fault.delay_s
        return Spell(begin_s=begin_s, ranks=ranks)

    def slowness(self, faults: Sequence[Fault], iteration_s: float) -> Iterable[Spell]:
        """What lasts: between two steps at which any begins or ends, nothing changes."""
        ends = (one.until_step for one in faults if one.until_step is not None)
        steps = sorted({*(one.at_step for one in faults), *ends})
        begins = [(step - 1) * iteration_s for step in steps]
        for step, (begin_s, end_s) in zip(steps, pairwise([*begins, inf]), strict=True):
            for rank, node in self._node_of.items():
                left = device_left(faults, rank, self._names[node], step)
                if left < 1:
                    yield Spell(begin_s=begin_s, end_s=end_s, ranks=(rank,), left=left)
            for a, b in combinations(self._names, 2):
                left = link_left(faults, self._names[a], self._names[b], step)
                if left < 1:
                    yield Spell(begin_s=begin_s, end_s=end_s, links=((a, b),), left=left)


def read_greyhound(
    path: str | Path,
    cluster: Cluster,
    *,
    iteration_s: float,
    competing_left: float = COMPETING_LEFT,
) -> tuple[Happening, ...]:
    """One of Greyhound's traces.

    Args:
        iteration_s: Of a healthy iteration.
        competing_left: What a ``comm`` line leaves of the bandwidth between its nodes.

    Raises:
        UserError: names the file, the line (from 1), and what is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            found.append(_greyhound(line, cluster, iteration_s, competing_left))
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}") from None
    return happenings_of(found)


def _greyhound(line: str, cluster: Cluster, iteration_s: float, competing_left: float) -> Spell:
    fields = [field.strip() for field in line.split(";")]
    if len(fields) != 4:
        raise ValueError(
            f"expected start;end;[ranks];delay or comm;start;duration;[a,b], got {line.strip()!r}"
        )
    if fields[0] == "comm":
        begin_s = _number("start", fields[1], least=0)
        duration_s = _number("duration", fields[2])
        link = _link(fields[3], set(cluster.node_of.values()))
        return Spell(
            begin_s=begin_s, end_s=begin_s + duration_s, links=(link,), left=competing_left
        )
    begin_s, end_s = _number("start", fields[0], least=0), _number("end", fields[1])
    if end_s <= begin_s:
        raise ValueError(f"end {fields[1]} is not after start {fields[0]}")
    ranks = _whole_numbers("ranks", fields[2])
    unknown = [rank for rank in ranks if rank not in cluster.node_of]
    if unknown or not ranks:
        raise ValueError(f"ranks {fields[2]}: expected some of {len(cluster.devices)} ranks")
    delay_s = _number("delay", fields[3])
    left = iteration_s / (iteration_s + delay_s)
    return Spell(begin_s=begin_s, end_s=end_s, ranks=tuple(sorted(set(ranks))), left=left)


def _number(name: str, text: str, *, least: float | None = None) -> float:
    """A finite number, positive unless ``least`` says more."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{name}: expected seconds, got {text!r}") from None
    fits = value > 0 if least is None else value >= least
    if not fits or value > 1e9:
        raise ValueError(f"{name}: expected a {'positive ' * (least is None)}time, got {text!r}")
    return value


def _whole_numbers(name: str, text: str) -> list[int]:
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = None
    whole = isinstance(found, list) and all(type(one) is int for one in found)
    if not whole:
        raise ValueError(f"{name}: expected whole numbers such as [0, 1], got {text!r}")
    return list(found)


def _link(text: str, nodes: set[int]) -> Link:
    ends = _whole_numbers("nodes", text)
    if len(ends) != 2 or len(set(ends)) != 2 or not set(ends) <= nodes:
        raise ValueError(f"nodes {text}: expected two different ones of {len(nodes)}")
    return min(ends), max(ends)
