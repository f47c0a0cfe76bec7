"""Everything a planner is asked about, with what it has computed once.

A problem is read-only; its caches only repeat what pure functions have said.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from resihp_ext.cost.cluster import Cluster
from resihp_ext.cost.cost_model import CostModel
from resihp_ext.cost.memory import MemoryPolicy, StageMemory, stage_memory
from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.plan.plan import Plan, PlanError
from resihp_ext.scheduler.held import Held, holdings
from resihp_ext.scheduler.options import Options
from resihp_ext.scheduler.prices import Prices


@dataclass(frozen=True, kw_only=True)
class Problem:
    """The inputs of a decision."""

    cluster: Cluster
    """What is there now; its ``p`` overrides that of any plan."""
    shape: ModelShape
    cost: CostModel
    policy: MemoryPolicy
    current: Plan
    """What is running, or was until now."""
    options: Options = field(default_factory=Options)
    nominal: Plan | None = None
    """The layout with every device healthy, to which a job returns. Default: the current one."""

    def __post_init__(self) -> None:
        for name, plan in (("current", self.current), ("nominal", self.base)):
            used = {rank for one in plan.replicas for rank in one.ranks}
            unknown = sorted(used - self.p_of.keys())
            if plan.num_layers != self.shape.num_layers:
                raise PlanError(
                    f"{name} plan: {plan.num_layers} layers, {self.shape.name} has "
                    f"{self.shape.num_layers}"
                )
            if unknown:
                raise PlanError(f"{name} plan: ranks {unknown} are not in the cluster")
            if len(used) < sum(stage.tp for one in plan.replicas for stage in one.stages):
                raise PlanError(f"{name} plan: planners know plans without virtual stages only")

    @property
    def base(self) -> Plan:
        """Where adaptation starts from."""
        return self.nominal or self.current

    @cached_property
    def p_of(self) -> dict[int, float]:
        """Throughput of each device; 0.0 is dead."""
        return {device.rank: device.p for device in self.cluster.devices}

    def valid_tps(self, limit: int) -> tuple[int, ...]:
        """TP degrees up to ``limit`` that a stage may have, ascending."""
        return self.shape.valid_tps(limit, sequence_parallel=self.policy.sequence_parallel)

    @cached_property
    def held(self) -> dict[int, Held]:
        """What every rank holds now."""
        return holdings(self.current)

    @cached_property
    def prices(self) -> Prices:
        """Seconds of stages and transfers."""
        return Prices(self.cost, self.shape, self.policy, self.cluster)

    @cached_property
    def _memory(self) -> dict[tuple[int, int, bool, bool, int], StageMemory]:
        return {}

    def memory(self, depth: int, tp: int, first: bool, last: bool, shards: int) -> StageMemory:
        """Bytes of a stage by kind."""
        key = (depth, tp, first, last, shards if self.policy.sharded else 1)
        if key not in self._memory:
            self._memory[key] = stage_memory(
                self.shape,
                self.policy,
                depth=depth,
                tp=tp,
                first=first,
                last=last,
                shards=shards,
            )
        return self._memory[key]

    def most_layers(
        self, *, tp: int, place: int, stages: int, shards: int, in_flight: int | None = None
    ) -> int:
        """How many layers fit on a stage; 0 if not even one does.

        Args:
            place: Index of the stage.
            in_flight: Micro-batches at once. Default: what 1F1B needs there.
        """
        first, last = place == 0, place == stages - 1
        held = stages - place if in_flight is None else in_flight

        def fits(depth: int) -> bool:
            total = self.memory(depth, tp, first, last, shards).total(held)
            return total <= self.cluster.memory_bytes

        low, high = 0, self.shape.num_layers
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low
