"""What befalls the clusters of the paper's figures.

PAPER tells the kinds (killed workers, locked clocks, competing traffic; weak, medium, severe) and
that failures come down to one every 30 minutes; not how many a run sees, nor how slow is weak. Ours:
runs of three hours; of each kind of fault one for every 16 devices, at most six, evenly spread over
the first hour, so that most of a run is under faults, on devices and nodes drawn at random, never repaired. Slow devices and slow networks come
in equal numbers. What is left of their speed: see ``laws.LEFT``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.simulator.happenings import Happening
from resihp_ext.simulator.laws import Form, Law, Severity, Source, Target, sample
from resihp_ext.simulator.setting import Setting

RUN_S = 10_800.0
SPREAD_S = 3600.0
DEVICES_PER_FAULT = 16
MOST_FAULTS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Kinds of faults, and how many of them."""

    name: str
    kills: bool = False
    slow: Severity | None = None
    """Of devices and networks."""
    slow_targets: tuple[Target, ...] = (Target.DEVICE, Target.NETWORK)
    every_s: float | None = None
    """From one fault of a kind to the next. None: as many as the cluster's size asks for."""
    until_s: float = RUN_S
    spread_s: float = SPREAD_S
    """In which faults come, where their number is set by the cluster's size."""

    def happenings(self, setting: Setting, seed: int) -> tuple[Happening, ...]:
        """Draws a run."""
        sources = [Source(target=Target.DEVICE, **self._clock(setting))] if self.kills else []
        if self.slow is not None:
            for target in self.slow_targets:
                clock = self._clock(setting)
                sources.append(Source(target=target, severity=self.slow, **clock))
        return sample(setting.cluster, sources, until_s=self.until_s, seed=seed)

    def _clock(self, setting: Setting) -> dict[str, Law | int | None]:
        if self.every_s is not None:
            return {"gap": Law(mean_s=self.every_s, form=Form.FIXED)}
        count = min(MOST_FAULTS, max(1, len(setting.cluster.devices) // DEVICES_PER_FAULT))
        gap = Law(mean_s=round(self.spread_s / (count + 1), 3), form=Form.FIXED)
        return {"gap": gap, "most": count}


STOP = Scenario(name="fail-stop", kills=True)
SLOW = tuple(Scenario(name=f"fail-slow, {one}", slow=one) for one in Severity)
MIXED = Scenario(name="mixed", kills=True, slow=Severity.MEDIUM)
SCENARIOS = (STOP, *SLOW, MIXED)
"""Of the throughput figures."""
FREQUENCIES = tuple(
    Scenario(
        name=f"fail-stop every {minutes} min", kills=True, every_s=60.0 * minutes, until_s=21_600
    )
    for minutes in (120, 60, 30)
)
"""PAPER: one every 30 minutes at most."""
