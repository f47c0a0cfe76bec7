"""The paper's configurations as settings: models, sequences, layouts, 16 to 256 A100s.

Source: PAPER.md (Testbed and configurations) names models, sequence lengths, the numbers of devices
and one layout, (TP, DP, PP) = (4, 4, 16). The others are ours, chosen by rule: TP 4, as in the
paper's layout; the least PP that divides the layers and is at least the paper's for this size of
model (13B: 4); DP at least 2, or nothing could replace a lost layer, and 4 from 64 devices on.
Every layout leaves room for an exclusion: a TP group of half the degree must hold its stage.
Activations are recomputed where that is not so without it (:func:`setting`). Sequence parallelism
and the distributed optimizer are on: without the former, 70B fits no layout of 256 devices.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from resihp_ext.cost.cluster import uniform_cluster, usable_memory_bytes
from resihp_ext.cost.cost_model import preset
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.errors import UserError
from resihp_ext.plan.plan import uniform_plan
from resihp_ext.simulator.documents import Documents
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.setting import Setting
from resihp_ext.simulator.times import Times

DEVICES_PER_NODE = 8
DEVICE = "a100"
"""With 200 Gb/s between nodes."""
ROUNDS = 4
"""Micro-batches of a pipeline over its stages; PAPER does not say: an assumption, to be swept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Configuration:
    """A model on a number of devices."""

    model: str
    seq_length: int
    tp: int
    dp: int
    pp: int

    @property
    def name(self) -> str:
        """Such as ``llama2-13b-16k``."""
        return f"{self.model}-{self.seq_length // 1024}k"

    @property
    def devices(self) -> int:
        """Of all replicas."""
        return self.tp * self.dp * self.pp


def _configuration(model: str, seq_k: int, tp: int, dp: int, pp: int) -> Configuration:
    return Configuration(model=model, seq_length=seq_k * 1024, tp=tp, dp=dp, pp=pp)


CONFIGURATIONS = {
    one.name: one
    for one in (
        _configuration("llama2-7b", 8, 4, 2, 2),
        _configuration("qwen2.5-7b", 8, 4, 2, 2),
        _configuration("llama2-13b", 16, 4, 2, 4),
        _configuration("qwen2.5-14b", 16, 4, 2, 4),
        _configuration("llama2-30b", 16, 4, 4, 4),
        _configuration("qwen2.5-32b", 32, 4, 4, 8),
        _configuration("llama2-70b", 8, 4, 4, 16),
        _configuration("qwen2.5-72b", 16, 4, 4, 16),
    )
}
"""By name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumptions:
    """What PAPER does not say and a result may hang on: all that is swept."""

    rounds: int = ROUNDS
    times: Times = field(default_factory=Times)
    documents: Documents = field(default_factory=Documents)


def setting(name: str, *, assumptions: Assumptions | None = None, seed: int = 0) -> Setting:
    """A configuration as the simulator takes it.

    Args:
        name: One of :data:`CONFIGURATIONS`.
        seed: Of documents and noise.

    Raises:
        UserError: no such configuration.
    """
    one = CONFIGURATIONS.get(name)
    if one is None:
        raise UserError(f"configuration {name!r}: choose one of {', '.join(CONFIGURATIONS)}")
    taken = assumptions or Assumptions()
    cluster = uniform_cluster(
        nodes=-(-one.devices // DEVICES_PER_NODE),
        devices_per_node=DEVICES_PER_NODE,
        memory_bytes=usable_memory_bytes(DEVICE),
    )
    shape = replace(MODELS[one.model], seq_length=one.seq_length)
    plan = uniform_plan(
        num_layers=shape.num_layers,
        tp=one.tp,
        pp=one.pp,
        dp=one.dp,
        micro_batches=taken.rounds * one.pp * one.dp,
        devices_per_node=DEVICES_PER_NODE,
    )
    made = Setting(
        name=name,
        cluster=cluster,
        shape=shape,
        cost=preset(DEVICE),
        memory=MemoryPolicy(sharded=True, sequence_parallel=True),
        nominal=replace(plan, devices=cluster.devices),
        documents=taken.documents,
        times=taken.times,
        seed=seed,
    )
    if has_room(made):
        return made
    return replace(made, memory=replace(made.memory, recompute=True))


def has_room(setting: Setting) -> bool:
    """Whether every stage fits on a TP group of half the degree."""
    plan = setting.nominal
    problem = setting.problem(Health(), plan)
    stages = plan.replicas[0].stages
    return all(
        problem.most_layers(
            tp=max(1, one.tp // 2), place=place, stages=len(stages), shards=len(plan.replicas)
        )
        >= one.depth
        for place, one in enumerate(stages)
    )
