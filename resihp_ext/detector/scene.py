"""What labelled synthetic runs are made of: a layout, documents, noise, and what befalls devices.

Half of the layouts are as uneven as those that a job goes on with after losses. Noise is drawn for
each action; in some runs devices drift as well, or stand still for a moment (collection of garbage,
page faults), sequences are not quite full, networks are slow, messages are delayed (``wires.py``),
steps are short, or documents are those of the real corpus: definitions and files of Python's
library.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
import re
import sysconfig
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Literal

from resihp_ext.cost.model_shape import MODELS, ModelShape
from resihp_ext.detector.slots import overlaps
from resihp_ext.detector.suspect import SuspectKind
from resihp_ext.plan.plan import Instance, Plan, Replica, Stage, uniform_plan

LAYOUTS = (
    # (TP, PP, DP)
    *((1, 4, 2), (2, 2, 2), (1, 8, 2), (2, 4, 2), (4, 2, 2), (4, 4, 1), (1, 4, 4), (2, 2, 4)),
    *((2, 4, 4), (4, 4, 2), (8, 2, 2), (4, 4, 4), (8, 4, 2)),
)
FIRST_ONSET = 50
"""No fault begins before: Greyhound's prior takes 30 steps, and more when outliers are dropped."""
BYTES_PER_TOKEN = 3.5
"""Of Python source, about."""
Documents = Literal["drawn", "definitions", "files"]
"""Lengths from a heavy-tailed distribution, or those of the standard library's definitions
(top-level ones, what ``tools/preprocess_data.py`` makes of Python source) or whole files."""
_DEFINITION = re.compile(rb"^(?:@|def |class |async def )", re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Something that is slow for a while; times are multiplied by ``factor``."""

    kind: SuspectKind
    ranks: tuple[int, ...]
    factor: float
    onset: int
    """First slow step."""
    end: int
    """One past the last."""
    ramp_steps: int = 0
    """Steps until the whole factor is reached."""

    def at(self, step: int) -> float:
        """The factor of a step."""
        if not self.onset <= step < self.end:
            return 1.0
        part = min((step - self.onset + 1) / (self.ramp_steps + 1), 1.0)
        return 1 + (self.factor - 1) * part


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is run, and what befalls it."""

    plan: Plan
    shape: ModelShape
    noise: float
    """Standard deviation of each action's time, relative."""
    faults: tuple[Fault, ...]
    steps: int
    seed: int
    drift: float = 0.0
    """Standard deviation of each device's pace, relative; it stays similar over about ten steps."""
    hiccups: float = 0.0
    """Part of the steps in which one device is 2 to 5 times as slow, in that step alone."""
    shortfall: float = 0.0
    """Largest part of a sequence that is not filled: micro-batches differ in tokens."""
    documents: Documents = "drawn"
    network: float = 1.0
    """Times by which messages take longer than on the preset's network."""
    delay_s: float = 0.0
    """Median of what is added to each message; its tail is heavy."""
    congestion: float = 0.0
    """Part of its steps in which a link is busy with what others send."""
    time_scale: float = 1.0
    """Everything takes so many times the preset's time, but delays: short steps show jitter."""


def draw_scene(seed: int, *, steps: int = 150, healthy: bool = False) -> Scene:
    """Draws a run."""
    random = Random(seed)
    tp, pp, dp = random.choice(LAYOUTS)
    shape = replace(MODELS["llama2-7b"], seq_length=random.choice((8192, 16384, 32768)))
    plan = uniform_plan(
        num_layers=shape.num_layers,
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batches=dp * random.choice((4, 6, 8)),
        devices_per_node=random.choice((4, 8)),
    )
    if random.random() < 0.5:
        plan = ragged_plan(plan, seed)
    faults = () if healthy else _draw_faults(random, plan, steps)
    # Where a link is slow, messages matter more often than not.
    slow_network = random.random() < 0.5 or any(f.kind == "link" for f in faults)
    return Scene(
        plan=plan,
        shape=shape,
        noise=random.uniform(0.01, 0.05),
        drift=random.choice((0.0, random.uniform(0.005, 0.02))),
        hiccups=random.choice((0.0, random.uniform(0.01, 0.05))),
        shortfall=random.choice((0.0, random.uniform(0.02, 0.10))),
        documents=random.choice(("drawn", "definitions", "files")),
        network=math.exp(random.uniform(0, math.log(30))) if slow_network else 1.0,
        delay_s=random.choice((0.0, math.exp(random.uniform(math.log(1e-5), math.log(1e-3))))),
        congestion=random.choice((0.0, random.uniform(0.01, 0.05))),
        time_scale=random.choice((1.0, 1.0, 1.0, random.uniform(0.005, 0.05))),
        faults=faults,
        steps=steps,
        seed=seed,
    )


def ragged_plan(plan: Plan, seed: int) -> Plan:
    """The same devices after losses: halved TP groups, uneven layers, a micro-batch that moved."""
    random = Random(seed)
    replicas = []
    for one in plan.replicas:
        edges = [0, *(stage.layers[1] for stage in one.stages)]
        for i in range(1, len(edges) - 1):
            low, high = edges[i - 1] + 1, edges[i + 1] - 1
            edges[i] = min(max(edges[i] + random.choice((-1, 0, 0, 1)), low), high)
        stages = []
        for stage, layers in zip(one.stages, pairwise(edges), strict=True):
            kept = stage.tp // 2 if stage.tp > 1 and random.random() < 0.3 else stage.tp
            stages.append(Stage(ranks=stage.ranks[:kept], layers=layers))
        replicas.append(Replica(stages=tuple(stages)))
    routes = list(plan.routes)
    there = random.randrange(len(replicas))
    stages_there = len(replicas[there].stages)
    routes[0] = tuple(Instance(replica=there, stage=k) for k in range(stages_there))
    return replace(plan, replicas=tuple(replicas), routes=tuple(routes)).validated()


def _draw_faults(random: Random, plan: Plan, steps: int) -> tuple[Fault, ...]:
    faults: list[Fault] = []
    taken: set[int] = set()
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        kind: SuspectKind = random.choice(("device", "device", "device", "link", "host"))
        ranks = _draw_ranks(random, plan, kind)
        if taken & set(ranks):
            continue
        taken |= set(ranks)
        onset = random.randrange(FIRST_ONSET, steps - 45)
        end = steps if random.random() < 0.5 else random.randrange(onset + 20, steps - 10)
        factor = math.exp(random.uniform(math.log(1.1), math.log(4.0)))
        ramp = random.choice((0, 0, 0, 2, 4))
        # The only device of a node is its host.
        kind = "device" if len(ranks) == 1 else kind
        faults.append(
            Fault(kind=kind, ranks=ranks, factor=factor, onset=onset, end=end, ramp_steps=ramp)
        )
    return tuple(faults)


def _draw_ranks(random: Random, plan: Plan, kind: SuspectKind) -> tuple[int, ...]:
    rank = random.choice([d.rank for d in plan.devices if d.rank not in plan.standby])
    if kind == "device":
        return (rank,)
    if kind == "host":
        node_of = {d.rank: d.node for d in plan.devices if d.rank not in plan.standby}
        return tuple(r for r, node in node_of.items() if node == node_of[rank])
    replica = random.choice(plan.replicas)
    stage = random.randrange(len(replica.stages) - 1)
    i, j = random.choice(overlaps(replica.stages[stage].tp, replica.stages[stage + 1].tp))
    one, other = replica.stages[stage].ranks[i], replica.stages[stage + 1].ranks[j]
    return (min(one, other), max(one, other))


@cache
def python_tokens(documents: Documents) -> tuple[int, ...]:
    """Lengths of the definitions, or files, of Python's standard library, in tokens."""
    sizes: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_bytes()
        found = _DEFINITION.finditer(text) if documents == "definitions" else ()
        edges = sorted({0, *(match.start() for match in found), len(text)})
        sizes += [b - a for a, b in pairwise(edges)]
    return tuple(int(size / BYTES_PER_TOKEN) + 1 for size in sizes)


def packed(random: Random, tokens: int, documents: Documents = "drawn") -> tuple[int, int]:
    """A sequence full of documents: tokens, and the sum of squared lengths."""
    room, squared = tokens, 0
    while room > 0:
        if documents == "drawn":
            whole = int(random.lognormvariate(6.8, 1.6)) + 16
        else:
            whole = random.choice(python_tokens(documents))
        length = min(whole, room)
        squared += length * length
        room -= length
    return tokens, squared
