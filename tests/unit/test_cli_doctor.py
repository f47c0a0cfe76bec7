"""Every verdict of ``resihp doctor``, from injected facts; no torch, no machine needed."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.resilience.doctor import facts, report
from megatron.resilience.doctor.check_device import check_device
from megatron.resilience.doctor.check_extras import check_extras
from megatron.resilience.doctor.check_machine import GIB, check_machine
from megatron.resilience.doctor.check_nccl import check_nccl
from megatron.resilience.doctor.check_origin import check_origin
from megatron.resilience.doctor.check_patches import check_patches
from megatron.resilience.doctor.check_versions import check_package, check_python
from megatron.resilience.doctor.finding import Finding, Status, fail, info, ok, warn
from megatron.resilience.doctor.gather_machine import cgroup_cores, cgroup_memory_bytes

pytestmark = pytest.mark.unit

WHEEL = "/env/megatron/core"
HEALTHY_GPU = facts.DeviceFacts(
    gpu_names=("H100", "H100"), cuda_build="13.0", gloo=True, nccl=True, nccl_version=(2, 30, 7)
)
HEALTHY_CPU = facts.DeviceFacts(gloo=True, nccl=True, nccl_package="nvidia-nccl-cu13 2.30.7")
ROOMY = facts.MachineFacts(
    cores=8,
    memory_bytes=64 * GIB,
    shm_bytes=32 * GIB,
    open_files_soft=65536,
    open_files_hard=65536,
)
BARE = facts.ExtrasFacts(has_gpu=False)


def healthy() -> facts.Facts:
    return facts.Facts(
        python=(3, 12, 1),
        packages=(facts.PackageFacts(name="torch", installed="2.14.1", wanted="==2.14.1"),),
        origins=(facts.OriginFacts(module="megatron.core", found=WHEEL, expected=WHEEL),),
        device=HEALTHY_CPU,
        patches=(facts.PatchFacts(symbol="torch.x", status="applies", detail="why"),),
        extras=BARE,
        machine=ROOMY,
    )


def only(findings: list[Finding], check: str) -> Finding:
    (finding,) = [each for each in findings if each.check == check]
    return finding


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 12, 9), Status.OK), ((3, 11, 9), Status.FAIL), ((3, 13, 0), Status.FAIL)],
)
def test_python(version: tuple[int, int, int], status: Status) -> None:
    assert check_python(version).status is status


@pytest.mark.parametrize(
    ("installed", "wanted", "status"),
    [
        ("2.14.1", "==2.14.1", Status.OK),
        ("2.14.1+cpu", "==2.14.1", Status.OK),
        ("2.13.0", "==2.14.1", Status.FAIL),
        ("0.19.3", ">=0.19.2,<0.20", Status.OK),
        ("0.20.0", ">=0.19.2,<0.20", Status.FAIL),
        ("0.20.0rc1", ">=0.19.2,<0.20", Status.FAIL),
        (None, ">=2", Status.FAIL),
        ("2.0", None, Status.WARN),
    ],
)
def test_package(installed: str | None, wanted: str | None, status: Status) -> None:
    package = facts.PackageFacts(name="p", installed=installed, wanted=wanted)
    assert check_package(package).status is status


@pytest.mark.parametrize(
    ("found", "expected", "shadow", "status", "named"),
    [
        (WHEEL, WHEEL, None, Status.OK, WHEEL),
        ("/home/me/Megatron-LM/megatron/core", WHEEL, None, Status.FAIL, "/home/me/Megatron-LM"),
        (WHEEL, WHEEL, "/x/megatron/__init__.py", Status.FAIL, "delete /x/megatron/__init__.py"),
        (None, WHEEL, None, Status.FAIL, "cannot be imported"),
        (WHEEL, None, None, Status.WARN, "no installed megatron-core wheel"),
    ],
)
def test_origin(
    found: str | None, expected: str | None, shadow: str | None, status: Status, named: str
) -> None:
    finding = check_origin(
        facts.OriginFacts(module="megatron.core", found=found, expected=expected, shadow=shadow)
    )
    assert finding.status is status
    assert named in finding.summary + finding.remedy


def test_device_without_gpu_is_a_choice_not_a_fault() -> None:
    findings = check_device(HEALTHY_CPU)
    assert [each.status for each in findings] == [Status.OK] * 3
    assert only(findings, "device").summary.startswith("CPU")


def test_gpus_are_counted_by_name() -> None:
    assert only(check_device(HEALTHY_GPU), "device").summary == "2 x H100 (CUDA 13.0)"


@pytest.mark.parametrize(
    ("base", "change", "check", "status", "named"),
    [
        (
            HEALTHY_CPU,
            {"nvidia_device_files": ("/dev/nvidia0",)},
            "device",
            Status.WARN,
            "/dev/nvidia0 exists; torch is built for no CUDA at all",
        ),
        (HEALTHY_CPU, {"gloo": False}, "gloo", Status.FAIL, "without gloo"),
        (HEALTHY_CPU, {"nccl": False}, "nccl", Status.OK, "CPU job does not need it"),
        (HEALTHY_GPU, {"nccl": False}, "nccl", Status.FAIL, "without NCCL"),
        (HEALTHY_CPU, {"torch_error": "no libc"}, "device", Status.FAIL, "no libc"),
    ],
)
def test_device_faults(
    base: facts.DeviceFacts, change: dict[str, object], check: str, status: Status, named: str
) -> None:
    finding = only(check_device(dataclasses.replace(base, **change)), check)
    assert finding.status is status
    assert named in finding.summary


@pytest.mark.parametrize(
    ("version", "status", "named"),
    [
        ((2, 25, 0), Status.OK, "2.25.0"),
        ((2, 25, 1), Status.FAIL, "pytorch/pytorch#149153"),
        ((2, 25, 2), Status.OK, "2.25.2"),
        ((2, 28, 2), Status.OK, "2.28.2"),
        ((2, 28, 3), Status.FAIL, "nvidia-resiliency-ext"),
        ((2, 28, 8), Status.FAIL, "nvidia-resiliency-ext"),
        ((2, 28, 9), Status.OK, "2.28.9"),
        ((2, 30, 7), Status.OK, "2.30.7"),
        ((2, 31, 0), Status.WARN, "shrinking"),
        ((3, 0, 0), Status.WARN, "shrinking"),
        (None, Status.WARN, "does not tell"),
    ],
)
def test_nccl_version_with_gpu(version: tuple[int, ...] | None, status: Status, named: str) -> None:
    finding = check_nccl(dataclasses.replace(HEALTHY_GPU, nccl_version=version))
    assert finding.status is status
    assert named in finding.summary


@pytest.mark.parametrize("package", ["nvidia-nccl-cu13 2.28.5", None])
def test_nccl_version_without_gpu_is_information(package: str | None) -> None:
    finding = check_nccl(dataclasses.replace(HEALTHY_CPU, nccl_package=package))
    assert finding.status is Status.INFO
    assert (package or "no nvidia-nccl package") in finding.summary


def patch(status: str) -> facts.PatchFacts:
    return facts.PatchFacts(symbol=f"torch.{status}", status=status, detail="signature changed")


def test_patches_that_fit_share_one_line() -> None:
    (finding,) = check_patches([patch("applies"), patch("applies"), patch("not needed")])
    assert (finding.status, finding.summary[:20]) == (Status.OK, "2 apply, 1 not neede")


def test_drifted_patch_fails_by_symbol() -> None:
    (finding,) = check_patches([patch("applies"), patch("drifted")])
    assert finding.status is Status.FAIL
    assert (finding.check, finding.summary) == ("patch torch.drifted", "signature changed")


def test_unknown_patch_status_is_not_taken_for_good() -> None:
    (finding,) = check_patches([patch("melted")])
    assert finding.status is Status.WARN


def test_missing_registry_is_said() -> None:
    (finding,) = check_patches(None, "No module named 'x'")
    assert (finding.status, finding.summary) == (
        Status.INFO,
        "not available: No module named 'x'",
    )


@pytest.mark.parametrize(
    ("change", "check", "status", "named"),
    [
        ({}, "apex", Status.INFO, "absent"),
        ({"apex_folder": "/s/apex"}, "apex", Status.WARN, "unrelated package"),
        (
            {"apex_folder": "/s/apex", "apex_has_optimizers": True},
            "apex",
            Status.WARN,
            "amp_C",
        ),
        (
            {"apex_folder": "/s/apex", "apex_has_optimizers": True, "apex_has_kernels": True},
            "apex",
            Status.OK,
            "/s/apex",
        ),
        ({}, "transformer engine", Status.INFO, "local"),
        ({"has_gpu": True}, "transformer engine", Status.WARN, "local"),
        ({"transformer_engine": "2.9"}, "transformer engine", Status.WARN, "torch extension"),
        (
            {"transformer_engine": "2.9", "transformer_engine_has_torch": True},
            "transformer engine",
            Status.OK,
            "2.9",
        ),
        ({}, "nvidia-resiliency-ext", Status.INFO, "absent"),
        ({"resiliency_ext": "0.5"}, "nvidia-resiliency-ext", Status.OK, "0.5"),
    ],
)
def test_extras(change: dict[str, object], check: str, status: Status, named: str) -> None:
    finding = only(check_extras(dataclasses.replace(BARE, **change)), check)
    assert finding.status is status
    assert named in finding.summary


@pytest.mark.parametrize(
    ("change", "check", "status", "named"),
    [
        ({}, "cores", Status.OK, "8"),
        ({"cgroup_cores": 1.5}, "cores", Status.WARN, "1.5 (control group; the host has 8)"),
        ({"cgroup_cores": 16.0}, "cores", Status.OK, "8"),
        ({"cores": 1}, "cores", Status.WARN, "1"),
        ({}, "memory", Status.OK, "64.0 GiB (host)"),
        ({"cgroup_memory_bytes": 4 * GIB}, "memory", Status.WARN, "4.0 GiB (control group)"),
        ({"memory_bytes": None}, "memory", Status.INFO, "unknown"),
        ({"shm_bytes": 64 * 1024**2}, "shared memory", Status.WARN, "0.1 GiB"),
        ({"shm_bytes": None}, "shared memory", Status.INFO, "no /dev/shm"),
        ({"shm_bytes": GIB}, "shared memory", Status.OK, "1.0 GiB"),
        ({"open_files_soft": None}, "open files", Status.OK, "no limit"),
        ({"open_files_soft": 4096}, "open files", Status.OK, "4096"),
        ({"open_files_soft": 1024}, "open files", Status.WARN, "ulimit -n 4096"),
        (
            {"open_files_soft": 1024, "open_files_hard": 2048},
            "open files",
            Status.WARN,
            "limits.conf",
        ),
    ],
)
def test_machine(change: dict[str, object], check: str, status: Status, named: str) -> None:
    finding = only(check_machine(dataclasses.replace(ROOMY, **change)), check)
    assert finding.status is status
    assert named in f"{finding.summary} {finding.remedy}"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def test_control_group_v2_takes_the_least_limit_on_the_way_down(tmp_path: Path) -> None:
    write(tmp_path / "memory.max", "max")
    write(tmp_path / "slurm" / "memory.max", "2048")
    write(tmp_path / "slurm" / "job" / "memory.max", "4096")
    write(tmp_path / "slurm" / "cpu.max", "150000 100000")
    write(tmp_path / "slurm" / "job" / "cpu.max", "max 100000")
    assert cgroup_memory_bytes(tmp_path, "/slurm/job") == 2048
    assert cgroup_cores(tmp_path, "/slurm/job") == 1.5


def test_control_group_v1(tmp_path: Path) -> None:
    write(tmp_path / "memory" / "memory.limit_in_bytes", "4096")
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "50000")
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000")
    assert cgroup_memory_bytes(tmp_path, "/") == 4096
    assert cgroup_cores(tmp_path, "/") == 0.5


def test_control_group_without_limits(tmp_path: Path) -> None:
    write(tmp_path / "memory" / "memory.limit_in_bytes", str(2**63 - 4096))
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", "-1")
    write(tmp_path / "cpu" / "cpu.cfs_period_us", "100000")
    assert cgroup_memory_bytes(tmp_path, "/not/visible") is None
    assert cgroup_cores(tmp_path, "/not/visible") is None


def test_healthy_machine_passes() -> None:
    findings = report.examine(healthy())
    assert report.exit_code(findings) == 0
    assert {each.status for each in findings} == {Status.OK, Status.INFO}
    assert json.loads(report.as_json(findings))["ok"] is True


def test_one_failure_decides_the_exit_code_and_warnings_do_not() -> None:
    warned = [ok("a", "x"), warn("b", "y", "do"), info("c", "z")]
    assert report.exit_code(warned) == 0
    assert report.exit_code([*warned, fail("d", "w", "do")]) == 1


def test_report_is_one_line_a_finding() -> None:
    findings = [ok("short", "fine"), fail("longer name", "broken", "mend it")]
    assert report.as_text(findings).splitlines() == [
        "ok    short        fine",
        "fail  longer name  broken -> mend it",
        "doctor: 1 ok, 1 fail",
    ]


def test_json_report_has_the_documented_keys() -> None:
    (finding,) = json.loads(report.as_json([warn("a", "b", "c")]))["findings"]
    assert finding == {"check": "a", "status": "warn", "summary": "b", "remedy": "c"}


@pytest.mark.parametrize(
    ("layout", "field", "ending"),
    [
        ("megatron/core/__init__.py", "found", "megatron/core"),
        ("megatron/__init__.py", "shadow", "megatron/__init__.py"),
    ],
)
def test_real_lookup_sees_a_checkout_on_the_path(
    tmp_path: Path, layout: str, field: str, ending: str
) -> None:
    write(tmp_path / layout, "")
    code = (
        "import sys; from megatron.resilience.doctor.gather import gather_origin\n"
        "sys.path.insert(0, sys.argv[1]); import megatron\n"
        f"print(gather_origin('megatron.core').{field})"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert ended.stdout.strip() == str(tmp_path / ending)
