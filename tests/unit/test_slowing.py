"""Which brakes a rank gets from lasting faults, and when; no process is made slow here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron.resilience.faults.config import JobFaults
from megatron.resilience.faults.register import register
from megatron.resilience.faults.slowing import Brakes, Slowing
from resihp_ext.brake.cpu_group import BrakeError, CpuGroup, why_not
from resihp_ext.brake.cpu_load import burners
from resihp_ext.brake.cpu_tree import CpuTree, find_cpu_tree
from resihp_ext.errors import UserError
from resihp_ext.faults.fault import By, Fault, Kind
from resihp_ext.faults.lasting import MIB, Hold, device_left, link_hold, link_left

pytestmark = pytest.mark.unit


class Recorded(Brakes):
    """Says what would be done."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__(launcher_pid=os.getpid(), rank=2, kernel=None)
        self.done: list[dict[By, float]] = []
        self._fails = fails

    def choose(self, by: By | None) -> tuple[By, str | None]:
        return (by or By.LOAD), ("not here" if by is By.QUOTA else None)

    def keep(self, left: Mapping[By, float]) -> None:
        if self._fails:
            raise BrakeError("no such group")
        self.done.append(dict(left))


def slow(factor: float = 0.5, **fields: object) -> Fault:
    told = {"at_step": 1, "rank": 2, "kind": Kind.SLOW, "factor": factor} | fields
    return Fault(**told)  # type: ignore[arg-type]


def slowing(folder: Path, *faults: Fault, **more: object) -> tuple[Slowing, Recorded]:
    brakes = Recorded()
    (folder / "faults").mkdir(exist_ok=True)
    told = JobFaults(**more)  # type: ignore[arg-type]
    found = Slowing(rank=2, node="b", folder=folder, brakes=brakes, faults=told)
    for number, fault in enumerate(faults):
        assert found.add(f"{number:03d}", fault) is None
    return found, brakes


def test_brakes_follow_the_steps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    faults = [
        slow(at_step=3, until_step=6),
        slow(0.5, at_step=4, rank=None, node="b", until_step=7),
        slow(0.25, at_step=5, by=By.KERNEL, until_step=6),
    ]
    found, brakes = slowing(tmp_path, *faults)
    for step in range(1, 9):
        for _ in range(2):  # a repeated step changes nothing
            found.at(step)
    assert brakes.done == [
        {By.LOAD: 0.5},
        {By.LOAD: 0.25},
        {By.LOAD: 0.25, By.KERNEL: 0.25},
        {By.LOAD: 0.5},
        {},
    ]
    said = capfd.readouterr().err.splitlines()
    assert said[0] == "resihp: fault: rank 2 keeps 0.5 of its speed by load from step 3 on"
    assert said[-1] == "resihp: fault: rank 2 keeps all of its speed from step 7 on"
    assert len(list((tmp_path / "faults").glob("*.done"))) == 3


def test_a_factor_of_1_ends_what_came_before_it(tmp_path: Path) -> None:
    found, brakes = slowing(tmp_path, slow(at_step=2), slow(0.5, rank=None, node="b"))
    found.at(2)
    found.add("d0", slow(1))
    found.at(3)
    found.add("d1", slow(0.8))
    found.at(4)
    assert brakes.done == [{By.LOAD: 0.25}, {}, {By.LOAD: 0.8}]
    healthy = [slow(at_step=2), slow(1, at_step=5)]
    assert [device_left(healthy, 2, "b", step) for step in (1, 2, 4, 5)] == [1.0, 0.5, 0.5, 1.0]


def test_leaving_lets_go(tmp_path: Path) -> None:
    found, brakes = slowing(tmp_path, slow())
    found.at(1)
    found.close()
    assert brakes.done == [{By.LOAD: 0.5}, {}]


def test_emulated_devices_take_what_is_theirs(tmp_path: Path) -> None:
    emulated: list[Fault] = []
    link = Fault(at_step=1, link=("a", "b"), kind=Kind.SLOW_LINK, factor=0.5)
    found, brakes = slowing(
        tmp_path, slow(), slow(by=By.EMULATED), link, slow(by=By.LOAD), emulated=emulated
    )
    found.at(1)
    assert emulated == [slow(), slow(by=By.EMULATED), link]
    assert brakes.done == [{By.LOAD: 0.5}]


