"""Faults from files: what they become, and the line that is wrong is named."""

from pathlib import Path

import pytest

from resihp_ext.cost.cluster import uniform_cluster
from resihp_ext.errors import UserError
from resihp_ext.simulator.traces import read_fault_file, read_greyhound

pytestmark = pytest.mark.unit

CLUSTER = uniform_cluster(nodes=2, devices_per_node=2, memory_bytes=2**30)


def written(folder: Path, text: str) -> Path:
    path = folder / "faults"
    path.write_text(text)
    return path


def test_the_projects_language_counts_steps(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "- {at_step: 5, rank: 0, kind: slow, factor: 0.5}\n"
        "- {at_step: 7, node: n0, kind: slow, factor: 0.8, until_step: 11}\n"
        "- {at_step: 9, rank: 0, kind: slow, factor: 1}\n"
        "- {at_step: 9, rank: 3, kind: kill, delay_s: 0.25}\n"
        "- {at_step: 3, link: [n1, n0], kind: slow_link, factor: 0.25, until_step: 4}\n",
    )
    found = read_fault_file(path, CLUSTER, iteration_s=10.0)
    assert [(one.at_s, one.p, one.links) for one in found] == [
        (20.0, (), (((0, 1), 0.25),)),
        (30.0, (), (((0, 1), 1.0),)),
        (40.0, ((0, 0.5),), ()),
        (60.0, ((0, 0.4), (1, 0.8)), ()),
        # Factor 1 ends what came before it in the list, both faults, for rank 0 alone.
        (80.0, ((0, 1.0),), ()),
        (85.25, ((3, 0.0),), ()),
        (100.0, ((1, 1.0),), ()),
    ]


def test_a_node_dies_with_all_its_devices(tmp_path: Path) -> None:
    path = written(tmp_path, "- {at_step: 1, node: b, kind: node}\n")
    found = read_fault_file(path, CLUSTER, iteration_s=2.0, names=("a", "b"))
    assert [(one.at_s, one.p) for one in found] == [(1.0, ((2, 0.0), (3, 0.0)))]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{at_step: 1, rank: 4, kind: kill}", "rank 4 is not one of 4"),
        ("{at_step: 1, node: x, kind: node}", "node 'x' is not in the cluster: n0, n1"),
        ("{at_step: 1, link: [n0, n1], kind: cut}", "not simulated"),
        ("{at_step: 1, link: [n0, n1], kind: slow_link, delay_ms: 5}", "delay_ms"),
    ],
)
def test_what_the_simulator_cannot_do_is_refused(tmp_path: Path, line: str, why: str) -> None:
    path = written(tmp_path, f"- {{at_step: 1, rank: 0, kind: kill}}\n- {line}\n")
    with pytest.raises(UserError, match="entry 1: .*" + why) as caught:
        read_fault_file(path, CLUSTER, iteration_s=1.0)
    assert "\n" not in str(caught.value)


def test_greyhounds_trace(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "# seconds\n\n10;70;[0, 1];2.5\n20;30;[1];10\ncomm;40;100;[1,0]\n",
    )
    found = read_greyhound(path, CLUSTER, iteration_s=10.0)
    assert [(one.at_s, one.p, one.links) for one in found] == [
        (10.0, ((0, 0.8), (1, 0.8)), ()),
        (20.0, ((1, 0.4),), ()),
        (30.0, ((1, 0.8),), ()),
        (40.0, (), (((0, 1), 0.5),)),
        (70.0, ((0, 1.0), (1, 1.0)), ()),
        (140.0, (), (((0, 1), 1.0),)),
    ]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("10;20;[0]", "expected start;end"),
        ("ten;20;[0];1", "start: expected seconds, got 'ten'"),
        ("30;20;[0];1", "end 20 is not after start 30"),
        ("10;20;0;1", r"ranks: expected whole numbers such as \[0, 1\], got '0'"),
        ("10;20;[9];1", r"ranks \[9\]: expected some of 4 ranks"),
        ("10;20;[];1", r"ranks \[\]: expected some"),
        ("10;20;[0];0", "delay: expected a positive time"),
        ("10;nan;[0];1", "end: expected a positive time"),
        ("comm;1;2;[0,0]", "two different"),
        ("comm;1;2;[0,2]", "two different"),
        ("comm;-1;2;[0,1]", "start"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = written(tmp_path, f"10;20;[0];1\n{line}\n")
    with pytest.raises(UserError, match=f"faults, line 2: .*{why}") as caught:
        read_greyhound(path, CLUSTER, iteration_s=10.0)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_greyhound(tmp_path / "none", CLUSTER, iteration_s=1.0)
