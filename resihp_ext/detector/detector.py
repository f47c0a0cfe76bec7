"""From what ranks measure to who is slow.

A device is judged by its own work over the prediction for healthy devices: that shows what bubbles
and waiting hide. A link is judged by its own usual transfer time. When all devices of a node slow
down together, the node is suspected. The iteration over its prediction is the paper's trigger: it
catches what has no timer of its own.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from resihp_ext.detector.attribute import device_suspects, link_suspects
from resihp_ext.detector.bocd import BocdConfig
from resihp_ext.detector.config import DetectorConfig
from resihp_ext.detector.iteration import IterationPredictor
from resihp_ext.detector.mtp import MicroBatchPredictor
from resihp_ext.detector.reader import Reader, Step
from resihp_ext.detector.slots import Array, Role, Sample, Slots, finite_median, medians
from resihp_ext.detector.suspect import Report, Suspect
from resihp_ext.detector.transfers import Transfers
from resihp_ext.detector.verify import Changes
from resihp_ext.detector.watch import Watch
from resihp_ext.plan.plan import Plan
from resihp_ext.plan.program import Program
from resihp_ext.plan.schedule import one_forward_one_backward

LEARN_EVERY = 5
"""Steps between two updates of settled fits: they change slowly, and cost more than a look."""


class Detector:
    """One job's detector; one thread."""

    def __init__(
        self,
        plan: Plan,
        config: DetectorConfig | None = None,
        *,
        program: Program | None = None,
        hints: Mapping[Role, Array] | None = None,
    ) -> None:
        """Begins with the first plan.

        Args:
            program: What is run, if it is not 1F1B of the plan.
            hints: See :class:`MicroBatchPredictor`.
        """
        self.config = config or DetectorConfig()
        self.mtp = MicroBatchPredictor(hints)
        self._first: list[Sample] | None = []
        self._step = 0
        self._unfamiliar = 0
        """Steps of a new layout that are still learned from before they are judged."""
        self._lay_out(plan, program)
        self.itp = IterationPredictor(self.slots)
        self._devices = Watch(len(self.slots.ranks), self.config.device_over_ratio, self.config)

    def _lay_out(self, plan: Plan, program: Program | None) -> None:
        self.plan = plan
        self.slots = Slots(plan, program or one_forward_one_backward(plan))
        self.reader = Reader(self.slots)
        self._transfers = Transfers(self.slots)
        pairs = len(self._transfers.pairs)
        self._links = Watch(
            pairs, self.config.link_over_ratio, self.config, chance=self.config.link_chance
        )
        self._first_links: list[Array] = []
        self._link_s, self._least_s = np.full(pairs, np.nan), np.full(pairs, np.nan)
        self._first_totals_s: list[float] = []
        self._warm_up, self._age = self.config.warm_up_steps, 0
        self._ratios: deque[float] = deque(maxlen=self.config.confirm_steps)
        self._changes = Changes(
            BocdConfig(
                hazard_steps=self.config.hazard_steps,
                longest_run_steps=int(self.config.longest_run_steps),
            ),
            ratio=self.config.verify_ratio,
            distance=self.config.verify_distance_steps,
            wait=self.config.confirm_steps,
        )

    def adopt(self, plan: Plan, program: Program | None = None) -> None:
        """Goes on with another plan: fits, and what is known of devices, are kept."""
        old = self.slots.index_of
        self._lay_out(plan, program)
        self.itp.adopt(self.slots)
        self._devices = self._devices.carried([old.get(rank) for rank in self.slots.ranks])
        self._first = [] if self._first is not None else None
        self._unfamiliar = self.config.confirm_steps

    @property
    def settled(self) -> bool:
        """Whether the first fit and healthy levels are there."""
        return self._first is None

    def observe(self, step: int, steps: Mapping[int, Step]) -> Report:
        """Judges a step; one that was judged already, or belongs to another plan, changes nothing.

        Args:
            steps: What was measured, by global rank; ranks may be missing.
        """
        nothing = Report(step=step, observed_s=np.nan, predicted_s=np.nan, ratio=np.nan)
        mine = {r: s for r, s in steps.items() if s.version == self.plan.version}
        if step <= self._step or not mine:
            return nothing
        self._step = step
        if self._warm_up > 0:
            self._warm_up -= 1
            return nothing
        return self.judge(step, self.reader.read(mine))

    def judge(self, step: int, sample: Sample) -> Report:
        """The same on arrays."""
        self._age += 1
        if self._first is not None:
            self._first.append(sample)
            self._settle()
            return Report(step=step, observed_s=np.nan, predicted_s=np.nan, ratio=np.nan)
        if self._unfamiliar:
            self._unfamiliar -= 1
            self._look_around(sample)
        predicted = self.mtp.predict_s(self.slots, sample)
        rises, back = self._devices.observe(step, self._own_ratio(predicted, sample))
        suspects = device_suspects(self.plan, self.slots, self._devices, rises)
        found, links_back = self._judge_links(step, sample)
        suspects += found
        report = self._judge_iteration(step, sample, predicted, bool(suspects))
        self._learn(sample, predicted, report)
        recovered = {self.slots.ranks[i] for i in back}
        recovered |= {r for i in links_back for r in self._transfers.pairs[i]}
        return Report(
            step=step,
            observed_s=report.observed_s,
            predicted_s=report.predicted_s,
            ratio=report.ratio,
            suspects=tuple(suspects),
            recovered=tuple(sorted(recovered)),
            unexplained=report.unexplained,
        )

    def paces(self) -> Array:
        """The usual own time of each rank's device over the common prediction."""
        return self._devices.bias

    def speeds(self) -> dict[int, float]:
        """Throughput of the devices that are known to be slow, by rank: 0.5 is twice as slow."""
        known = self._devices.known
        return {self.slots.ranks[i]: float(1 / known[i]) for i in np.flatnonzero(known > 1)}

    def confirm(
        self, p: Mapping[int, float], links: Mapping[tuple[int, int], float] | None = None
    ) -> None:
        """Takes what a validation has found: throughputs by rank, and by pair of ranks."""
        for rank, value in p.items():
            if (i := self.slots.index_of.get(rank)) is not None:
                _confirm(self._devices, i, value, self._step)
        places = {frozenset(pair): i for i, pair in enumerate(self._transfers.pairs)}
        for pair, value in (links or {}).items():
            if (i := places.get(frozenset(pair))) is not None:
                _confirm(self._links, i, value, self._step)

    def clear(self, ranks: Iterable[int], links: Iterable[tuple[int, int]] = ()) -> None:
        """Devices and links that were slow are healthy: news of them begins from now on."""
        devices = [i for rank in ranks if (i := self.slots.index_of.get(rank)) is not None]
        self._devices.clear(devices)
        places = {frozenset(pair): i for i, pair in enumerate(self._transfers.pairs)}
        self._links.clear([i for pair in links if (i := places.get(frozenset(pair))) is not None])

    def _own_ratio(self, predicted: Array, sample: Sample) -> Array:
        """Own work over prediction of each rank, over all that was measured of both."""
        slots = self.slots
        own, healthy = sample.own_s.take(slots.compute), predicted.take(slots.compute_node)
        both = own + healthy
        if not np.isfinite(both).all():
            own, healthy = np.where(np.isfinite(both), (own, healthy), 0.0)
        top, bottom = slots.sums_of_ranks(own), slots.sums_of_ranks(healthy)
        ratio: Array = np.divide(
            top, bottom, out=np.full(len(slots.ranks), np.nan), where=bottom > 0
        )
        return ratio

    def _look_around(self, sample: Sample) -> None:
        """Learns what other TP degrees and numbers of layers take, from all devices at the speed
        that each is known for: what is new of a layout must not be anybody's fault."""
        level = (self._devices.known * self._devices.bias)[self.slots.rank_of]
        everyone = np.ones(len(self.slots.ranks), dtype=bool)
        self.mtp.learn(self.slots, replace(sample, own_s=sample.own_s / level), everyone)

    def _settle(self) -> None:
        assert self._first is not None
        if len(self._first) < self.config.settle_steps:
            return
        everyone = np.ones(len(self.slots.ranks), dtype=bool)
        for sample in self._first * 2:
            self.mtp.learn(self.slots, sample, everyone)
        ratios = [self._own_ratio(self.mtp.predict_s(self.slots, s), s) for s in self._first]
        self._devices.settle(np.array(ratios))
        for sample in self._first:
            self._settle_links(sample)
        for sample in self._first:
            self.itp.learn(sample, self._transfers, self._link_s)
            self._judge_iteration(0, sample, self.mtp.predict_s(self.slots, sample), False)
        self._first = None

    def _settle_links(self, sample: Sample) -> None:
        self._first_links.append(self._transfers.seconds(sample))
        self._first_totals_s.append(finite_median(sample.total_s))
        if len(self._first_links) == self.config.settle_steps and self._transfers.pairs:
            seconds = np.array(self._first_links)
            self._link_s = medians(seconds)
            material_s = self.config.link_step_ratio * float(np.nanmedian(self._first_totals_s))
            least_s = np.fmax(material_s / self._transfers.messages, self.config.link_excess_s)
            self._least_s = least_s
            self._links.settle(seconds / self._link_s)
            for row in seconds:
                self._links.remember(self._link_ratio(row))

    def _judge_links(self, step: int, sample: Sample) -> tuple[list[Suspect], list[int]]:
        if len(self._first_links) < self.config.settle_steps:
            self._settle_links(sample)
            return [], []
        seconds = self._transfers.seconds(sample)
        rises, back = self._links.observe(step, self._link_ratio(seconds))
        return link_suspects(self._transfers.pairs, self._links, rises, self._link_s), back

    def _link_ratio(self, seconds: Array) -> Array:
        """Over the usual time; an excess that does not matter is none."""
        with np.errstate(all="ignore"):
            ratio = seconds / self._link_s
            small = (seconds - self._link_s) < self._least_s
        result: Array = np.where(small, np.minimum(ratio, 1.0), ratio)
        return result

    def _judge_iteration(
        self, step: int, sample: Sample, predicted: Array, explained: bool
    ) -> Report:
        # Its own usual pace is a device's healthy time, too.
        level = self._devices.known * self._devices.bias
        expected = self.itp.predict_s(predicted, level, sample)
        observed = finite_median(sample.total_s)
        ratio = observed / expected if expected > 0 else np.nan
        # An odd step, or two, is no change: what counts is what all of the last ones show.
        self._ratios.append(ratio)
        change = self._changes.observe(float(np.fmin.reduce(self._ratios)))
        over = change is not None and change.after > self.config.validate_over_ratio
        new = over and change is not None and change.after > change.before
        known = bool((self._devices.known > 1).any() or (self._links.known > 1).any())
        if self._changes.unsettled or (0.8 < ratio < 1.25 and not known):
            self.itp.correct(ratio)
        return Report(
            step=step,
            observed_s=observed,
            predicted_s=expected,
            ratio=ratio,
            unexplained=new and not explained and not known,
        )

    def _learn(self, sample: Sample, predicted: Array, report: Report) -> None:
        young, turn = self._age <= LEARN_EVERY, self._age % LEARN_EVERY
        steady = self._devices.steady()
        decay = float(np.exp(-LEARN_EVERY / self.config.forget_steps))
        # No step pays for everything: the iteration has the last turn, roles share the others.
        roles = self.slots.roles if young else list(self.slots.roles)[turn :: LEARN_EVERY - 1]
        if young or turn < LEARN_EVERY - 1:
            self.mtp.learn(self.slots, sample, steady, decay, roles)
        normal = report.ratio < self.config.validate_over_ratio
        if (young or turn == LEARN_EVERY - 1) and normal and steady.all():
            self.itp.learn(sample, self._transfers, self._link_s)


def _confirm(watch: Watch, at: int, p: float, step: int) -> None:
    if p >= 1 / watch.over_ratio:
        watch.pardon(at, step)
    elif p > 0:
        watch.know([at], 1 / p)
