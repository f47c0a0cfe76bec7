"""Who is at the other end, and whether it was they who sent this: all without any input or output.

A connection begins with three small records: the server's challenge, the client's proof that it
knows the job's token, and the server's proof. Proofs and the key of the connection are
HMAC-SHA256 under the token over role, name and the nonces of both sides, so none can be used
again. Then every frame carries a tag under that key over direction, sequence number and payload:
nothing can be changed, left out, repeated, turned back or put into another order unseen.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from typing import Annotated

import msgspec
from msgspec import Meta

VERSION = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
TAG_BYTES = 16
TOKEN_BYTES = 32

Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Proof = Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]
Word = Annotated[str, Meta(min_length=1, max_length=64)]


class FrameError(Exception):
    """A frame that the peer cannot have sent; ``kind`` is for the counters."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Challenge(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """From the server."""

    version: int
    nonce: Nonce


class Claim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """From the client: who it is, and that it knows the token."""

    role: Word
    name: Word
    nonce: Nonce
    proof: Proof


class Welcome(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """From the server: that it knows the token, too."""

    proof: Proof


_pack = msgspec.msgpack.encode


def new_token() -> bytes:
    """A secret for one job."""
    return secrets.token_bytes(TOKEN_BYTES)


def challenge() -> Challenge:
    """A question that was never asked before."""
    return Challenge(VERSION, secrets.token_bytes(NONCE_BYTES))


def claim(token: bytes, asked: Challenge, role: str, name: str) -> Claim:
    """The client's answer."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    return Claim(role, name, nonce, _proof(token, "client", asked, role, name, nonce))


def check_claim(token: bytes, asked: Challenge, found: Claim) -> None:
    """The server's check.

    Raises:
        FrameError: the client does not know the token.
    """
    right = _proof(token, "client", asked, found.role, found.name, found.nonce)
    if not hmac.compare_digest(right, found.proof):
        raise FrameError("wrong token", f"{found.role} {found.name}")


def welcome(token: bytes, asked: Challenge, found: Claim) -> Welcome:
    """The server's proof, for this client alone."""
    return Welcome(_proof(token, "server", asked, found.role, found.name, found.nonce))


def check_welcome(token: bytes, asked: Challenge, mine: Claim, found: Welcome) -> None:
    """The client's check.

    Raises:
        FrameError: the server does not know the token.
    """
    if not hmac.compare_digest(welcome(token, asked, mine).proof, found.proof):
        raise FrameError("wrong token", "the server does not know the token of this job")


def key_of(token: bytes, asked: Challenge, found: Claim) -> bytes:
    """The key of this one connection."""
    return _proof(token, "key", asked, found.role, found.name, found.nonce)


def _proof(token: bytes, label: str, asked: Challenge, role: str, name: str, nonce: bytes) -> bytes:
    # MessagePack carries lengths: no two different lists give the same bytes.
    said = _pack([label, asked.version, asked.nonce, role, name, nonce])
    return hmac.digest(token, said, hashlib.sha256)


class Seal:
    """One direction of a connection: adds tags on one side, checks them on the other."""

    def __init__(self, key: bytes, *, to_server: bool) -> None:
        self._key = key
        self._direction = b"\x01" if to_server else b"\x02"
        self._number = 0

    def close(self, payload: bytes) -> bytes:
        """The next frame."""
        frame = self._tag(payload) + payload
        self._number += 1
        return frame

    def open(self, frame: bytes) -> bytes:
        """The payload of the next frame.

        Raises:
            FrameError: it is not the next frame of this connection.
        """
        tag, payload = frame[:TAG_BYTES], frame[TAG_BYTES:]
        if not hmac.compare_digest(self._tag(payload), tag):
            raise FrameError("bad tag", f"frame {self._number}, {len(frame)} bytes")
        self._number += 1
        return payload

    def _tag(self, payload: bytes) -> bytes:
        head = self._direction + struct.pack(">Q", self._number)
        return hmac.digest(self._key, head + payload, "sha256")[:TAG_BYTES]
