"""What befalls the clusters of the paper's figures.

PAPER tells the kinds (killed workers, locked clocks, competing traffic; weak, medium, severe) and
that failures come down to one every 30 minutes; not how many a run sees, nor how slow is weak.
Ours: of each kind of fault one for every 32 devices, at least one, at most four, on devices and
nodes drawn at random, never repaired. They come about 30 minutes apart (a quarter of that more or
less, or they would keep step with checkpoints), or 100 healthy iterations where these take longer:
change-point detectors need 30 iterations and more after each change before they see
the next, and no system is to fail for want of them. Three more gaps pass after the last fault. Slow
devices and slow networks come in equal numbers. What is left of their speed: see ``laws.LEFT``.
What is measured begins with the first fault.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.simulator.happenings import Happening
from resihp_ext.simulator.laws import Form, Law, Severity, Source, Target, sample
from resihp_ext.simulator.setting import Setting

GAP_S = 1800.0
GAP_ITERATIONS = 100
GAP_DEVIATION = 0.25
GAPS_AFTER = 3
DEVICES_PER_FAULT = 32
MOST_FAULTS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What befalls one run."""

    happenings: tuple[Happening, ...]
    begin_s: float
    """The first fault: what is measured begins here."""
    until_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Kinds of faults, and how many of them."""

    name: str
    kills: bool = False
    slow: Severity | None = None
    """Of devices and networks."""
    slow_targets: tuple[Target, ...] = (Target.DEVICE, Target.NETWORK)
    gap_s: float = GAP_S
    """From one fault of a kind to the next."""
    gap_iterations: int = GAP_ITERATIONS
    """As many at least."""
    run_s: float | None = None
    """From the first fault on, with faults until the end. None: as many faults as the cluster's
    size asks for."""

    def drawn(self, setting: Setting, healthy_s: float, seed: int) -> Drawn:
        """Draws a run.

        Args:
            healthy_s: Of an iteration.
        """
        gap_s = round(max(self.gap_s, self.gap_iterations * healthy_s), 3)
        count = min(MOST_FAULTS, max(1, len(setting.cluster.devices) // DEVICES_PER_FAULT))
        after_s = self.run_s if self.run_s is not None else gap_s * (count - 1 + GAPS_AFTER)
        gap = Law(mean_s=gap_s, form=Form.NORMAL, shape=GAP_DEVIATION)
        most = count if self.run_s is None else None
        sources = [Source(target=Target.DEVICE, gap=gap, most=most)] if self.kills else []
        if self.slow is not None:
            for target in self.slow_targets:
                sources.append(Source(target=target, gap=gap, most=most, severity=self.slow))
        until_s = gap_s + after_s
        happenings = sample(setting.cluster, sources, until_s=until_s, seed=seed)
        begin_s = happenings[0].at_s if happenings else gap_s
        return Drawn(happenings=happenings, begin_s=begin_s, until_s=until_s)


STOP = Scenario(name="fail-stop", kills=True)
SLOW = tuple(Scenario(name=f"fail-slow, {one}", slow=one) for one in Severity)
MIXED = Scenario(name="mixed", kills=True, slow=Severity.MEDIUM)
SCENARIOS = (STOP, *SLOW, MIXED)
"""Of the throughput figures."""
FREQUENCIES_MINUTES = (240, 120, 60, 30)
"""PAPER: one every 30 minutes at most."""
FREQUENCIES = tuple(
    Scenario(
        name=f"fail-stop every {minutes} min",
        kills=True,
        gap_s=60.0 * minutes,
        gap_iterations=0,
        run_s=6 * 3600.0,
    )
    for minutes in FREQUENCIES_MINUTES
)
