"""Limits of the control plane from the command line: defaults, values, every refusal."""

import pytest

from resihp_ext.control.hang import HangRules
from resihp_ext.errors import UserError
from resihp_ext.launcher.limits import Limits

pytestmark = pytest.mark.unit


def test_nothing_said_leaves_the_defaults() -> None:
    limits = Limits.read(None, restarts=3)
    assert limits == Limits()
    assert limits.node.hang == HangRules()


def test_each_key_reaches_its_part() -> None:
    text = "silence_s=3, patient_silence_s=8,lease_s=4,node_silence_s=6.5,deaths=7,arrive_s=9"
    limits = Limits.read(text, restarts=1)
    assert limits.hang.silence_s == limits.node.hang.silence_s == 3.0
    assert limits.node.hang.patient_silence_s == 8.0
    assert (limits.node.lease_s, limits.server.node_silence_s) == (4.0, 6.5)
    assert (limits.rules.deaths, limits.rules.arrive_s, limits.rules.restarts) == (7, 9.0, 1)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("silence=3", "unknown key 'silence'; known are adopt_s, "),
        ("restarts=3", "unknown key 'restarts'"),
        ("floors_s=3", "unknown key 'floors_s'"),
        ("silence_s", "silence_s: expected a number above 0, got ''"),
        ("silence_s=nan", "silence_s: expected a number above 0, got 'nan'"),
        ("deaths=1.5", "deaths: expected a whole number above 0, got '1.5'"),
        ("lease_s=15", "node_silence_s must be longer than lease_s"),
    ],
)
def test_what_means_nothing_is_refused(text: str, named: str) -> None:
    with pytest.raises(UserError, match="resihp-run: --control-conf: ") as refusal:
        Limits.read(text, restarts=3)
    assert named in str(refusal.value)
