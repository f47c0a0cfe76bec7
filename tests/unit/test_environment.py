"""The place of a process beyond what launchers set: missing, garbled and contradicting variables.

What torchrun itself sets, and each single malformed value, is in ``test_launcher_environment.py``.
"""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

import pytest

from megatron.resilience.start import run_to_exit_code
from resihp_ext import environment
from resihp_ext.environment import RankEnvironment
from resihp_ext.errors import EXIT_USAGE, UserError
from resihp_ext.flags import field_docs

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "world_size": "WORLD_SIZE",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "group_rank": "GROUP_RANK",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}
NUMBERS = tuple(name for name in NAMES.values() if name != "MASTER_ADDR")
SOUND = {"RANK": "1", "WORLD_SIZE": "4"}


class Recording(Mapping[str, str]):
    """An environment that remembers what was asked for."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self.values_, self.asked = values, set[str]()

    def __getitem__(self, name: str) -> str:
        self.asked.add(name)
        return self.values_[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_)

    def __len__(self) -> int:
        return len(self.values_)


def refusal(environ: Mapping[str, str]) -> str:
    with pytest.raises(UserError) as raised:
        RankEnvironment.from_environ(environ)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("environment: ")
    return str(raised.value)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", ["x", "1.5", "0x1", "1e3", "1 2", "None", "-", "1\n2", "½"])
def test_garbled_number_is_one_line_that_names_it(name: str, value: str) -> None:
    line = refusal(SOUND | {name: value})
    assert f"{name}={value!r} is not a whole number" in line
    assert "resihp-run" in line


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_below_its_range_is_one_line_that_names_it(name: str) -> None:
    assert f"{name}=-1 " in refusal(SOUND | {name: "-1"})


@pytest.mark.parametrize("name", list(NAMES.values()))
@pytest.mark.parametrize("blank", ["", " ", "\t\n"])
def test_blank_is_unset(name: str, blank: str) -> None:
    others = {each: SOUND[each] for each in SOUND if each != name}
    if name in SOUND:
        (present,) = others
        assert f"{present} is set but {name} is not" in refusal(SOUND | {name: blank})
    else:
        assert RankEnvironment.from_environ(SOUND | {name: blank}) == (
            RankEnvironment.from_environ(SOUND)
        )


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1 is outside 0..0 (LOCAL_WORLD_SIZE=1)"),
        ({"LOCAL_WORLD_SIZE": "2"}, "LOCAL_WORLD_SIZE=2 is larger than WORLD_SIZE=1"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is outside 0..3 (WORLD_SIZE=4)"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a TCP port; use 1 to 65535"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a TCP port"),
    ],
)
def test_values_that_contradict_each_other(environ: dict[str, str], named: str) -> None:
    assert named in refusal(environ)


@pytest.mark.parametrize("port", ["1", "65535"])
def test_every_port_is_allowed(port: str) -> None:
    assert RankEnvironment.from_environ({"MASTER_PORT": port}).master_port == int(port)


def test_spaces_around_values_do_not_count() -> None:
    place = RankEnvironment.from_environ(
        {"RANK": " 1", "WORLD_SIZE": "4\n", "MASTER_ADDR": " node0 ", "MASTER_PORT": "\t1234 "}
    )
    assert (place.rank, place.world_size) == (1, 4)
    assert (place.master_addr, place.master_port) == ("node0", 1234)


def test_every_rank_of_every_size_has_a_place() -> None:
    for world_size, local_world_size in product((1, 2, 3, 6, 8), repeat=2):
        for rank in range(world_size):
            environ = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "LOCAL_WORLD_SIZE": str(local_world_size),
            }
            if local_world_size > world_size:
                refusal(environ)
                continue
            place = RankEnvironment.from_environ(environ)
            assert place.rank == rank
            assert place.local_rank == rank % local_world_size


def test_only_the_documented_variables_are_read() -> None:
    recording = Recording({})
    RankEnvironment.from_environ(recording)
    assert recording.asked == set(NAMES.values())
    docs = field_docs(RankEnvironment)
    assert docs.keys() == NAMES.keys()
    for field, name in NAMES.items():
        assert docs[field].startswith(f"``{name}``")


def test_rank_and_rendezvous_are_read_nowhere_else() -> None:
    own = Path(environment.__file__)
    readers = []
    for folder in ("resihp_ext", "megatron"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Subscript | ast.Call) and path != own:
                    words = ast.unparse(node)
                    reads = words.startswith(("os.environ[", "os.environ.get(", "os.getenv("))
                    if reads and any(f"'{name}'" in words for name in NAMES.values()):
                        readers.append(f"{path}: {words}")
    assert not readers


def test_the_place_of_a_process_does_not_change() -> None:
    place = RankEnvironment.from_environ(SOUND)
    with pytest.raises(dataclasses.FrozenInstanceError):
        place.rank = 2  # type: ignore[misc]
    assert hash(place) == hash(RankEnvironment.from_environ(dict(SOUND)))


@pytest.mark.parametrize("bad", [{"RANK": "x"}, {"WORLD_SIZE": "2"}, {"LOCAL_RANK": "y"}])
def test_a_process_that_does_not_know_its_place_still_says_so(
    bad: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who speaks for a node depends on the environment, which is what is wrong here."""
    for name in NAMES.values():
        monkeypatch.delenv(name, raising=False)
    for name, value in bad.items():
        monkeypatch.setenv(name, value)

    def job(_argv: object) -> None:
        RankEnvironment.from_environ(os.environ)

    assert run_to_exit_code(job, []) == EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: environment: ")


@pytest.mark.parametrize(
    ("local_rank", "joins", "speaks"), [("0", "", True), ("1", "", False), ("1", "1", True)]
)
def test_whoever_joins_a_running_job_says_its_own_error(
    local_rank: str,
    joins: str,
    speaks: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks that begin together fail alike, and one of them is enough."""
    told = {"RANK": local_rank, "WORLD_SIZE": "2", "LOCAL_RANK": local_rank}
    told |= {"RESIHP_AGENT": "/run/agent", "RESIHP_JOINS": joins}
    for name in NAMES.values():
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)

    def job(_argv: object) -> None:
        raise UserError("faults.yaml: no such rank")

    assert run_to_exit_code(job, []) == EXIT_USAGE
    assert capsys.readouterr().err == ("error: faults.yaml: no such rank\n" if speaks else "")
