"""From what the coordinator knows to a plan; pure and deterministic.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Self

from resihp_ext.control.actions import Answer, NeedPlan
from resihp_ext.control.worth import Terms
from resihp_ext.cost.cluster import Cluster
from resihp_ext.cost.cost_model import CostModel, of_profile, preset
from resihp_ext.cost.emulated import Emulated
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.cost.presets import FIGURES
from resihp_ext.cost.profile_file import parse_profile
from resihp_ext.errors import ResiHPError, UserError
from resihp_ext.plan.plan import Device, Instance, Plan, Replica, Stage
from resihp_ext.scheduler.decide import decide
from resihp_ext.scheduler.options import Options
from resihp_ext.scheduler.predict import Predictor
from resihp_ext.scheduler.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Brief:
    """What a job tells its coordinator before the first step."""

    shape: ModelShape
    policy: MemoryPolicy
    memory_bytes: int
    """Of each device, for what the memory model counts."""
    nominal: Plan
    """The layout with every device healthy."""
    hardware: str = ""
    """A preset of costs."""
    profile: str = ""
    """Or the text of a file that ``resihp profile`` has written."""
    options: Options = field(default_factory=Options)
    emulated: ModelShape | None = None
    """The large model that this one stands for, where devices are emulated: it gives the times."""
    act: Terms | None = None
    """When plans for slow devices are run; None: never."""
    last_step: int = 0
    """With which the job ends; 0: not known."""

    def __post_init__(self) -> None:
        if bool(self.hardware) == bool(self.profile):
            raise UserError("brief: give either a preset of costs (hardware) or a profile")
        if self.hardware and self.hardware not in FIGURES:
            raise UserError(
                f"brief: hardware {self.hardware!r}: choose one of {', '.join(FIGURES)}"
            )
        if self.memory_bytes < 1:
            raise UserError(f"brief: memory of a device, {self.memory_bytes} bytes")
        if self.nominal.num_layers != self.shape.num_layers:
            raise UserError(
                f"brief: the plan has {self.nominal.num_layers} layers, the model "
                f"{self.shape.num_layers}"
            )

    @property
    def cost(self) -> CostModel:
        """What things cost.

        Raises:
            UserError: the profile is none.
        """
        if self.profile:
            return of_profile(parse_profile(self.profile, "of the job"))
        found = preset(self.hardware)
        if self.emulated is None:
            return found
        return replace(found, layers=Emulated(large=self.emulated, layers=found.layers))

    def to_json(self) -> str:
        """JSON with sorted keys."""
        return json.dumps(
            {
                "shape": asdict(self.shape),
                "policy": asdict(self.policy),
                "memory_bytes": self.memory_bytes,
                "nominal": self.nominal.to_json(),
                "hardware": self.hardware,
                "profile": self.profile,
                "options": asdict(self.options),
                "emulated": None if self.emulated is None else asdict(self.emulated),
                "act": None if self.act is None else asdict(self.act),
                "last_step": self.last_step,
            },
            sort_keys=True,
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of :meth:`to_json`; what has a default may be lacking.

        Raises:
            UserError: not a brief; one line that says what is wrong.
        """
        try:
            found = json.loads(text)
            unknown = sorted(found.keys() - {one.name for one in fields(cls)})
            if unknown:
                raise UserError(f"brief: unknown fields {', '.join(unknown)}")
            return cls(**_parts(found))
        except UserError:
            raise
        except KeyError as error:
            raise UserError(f"brief: {error.args[0]} is missing") from error
        except (AttributeError, TypeError, ValueError, ResiHPError) as error:
            raise UserError(f"brief: {error}") from error


