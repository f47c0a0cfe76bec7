"""Change points of one series."""

import numpy as np
import pytest

from resihp_ext.detector.bocd import Bocd, BocdConfig
from resihp_ext.detector.verify import Changes, differ

pytestmark = pytest.mark.unit


def series(*levels: float, length: int = 60, noise: float = 0.02) -> np.ndarray:
    numbers = np.random.default_rng(1)
    return np.concatenate([x * (1 + numbers.normal(0, noise, length)) for x in levels])


def test_step_is_found_soon_and_once() -> None:
    bocd = Bocd()
    found = [i for i, value in enumerate(series(1.0, 1.3)) if bocd.observe(value) is not None]
    assert len(found) == 1
    assert 60 <= found[0] <= 63


def test_quiet_series_has_no_changes() -> None:
    changes = Changes(BocdConfig(), ratio=0.1, distance=10)
    assert not [v for v in series(1.0, length=2000) if changes.observe(v)]


def test_truncation_keeps_the_posterior_whole() -> None:
    bocd = Bocd(BocdConfig(longest_run_steps=40))
    for value in series(1.0, length=300):
        bocd.observe(value)
    assert bocd.run_lengths().shape == (40,)
    assert bocd.run_lengths().sum() == pytest.approx(1.0)


def test_verification_gives_both_means() -> None:
    changes = Changes(BocdConfig(), ratio=0.1, distance=10)
    found = [c for v in series(1.0, 1.5) if (c := changes.observe(v))]
    assert len(found) == 1
    assert found[0].before == pytest.approx(1.0, rel=0.02)
    assert found[0].after == pytest.approx(1.5, rel=0.05)


def test_small_changes_are_dropped() -> None:
    changes = Changes(BocdConfig(), ratio=0.1, distance=10)
    assert not [v for v in series(1.0, 1.08, noise=0.002) if changes.observe(v)]
    assert differ([1.0], [1.2], 0.1)
    assert not differ([1.0], [1.1], 0.1)
    assert not differ([], [1.1], 0.1)
