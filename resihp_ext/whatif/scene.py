"""The question as the planners understand it: cluster, model, prices, the layout before the fault.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from resihp_ext.cost.cluster import Cluster, uniform_cluster, usable_memory_bytes
from resihp_ext.cost.cost_model import CostModel, from_profile, preset
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.cost.presets import FIGURES
from resihp_ext.plan.plan import Plan, uniform_plan
from resihp_ext.scheduler.options import Options
from resihp_ext.scheduler.problem import Problem
from resihp_ext.whatif.damage import damage
from resihp_ext.whatif.model import model_shape
from resihp_ext.whatif.settings import Settings

MOST_DEVICES, MOST_MICRO_BATCHES = 2**17, 2**20
"""Beyond that it is a slip; without limits it would be refused by lack of memory."""
PLANNERS = ("joint", "progressive")


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A uniform layout on a cluster of equal nodes."""

    nodes: int
    devices_per_node: int
    tp: int
    pp: int
    dp: int

    @property
    def devices(self) -> int:
        """Of the whole cluster."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What every question begins with."""

    grid: Grid
    healthy: Problem
    hardware: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One question."""

    grid: Grid
    healthy: Problem
    """Before the fault."""
    faulty: Problem
    """After it; the layout is the same."""
    damage: Mapping[int, float]
    """Throughput of each device that is not healthy, by global rank."""
    hardware: str
    planner: str


def scene(settings: Settings) -> Scene:
    """Builds the question.

    Raises:
        UserError: something is missing or does not fit; one line.
    """
    ground = healthy_ground(settings)
    grid, healthy = ground.grid, ground.healthy
    p_of = damage(settings, grid.devices)
    return Scene(
        grid=grid,
        healthy=healthy,
        faulty=replace(healthy, cluster=_damaged(healthy.cluster, p_of)),
        damage=p_of,
        hardware=ground.hardware,
        planner=settings.choice("planner", PLANNERS, "joint"),
    )


def healthy_ground(settings: Settings) -> Ground:
    """Cluster, model, prices and layout with every device healthy.

    Raises:
        UserError: something is missing or does not fit; one line.
    """
    shape = model_shape(settings)
    grid = _grid(settings)
    current = _layout(settings, shape, grid)
    cost, hardware = _cost(settings)
    cluster = uniform_cluster(
        nodes=grid.nodes,
        devices_per_node=grid.devices_per_node,
        memory_bytes=_memory_bytes(settings, hardware),
    )
    current = replace(current, devices=cluster.devices)
    lifetime_s = settings.number("lifetime-s", Options().expected_lifetime_s)
    healthy = Problem(
        cluster=cluster,
        shape=shape,
        cost=cost,
        policy=_policy(settings, cost),
        current=current,
        options=Options(expected_lifetime_s=lifetime_s),
    )
    return Ground(grid=grid, healthy=healthy, hardware=hardware)


def _damaged(cluster: Cluster, p_of: Mapping[int, float]) -> Cluster:
    devices = tuple(replace(one, p=p_of.get(one.rank, 1.0)) for one in cluster.devices)
    return replace(cluster, devices=devices)


def _grid(settings: Settings) -> Grid:
    tp, pp = settings.whole("tp") or 1, settings.whole("pp") or 1
    each = settings.whole("devices-per-node") or 8
    dp = settings.whole("dp")
    nodes = settings.whole("nodes") or -(-tp * pp * (dp or 1) // each)
    devices = nodes * each
    if devices > MOST_DEVICES:
        raise settings.error("nodes", f"{devices} devices in all; at most {MOST_DEVICES}")
    dp = dp or max(1, devices // (tp * pp))
    if tp * pp * dp > devices:
        name = "dp" if tp * pp <= devices else "nodes"
        raise settings.error(
            name,
            f"tp {tp} x pp {pp} x dp {dp} need {tp * pp * dp} devices, nodes {nodes} x "
            f"devices-per-node {each} are {devices}; change one of them",
        )
    return Grid(nodes=nodes, devices_per_node=each, tp=tp, pp=pp, dp=dp)


def _layout(settings: Settings, shape: ModelShape, grid: Grid) -> Plan:
    divided = settings.switch("sequence-parallel")
    if problem := shape.problem_with_tp(grid.tp, sequence_parallel=divided):
        raise settings.error("tp", f"{shape.name}: {problem}")
    if shape.num_layers % grid.pp:
        raise settings.error(
            "pp",
            f"the {shape.num_layers} layers of {shape.name} do not divide by {grid.pp}; "
            "change pp or layers",
        )
    micro_batches = (
        settings.whole("micro-batches", most=MOST_MICRO_BATCHES) or 4 * grid.pp * grid.dp
    )
    if micro_batches % grid.dp:
        raise settings.error(
            "micro-batches", f"{micro_batches} do not divide by {grid.dp} replicas (dp)"
        )
    return uniform_plan(
        num_layers=shape.num_layers,
        tp=grid.tp,
        pp=grid.pp,
        dp=grid.dp,
        micro_batches=micro_batches,
        devices_per_node=grid.devices_per_node,
    )


def _cost(settings: Settings) -> tuple[CostModel, str]:
    name = settings.text("hardware") or "h100"
    if name in FIGURES:
        return preset(name), name
    path = settings.folder("hardware") / name
    if path.suffix != ".json" and not path.is_file():
        raise settings.error(
            "hardware",
            f"{name!r} is unknown; choose one of {', '.join(FIGURES)}, or a file that "
            "`resihp profile --out FILE` has written",
        )
    return from_profile(path), name


def _memory_bytes(settings: Settings, hardware: str) -> int:
    if "memory-gb" not in settings and hardware not in FIGURES:
        raise settings.error("memory-gb", "missing; a profile does not say how much there is")
    default = usable_memory_bytes(hardware) / 1e9 if hardware in FIGURES else 0.0
    return round(settings.number("memory-gb", default) * 1e9)


def _policy(settings: Settings, cost: CostModel) -> MemoryPolicy:
    """Parameters in 32 bits need no copy in the optimizer; such jobs run local layers, unfused."""
    half = cost.element_bytes < 4
    return MemoryPolicy(
        param_bytes=cost.element_bytes,
        master_bytes=4 if half else 0,
        fused=half,
        sharded=settings.switch("sharded-optimizer"),
        sequence_parallel=settings.switch("sequence-parallel"),
        recompute=settings.switch("recompute"),
    )
