"""Handshake and frames: only who knows the token is heard, each word once and in order."""

from __future__ import annotations

import msgspec
import pytest

from resihp_ext.control import frames
from resihp_ext.control.frames import FrameError, Seal

pytestmark = pytest.mark.unit

TOKEN = b"t" * 32
KEY = b"k" * 32


def pair() -> tuple[Seal, Seal]:
    return Seal(KEY, to_server=True), Seal(KEY, to_server=True)


def test_frames_arrive_in_order() -> None:
    mine, theirs = pair()
    for payload in (b"", b"one", b"x" * 100_000):
        assert theirs.open(mine.close(payload)) == payload


def test_frame_is_taken_once() -> None:
    mine, theirs = pair()
    frame = mine.close(b"one")
    theirs.open(frame)
    with pytest.raises(FrameError, match="frame 1"):
        theirs.open(frame)


def test_frame_cannot_be_left_out() -> None:
    mine, theirs = pair()
    mine.close(b"lost")
    with pytest.raises(FrameError):
        theirs.open(mine.close(b"next"))


def test_frame_cannot_be_turned_back() -> None:
    mine, _ = pair()
    with pytest.raises(FrameError):
        Seal(KEY, to_server=False).open(mine.close(b"one"))


def test_frame_of_another_connection_is_refused() -> None:
    mine, _ = pair()
    with pytest.raises(FrameError):
        Seal(b"o" * 32, to_server=True).open(mine.close(b"one"))


def test_every_bit_counts() -> None:
    frame = Seal(KEY, to_server=True).close(b"pay")
    for bit in range(len(frame) * 8):
        changed = bytearray(frame)
        changed[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(FrameError):
            Seal(KEY, to_server=True).open(bytes(changed))


def test_short_frames_are_refused() -> None:
    frame = Seal(KEY, to_server=True).close(b"")
    for size in range(len(frame)):
        with pytest.raises(FrameError):
            Seal(KEY, to_server=True).open(frame[:size])


def test_both_sides_prove_the_token_and_get_one_key() -> None:
    asked = frames.challenge()
    mine = frames.claim(TOKEN, asked, "worker", "rank 0")
    frames.check_claim(TOKEN, asked, mine)
    frames.check_welcome(TOKEN, asked, mine, frames.welcome(TOKEN, asked, mine))
    other = frames.claim(TOKEN, asked, "worker", "rank 0")
    assert frames.key_of(TOKEN, asked, mine) != frames.key_of(TOKEN, asked, other)


def test_client_without_token_is_refused() -> None:
    asked = frames.challenge()
    with pytest.raises(FrameError, match="worker rank 0"):
        frames.check_claim(TOKEN, asked, frames.claim(b"w" * 32, asked, "worker", "rank 0"))


def test_server_without_token_is_refused() -> None:
    asked = frames.challenge()
    mine = frames.claim(TOKEN, asked, "worker", "rank 0")
    with pytest.raises(FrameError):
        frames.check_welcome(TOKEN, asked, mine, frames.welcome(b"w" * 32, asked, mine))


def test_claim_answers_one_challenge_alone() -> None:
    mine = frames.claim(TOKEN, frames.challenge(), "worker", "rank 0")
    with pytest.raises(FrameError):
        frames.check_claim(TOKEN, frames.challenge(), mine)


@pytest.mark.parametrize("changed", [{"role": "agent"}, {"name": "rank 1"}, {"nonce": b"n" * 32}])
def test_claim_cannot_be_changed(changed: dict[str, str]) -> None:
    asked = frames.challenge()
    mine = frames.claim(TOKEN, asked, "worker", "rank 0")
    with pytest.raises(FrameError):
        frames.check_claim(TOKEN, asked, msgspec.structs.replace(mine, **changed))


def test_proof_of_a_client_is_none_of_the_server() -> None:
    """A server that knows no token cannot hand a client's proof back to it."""
    asked = frames.challenge()
    mine = frames.claim(TOKEN, asked, "worker", "rank 0")
    with pytest.raises(FrameError):
        frames.check_welcome(TOKEN, asked, mine, frames.Welcome(mine.proof))
