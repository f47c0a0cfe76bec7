"""Waits for real peers over gloo are broken off at once: peers that live, die or never come."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.resilience.patches.group_birth import GroupBirth
from megatron.resilience.recovery.abort import Abort
from megatron.resilience.recovery.birth import guarded_birth
from megatron.resilience.testing.trial import PRELOAD
from resihp_ext.testing.ranks import preload, run_ranks, start_ranks

pytestmark = pytest.mark.dist

SOON_S, LATE_S = 0.1, 1.0
TIMEOUT = timedelta(seconds=60)
"""Of groups: a wait that is not broken off is seen as such."""


def connect(epoch: int) -> None:
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=TIMEOUT
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"world/{epoch}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=TIMEOUT,
    )


def seconds_until_released(abort: Abort, wait: Callable[[], Any]) -> tuple[float, str]:
    """From the abort, which another thread calls, to the error of the wait, and its type."""
    begun_s: list[float] = []

    def later() -> None:
        time.sleep(0.3)
        begun_s.append(time.perf_counter())
        abort.now()

    thread = threading.Thread(target=later)
    thread.start()
    try:
        wait()
    except Exception as error:  # noqa: BLE001 - whatever it is, the test judges it
        ended_s, kind = time.perf_counter(), type(error).__name__
    else:
        ended_s, kind = time.perf_counter(), "nothing"
    thread.join()
    return ended_s - begun_s[0], kind


# -- a peer that lives ---------------------------------------------------------


class Page(http.server.BaseHTTPRequestHandler):
    """Answers every request over a connection that stays open."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_args: object) -> None:
        """Not into the log of the rank."""


def answers(connection: http.client.HTTPConnection) -> bool:
    connection.request("GET", "/")
    return connection.getresponse().read() == b"ok"


def recv_from_a_live_peer() -> list[tuple[float, str]]:
    """Runs in two ranks: rank 1 sends nothing; three connections, one after the other."""
    rank = int(os.environ["RANK"])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = http.client.HTTPConnection(*server.server_address[:2], timeout=10)  # type: ignore[misc]
    assert answers(page)
    meeting = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    abort, found = Abort(), []
    for epoch in range(3):
        abort.forget()
        with abort.watching():
            connect(epoch)
            listening = socket.create_server(("127.0.0.1", 0))
        tensor = torch.zeros(1000)
        dist.all_reduce(tensor)
        if rank == 0:
            found.append(seconds_until_released(abort, lambda: dist.recv(tensor, 1)))  # noqa: B023
            assert answers(page), "a connection of others is theirs"
            with socket.create_connection(listening.getsockname(), timeout=5):
                listening.accept()[0].close()
            meeting.set(f"done/{epoch}", "")
        else:
            meeting.wait([f"done/{epoch}"], TIMEOUT)
        listening.close()
        dist.destroy_process_group()
    return found


def test_a_recv_from_a_live_peer_is_released() -> None:
    preload(PRELOAD)
    found, _ = run_ranks(2, recv_from_a_live_peer)
    assert [kind for _, kind in found] == ["RuntimeError"] * 3
    assert statistics.median(seconds for seconds, _ in found) < SOON_S, found


ROUNDS = 12


def broken_off_at_any_moment() -> list[float]:
    """Runs in two ranks, which send each other large messages until both break off.

    Returns:
        Seconds from the abort of this rank until it was released.
    """
    found, large = [], torch.ones(1 << 21)
    meeting = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    for epoch in range(ROUNDS):
        abort = Abort()
        with abort.watching():
            connect(epoch)
        dist.barrier()
        delay_s = Random(epoch).uniform(0.01, 0.05) + 0.003 * Random().random()
        due_s = time.perf_counter() + delay_s
        threading.Timer(delay_s, abort.now).start()
        with contextlib.suppress(RuntimeError):
            while not abort.raised:
                dist.all_reduce(large)
        found.append(time.perf_counter() - due_s)
        # Nobody ends its connections before all are released, as in a recovery.
        meeting.set(f"done/{epoch}/{os.environ['RANK']}", "")
        meeting.wait([f"done/{epoch}/{rank}" for rank in range(2)], 2 * TIMEOUT)
        dist.destroy_process_group()
    return found


def test_a_message_on_its_way_is_no_trap() -> None:
    """gloo does not wake those who are in the middle of a message when its connection ends."""
    preload(PRELOAD)
    for found in run_ranks(2, broken_off_at_any_moment):
        assert max(found) < LATE_S, found


def reduce_until_broken_off() -> int:
    """Runs in two ranks: both are told at almost the same moment, and begin further messages."""
    rank = int(os.environ["RANK"])
    abort, delays = Abort(), Random(rank)
    meeting = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    for epoch in range(ROUNDS):
        abort.forget()
        with abort.watching():
            connect(epoch)
        tensor = torch.zeros(1000)
        dist.all_reduce(tensor)
        timer = threading.Timer(0.01 + delays.random() * 0.002, abort.now)
        timer.start()
        with contextlib.suppress(RuntimeError):
            while True:
                dist.all_reduce(tensor)
        timer.join()
        meeting.set(f"stopped/{epoch}/{rank}", "")
        meeting.wait([f"stopped/{epoch}/{1 - rank}"], TIMEOUT / 4)
        dist.destroy_process_group()
    return ROUNDS


def test_whoever_goes_on_is_stopped() -> None:
    """gloo forgets a send that is announced and whose first write then fails."""
    preload(PRELOAD)
    assert run_ranks(2, reduce_until_broken_off, timeout_s=60) == [ROUNDS, ROUNDS]


# -- a store -------------------------------------------------------------------


def wait_for_a_key() -> tuple[float, str]:
    """Runs in a rank: nobody ever sets it."""
    abort = Abort()
    with abort.watching():
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            timeout=TIMEOUT,
        )
    return seconds_until_released(abort, lambda: store.get("never"))


def test_a_wait_for_a_key_is_released() -> None:
    preload(PRELOAD)
    ((seconds, kind),) = run_ranks(1, wait_for_a_key)
    assert kind == "DistNetworkError"
    assert seconds < SOON_S


# -- a group that is being made ------------------------------------------------


def make_a_group_with(way: str) -> tuple[float, str]:
    """Runs in two ranks; rank 1 dies instead of making the group, or never comes."""
    patch, abort = GroupBirth(), Abort()
    patch.apply()
    patch.guard = guarded_birth(abort)
    connect(0)
    dist.barrier()
    if os.environ["RANK"] == "1":
        if way == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return seconds_until_released(abort, lambda: dist.new_group([0, 1]))


@pytest.mark.parametrize("way", ["dies", "stays away"])
def test_a_group_is_given_up_whose_member(way: str) -> None:
    preload(PRELOAD)
    with start_ranks(2, make_a_group_with, way) as ranks:
        ((seconds, kind),) = ranks.join(60, survivors=[0])
    assert kind == "AbortedError"
    assert seconds < SOON_S
