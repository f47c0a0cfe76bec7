"""Fixtures of the tests with real processes."""

import pytest


@pytest.fixture
def out(tmp_path):
    directory = tmp_path / "out"
    directory.mkdir()
    return directory
