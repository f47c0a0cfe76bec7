"""What all tests share: golden files and the switch that rewrites them."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden",
        action="store_true",
        help="rewrite the files below tests/golden with what the tests find; then read the diff",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with ``tests/golden/NAME``, or rewrites that file."""

    def compare(name: str, found: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--rewrite-golden"):
            path.write_text(found, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else ""
        changes = difflib.unified_diff(
            expected.splitlines(), found.splitlines(), f"golden/{name}", "found", n=0, lineterm=""
        )
        listed = "\n".join(changes)
        assert not listed, f"{listed}\nif that is intended: pytest --rewrite-golden, then commit"

    return compare
