"""Reading the place of a process from the environment: defaults, values, every refusal."""

import pytest

from resihp_ext.environment import RankEnvironment
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}


def test_everything_a_launcher_sets_is_read() -> None:
    assert RankEnvironment.from_environ(TORCHRUN) == RankEnvironment(
        rank=5,
        local_rank=1,
        world_size=8,
        local_world_size=4,
        group_rank=1,
        master_addr="node0",
        master_port=29500,
    )


def test_empty_environment_is_a_job_of_one() -> None:
    assert RankEnvironment.from_environ({}) == RankEnvironment()


def test_empty_value_counts_as_unset() -> None:
    assert RankEnvironment.from_environ({"RANK": "", "MASTER_PORT": " "}) == RankEnvironment()


def test_without_local_variables_the_job_runs_on_one_node() -> None:
    place = RankEnvironment.from_environ({"RANK": "3", "WORLD_SIZE": "4"})
    assert (place.local_rank, place.local_world_size) == (3, 4)


def test_local_rank_follows_from_the_local_world_size() -> None:
    place = RankEnvironment.from_environ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"})
    assert place.local_rank == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RANK": "five"}, "RANK='five'"),
        ({"RANK": "8"}, "RANK=8 is outside 0..7"),
        ({"RANK": "-1"}, "RANK=-1"),
        ({"RANK": ""}, "WORLD_SIZE is set but RANK is not"),
        ({"WORLD_SIZE": ""}, "RANK is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK=4 is outside 0..3"),
        ({"LOCAL_RANK": "1.0"}, "LOCAL_RANK='1.0'"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 is larger than WORLD_SIZE=8"),
        ({"LOCAL_WORLD_SIZE": "0", "LOCAL_RANK": ""}, "LOCAL_WORLD_SIZE=0"),
        ({"GROUP_RANK": "-2"}, "GROUP_RANK=-2"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    ],
)
def test_malformed_value_is_refused_by_name(change: dict[str, str], named: str) -> None:
    with pytest.raises(UserError) as refusal:
        RankEnvironment.from_environ(TORCHRUN | change)
    assert named in str(refusal.value)
    assert "\n" not in str(refusal.value)
