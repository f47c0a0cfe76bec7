"""A job for tests of the coordinator's rules: messages in, actions out, a clock by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, Answer, End, NeedPlan, ToNode, ToRank
from resihp_ext.control.membership import Membership, Phase, Rules
from resihp_ext.control.messages import Message
from resihp_ext.plan.plan import Plan, uniform_plan

ZERO_S = 1000.0


def some_plan(version: int, ranks: Iterable[int], num_layers: int = 1) -> str:
    """One stage of all ranks."""
    ranks = tuple(ranks)
    plan = uniform_plan(num_layers=num_layers, tp=len(ranks), pp=1, dp=1, micro_batches=1)
    fields = json.loads(plan.to_json())
    fields["version"] = version
    fields["devices"] = [{"rank": rank, "node": 0, "p": 1.0} for rank in ranks]
    fields["replicas"][0]["stages"][0]["ranks"] = list(ranks)
    return Plan.from_json(json.dumps(fields)).to_json()


class Driver:
    """Members that do what they are told, when a test says so."""

    def __init__(self, nodes: int = 2, each: int = 2, rules: Rules | None = None) -> None:
        self.rules = Membership(rules, zero_s=ZERO_S)
        self.now_s = 100.0
        self.each, self.nodes = each, nodes
        self.actions: list[Action] = []
        """Of the last call."""
        self.log: list[Action] = []
        for node in range(nodes):
            self.join(node)

    # What comes from outside

    def take(self, actions: list[Action]) -> list[Action]:
        self.actions = actions
        self.log += actions
        return actions

    def join(self, node: int) -> list[Action]:
        ranks = tuple(range(node * self.each, (node + 1) * self.each))
        return self.take(self.rules.node_joined(self.hello(node, ranks)))

    def come(self, node: int) -> list[Action]:
        """A node comes to the running job."""
        return self.take(self.rules.node_joined(self.hello(node, ())))

    def hello(self, node: int, ranks: tuple[int, ...]) -> say.NodeHello:
        world_size = self.nodes * self.each
        return say.NodeHello(
            node=f"n{node}", address="a", ranks=ranks, slots=self.each, world_size=world_size
        )

    def hear(self, message: Message, node: str = "") -> list[Action]:
        rank = getattr(message, "rank", None)
        node = node or self.rules.job.slots.of[rank].node
        return self.take(self.rules.handle(message, node, self.now_s))

    def wait(self, seconds: float) -> list[Action]:
        """Ticks every quarter of a second; all that followed."""
        found: list[Action] = []
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + 0.25)
            found += self.rules.tick(self.now_s)
        return self.take(found)

    def die(self, rank: int, cause: str = "was killed", exit_code: int = -9) -> list[Action]:
        incarnation = self.rules.job.slots.of[rank].incarnation
        return self.hear(
            say.Exited(rank=rank, incarnation=incarnation, cause=cause, exit_code=exit_code)
        )

    def lose(self, node: int) -> list[Action]:
        return self.take(self.rules.node_lost(f"n{node}", "no beat", self.now_s))

    # What workers do

    def start(self) -> Driver:
        ranks = range(self.nodes * self.each)
        self.hear(say.Described(rank=0, problem="{}", plan=some_plan(0, ranks)))
        for rank in ranks:
            self.hear(say.Armed(rank=rank))
        assert self.phase is Phase.RUNNING
        return self

    def arrive(self, *ranks: int, region: int = 7, versions: Iterable[int] = (0,)) -> list[Action]:
        found: list[Action] = []
        for rank in ranks:
            found += self.hear(
                say.Arrived(
                    rank=rank,
                    epoch=self.rules.job.epoch,
                    region=region,
                    result=(float(region), float(rank)),
                    versions=tuple(versions),
                    phase="forward",
                )
            )
        return self.take_only(found)

    def adopt(self, *ranks: int, epoch: int = -1) -> list[Action]:
        epoch = self.rules.job.epoch if epoch < 0 else epoch
        found: list[Action] = []
        for rank in ranks:
            found += self.hear(say.Adopted(rank=rank, epoch=epoch, version=0))
        return self.take_only(found)

    def take_only(self, actions: list[Action]) -> list[Action]:
        self.actions = actions
        return actions

    def plan(self, need: NeedPlan | None = None) -> list[Action]:
        """Answers the last question with a plan of all that may be used."""
        need = need or self.need()
        ranks = [rank for rank, _, usable in need.devices if usable]
        plan = some_plan(need.version, ranks)
        return self.take(self.rules.planned(need.request, Answer(plan, "", need.version)))

    def refuse(self, why: str = "too few devices") -> list[Action]:
        return self.take(self.rules.planned(self.need().request, Answer(None, why)))

    def recover(self, *, region: int = 7, versions: Iterable[int] = (0,)) -> Driver:
        """All members arrive, the plan comes, all adopt."""
        members = self.members
        self.arrive(*members, region=region, versions=versions)
        self.plan()
        assert self.said(say.Go).keys() == set(members), self.actions
        self.adopt(*members)
        assert self.phase is Phase.RUNNING
        return self

    def prepare(self, *ranks: int) -> list[Action]:
        """Newcomers say that they are ready."""
        found: list[Action] = []
        for rank in ranks:
            found += self.hear(say.Ready(rank=rank))
        return self.take_only(found)

    def agree(self, number: int, step: int = 12) -> list[Action]:
        rank = min(self.members)
        return self.hear(say.Agreed(rank=rank, number=number, step=step, loop="{}"))

    # What followed

    @property
    def phase(self) -> Phase:
        return self.rules.job.phase

    @property
    def members(self) -> tuple[int, ...]:
        return self.rules.job.members

    def need(self) -> NeedPlan:
        """The last question to the planner."""
        return next(one for one in reversed(self.log) if isinstance(one, NeedPlan))

    def said[Kind: Message](self, kind: type[Kind]) -> dict[int, Kind]:
        """Messages of a kind to ranks, in the last actions."""
        return {
            one.rank: one.message
            for one in self.actions
            if isinstance(one, ToRank) and isinstance(one.message, kind)
        }

    def told[Kind: Message](self, kind: type[Kind]) -> list[tuple[str, Kind]]:
        """Messages of a kind to nodes, in the last actions."""
        return [
            (one.node, one.message)
            for one in self.actions
            if isinstance(one, ToNode) and isinstance(one.message, kind)
        ]

    @property
    def ended(self) -> End | None:
        return next((one for one in self.log if isinstance(one, End)), None)

    def state(self, rank: int) -> str:
        return self.rules.job.slots.of[rank].state.value


def running(nodes: int = 2, each: int = 2, rules: Rules | None = None) -> Driver:
    """After the first step has begun."""
    return Driver(nodes, each, rules).start()
