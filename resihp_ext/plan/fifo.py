"""Messages between two rank groups are received in the order in which they are sent.

NCCL matches the messages from one rank to another by their order alone, so this must hold of all
that one group sends to another, activations and gradients together: where routes cross, and with
virtual stages, both may go the same way.

A schedule does not give it by itself: where micro-batches reach a group by several routes, it may
run first what arrived second, because another micro-batch was older or its chunk's turn had come.
Then the receive of the first is moved forward, to before that of the second: it waits in the
receiver's memory instead of on the wire. Nobody waits longer for that, since the first message was
sent before the second, and a program without deadlock stays one.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import replace

from resihp_ext.plan.action import RECEIVES, SENDS, Action, Kind
from resihp_ext.plan.plan import Instance
from resihp_ext.plan.program import Cell, Message, Program

Channel = tuple[Instance, Instance]
"""Sending host, receiving host."""


def received_in_order(program: Program) -> Program:
    """Moves receives forward until every channel is first in, first out.

    Args:
        program: Every send has its receive, and nothing deadlocks.
    """
    lists = []
    sent = _by_channel(program, SENDS)
    for host, actions in program.lists:
        received = {cell.index: m for cell, m in _messages(program, host, RECEIVES)}
        receive_of = {message: actions[index] for index, message in received.items()}
        moved: list[Action] = []
        for index, action in enumerate(actions):
            if message := received.get(index):
                waiting = sent[_channel(program, message)]
                while message in receive_of:
                    moved.append(receive_of.pop(waiting.popleft()))
            else:
                moved.append(action)
        lists.append((host, tuple(moved)))
    return replace(program, lists=tuple(lists))


def out_of_order(program: Program) -> tuple[Cell, Message] | None:
    """The first receive that comes before its turn, and the message whose turn it is.

    Args:
        program: Every send has its receive.
    """
    sent = _by_channel(program, SENDS)
    for host in program.instances:
        for cell, message in _messages(program, host, RECEIVES):
            turn = sent[_channel(program, message)].popleft()
            if turn != message:
                return cell, turn
    return None


def _by_channel(program: Program, kinds: Collection[Kind]) -> dict[Channel, deque[Message]]:
    found: dict[Channel, deque[Message]] = {}
    for host in program.instances:
        for _, message in _messages(program, host, kinds):
            found.setdefault(_channel(program, message), deque()).append(message)
    return found


def _messages(
    program: Program, host: Instance, kinds: Collection[Kind]
) -> Iterator[tuple[Cell, Message]]:
    for index, action in enumerate(program.actions(host)):
        if action.kind in kinds:
            yield Cell(instance=host, index=index), program.message(host, action)


def _channel(program: Program, message: Message) -> Channel:
    return program.host_of(message.source), program.host_of(message.target)
