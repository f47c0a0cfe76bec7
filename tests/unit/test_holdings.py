"""What a process holds, counted from outside, and what counts as more of it."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from megatron.resilience.testing.chaos.counted import answers, ask
from megatron.resilience.testing.chaos.holdings import growth, holdings, least, most

pytestmark = pytest.mark.unit


def test_open_files_are_counted_by_kind_and_forgotten_when_closed(tmp_path: Path) -> None:
    before = holdings()
    one, other = socket.socketpair()
    reading, writing = os.pipe()
    null, polled = os.open(os.devnull, os.O_RDONLY), os.eventfd(0)
    with (tmp_path / "file").open("w"):
        during = holdings(os.getpid())
    for descriptor in (reading, writing, null, polled):
        os.close(descriptor)
    one.close()
    other.close()
    kinds = ("fds", "sockets", "pipes", "files", "other_fds")
    grown = growth(before, during)
    assert [grown[kind] for kind in kinds] == [7, 2, 2, 2, 1]
    grown = growth(before, holdings())
    assert [grown[kind] for kind in kinds] == [0] * len(kinds)


def test_threads_and_memory_are_counted() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    before = holdings()
    thread.start()
    block = bytearray(b"x") * (64 << 20)
    during = holdings()
    over.set()
    thread.join()
    grown = growth(before, during)
    assert grown["threads"] == 1
    for kind in ("rss_bytes", "pss_bytes"):
        assert len(block) * 0.9 < during[kind] - before[kind] < len(block) * 1.5
    assert grown["rss_ratio"] == during["rss_bytes"] / before["rss_bytes"]


def test_nothing_is_said_of_a_process_that_is_gone() -> None:
    with pytest.raises(OSError, match="No such file"):
        holdings(2**22 + 1)  # above every pid of Linux


def test_what_comes_and_goes_is_not_held() -> None:
    looks = [{"fds": 7, "rss_bytes": 10}, {"fds": 5, "rss_bytes": 20}]
    assert least(looks) == {"fds": 5, "rss_bytes": 10}


def test_the_worst_process_decides() -> None:
    grown = [
        growth({"fds": 5, "rss_bytes": 10}, {"fds": 6, "rss_bytes": 10}),
        growth({"fds": 5, "rss_bytes": 10}, {"fds": 4, "rss_bytes": 15}),
    ]
    assert most(grown) == {"fds": 1, "rss_ratio": 1.5}


def test_only_answers_to_this_question_count(tmp_path: Path) -> None:
    ask(tmp_path, 7)
    folder = tmp_path / "counts"
    (folder / "0.json").write_text('{"asked": 7, "held": {"fds": 1}}')
    (folder / "1.json").write_text('{"asked": 6, "held": {"fds": 2}}')
    assert (folder / "asked").read_text() == "7"
    assert {rank: one["held"] for rank, one in answers(tmp_path, 7).items()} == {0: {"fds": 1}}