def test_what_cannot_be_done_is_said(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found, _ = slowing(tmp_path)
    assert found.add("000", slow(by=By.QUOTA)) == "slow by quota: not here"
    assert "emulated devices" in str(found.add("000", slow(by=By.EMULATED)))
    failing = Slowing(
        rank=2, node="b", folder=tmp_path, brakes=Recorded(fails=True), faults=JobFaults()
    )
    failing.add("000", slow())
    failing.at(1)
    failing.at(2)
    said = capfd.readouterr().err
    assert said == "resihp: fault: rank 2 cannot be made slow: no such group from step 1 on\n"


def test_a_cpu_has_no_kernels() -> None:
    brakes = Brakes(launcher_pid=os.getpid(), rank=0)
    assert brakes.choose(By.KERNEL) == (By.KERNEL, "this process computes on the CPU")
    assert Brakes(launcher_pid=1, rank=0, kernel=Recorded).choose(None) == (By.KERNEL, None)  # type: ignore[arg-type]


def test_links_hold_back_what_crosses_them(tmp_path: Path) -> None:
    register(tmp_path, rank=0, node="a")
    register(tmp_path, rank=3, node="b")
    faults = [
        Fault(at_step=2, link=("a", "b"), kind=Kind.SLOW_LINK, delay_ms=20),
        Fault(at_step=3, link=("b", "a"), kind=Kind.SLOW_LINK, factor=0.5, bandwidth_mib_s=4),
    ]
    found, _ = slowing(tmp_path, *faults)
    seen = []
    for step in (1, 2, 3):
        found.at(step)
        seen.append(found.link_hold(0))
        assert found.link_hold(3) is None
    extra_s = 1 / (4 * MIB)
    assert seen == [None, Hold(0.02), Hold(0.02, extra_s, 2 * extra_s)]
    with pytest.raises(UserError, match=r"7\.json"):
        found.link_hold(7)
    ended = [*faults, Fault(at_step=4, link=("a", "b"), kind=Kind.SLOW_LINK, factor=1)]
    assert link_hold(ended, "a", "b", 4) is None
    assert link_left(ended, "a", "b", 3) == 0.5


@pytest.mark.parametrize("left", [0.95, 0.8, 0.5, 0.4, 1 / 3, 0.25, 0.1, 0.03])
def test_burners_leave_about_what_they_should(left: float) -> None:
    weights = [1.25**-niceness for niceness in burners(left)]
    assert 1 / (1 + sum(weights)) == pytest.approx(left, rel=0.06)


V1 = "30 25 0:26 {root} {top} rw,relatime - cgroup cgroup rw,{controllers}\n"
V2 = "31 25 0:27 / {top} rw - cgroup2 cgroup2 rw,nsdelegate\n"


def test_version_1_is_found(tmp_path: Path) -> None:
    (tmp_path / "cpu" / "job" / "a").mkdir(parents=True)
    mounts, groups = tmp_path / "mountinfo", tmp_path / "cgroup"
    other = V1.format(root="/", top=tmp_path, controllers="cpuset")
    mounts.write_text(other + V1.format(root="/", top=tmp_path / "cpu", controllers="cpu,cpuacct"))
    for path, own in (("/job/a", "job/a"), ("/", ""), ("/elsewhere", ""), ("/../job", "")):
        groups.write_text(f"4:cpuset:/other\n3:cpu,cpuacct:{path}\n0::/\n")
        tree = find_cpu_tree(mounts, groups)
        assert tree is not None
        assert (tree.version, tree.own) == (1, tmp_path / "cpu" / own)
    mounts.write_text(V1.format(root="/job", top=tmp_path / "cpu" / "job", controllers="cpu"))
    groups.write_text("3:cpu:/job/a\n")
    tree = find_cpu_tree(mounts, groups)
    assert tree is not None
    assert tree.own == tmp_path / "cpu" / "job" / "a"


def test_version_2_is_found_where_it_has_the_controller(tmp_path: Path) -> None:
    own = tmp_path / "two" / "job"
    own.mkdir(parents=True)
    mounts, groups = tmp_path / "mountinfo", tmp_path / "cgroup"
    mounts.write_text(V2.format(top=tmp_path / "two"))
    groups.write_text("0::/job\n")
    assert find_cpu_tree(mounts, groups) is None
    (own / "cgroup.controllers").write_text("cpuset cpu io\n")
    tree = find_cpu_tree(mounts, groups)
    assert tree is not None
    assert (tree.version, tree.own) == (2, own)


def test_a_group_of_version_2_is_threaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as files show it: the real thing needs a machine with version 2."""
    monkeypatch.setattr("resihp_ext.brake.cpu_group._EMPTY_S", 0.0)
    group = CpuGroup(CpuTree(version=2, top=tmp_path, own=tmp_path), 7, "3.9")
    group.limit(0.5)
    group.enter(9)
    group.close()
    job = tmp_path / "resihp-7"
    told = {
        str(path.relative_to(tmp_path)): path.read_text()
        for path in tmp_path.rglob("*")
        if path.is_file()
    }
    assert told == {
        "cgroup.subtree_control": "+cpu",
        "resihp-7/cgroup.type": "threaded",
        "resihp-7/cgroup.subtree_control": "+cpu",
        "resihp-7/cpu.weight": "100",
        "resihp-7/3.9/cgroup.type": "threaded",
        "resihp-7/3.9/cpu.max": "2500 5000",
        "resihp-7/3.9/cgroup.procs": "9",
    }
    assert group.folder.parent == job


def test_without_control_groups_there_is_a_reason(tmp_path: Path) -> None:
    assert find_cpu_tree(tmp_path / "none", tmp_path / "none") is None
    assert why_not(None, os.getpid()) == "no control group with the CPU controller is mounted here"
    mounts, groups = tmp_path / "mountinfo", tmp_path / "cgroup"
    mounts.write_text(V1.format(root="/", top=tmp_path, controllers="cpu"))
    groups.write_text("3:cpu:/\n")
    (tmp_path / f"resihp-{os.getpid()}").touch()
    said = why_not(find_cpu_tree(mounts, groups), os.getpid())
    assert said is not None
    assert said.endswith("File exists")
