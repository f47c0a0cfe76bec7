"""What the detector finds and what becomes of it, as one line each for people in the training log.

Pure: nothing is printed here. Every line begins with ``resihp:`` and says who, how much, since
when, and what it means for the job. Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from resihp_ext.detector.suspect import Report, Suspect, Verdict
from resihp_ext.plan.plan import Plan
from resihp_ext.whatif.layout import ranges

MEASURING = "measuring it"
MOST_CHARACTERS = 400
"""Of a line."""
REASON_CHARACTERS = 160
"""Of a reason in it, which may quote anybody: what has changed comes after it."""

Nodes = Mapping[int, str]
"""Names of the nodes of ranks; without one a rank stands alone."""


def suspect_line(
    suspect: Suspect, nodes: Nodes, *, plan: Plan | None = None, then: str = MEASURING
) -> str:
    """A device, link or host that has become slow.

    Args:
        suspect: Who, and how slow.
        nodes: Of all ranks.
        plan: That runs; with it the line says who waits.
        then: What happens next; nothing if empty.
    """
    verb = "work" if suspect.kind == "host" and len(suspect.ranks) > 1 else "works"
    text = (
        f"{_subject(suspect, nodes)} {verb} at {_ratio(suspect.p)} of its speed since step "
        f"{suspect.since_step}"
    )
    if verb == "work":
        text = text.replace("of its speed", "of their speed")
    waits = "" if plan is None else _who_waits(suspect, plan)
    return _line(text + (f" and {waits}" if waits else ""), then)


def verdict_line(suspect: Suspect, nodes: Nodes, verdict: Verdict, p: float | None = None) -> str:
    """What a validation of a suspect has found.

    Args:
        suspect: Of whom.
        nodes: Of all ranks.
        verdict: What was found.
        p: Measured throughput, where there was a measurement.
    """
    who = _subject(suspect, nodes)
    measured = "" if p is None else f" at {_ratio(p)} of full speed"
    match verdict:
        case Verdict.SLOW:
            return _line(f"{who}: measured{measured}, slow indeed")
        case Verdict.HEALTHY:
            return _line(f"{who}: measured{measured}, healthy after all; nothing changes")
        case Verdict.UNKNOWN:
            return _line(f"{who}: could not be measured; taken for slow, as its times say")


def remeasured_line(ranks: Iterable[int], nodes: Nodes, p: float, *, link: bool = False) -> str:
    """What was measured as slow before is measured as healthy."""
    found = Suspect(
        kind="link" if link else "device",
        ranks=tuple(sorted(ranks)),
        p=p,
        since_step=0,
        evidence="",
    )
    return _line(f"{_subject(found, nodes)}: measured at {_ratio(p)} of full speed, slow no more")


def recovered_line(ranks: Iterable[int], nodes: Nodes, step: int) -> str:
    """Devices that are as fast as ever again."""
    ranks = sorted(ranks)
    verb = "work" if len(ranks) > 1 else "works"
    return _line(f"{_ranks(ranks, nodes)} {verb} at full speed again since step {step}")


def unexplained_line(report: Report) -> str:
    """A step was slow, and nobody is to blame."""
    return _line(
        f"step {report.step} took {report.observed_s:.3g} s, {report.ratio:.2f} times the "
        f"{report.predicted_s:.3g} s predicted, and no device or link explains it"
    )


def report_lines(report: Report, nodes: Nodes, *, plan: Plan | None = None) -> list[str]:
    """Everything that is news in a step: mostly nothing."""
    lines = [suspect_line(one, nodes, plan=plan) for one in report.suspects]
    if report.recovered:
        lines.append(recovered_line(report.recovered, nodes, report.step))
    if report.unexplained:
        lines.append(unexplained_line(report))
    return lines


def plan_line(step: int, before: Plan, after: Plan, reason: str = "") -> str:
    """A change of layout: which devices are why, and what is different.

    Args:
        step: The first one under the new plan.
        before: The plan that ran.
        after: The plan that runs.
        reason: Why this one; the devices' speeds are said in any case.
    """
    parts = [
        text
        for text in (_devices(before, after), _work(before, after), _users(before, after))
        if text
    ]
    changes = "; ".join(parts) or "the same work on the same ranks"
    why = f" ({_cut(reason, REASON_CHARACTERS)})" if reason else ""
    return _line(f"from step {step} plan {after.version} instead of {before.version}{why}", changes)


# Parts of lines


def _subject(suspect: Suspect, nodes: Nodes) -> str:
    if suspect.kind == "link":
        ends = " and ".join(_with_node(rank, nodes) for rank in suspect.ranks)
        return f"the link between ranks {ends}"
    if suspect.kind == "host" and len(suspect.ranks) > 1:
        count = f"all {len(suspect.ranks)} ranks" if len(suspect.ranks) > 2 else "both ranks"
        names = sorted({nodes[rank] for rank in suspect.ranks if rank in nodes})
        where = f" of node {', '.join(names)}" if names else ""
        return f"{count}{where} ({ranges(sorted(suspect.ranks))})"
    return _ranks(suspect.ranks, nodes)


def _ranks(ranks: Sequence[int], nodes: Nodes) -> str:
    """``rank 5 (node n1)``, ``ranks 4-5 (node n1)``."""
    names = sorted({nodes[rank] for rank in ranks if rank in nodes})
    where = f" (node{'s' * (len(names) > 1)} {', '.join(names)})" if names else ""
    return f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)}{where}"


def _with_node(rank: int, nodes: Nodes) -> str:
    return f"{rank} (node {nodes[rank]})" if rank in nodes else str(rank)


def _ratio(p: float) -> str:
    return f"{p:.2f}"


def _who_waits(suspect: Suspect, plan: Plan) -> str:
    stages = {}
    for rank in suspect.ranks:
        instance = plan.instance_of(rank)
        if instance is not None:
            stages[plan.stage(instance).ranks] = instance
    if not stages:
        return "holds no stage: nobody waits for it"
    if suspect.kind == "device" and any(len(ranks) > 1 for ranks in stages):
        return "keeps its stage waiting"
    pronoun = "their" if suspect.kind == "host" else "its"
    verb = "keep" if suspect.kind == "host" and len(suspect.ranks) > 1 else "keeps"
    replicas = sorted({instance.replica for instance in stages.values()})
    if len(plan.replicas) == 1 or suspect.kind == "device":
        return f"{verb} {pronoun} pipeline waiting"
    return f"{verb} replica{'s' * (len(replicas) > 1)} {ranges(replicas)} waiting"


def _devices(before: Plan, after: Plan) -> str:
    """Whose speed is another one now, by speed."""
    were = {device.rank: device.p for device in before.devices}
    now: dict[float, list[int]] = {}
    for device in sorted(after.devices, key=lambda one: one.rank):
        if device.p != were.get(device.rank, 1.0):
            now.setdefault(device.p, []).append(device.rank)
    return ", ".join(
        f"rank{'s' * (len(ranks) > 1)} {ranges(ranks)} "
        f"{'dead' if p <= 0 else f'at {_ratio(p)} of full speed'}"
        for p, ranks in sorted(now.items())
    )


def _work(before: Plan, after: Plan) -> str:
    """How many stages have other layers or ranks, and which replicas other micro-batches."""
    known = Counter(stage for one in before.replicas for stage in one.stages)
    stages = [stage for one in after.replicas for stage in one.stages]
    other = sum((Counter(stages) - known).values())
    parts = []
    if other:
        parts.append(f"{other} of {len(stages)} stages hold other layers or have other ranks")
    if len(before.replicas) != len(after.replicas):
        parts.append(f"{_count(len(after.replicas), 'replica')} instead of {len(before.replicas)}")
    if _shares(before) != _shares(after):
        parts.append(f"micro-batches by first stage {_shown(_shares(after))}")
    return ", ".join(parts)


def _shares(plan: Plan) -> list[int]:
    """Micro-batches that begin in each replica."""
    begun = Counter(route[0].replica for route in plan.routes)
    return [begun[number] for number in range(len(plan.replicas))]


def _shown(counts: Sequence[int]) -> str:
    return "/".join(map(str, counts[:8])) + ("/..." if len(counts) > 8 else "")


def _users(before: Plan, after: Plan) -> str:
    """How many ranks hold a stage, if that has changed."""
    were, now = _used(before), _used(after)
    if were == now:
        return ""
    idle = f", {len(after.standby)} stand{'s' * (len(after.standby) == 1)} by"
    return f"{_count(len(now), 'rank')} of {len(after.devices)} work{'s' * (len(now) == 1)}" + (
        idle if after.standby else ""
    )


def _used(plan: Plan) -> frozenset[int]:
    return frozenset(rank for one in plan.replicas for rank in one.ranks)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _line(text: str, then: str = "") -> str:
    """One line, whatever the parts hold."""
    whole = f"resihp: {text}{'; ' if then else ''}{then}"
    whole = "".join(char if char.isprintable() else "?" for char in whole)
    return _cut(whole, MOST_CHARACTERS)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