def _parts(found: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "shape": ModelShape(**found["shape"]),
        "policy": MemoryPolicy(**found["policy"]),
        "memory_bytes": int(found["memory_bytes"]),
        "nominal": Plan.from_json(found["nominal"]),
        "hardware": str(found.get("hardware", "")),
        "profile": str(found.get("profile", "")),
        "options": Options(**found.get("options", {})),
        "emulated": ModelShape(**emulated) if (emulated := found.get("emulated")) else None,
        "act": Terms(**act) if (act := found.get("act")) else None,
        "last_step": int(found.get("last_step", 0)),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The answer to :class:`~resihp_ext.control.actions.NeedPlan`."""

    plan: str | None
    """JSON, if there is any plan."""
    why: str
    """What speaks against any plan."""
    version: int
    reason: str = ""
    """For people: why this plan."""
    now_s: float = 0.0
    """What a step of the present plan should take, as the devices are; 0 if it cannot run."""
    then_s: float = 0.0
    """What a step of this one should take."""

    def answer(self) -> Answer:
        """As the coordinator's rules take it."""
        why = self.why or self.reason
        return Answer(self.plan, why, self.version, self.now_s, self.then_s)


def plan_for(need: NeedPlan, planner: str = "joint") -> Planned:
    """Plans for the devices as they are; other planners than ``joint`` are faster and worse."""
    try:
        brief = _brief(need.problem)
        current = plain(Plan.from_json(need.plan))
        devices = tuple(Device(rank=rank, node=node, p=float(p)) for rank, node, p in need.devices)
        problem = Problem(
            cluster=Cluster(devices=devices, memory_bytes=brief.memory_bytes),
            shape=brief.shape,
            cost=brief.cost,
            policy=brief.policy,
            current=current,
            options=brief.options,
            nominal=plain(brief.nominal),
        )
        decision = decide(problem, planner)
        # Staying counts as an answer, too: the group of processes is another one in any case.
        plan = replace(decision.plan, version=need.version, devices=devices).validated()
    except ResiHPError as error:
        return Planned(plan=None, why=str(error), version=need.version)
    return Planned(
        plan=plan.to_json(),
        why="",
        version=need.version,
        reason=decision.reason,
        now_s=_now_s(problem),
        then_s=decision.iteration_s,
    )


def _now_s(problem: Problem) -> float:
    """Seconds of a step if nothing changes, with the schedule that was made for other speeds."""
    current = problem.current
    if any(problem.p_of[rank] <= 0 for one in current.replicas for rank in one.ranks):
        return 0.0
    made_for = {device.rank: device.p for device in current.devices}
    return Predictor(problem).predict(current, made_for).iteration_s


@lru_cache(maxsize=4)
def _brief(text: str) -> Brief:
    return Brief.from_json(text)


def with_version(planned: Planned, version: int) -> Planned:
    """The same answer to the same question, asked once more."""
    if planned.plan is None:
        return replace(planned, version=version)
    plan = replace(Plan.from_json(planned.plan), version=version)
    return replace(planned, plan=plan.to_json(), version=version)


def plain(plan: Plan) -> Plan:
    """The same ranks with as many layers each, but without virtual stages: planners know none."""
    if all(plan.host_of(one) == one for one in plan.instances):
        return plan
    replicas = tuple(_plain(plan, number) for number in range(len(plan.replicas)))
    straight = [
        tuple(Instance(replica=number, stage=place) for place in range(len(one.stages)))
        for number, one in enumerate(replicas)
    ]
    routes = tuple(straight[route[0].replica] for route in plan.routes)
    return replace(plan, replicas=replicas, routes=routes).validated()


def _plain(plan: Plan, number: int) -> Replica:
    hosts = [one for one in plan.hosts if one.replica == number]
    depths = [sum(plan.stage(chunk).depth for chunk in plan.chunks(host)) for host in hosts]
    edges = _edges(depths)
    return Replica(
        stages=tuple(
            Stage(ranks=plan.stage(host).ranks, layers=layers)
            for host, layers in zip(hosts, pairwise(edges), strict=True)
        )
    )


def _edges(depths: Sequence[int]) -> list[int]:
    edges = [0]
    for depth in depths:
        edges.append(edges[-1] + depth)
    return edges
