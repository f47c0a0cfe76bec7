"""Names, addresses and the secret of a node; a restart that a node hears of late."""

from pathlib import Path

import pytest

from resihp_ext.control import messages as say
from resihp_ext.control.actions import ToNode
from resihp_ext.control.ask import read_address
from resihp_ext.control.membership import Membership
from resihp_ext.errors import UserError
from resihp_ext.launcher.hosting import (
    AddressFile,
    NodeName,
    given_token,
    own_address,
    resilience_dir,
)

pytestmark = pytest.mark.unit


def hello(node: str, *ranks: int, attempt: int) -> say.NodeHello:
    return say.NodeHello(
        node=node, address="10.0.0.1", ranks=ranks, slots=2, world_size=4, attempt=attempt
    )


def test_a_node_that_joins_after_a_restart_is_restarted_too() -> None:
    job = Membership()
    assert job.node_joined(hello("a", 0, 1, attempt=1)) == []
    died = say.Exited(rank=0, incarnation=0, cause="exited with code 7", exit_code=7)
    told = job.handle(died, "a", 1.0)
    assert [type(one.message) for one in told if isinstance(one, ToNode)] == [say.Restart]
    (late,) = job.node_joined(hello("b", 2, 3, attempt=1))
    assert isinstance(late, ToNode)
    assert (late.node, type(late.message)) == ("b", say.Restart)
    assert job.node_joined(hello("b", 2, 3, attempt=2)) == []
    assert job.node_joined(hello("a", 0, 1, attempt=2)) == []
    for rank, node in enumerate("aabb"):
        job.handle(say.Armed(rank=rank), node, 2.0)
    assert job.status()["phase"] == "running"


def test_agents_of_one_job_on_one_host_have_names_of_their_own() -> None:
    first, second, other = NodeName("job"), NodeName("job"), NodeName("another job")
    assert second.text == f"{first.text}.1"
    assert other.text == first.text
    first.close()
    again = NodeName("job")
    assert again.text == first.text
    for name in (second, other, again):
        name.close()


def test_the_operators_token_is_read_or_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("ab" * 32 + "\n")
    assert given_token(str(file), {}) == bytes.fromhex("ab" * 32)
    assert given_token(None, {"RESIHP_TOKEN": "cd" * 32}) == bytes.fromhex("cd" * 32)
    assert given_token(None, {}) is None
    file.write_text("ab" * 31)
    with pytest.raises(UserError, match="needs 64 hexadecimal digits"):
        given_token(str(file), {})
    with pytest.raises(UserError, match="No such file"):
        given_token(str(tmp_path / "none"), {})


def test_the_address_for_others_is_one_interface() -> None:
    assert own_address("localhost", None) == "127.0.0.1"
    assert own_address("127.0.0.1", None).startswith("127.")
    assert own_address("localhost", "127.0.0.3") == "127.0.0.3"


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        (["--resilience-dir", "a", "--save", "b/c"], "a"),
        (["--resilience-dir=a", "--resilience-dir=d"], "d"),
        (["--save", "b/c"], "b/resilience"),
        (["--resilience"], "resilience"),
        (["--lr", "1"], None),
    ],
)
def test_the_jobs_directory_is_found_on_the_command_line(
    words: list[str], folder: str | None
) -> None:
    assert resilience_dir(words) == (None if folder is None else Path(folder))


def test_the_coordinators_address_is_for_its_owner_only(tmp_path: Path) -> None:
    file = AddressFile(tmp_path / "resilience")
    file.write(("127.0.0.1", 4711), b"\x01" * 32)
    found = read_address(tmp_path / "resilience")
    assert (found.address, found.port) == ("127.0.0.1", 4711)
    assert Path(found.token_file).read_text().strip() == "01" * 32
    left = sorted((tmp_path / "resilience").iterdir())
    assert [path.stat().st_mode & 0o777 for path in left] == [0o600, 0o600]
    file.remove()
    assert not list((tmp_path / "resilience").iterdir())
