"""Whatever a stranger sends is either exactly a message, or one of two refusals; never a crash."""

from __future__ import annotations

from collections import Counter
from random import Random

import msgspec
import pytest
from control_samples import SAMPLES

from resihp_ext.control import messages as say
from resihp_ext.control.frames import Challenge, Claim, FrameError, Seal, Welcome, challenge, claim

pytestmark = pytest.mark.unit

KEY = b"k" * 32
TOKEN = b"t" * 32
RECORDS = (Challenge, Claim, Welcome)


def seeds() -> list[bytes]:
    asked = challenge()
    mine = claim(TOKEN, asked, "worker", "rank 0")
    records = (asked, mine, Welcome(mine.proof))
    return [say.encode(one) for one in SAMPLES] + [msgspec.msgpack.encode(one) for one in records]


def mutated(random: Random, raw: bytes) -> bytes:
    """A few changes: bits, insertions, cuts, repetitions, or something else altogether."""
    if random.random() < 0.1:
        return random.randbytes(random.randrange(64))
    changed = bytearray(raw)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at = random.randrange(len(changed) + 1)
        match random.randrange(5):
            case 0 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 1 if at < len(changed):
                changed[at] = random.choice((0x00, 0x7F, 0xC1, 0xDD, 0xDF, 0xFF))
            case 2:
                changed[at:at] = random.randbytes(random.choice((1, 4)))
            case 3:
                del changed[at:]
            case 4:
                changed[at:at] = changed[:at]
    return bytes(changed)


def refused(seal: Seal, frame: bytes) -> None:
    with pytest.raises(FrameError):
        seal.open(frame)


def attack(count: int, seed: int) -> Counter[str]:
    random, known, seen = Random(seed), seeds(), Counter[str]()
    seal = Seal(KEY, to_server=True)
    for _ in range(count):
        raw = mutated(random, random.choice(known))
        try:
            seal.open(raw)
        except FrameError:
            seen["bad tag"] += 1
        try:
            message = say.decode(raw)
        except msgspec.MsgspecError:
            seen["no message"] += 1
        else:
            # What is taken for a message is one: it says the same again.
            seen["message"] += 1
            assert repr(say.decode(say.encode(message))) == repr(message)
        try:
            msgspec.msgpack.decode(raw, type=random.choice(RECORDS))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            seen["no record"] += 1
    return seen


def check(count: int, seed: int) -> None:
    seen = attack(count, seed)
    assert seen["bad tag"] == count
    # The mutations are neither all nonsense nor all harmless.
    assert 0.01 * count < seen["message"] < 0.5 * count
    assert seen["message"] + seen["no message"] == count


def test_some_strange_inputs() -> None:
    check(3_000, seed=1)


def test_nested_and_huge_lengths_are_refused() -> None:
    """Lengths that promise gigabytes, and nesting without an end, cost nothing."""
    nested = b"\x82\xa1a" + b"\x91" * 1_000_000 + b"\xc0\xa4type\xa5ready"
    for raw in (nested, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff" + b"x" * 10):
        with pytest.raises(msgspec.MsgspecError):
            say.decode(raw)


def test_only_valid_frames_pass_among_strange_ones() -> None:
    random, mine, theirs = Random(2), Seal(KEY, to_server=True), Seal(KEY, to_server=True)
    for sample in SAMPLES:
        frame = mine.close(say.encode(sample))
        for _ in range(20):
            strange = mutated(random, frame)
            if strange != frame:
                refused(theirs, strange)
        assert say.decode(theirs.open(frame)) == sample


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_million_strange_inputs() -> None:
    check(1_000_000, seed=3)
