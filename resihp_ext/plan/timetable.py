"""Plans written by hand: a YAML file that says from which step on which layout is used.

    - step: 0
      uniform: {tp: 2, pp: 2, dp: 2}
    - step: 10
      replicas:
        - [{ranks: [0, 1], layers: 3}, {ranks: [2], layers: 1}]
        - [{ranks: [3, 4], layers: 2}, {ranks: [5, 6], layers: 2}]
      shares: [3, 5]
    - step: 20
      plan: plans/007.json

``shares`` counts the micro-batches of each replica (default: equal). ``routes``, in its place,
lists the instances that each micro-batch visits: ``["0.0 1.1", ...]``. ``plan`` names the JSON form
of a plan, relative to the file. Live ranks that no stage names are standby.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from resihp_ext.errors import UserError
from resihp_ext.plan.plan import (
    Device,
    Instance,
    Plan,
    PlanError,
    Replica,
    Route,
    Stage,
    uniform_plan,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A plan and the step from which it is used: the number of steps done before it."""

    step: int
    plan: Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """What every plan of a job has in common."""

    num_layers: int
    micro_batches: int
    devices: tuple[Device, ...]


def read_timetable(path: str | Path, frame: Frame) -> tuple[Entry, ...]:
    """Reads and checks a file of plans.

    Raises:
        UserError: names the file, the entry, and what is wrong.
    """
    try:
        rows = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{path}: expected a list of entries with `step` and a layout")
    entries = []
    for number, row in enumerate(rows):
        try:
            entry = _entry(row, number, Path(path).parent, frame)
        except (PlanError, KeyError, TypeError, ValueError, OSError) as error:
            reason = f"needs {error}" if isinstance(error, KeyError) else error
            raise UserError(f"{path}: entry {number}: {reason}") from error
        entries.append(entry)
    if entries[0].step != 0:
        raise UserError(f"{path}: the first entry must be for step 0, not {entries[0].step}")
    if any(a.step >= b.step for a, b in pairwise(entries)):
        raise UserError(f"{path}: steps must ascend: {[entry.step for entry in entries]}")
    return tuple(entries)


def plan_at(entries: Sequence[Entry], step: int) -> Plan:
    """The plan in force after ``step`` steps."""
    return next(entry.plan for entry in reversed(entries) if entry.step <= step)


def _entry(row: Any, number: int, folder: Path, frame: Frame) -> Entry:
    if not isinstance(row, dict):
        raise ValueError(f"expected `step` and a layout, got {row!r}")
    kinds = {"uniform", "replicas", "plan"} & row.keys()
    unknown = row.keys() - {"step", "uniform", "replicas", "plan", "shares", "routes"}
    if unknown or len(kinds) != 1:
        raise ValueError(
            f"unknown keys {sorted(unknown)}"
            if unknown
            else f"needs one of uniform, replicas, plan; has {sorted(kinds)}"
        )
    misplaced = row.keys() & {"shares", "routes"}
    if len(misplaced) == 2 or (misplaced and kinds != {"replicas"}):
        raise ValueError(f"{' and '.join(sorted(misplaced))}: only one, and only with replicas")
    step = _number("step", row["step"], least=0)
    plan = _LAYOUTS[kinds.pop()](row, folder, frame)
    _check_frame(plan, frame)
    return Entry(step=step, plan=replace(plan, version=number).validated())


def _uniform(row: Any, _folder: Path, frame: Frame) -> Plan:
    sizes = {"tp": 1, "pp": 1, "dp": 1, "virtual": 1, **_fields("uniform", row["uniform"])}
    if len(sizes) > 4:
        raise ValueError(f"uniform: unknown keys {sorted(sizes.keys() - _SIZES)}")
    for name, size in sizes.items():
        _number(f"uniform: {name}", size)
    plan = uniform_plan(num_layers=frame.num_layers, micro_batches=frame.micro_batches, **sizes)
    return replace(plan, devices=frame.devices)


