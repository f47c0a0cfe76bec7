"""A whole job around the coordinator's rules: nodes, workers, a slow network, chance."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from random import Random

from coordinated import ZERO_S, some_plan
from simulated_worker import Worker

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, Answer, End, NeedPlan, ToNode, ToRank
from resihp_ext.control.membership import Membership, Phase, Rules
from resihp_ext.control.messages import Message

TICK_S = 0.05
STUCK_S = 60.0
NEVER = 10**9


@dataclass(eq=False)
class SimulatedJob:
    """Messages keep their order on the way from and to each rank, and overtake all others."""

    random: Random
    nodes: int
    each: int
    end_at: int = NEVER
    least: int = 1
    """Devices without which there is no plan."""
    now_s: float = 0.0
    workers: dict[int, Worker] = field(default_factory=dict)
    ended: End | None = None
    views: dict[int, set[Message]] = field(default_factory=lambda: defaultdict(set))
    goes: dict[int, set[Message]] = field(default_factory=lambda: defaultdict(set))
    reported: set[tuple[int, str]] = field(default_factory=set)
    shared: dict[tuple[str, int, int], dict[int, int]] = field(default_factory=dict)
    moved_s: float = 0.0
    best: int = 0

    def __post_init__(self) -> None:
        rules = Rules(same_failures=NEVER, deaths=self.random.choice([3, NEVER]))
        self.rules = Membership(rules, zero_s=ZERO_S)
        self.up: dict[int, deque[tuple[float, Message]]] = defaultdict(deque)
        self.down: dict[int | str, deque[tuple[float, Message]]] = defaultdict(deque)
        self.asked: list[tuple[float, NeedPlan]] = []
        self.node_of: dict[int, str] = {}
        self.gone: set[str] = set()
        size = self.nodes * self.each
        for node in range(self.nodes):
            ranks = tuple(range(node * self.each, (node + 1) * self.each))
            self.join(node, ranks)
        for rank in range(size):
            worker = self.launch(rank, 0, newcomer=False)
            worker.members = tuple(range(size))
        self.post(0, say.Described(rank=0, problem="{}", plan=some_plan(0, range(size))))
        for worker in self.workers.values():
            worker.start()

    # Nodes

    def join(self, node: int, ranks: tuple[int, ...]) -> None:
        size = self.nodes * self.each
        name = f"n{node}"
        self.gone.discard(name)
        self.node_of.update(dict.fromkeys(ranks, name))
        self.act(
            self.rules.node_joined(
                say.NodeHello(node=name, address="a", ranks=ranks, slots=self.each, world_size=size)
            )
        )

    def lose(self, node: str) -> None:
        self.gone.add(node)
        for rank, worker in self.workers.items():
            if self.node_of[rank] == node:
                worker.alive = False
                self.up[rank].clear()
        self.down[node].clear()
        self.act(self.rules.node_lost(node, "no beat", self.now_s))

    def launch(self, rank: int, incarnation: int, *, newcomer: bool) -> Worker:
        worker = Worker(
            rank,
            incarnation,
            lambda message: self.post(rank, message),
            newcomer,
            self.end_at,
            self.shared,
        )
        self.workers[rank] = worker
        self.down[rank].clear()
        return worker

    # The network

    def delay_s(self) -> float:
        return self.now_s + self.random.choice([0.0, 0.05, 0.3, 1.0]) * self.random.random()

    def post(self, rank: int, message: Message) -> None:
        if self.node_of[rank] not in self.gone:
            self.up[rank].append((self.delay_s(), message))

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ToRank(rank=rank, message=message):
                    self.down[rank].append((self.delay_s(), message))
                    if isinstance(message, say.Propose):
                        # Whoever is left out takes no part: its state must not be needed.
                        assert self.rules.job.plan.ranks <= set(message.members)
                    if isinstance(message, say.View):
                        self.views[message.epoch].add(message)
                        self.reported |= {(loss.rank, loss.cause) for loss in message.losses}
                    if isinstance(message, say.Go):
                        self.goes[message.epoch].add(message)
                case ToNode(node=node, message=message):
                    self.down[node].append((self.delay_s(), message))
                case NeedPlan():
                    self.asked.append((self.now_s + 2.0 * self.random.random() ** 4, action))
                case End():
                    assert self.ended is None
                    self.ended = action

    def hear_node(self, node: str, message: Message) -> None:
        match message:
            case say.Kill(rank=rank):
                self.die(rank)
            case say.Replace(rank=rank, incarnation=incarnation):
                self.workers[rank].alive = False
                self.up[rank].clear()
                self.launch(rank, incarnation, newcomer=True).start()
            case say.Assigned(ranks=ranks):
                self.node_of.update(dict.fromkeys(ranks, node))
                for rank in ranks:
                    self.launch(rank, 0, newcomer=True).start()

    def die(self, rank: int) -> None:
        worker = self.workers[rank]
        if worker.alive:
            worker.alive = False
            self.say_exited(worker, "was killed", -9)

    def say_exited(self, worker: Worker, cause: str, exit_code: int) -> None:
        self.post(
            worker.rank,
            say.Exited(
                rank=worker.rank,
                incarnation=worker.incarnation,
                cause=cause,
                exit_code=exit_code,
            ),
        )

    # Time

    def advance(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s and self.ended is None:
            self.now_s += TICK_S
            self.deliver()
            for worker in list(self.workers.values()):
                if worker.alive and not worker.hung and self.random.random() < 0.5:
                    self.let(worker)
            if self.random.random() < 0.3:
                self.act(self.rules.tick(self.now_s))
            self.look()

    def let(self, worker: Worker) -> None:
        if worker.mode == "prepare" and self.random.random() < 0.1:
            worker.mode = "ready"
            worker.send(say.Ready(rank=worker.rank))
        worker.step(self.now_s)
        if not worker.alive:
            code = 0 if worker.left else 1
            self.say_exited(worker, f"exited with code {code}", code)

    def deliver(self) -> None:
        for rank, queue in list(self.up.items()):
            while queue and queue[0][0] <= self.now_s:
                _, message = queue.popleft()
                self.act(self.rules.handle(message, self.node_of[rank], self.now_s))
        for key, queue in list(self.down.items()):
            while queue and queue[0][0] <= self.now_s:
                _, message = queue.popleft()
                if isinstance(key, str):
                    if key not in self.gone:
                        self.hear_node(key, message)
                elif self.workers[key].alive and not self.workers[key].hung:
                    worker = self.workers[key]
                    worker.hear(message, self.now_s)
                    if not worker.alive:
                        self.say_exited(worker, "ended", 0 if worker.left else 1)
        for due in [one for one in self.asked if one[0] <= self.now_s]:
            self.asked.remove(due)
            self.answer(due[1])

    def answer(self, need: NeedPlan) -> None:
        usable = [rank for rank, _, able in need.devices if able]
        refuses = need.request.startswith("proposal") and self.random.random() < 0.1
        if refuses or len(usable) < self.least:
            self.act(self.rules.planned(need.request, Answer(None, "too few")))
        else:
            plan = some_plan(need.version, usable)
            self.act(self.rules.planned(need.request, Answer(plan, "", need.version)))

    def look(self) -> None:
        """What the server and the agents see: progress, or none."""
        members = [self.workers[rank] for rank in self.rules.job.members]
        best = sum(one.done for one in members) + len(self.goes)
        if best != self.best or self.rules.job.phase is not Phase.RUNNING:
            self.best, self.moved_s = best, self.now_s
        elif self.now_s - self.moved_s > STUCK_S:
            self.moved_s = self.now_s
            self.act(self.rules.stuck("all ranks have waited for 60 s"))
        for node in self.rules.job.slots.nodes:
            step = max((one.done for one in members), default=0) + 1
            beat = say.NodeBeat(node=node, step=step, alive=())
            self.act(self.rules.handle(beat, node, self.now_s))
