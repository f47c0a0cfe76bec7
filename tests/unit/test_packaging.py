"""The wheel that users install: our two packages, their data, and nothing of Megatron's."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "megatron", "resihp_ext")


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Build in a copy: setuptools leaves build/ and egg-info beside the sources."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        source = ROOT / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, tree / name)
    # A byte-code folder in the sources must not become a package.
    (tree / "resihp_ext" / "__pycache__").mkdir(exist_ok=True)
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "out", "."],
        cwd=tree,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = (tree / "out").glob("resihp-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_wheel_claims_nothing_of_megatron(wheel_names: list[str]) -> None:
    assert "megatron/__init__.py" not in wheel_names
    claimed = [name for name in wheel_names if name.startswith("megatron/")]
    assert claimed
    assert all(name.startswith("megatron/resilience/") for name in claimed)


def test_wheel_holds_only_our_packages(wheel_names: list[str]) -> None:
    tops = {name.partition("/")[0].partition("-")[0] for name in wheel_names}
    assert tops == {"megatron", "resihp_ext", "resihp"}  # the last is the metadata
    assert not [name for name in wheel_names if "__pycache__" in name or name.endswith(".pyc")]


def test_wheel_holds_every_source_and_all_data(wheel_names: list[str]) -> None:
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in ("resihp_ext", "megatron/resilience")
        for pattern in ("*.py", "*.args", "py.typed")
        for path in (ROOT / package).rglob(pattern)
    }
    assert wanted <= set(wheel_names), sorted(wanted - set(wheel_names))
    assert {"resihp_ext/py.typed", "megatron/resilience/py.typed"} <= wanted
    assert any(name.endswith(".args") for name in wanted)


def test_console_scripts_exist() -> None:
    scripts = importlib.metadata.distribution("resihp").entry_points.select(group="console_scripts")
    for script in scripts:
        assert callable(script.load())
    assert {script.name for script in scripts} == {"resihp", "resihp-run"}