def _by_replicas(row: Any, _folder: Path, frame: Frame) -> Plan:
    replicas = tuple(map(_replica, _list("replicas", row["replicas"])))
    if "routes" in row:
        routes = tuple(map(_route, _list("routes", row["routes"])))
    else:
        counts = row.get("shares")
        if counts is not None:
            counts = [_number("shares", count, least=0) for count in _list("shares", counts)]
        routes = straight_routes(replicas, counts, frame.micro_batches)
    return Plan(
        version=0,
        num_layers=frame.num_layers,
        devices=frame.devices,
        replicas=replicas,
        routes=routes,
    )


def _from_file(row: Any, folder: Path, _frame: Frame) -> Plan:
    return Plan.from_json((folder / str(row["plan"])).read_text())


_LAYOUTS = {"uniform": _uniform, "replicas": _by_replicas, "plan": _from_file}


def _replica(stages: Any) -> Replica:
    built, at = [], 0
    for stage in _list("replica", stages):
        if _fields("stage", stage).keys() != {"ranks", "layers"}:
            raise ValueError(f"stage: expected ranks and layers, got {stage!r}")
        ranks = [_number("ranks", rank, least=0) for rank in _list("ranks", stage["ranks"])]
        depth = _number("layers", stage["layers"])
        built.append(Stage(ranks=tuple(ranks), layers=(at, at + depth)))
        at += depth
    return Replica(stages=tuple(built))


def _route(text: Any) -> Route:
    if not isinstance(text, str) or not all(map(_PLACE.fullmatch, text.split())):
        raise ValueError(f'routes: expected texts such as "0.0 1.1", got {text!r}')
    places = (map(int, place.split(".")) for place in text.split())
    return tuple(Instance(replica=replica, stage=stage) for replica, stage in places)


_SIZES = {"tp", "pp", "dp", "virtual"}
_PLACE = re.compile(r"\d+\.\d+")


def _number(what: str, value: Any, *, least: int = 1) -> int:
    # True is an int, too.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{what}: expected a whole number from {least}, got {value!r}")
    return value


def _list(what: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what}: expected a list, got {value!r}")
    return value


def _fields(what: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what}: expected names with values, got {value!r}")
    return value


def straight_routes(
    replicas: Sequence[Replica], counts: Sequence[int] | None, micro_batches: int
) -> tuple[Route, ...]:
    """Routes that stay in one replica each, dealt out evenly.

    Args:
        counts: Micro-batches of each replica; default: equal.

    Raises:
        ValueError: the counts do not add up, or cannot be equal.
    """
    if counts is None:
        if micro_batches % len(replicas):
            raise ValueError(
                f"{micro_batches} micro-batches over {len(replicas)} replicas: give `shares`"
            )
        counts = [micro_batches // len(replicas)] * len(replicas)
    if len(counts) != len(replicas) or sum(counts) != micro_batches or min(counts) < 0:
        raise ValueError(
            f"shares {list(counts)}: expected {len(replicas)} numbers with sum {micro_batches}"
        )
    given = [0] * len(replicas)
    routes = []
    for _ in range(micro_batches):
        # The replica that is furthest behind its share comes next.
        replica = min(
            (k for k in range(len(replicas)) if given[k] < counts[k]),
            key=lambda k: ((given[k] + 1) / counts[k], k),
        )
        given[replica] += 1
        stages = range(len(replicas[replica].stages))
        routes.append(tuple(Instance(replica=replica, stage=stage) for stage in stages))
    return tuple(routes)


def _check_frame(plan: Plan, frame: Frame) -> None:
    for what, found, wanted in (
        ("layers", plan.num_layers, frame.num_layers),
        ("micro-batches", plan.micro_batches, frame.micro_batches),
        ("devices", len(plan.devices), len(frame.devices)),
    ):
        if found != wanted:
            raise ValueError(f"the plan has {found} {what}, the job {wanted}")
