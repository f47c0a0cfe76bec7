"""Waits are broken off by shutting down the sockets of collectives, and no others."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from megatron.resilience.recovery.abort import Abort
from megatron.resilience.recovery.birth import AbortedError, check, guarded_birth

pytestmark = pytest.mark.unit

SOON_S = 0.1


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened
    settled()


def settled() -> None:
    """Waits until nobody looks at sockets any more."""
    for thread in threading.enumerate():
        if thread.name == "resihp-cut":
            thread.join(5)


def pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Two connected ends, closed after the test; waits in them end after ten seconds."""
    ends = socket.socketpair()
    for end in ends:
        stack.enter_context(end)
        end.settimeout(10)
    return ends


def works(ends: tuple[socket.socket, socket.socket]) -> bool:
    try:
        ends[0].sendall(b"x")
        return ends[1].recv(1) == b"x"
    except OSError:
        return False


def test_what_appeared_while_watching_is_shut_down_and_nothing_else(stack: ExitStack) -> None:
    abort, before = Abort(), pair(stack)
    with abort.watching():
        inside = pair(stack)
    after = pair(stack)
    assert works(inside)
    abort.now()
    assert abort.raised
    settled()
    assert not works(inside)
    assert works(before)
    assert works(after)


def test_a_wait_in_another_thread_ends_at_once(stack: ExitStack) -> None:
    abort = Abort()
    with abort.watching():
        inside = pair(stack)
    ended_s: list[float] = []

    def wait() -> None:
        assert inside[1].recv(1) == b""
        ended_s.append(time.perf_counter())

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.05)
    assert not ended_s
    begun_s = time.perf_counter()
    abort.now()
    assert time.perf_counter() - begun_s < SOON_S, "the one who aborts does not wait either"
    waiting.join(5)
    assert ended_s[0] - begun_s < SOON_S


def test_a_message_between_living_ends_is_finished_first(stack: ExitStack) -> None:
    """gloo asks to hear when it can go on with what it sends; whoever gets it is at its middle."""
    abort, loop = Abort(), stack.enter_context(select.epoll())
    with abort.watching():
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        sender = stack.enter_context(socket.create_connection(listening.getsockname()))
        receiver = stack.enter_context(listening.accept()[0])
    receiver.settimeout(10)
    message, got = b"x" * (32 << 20), bytearray()
    sender.setblocking(False)
    loop.register(sender, select.EPOLLIN | select.EPOLLOUT)
    sent = sender.send(message)
    assert 0 < sent < len(message), "it does not fit"

    def send() -> None:
        rest = memoryview(message)[sent:]
        while rest and (found := dict(loop.poll(5))[sender.fileno()]):
            assert not found & select.EPOLLIN, "gloo would give up at the peer's end"
            rest = rest[sender.send(rest) :]
        loop.modify(sender, select.EPOLLIN)

    sending = threading.Thread(target=send)
    abort.now()
    sending.start()
    while part := receiver.recv(1 << 20):
        got += part
    sending.join(5)
    assert len(got) == len(message)
    settled()
    assert sender.recv(1) == b""


def test_a_message_that_nobody_goes_on_with_is_torn_in_the_end(stack: ExitStack) -> None:
    abort, loop = Abort(), stack.enter_context(select.epoll())
    with abort.watching():
        inside = pair(stack)
    loop.register(inside[0], select.EPOLLOUT)
    abort.now()
    assert works(inside)
    settled()
    assert not works(inside)


def test_listening_sockets_are_left_alone(stack: ExitStack) -> None:
    abort = Abort()
    with abort.watching():
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    listening.settimeout(5)
    abort.now()
    client = stack.enter_context(socket.create_connection(listening.getsockname(), timeout=5))
    server = stack.enter_context(listening.accept()[0])
    assert works((client, server))


def test_descriptors_stay_open_for_those_who_own_them(stack: ExitStack) -> None:
    """A number that is closed under gloo would be given to somebody else's file."""
    abort = Abort()
    with abort.watching():
        inside = pair(stack)
    count = len(os.listdir("/proc/self/fd"))
    abort.now()
    abort.now()
    settled()
    os.fstat(inside[0].fileno())
    # Copies keep the connections open until new ones are made.
    assert len(os.listdir("/proc/self/fd")) == count + len(inside)
    abort.forget()
    assert len(os.listdir("/proc/self/fd")) == count
    os.fstat(inside[0].fileno())


def test_a_number_that_is_used_again_is_another_socket(stack: ExitStack) -> None:
    abort = Abort()
    with abort.watching():
        gone = socket.socketpair()
    numbers = {end.fileno() for end in gone}
    for end in gone:
        end.close()
    again = pair(stack)
    assert {end.fileno() for end in again} == numbers
    abort.now()
    settled()
    assert works(again)


def test_sockets_of_a_failed_attempt_count_too(stack: ExitStack) -> None:
    abort, made = Abort(), []

    def attempt() -> None:
        with abort.watching():
            made.append(pair(stack))
            raise ConnectionError

    with pytest.raises(ConnectionError):
        attempt()
    abort.now()
    settled()
    assert not works(made[0])


def test_after_forgetting_work_may_go_on(stack: ExitStack) -> None:
    abort = Abort()
    with abort.watching():
        inside = pair(stack)
    abort._raised.set()
    with pytest.raises(AbortedError, match="another rank is lost"):
        check(abort)
    abort.forget()
    check(abort)
    assert not abort.raised
    abort.cut()
    settled()
    assert works(inside), "what is forgotten is somebody else's"


# -- groups that can be given up while they are made ---------------------------


def test_what_is_made_is_returned_and_its_sockets_are_known(stack: ExitStack) -> None:
    abort = Abort()
    made = guarded_birth(abort)(lambda: pair(stack))
    assert works(made)
    abort.now()
    settled()
    assert not works(made)


def test_an_error_of_the_making_reaches_the_one_who_waits() -> None:
    def create() -> None:
        raise ValueError("no such interface")

    with pytest.raises(ValueError, match="no such interface"):
        guarded_birth(Abort())(create)


def test_nothing_is_made_once_work_is_broken_off() -> None:
    abort, calls = Abort(), []
    abort.now()
    with pytest.raises(AbortedError):
        guarded_birth(abort)(lambda: calls.append(1))
    assert not calls


def test_a_making_that_hangs_is_given_up_at_once() -> None:
    abort, never = Abort(), threading.Event()
    began_s: list[float] = []

    def later() -> None:
        time.sleep(0.1)
        began_s.append(time.perf_counter())
        abort.now()

    threading.Thread(target=later).start()
    with pytest.raises(AbortedError):
        guarded_birth(abort)(lambda: never.wait(30))
    assert time.perf_counter() - began_s[0] < SOON_S
    never.set()


def test_what_was_made_while_work_was_broken_off_is_not_used() -> None:
    abort = Abort()
    with pytest.raises(AbortedError):
        guarded_birth(abort)(abort.now)
