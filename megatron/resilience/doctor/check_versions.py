"""Python and the pinned packages: a version outside the tested range is a failure."""

from packaging.specifiers import SpecifierSet

from megatron.resilience.doctor.facts import PackageFacts
from megatron.resilience.doctor.finding import Finding, fail, ok, warn

WANTED_PYTHON = (3, 12)


def check_python(version: tuple[int, int, int]) -> Finding:
    """Only one minor version is tested, because upstream's wheel and torch's move together."""
    text = ".".join(str(part) for part in version)
    if version[:2] == WANTED_PYTHON:
        return ok("python", text)
    wanted = ".".join(str(part) for part in WANTED_PYTHON)
    return fail("python", f"{text}, wanted {wanted}", f"install Python {wanted}, then: make .venv")


def check_package(package: PackageFacts) -> Finding:
    """Compare one installed distribution with its pinned range."""
    if package.installed is None:
        return fail(package.name, "not installed", "make .venv")
    if package.wanted is None:
        return warn(
            package.name,
            f"{package.installed}; the tested range is unknown because resihp is not installed",
            "pip install --no-deps -e .",
        )
    if SpecifierSet(package.wanted).contains(package.installed, prereleases=True):
        return ok(package.name, f"{package.installed} ({package.wanted})")
    return fail(
        package.name,
        f"{package.installed} is outside {package.wanted}",
        f'pip install "{package.name}{package.wanted}"',
    )
