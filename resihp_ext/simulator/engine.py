"""Runs a policy through hours of faults: what is known when, what is decided, what it costs.

Time passes in whole iterations. A death breaks the iteration that it falls into; everything else
counts from the next one on. The policy is told of deaths after ``notice_s``, of slowness when its
detector has seen it, and of devices outside the layout when they are probed.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import ceil, inf

import numpy as np

from resihp_ext.detector.slots import Array
from resihp_ext.errors import ResiHPError
from resihp_ext.simulator.eyes import Alarm, Blind, eye
from resihp_ext.simulator.happenings import Happening
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.iteration import POOL, Iterations
from resihp_ext.simulator.layout import Layout
from resihp_ext.simulator.policy import Answer, Cause, Policy, Undone, View
from resihp_ext.simulator.record import Change, Record, State, Stretch
from resihp_ext.simulator.restart import read_s
from resihp_ext.simulator.setting import Setting

CHUNK = 128
"""Iterations that are timed at once."""


class SimulationError(ResiHPError):
    """A policy has answered what cannot be."""


def simulate(
    setting: Setting,
    policy: Policy,
    happenings: Sequence[Happening],
    *,
    until_s: float,
    iterations: Iterations | None = None,
) -> Record:
    """One run.

    Args:
        happenings: In the order of time.
        until_s: When it ends; the iteration that is under way does not count.
        iterations: Of the setting, where several runs share what they have computed.

    Raises:
        SimulationError: the policy runs dead ranks, or something similar.
    """
    run = _Run(setting, policy, happenings, until_s, iterations or Iterations(setting))
    while run.now_s < until_s:
        run.advance()
    return run.record


class _Run:
    def __init__(
        self,
        setting: Setting,
        policy: Policy,
        happenings: Sequence[Happening],
        until_s: float,
        iterations: Iterations,
    ) -> None:
        self._setting, self._policy, self._until_s = setting, policy, until_s
        self._happenings, self._next = happenings, 0
        self._iterations = iterations
        self._truth = self._known = Health()
        self._noise = np.random.default_rng([setting.seed, 2])
        self._eye = eye(policy.sense, setting)
        self.now_s, self._due_s = 0.0, inf
        """When a validation is due."""
        self._alarm: Alarm | None = None
        self._step, self._saved, self._saved_s = 0, 0, 0.0
        self._writing: tuple[int, float] | None = None
        """The step of a checkpoint that is being written, and when it is whole."""
        self._slow_s = self._asked_slow_s = 0.0
        self._layout: Layout | None = policy.begin(setting)
        self._held = self._layout
        healthy = iterations.look(Layout(plan=setting.nominal), Health())
        self.record = Record(
            policy=policy.name,
            step_tokens=setting.step_tokens,
            healthy_s=float(healthy.iteration_s.mean()),
        )
        self._number = self._enlist(self._layout)
        self._adopt()

    # What happens.

    def advance(self) -> None:
        """Goes on to the next thing that is decided."""
        if self._layout is None:
            self._wait()
        elif self._upcoming_s <= self.now_s:
            self._happen()
        else:
            self._train(self._layout)

    @property
    def _upcoming_s(self) -> float:
        if self._next == len(self._happenings):
            return inf
        return self._happenings[self._next].at_s

    def _take(self) -> tuple[set[int], set[int]]:
        """The next happening comes true; returns who has died, and who lives again."""
        one = self._happenings[self._next]
        self._next += 1
        before = self._truth.dead
        self._truth = self._truth.changed(dict(one.p), dict(one.links))
        return set(self._truth.dead - before), set(before - self._truth.dead)

    def _happen(self) -> None:
        died, back = self._take()
        if died:
            used = self._used()
            self._know(dict.fromkeys(died, 0.0))
            if died & used:
                self._spend(self._setting.times.notice_s, State.NOTICE)
            self._ask(Cause.DEAD)
        elif back:
            # Whether it is as fast as ever is not known; that it is there, is.
            self._know(dict.fromkeys(back, 1.0))
            self._ask(Cause.BACK)
        elif self._unused_change():
            every_s = self._setting.times.probe_every_s
            self._plan_validation(ceil(self.now_s / every_s + 1e-9) * every_s)

    def _unused_change(self) -> bool:
        """Whether a device outside the layout is not as it is believed to be."""
        used = self._used()
        return not isinstance(self._eye, Blind) and any(
            _measured(self._truth.p.get(rank, 1.0)) != self._known.p.get(rank, 1.0)
            for rank in {*self._truth.p, *self._known.p} - used
        )

    def _wait(self) -> None:
        self._spend(min(self._upcoming_s, self._until_s) - self.now_s, State.WAIT)
        if self._upcoming_s <= self.now_s:
            died, back = self._take()
            self._know({**dict.fromkeys(died, 0.0), **dict.fromkeys(back, 1.0)})
            self._ask(Cause.BACK if back else Cause.DEAD)

    # Training.

    def _train(self, layout: Layout) -> None:
        seconds = self._seconds(layout)
        ends = self.now_s + np.cumsum(seconds)
        save_s = self._saved_s + self._setting.times.checkpoint_every_s
        limit_s = min(self._upcoming_s, self._until_s, self._due_s, save_s)
        whole = int(np.searchsorted(ends, limit_s, side="right"))
        done = self._watch(seconds[:whole])
        if done:
            self._count(done, float(ends[done - 1]))
        if done < whole or whole == len(ends):
            return
        self._straddle(float(seconds[whole]))

    def _seconds(self, layout: Layout) -> Array:
        look = self._iterations.look(layout, self._truth).iteration_s
        deviation = self._setting.times.iteration_noise
        noise = np.exp(self._noise.normal(0, deviation, CHUNK))
        return np.asarray(look[(self._step + np.arange(CHUNK)) % POOL] * noise)

    def _watch(self, seconds: Array) -> int:
        """Lets the detector see iterations until it says something; returns how many it saw."""
        if isinstance(self._eye, Blind) or self._alarm is not None:
            return len(seconds)
        for i, one in enumerate(seconds):
            alarm = self._eye.observe(self._step + i + 1, float(one), self._truth)
            if alarm is not None:
                self._alarm = alarm
                self._due_s = self.now_s + float(seconds[: i + 1].sum()) + alarm.delay_s
                return i + 1
        return len(seconds)

    def _count(self, steps: int, end_s: float) -> None:
        spent_s = end_s - self.now_s
        self._stretch(end_s, State.TRAIN, steps)
        self._step += steps
        self.record.steps = self._step
        if self._known_slow():
            self._slow_s += max(0.0, spent_s - steps * self.record.healthy_s)
        self._save()
        if self._due_s <= self.now_s:
            self._validate()
        elif self._slow_s - self._asked_slow_s >= self._policy.patience_s:
            self._asked_slow_s = self._slow_s
            self._ask(Cause.WAITED)

    def _save(self) -> None:
        times = self._setting.times
        if self.now_s - self._saved_s >= times.checkpoint_every_s:
            self._saved = self._whole()
            self._spend(times.checkpoint_s, State.SAVE)
            self._writing = self._step, self.now_s + read_s(self._setting)
            self._saved_s = self.now_s

    def _whole(self) -> int:
        """The step of the last checkpoint that is written; as fast as it is read."""
        if self._writing is not None and self._writing[1] <= self.now_s:
            return self._writing[0]
        return self._saved

    def _straddle(self, seconds: float) -> None:
        """An iteration in whose midst something comes."""
        end_s = self.now_s + seconds
        break_s = min(self._break_s(end_s), self._until_s)
        if break_s >= end_s:
            self._count(1, end_s)
        else:
            state = State.TRAIN if break_s == self._until_s else State.BROKEN
            self._spend(break_s - self.now_s, state)

    def _break_s(self, end_s: float) -> float:
        """When a rank of the layout dies before a moment; endless: none does."""
        used = self._used()
        for one in islice(self._happenings, self._next, None):
            if one.at_s >= end_s:
                break
            if any(p <= 0 and rank in used for rank, p in one.p):
                return one.at_s
        return inf

    # What is known.

    def _plan_validation(self, at_s: float) -> None:
        if self._alarm is None:
            self._alarm = Alarm(delay_s=0.0, pause_s=self._setting.times.validation_s)
            self._due_s = at_s

    def _validate(self) -> None:
        alarm, self._alarm, self._due_s = self._alarm, None, inf
        assert alarm is not None
        self._spend(alarm.pause_s, State.VALIDATE)
        self.record.alarms += 1
        # Who is dead is known; who has died this moment will be noticed in its own time.
        dead = self._known.dead
        p = {rank: _measured(p) for rank, p in self._truth.devices if p > 0}
        found = Health.of({**p, **dict.fromkeys(dead, 0.0)}, self._truth.left)
        if found == self._known:
            self.record.false_alarms += 1
            self._adopt()
            return
        slower = any(p < self._known.p.get(rank, 1.0) for rank, p in found.devices) or any(
            left < self._known.left.get(link, 1.0) for link, left in found.links
        )
        self._known = found
        self._adopt()
        self._ask(Cause.SLOW if slower else Cause.BACK)

    def _know(self, p: dict[int, float]) -> None:
        self._known = self._known.changed(p)

    def _known_slow(self) -> bool:
        return bool(self._known.links) or any(0 < p < 1 for _, p in self._known.devices)

    def _used(self) -> set[int]:
        if self._layout is None:
            return set()
        return {rank for one in self._layout.plan.replicas for rank in one.ranks}

    # Changes.

    def _ask(self, cause: Cause) -> None:
        if not self._known_slow():
            self._slow_s = self._asked_slow_s = 0.0
        view = View(
            setting=self._setting,
            cause=cause,
            layout=self._layout,
            health=self._known,
            now_s=self.now_s,
            lost_s=self._slow_s,
            held=self._held,
        )
        answer = self._policy.answer(view)
        if answer.layout is self._layout:
            self._check(answer)
            if self._layout is not None and answer.pause_s:
                self._spend(answer.pause_s, State.CHANGE)
            return
        self._change(cause, answer)

    def _check(self, answer: Answer) -> None:
        if answer.layout is None:
            return
        used = {rank for one in answer.layout.plan.replicas for rank in one.ranks}
        if dead := sorted(used & self._known.dead):
            raise SimulationError(
                f"simulation: policy {self._policy.name} runs dead ranks {dead} at "
                f"{self.now_s:.1f} s: {answer.reason}"
            )

    def _change(self, cause: Cause, answer: Answer) -> None:
        self._check(answer)
        at_s, before, lost = self.now_s, self._number, 0
        before_s = self.record.healthy_s if self._layout is None else self._pace(self._layout)
        if answer.undone is Undone.CHECKPOINT:
            self._saved = self._whole()
            lost = self._step - self._saved
            self._step = self.record.steps = self._saved
            self.record.redone += lost
        self._spend(answer.pause_s, State.CHANGE)
        if answer.saved or answer.undone is Undone.CHECKPOINT:
            self._saved, self._writing = self._step, None
            self._saved_s = self.now_s
        self._layout = answer.layout
        self._number = -1 if answer.layout is None else self._enlist(answer.layout)
        self._held = answer.layout or self._held
        if self._layout is not None:
            self._adopt()
        self.record.changes.append(
            Change(
                at_s=at_s,
                step=self._step,
                cause=cause,
                health=self._known,
                before=before,
                after=self._number,
                pause_s=answer.pause_s,
                moved_bytes=answer.moved_bytes,
                lost_steps=lost,
                before_s=before_s,
                after_s=inf if answer.layout is None else self._pace(answer.layout),
                reason=answer.reason,
            )
        )

    def _pace(self, layout: Layout) -> float:
        """Seconds of an iteration, in the mean; endless when a rank is dead."""
        used = {rank for one in layout.plan.replicas for rank in one.ranks}
        if used & self._truth.dead:
            return inf
        return float(self._iterations.look(layout, self._truth).iteration_s.mean())

    def _enlist(self, layout: Layout) -> int:
        layouts = self.record.layouts
        for number, one in enumerate(layouts):
            if one.plan.digest == layout.plan.digest and one.schedule == layout.schedule:
                return number
        layouts.append(layout)
        return len(layouts) - 1

    def _adopt(self) -> None:
        if self._layout is not None:
            self._alarm, self._due_s = None, inf
            self._eye.adopt(self._layout.plan, self._known)
            if self._unused_change():
                every_s = self._setting.times.probe_every_s
                self._plan_validation(ceil(self.now_s / every_s + 1e-9) * every_s)

    def _spend(self, seconds: float, state: State) -> None:
        if seconds > 0:
            self._stretch(min(self.now_s + seconds, self._until_s), state, 0)

    def _stretch(self, end_s: float, state: State, steps: int) -> None:
        one = Stretch(
            begin_s=self.now_s, end_s=end_s, state=state, steps=steps, layout=self._number
        )
        self.record.stretches.append(one)
        self.now_s = end_s


def _measured(p: float) -> float:
    """As a validation has it: to a hundredth."""
    return max(round(p, 2), 0.01) if p > 0 else 0.0
