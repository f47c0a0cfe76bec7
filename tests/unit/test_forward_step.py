"""What leaves a forward step in the middle."""

from __future__ import annotations

import logging

import pytest
import torch

from megatron.resilience.recovery.birth import AbortedError
from megatron.resilience.upstream.forward import ForwardStep
from megatron.resilience.upstream.rng import RngKeeper

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("data", [True, False])
def test_what_breaks_it_off_passes_through_without_a_traceback_in_the_log(
    data: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    step = ForwardStep(torch.device("cpu"), RngKeeper())
    monkeypatch.setattr(step._stragglers, "start", lambda: calls.append("start"))
    monkeypatch.setattr(step._stragglers, "stop", lambda: calls.append("stop"))
    with (
        caplog.at_level(logging.DEBUG),
        pytest.raises(AbortedError, match="another rank is lost"),
        step._timed(data=data),
    ):
        raise AbortedError("another rank is lost")
    assert calls == ["start", "stop"]
    assert step._stragglers.bdata is data
    assert not caplog.records
