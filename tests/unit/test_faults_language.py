"""The language of faults: what it refuses and how, and that it comes back as it went out."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from megatron.resilience.faults.config import FaultsConfig
from resihp_ext.errors import UserError
from resihp_ext.faults.fault import Fault, Kind, Phase
from resihp_ext.faults.read import faults_from_yaml, faults_to_yaml, read_faults

pytestmark = pytest.mark.unit

EVERY_KIND = """\
- {at_step: 7, phase: backward, micro_batch: 2, rank: 3, kind: kill}
- {at_step: 7, rank: 4, kind: stop, delay_s: 0.25}
- {at_step: 8, phase: vote, rank: 0, kind: hang, lasts_s: 30, holds_gil: false}
- {at_step: 9, phase: optimizer, rank: 1, kind: exit, exit_code: 7}
- {at_step: 10, node: n1, kind: node}
- {at_step: 11, phase: p2p, link: [n0, n2], kind: cut}
- {at_step: 12, rank: 5, kind: slow, factor: 0.5, until_step: 20}
- {at_step: 13, link: [n0, n2], kind: slow_link, factor: 0.1}
"""


def test_every_kind_is_read() -> None:
    found = faults_from_yaml(EVERY_KIND, "f.yaml")
    assert {one.kind for one in found} == set(Kind)
    assert found[0] == Fault(at_step=7, phase=Phase.BACKWARD, micro_batch=2, rank=3, kind=Kind.KILL)
    assert found[2].lasts_s == 30
    assert not found[2].holds_gil
    assert found[5].link == ("n0", "n2")
    assert (found[6].factor, found[6].until_step) == (0.5, 20)


def test_it_is_written_as_it_was_read() -> None:
    assert faults_to_yaml(faults_from_yaml(EVERY_KIND, "f.yaml")) == EVERY_KIND
    assert faults_from_yaml(faults_to_yaml([]), "f.yaml") == ()


def test_a_node_with_a_number_for_a_name() -> None:
    (fault,) = faults_from_yaml("- {at_step: 1, node: 0, kind: node}", "f.yaml")
    assert fault.node == "0"
    assert faults_from_yaml(faults_to_yaml([fault]), "f.yaml") == (fault,)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("kill", "expected names with values, such as kind: kill, got 'kill'"),
        ("{at_step: 1, rank: 0}", "needs kind"),
        ("{rank: 0, kind: }", "needs at_step and kind"),
        ("{at_step: 1, rank: 0, kind: kil}", "kind: expected one of kill, stop, hang, .*got 'kil'"),
        ("{at_step: 1, rank: 0, kind: [a]}", r"kind: expected one of .*got \['a'\]"),
        ("{at_step: 1, rnk: 0, kind: kill}", "unknown key 'rnk'; known are at_step, phase"),
        ("{at_step: 0, rank: 0, kind: kill}", "at_step: expected a whole number from 1, got 0"),
        ("{at_step: yes, rank: 0, kind: kill}", "at_step: .*got True"),
        ("{at_step: 1, rank: -1, kind: kill}", "rank: expected a whole number from 0, got -1"),
        ("{at_step: 1, kind: kill}", "kill needs rank, got none"),
        ("{at_step: 1, kind: kill, node: a}", "kill needs rank, got node"),
        (
            "{at_step: 1, kind: cut, node: a, link: [a, b]}",
            "cut needs link or node and nothing else, got link, node",
        ),
        ("{at_step: 1, kind: node, node: 'a b'}", "node: expected a name without blanks"),
        ("{at_step: 1, kind: node, node: [a]}", r"node: expected a name .*got \['a'\]"),
        ("{at_step: 1, kind: cut, link: [a, a]}", "link: expected two different nodes"),
        ("{at_step: 1, kind: cut, link: a}", r"link: expected two nodes, such as \[n0, n1\]"),
        ("{at_step: 1, rank: 0, kind: kill, phase: lunch}", "phase: expected one of forward"),
        ("{at_step: 1, rank: 0, kind: kill, delay_s: -1}", "delay_s: expected a number 0 to"),
        ("{at_step: 1, rank: 0, kind: kill, delay_s: .nan}", "delay_s: .*got nan"),
        ("{at_step: 1, rank: 0, kind: kill, lasts_s: 1}", "lasts_s means nothing for kill"),
        ("{at_step: 1, rank: 0, kind: hang, lasts_s: 0}", "lasts_s: expected a number up to"),
        ("{at_step: 1, rank: 0, kind: hang, holds_gil: 1}", "holds_gil: expected true or false"),
        ("{at_step: 1, rank: 0, kind: stop, holds_gil: false}", "holds_gil means nothing for stop"),
        ("{at_step: 1, rank: 0, kind: kill, exit_code: 1}", "exit_code means nothing for kill"),
        ("{at_step: 1, rank: 0, kind: exit, exit_code: 256}", "exit_code: .*0 to 255, got 256"),
        ("{at_step: 1, rank: 0, kind: slow}", "slow needs factor"),
        ("{at_step: 1, rank: 0, kind: slow, factor: 2}", "factor: .*above 0, 1 at most, got 2"),
        (
            "{at_step: 1, rank: 0, kind: slow, factor: .5, by: magic}",
            "by: expected one of emu",
        ),
        ("{at_step: 1, rank: 0, kind: kill, by: load}", "by means nothing for kill"),
        ("{at_step: 1, rank: 0, kind: slow, factor: 1, by: load}", "factor 1 ends other faults"),
        ("{at_step: 1, rank: 0, kind: slow, factor: .5, delay_ms: 3}", "delay_ms means nothing"),
        ("{at_step: 1, link: [a, b], kind: slow_link}", r"slow_link needs factor .*or delay_ms"),
        (
            "{at_step: 1, link: [a, b], kind: slow_link, delay_ms: 1, bandwidth_mib_s: 9}",
            "bandwidth_mib_s means nothing",
        ),
        ("{at_step: 1, rank: 0, kind: slow, factor: .5, phase: sync}", "phase means nothing"),
        ("{at_step: 3, rank: 0, kind: slow, factor: .5, until_step: 3}", "until_step: .*from 4"),
        ("{at_step: 3, rank: 0, kind: kill, until_step: 4}", "until_step means nothing for kill"),
        ("{at_step: 3, rank: 0, kind: kill, factor: 0.5}", "factor means nothing for kill"),
        ("{at_step: 3, rank: 0, kind: kill, micro_batch: 1}", "micro_batch needs a phase of back"),
        ("{at_step: 3, rank: 0, kind: kill, micro_batch: 1, phase: vote}", "micro_batch needs"),
    ],
)
def test_refusals_name_file_entry_and_reason(entry: str, said: str) -> None:
    text = "- {at_step: 1, rank: 0, kind: kill}\n- " + entry
    with pytest.raises(UserError, match=rf"^f\.yaml: entry 1: .*{said}") as refusal:
        faults_from_yaml(text, "f.yaml")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "kind: kill", "- [", "3", "- {at_step: 2026-99-99}"])
def test_what_is_no_list_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=r"faults\.yaml: ") as refusal:
        read_faults(path)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_faults(tmp_path / "nothing.yaml")


STEP, PHASE = 7, Phase.BACKWARD


@pytest.mark.parametrize(
    ("place", "due"),
    [
        ((PHASE, 6, 5), False),
        ((PHASE, 7, 1), False),
        ((PHASE, 7, 2), True),
        ((PHASE, 7, 3), True),
        ((PHASE, 8, 0), True),
        ((Phase.FORWARD, 7, 2), False),
        ((Phase.FORWARD, 9, 2), False),
    ],
)
def test_when_it_strikes(place: tuple[Phase, int, int], due: bool) -> None:
    fault = Fault(at_step=STEP, phase=PHASE, micro_batch=2, rank=0, kind=Kind.KILL)
    assert fault.is_due(*place) is due
    assert fault.is_due(str(place[0]), *place[1:]) is due


def test_without_a_phase_it_strikes_at_the_first() -> None:
    fault = Fault(at_step=STEP, rank=0, kind=Kind.KILL)
    assert all(fault.is_due(phase, STEP) for phase in Phase)


def test_whom_it_hits() -> None:
    hits = {
        Fault(at_step=1, rank=1, kind=Kind.KILL): [("a", 1)],
        Fault(at_step=1, node="a", kind=Kind.NODE): [("a", 0), ("a", 1)],
        Fault(at_step=1, link=("c", "a"), kind=Kind.CUT): [("a", 0), ("a", 1), ("c", 3)],
    }
    everyone = [("a", 0), ("a", 1), ("b", 2), ("c", 3)]
    for fault, expected in hits.items():
        assert [one for one in everyone if fault.hits(one[1], one[0])] == expected


names = some.from_regex(r"[a-z0-9.:_-]{1,12}", fullmatch=True)
targets = {
    Kind.NODE: some.fixed_dictionaries({"node": names}),
    Kind.CUT: some.fixed_dictionaries({"link": some.tuples(names, names)}).filter(
        lambda one: len(set(one["link"])) == 2
    ),
}
numbers = some.floats(0, 100, allow_nan=False)


@given(some.data())
def test_any_fault_comes_back(data: some.DataObject) -> None:
    """Names that YAML takes for numbers, dates or booleans, and awkward floats, included."""
    kind = data.draw(some.sampled_from([Kind.KILL, Kind.HANG, Kind.NODE, Kind.CUT]))
    target = data.draw(targets.get(kind, some.fixed_dictionaries({"rank": some.integers(0, 99)})))
    phase = data.draw(some.none() | some.sampled_from(Phase))
    fault = Fault(at_step=3, kind=kind, phase=phase, delay_s=data.draw(numbers), **target)
    assert faults_from_yaml(faults_to_yaml([fault]), "f.yaml") == (fault,)


def test_a_job_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    path = tmp_path / "faults.yaml"
    config = FaultsConfig(faults=str(path))
    good = "- {at_step: 1, rank: 3, kind: kill}\n"
    path.write_text(good)
    assert len(config.read(world_size=4)) == 1
    with pytest.raises(UserError, match="entry 0: rank 3: the job has ranks 0 to 2"):
        config.read(world_size=3)
    assert FaultsConfig().read(world_size=1) == ()


SLOW, LINK = "rank: 0, kind: slow, factor: 0.5", "link: [a, b], kind: slow_link, "
REAL, EMULATED, NCCL = {}, {"emulated": True}, {"tagged": False}


@pytest.mark.parametrize(
    ("row", "job", "said"),
    [
        (SLOW, REAL, None),
        (SLOW, EMULATED, None),
        (SLOW, NCCL, None),
        (f"{SLOW}, by: emulated", REAL, "needs emulated devices"),
        (f"{SLOW}, by: quota", EMULATED, None),
        (f"{LINK} factor: 0.5", REAL, "needs bandwidth_mib_s with factor, or delay_ms"),
        (f"{LINK} factor: 0.5", EMULATED, None),
        (f"{LINK} factor: 1", REAL, None),
        (f"{LINK} factor: 0.5, bandwidth_mib_s: 100", REAL, None),
        (f"{LINK} factor: 0.5, bandwidth_mib_s: 100", EMULATED, "needs factor, and nothing else"),
        (f"{LINK} delay_ms: 20", REAL, None),
        (f"{LINK} delay_ms: 20", EMULATED, "needs factor, and nothing else"),
        (f"{LINK} delay_ms: 20", NCCL, "needs --distributed-backend gloo"),
    ],
)
def test_slow_faults_fit_the_job(
    tmp_path: Path, row: str, job: dict[str, bool], said: str | None
) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(f"- {{at_step: 1, {row}}}")
    config = FaultsConfig(faults=str(path))
    if said is None:
        assert len(config.read(world_size=4, **job)) == 1
    else:
        with pytest.raises(UserError, match=f"entry 0: slow.*{said}"):
            config.read(world_size=4, **job)
