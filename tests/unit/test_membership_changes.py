"""The coordinator's rules: newcomers and drained nodes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from coordinated import Driver, running

from resihp_ext.control import messages as say
from resihp_ext.control.membership import Phase

pytestmark = pytest.mark.unit


# Newcomers


def grown(state: str = "running") -> Driver:
    """A job of ranks 0 to 2 that takes rank 3 in again, up to some state."""
    job = running()
    job.die(3)
    job.recover()
    states = ["preparing", "ready", "proposed", "agreed", "adopted", "running"]
    steps: list[Callable[[], object]] = [
        lambda: job.prepare(3),
        job.plan,
        lambda: job.agree(1),
        lambda: job.adopt(3),
        lambda: job.adopt(0, 1, 2),
    ]
    for step in steps[: states.index(state)]:
        step()
    return job


def test_a_newcomer_is_taken_in() -> None:
    job = grown("proposed")
    proposals = job.said(say.Propose)
    assert proposals.keys() == {0, 1, 2, 3}
    (proposal,) = set(proposals.values())
    assert (proposal.members, proposal.reason) == ((0, 1, 2, 3), "rank 3 joined")
    job.agree(1, step=20)
    assert job.said(say.Enter) == {3: say.Enter(number=1, step=20, loop="{}")}
    job.adopt(0, 1, 2, 3)
    assert job.phase is Phase.RUNNING
    assert job.members == (0, 1, 2, 3)


def test_newcomers_wait_for_each_other_for_a_moment() -> None:
    job = running()
    job.lose(1)
    job.recover()
    job.come(1)
    job.prepare(2)
    assert job.wait(4.75) == []
    job.wait(0.5)
    assert [rank for rank, _, usable in job.need().devices if usable] == [0, 1, 2]


def test_a_newcomer_lost_while_it_prepares_disturbs_nobody() -> None:
    job = grown("preparing")
    assert job.die(3) == [*job.actions]
    assert job.told(say.Replace) == [("n1", say.Replace(rank=3, incarnation=2))]
    assert not job.said(say.View)


def test_a_newcomer_lost_while_its_plan_is_made() -> None:
    job = grown("ready")
    job.die(3)
    assert not job.said(say.Withdraw)
    assert job.told(say.Replace)
    assert job.plan() == []


def test_a_newcomer_lost_before_the_agreement() -> None:
    job = grown("proposed")
    job.die(3)
    assert job.said(say.Withdraw).keys() == {0, 1, 2}
    assert job.phase is Phase.RUNNING


def test_a_proposal_taken_back_too_late_gathers_all_in_an_epoch_of_its_own() -> None:
    job = grown("proposed")
    proposed = job.said(say.Propose)[0].epoch
    job.die(3)
    job.agree(1)
    view = job.said(say.View)[0]
    assert view.epoch > proposed
    assert view.members == (0, 1, 2)
    job.recover(versions=(1,))


@pytest.mark.parametrize("state", ["agreed", "adopted"])
def test_a_newcomer_lost_while_it_enters_is_a_loss(state: str) -> None:
    job = grown(state)
    job.die(3)
    assert job.said(say.View).keys() == {0, 1, 2}
    assert job.said(say.View)[0].losses[0].rank == 3
    job.recover(versions=(1,))


def test_a_member_lost_before_the_agreement_is_heard_of() -> None:
    """The members may be bound already: the epoch is beyond that of the proposal."""
    job = grown("proposed")
    proposed = job.said(say.Propose)[0].epoch
    job.die(0)
    assert job.said(say.View)[1].epoch > proposed
    assert job.members == (1, 2)
    job.recover(versions=(1,))
    # The newcomer still waits, and is proposed once more.
    assert job.state(3) == "ready"
    job.wait(6.0)
    assert job.need().request == "proposal 2"


def test_before_the_change_is_complete_newcomers_are_not_needed() -> None:
    job = grown("agreed")
    job.die(2)
    assert job.said(say.View).keys() == {0, 1, 3}
    job.arrive(0, versions=(1,))
    job.arrive(1, versions=(1, 2))
    assert [kill.rank for _, kill in job.told(say.Kill)] == [3]
    assert job.said(say.View)[0].members == (0, 1)
    assert {loss.rank for loss in job.said(say.View)[0].losses} == {2, 3}
    assert job.rules.job.slots.nodes["n1"].deaths_s == [100.0, 100.0]
    job.recover(versions=(1,))


def test_after_the_change_is_complete_a_newcomer_is_a_member() -> None:
    """Nobody's word of it has come yet, but members hold the new state alone."""
    job = grown("agreed")
    job.die(2)
    job.plan()
    job.arrive(0, versions=(2,))
    job.arrive(1, versions=(1, 2))
    assert job.actions == []
    job.arrive(3, versions=(2,))
    goes = job.said(say.Go)
    assert goes.keys() == {0, 1, 3}
    assert goes[0].version == 2


def test_a_newcomer_that_has_adopted_stays() -> None:
    job = grown("adopted")
    job.die(2)
    assert job.said(say.View)[0].members == (0, 1, 3)
    job.recover(versions=(2,))
    assert job.members == (0, 1, 3)


def test_of_two_states_the_one_that_lacks_fewer_ranks_is_the_source() -> None:
    job = grown("adopted")
    job.die(3)
    job.arrive(0, 1, 2, versions=(1, 2))
    job.plan()
    assert job.said(say.Go)[0].version == 1


def test_a_change_that_hangs_is_broken_off_once_its_step_is_reached() -> None:
    job = grown("agreed")
    job.wait(600.0)
    assert job.phase is Phase.CHANGING
    job.hear(say.NodeBeat(node="n0", step=13, alive=(0, 1)), "n0")
    job.wait(60.0)
    assert job.said(say.View).keys() == {0, 1, 2, 3}


def test_without_a_plan_newcomers_wait_and_try_again() -> None:
    job = grown("ready")
    job.refuse("no layout uses 4 devices")
    assert job.phase is Phase.RUNNING
    assert job.state(3) == "ready"
    assert job.rules.status()["refused"] == "no layout uses 4 devices"
    job.wait(61.0)
    assert job.need().request == "proposal 2"


def test_a_node_that_loses_one_after_the_other_gets_no_more() -> None:
    job = running()
    job.die(3)
    job.recover(region=1)
    for _ in range(2):
        assert job.state(3) == "preparing"
        job.die(3)
    assert job.told(say.Replace) == []
    assert job.rules.status()["nodes"]["n1"]["quarantined"]
    job.wait(1000.0)
    assert job.state(3) == "lost"
    job.take(job.rules.readmit("n1"))
    assert job.told(say.Replace) == [("n1", say.Replace(rank=3, incarnation=3))]


def test_old_deaths_are_forgotten() -> None:
    job = running(1, 8)
    for rank in range(3, 8):
        job.die(rank)
        job.recover(region=rank)
        assert job.told(say.Replace)
        job.wait(400.0)


# Drained nodes


STATES = ["asked", "proposed", "agreed", "unused", "released", "going", "drained"]


def drained(state: str = "drained") -> Driver:
    """A job of two nodes that is to do without the second, up to some state."""
    job = running()
    job.take(job.rules.drain("n1"))
    steps: list[Callable[[], object]] = [
        job.plan,
        lambda: job.agree(1),
        lambda: job.adopt(0, 1, 2, 3),
        job.plan,
        lambda: job.agree(2),
        lambda: [job.adopt(0, 1), *(job.hear(say.Leaving(rank=r, exit_code=0)) for r in (2, 3))],
    ]
    for step in steps[: STATES.index(state)]:
        step()
    return job


def test_a_drained_node_first_hands_over_its_state() -> None:
    job = drained("proposed")
    assert {r for r, _, usable in job.need().devices if usable} == {0, 1}
    assert job.said(say.Propose)[3].members == (0, 1, 2, 3)
    job = drained("released")
    assert job.said(say.Propose)[3].members == (0, 1)
    assert job.rules.job.proposal is not None
    assert job.rules.job.proposal.reason == "ranks 2, 3 drained"


def test_a_drained_node_leaves_and_may_come_back() -> None:
    job = drained("going")
    assert job.state(3) == "going"
    job.hear(say.Leaving(rank=3, exit_code=0))
    job.adopt(0, 1)
    job.hear(say.Leaving(rank=2, exit_code=0))
    assert job.phase is Phase.RUNNING
    assert job.ended is None
    assert (job.members, job.state(2), job.state(3)) == ((0, 1), "away", "away")
    job.take(job.rules.readmit("n1"))
    assert [message.rank for _, message in job.told(say.Replace)] == [2, 3]


def test_members_may_adopt_before_the_agreement_is_heard() -> None:
    job = drained("released")
    epoch = job.said(say.Propose)[0].epoch
    job.adopt(1, epoch=epoch)
    job.hear(say.Leaving(rank=3, exit_code=0))
    assert job.ended is None
    job.agree(2)
    job.adopt(0)
    assert job.phase is Phase.RUNNING


def test_one_who_has_left_by_a_proposal_taken_back_has_not_ended_the_job() -> None:
    job = drained("released")
    job.take(job.rules.readmit("n1"))
    assert job.said(say.Withdraw).keys() == {0, 1, 2, 3}
    job.agree(2)
    job.hear(say.Leaving(rank=3, exit_code=0))
    assert job.said(say.View).keys() == {0, 1, 2}
    job.recover()
    assert not job.rules.job.done


@pytest.mark.parametrize("state", ["agreed", "unused", "going"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_loss_while_a_node_is_drained(state: str, rank: int) -> None:
    """Until it has left, whoever is to go is needed, and may be asked to arrive."""
    job = drained(state)
    job.die(rank)
    assert set(job.members) == {0, 1, 2, 3} - {rank}
    assert {r for r, _, usable in job.need().devices if usable} == {0, 1} - {rank}
    job.recover()
    # Afterwards it is asked to go once more.
    assert job.need().request.startswith("proposal")


def test_a_node_lost_while_it_is_drained() -> None:
    for state in STATES[:-1]:
        job = drained(state)
        job.lose(1)
        assert job.said(say.View).keys() == {0, 1}
        job.recover()
        assert job.members == (0, 1)


def test_one_who_goes_while_the_others_are_gathered() -> None:
    job = drained("going")
    job.die(1)
    job.arrive(0, 3, versions=(0, 1))
    job.plan()
    job.hear(say.Leaving(rank=2, exit_code=0))
    assert job.said(say.View).keys() == {0, 3}
    job.recover()


def test_drained_devices_are_used_if_there_is_no_other_way() -> None:
    job = drained("agreed")
    job.die(1)
    job.refuse("1 device is too few")
    assert {r for r, _, usable in job.need().devices if usable} == {0, 2, 3}
    job.recover()


def test_the_only_node_is_not_drained() -> None:
    job = running(1, 2)
    job.take(job.rules.drain("n0"))
    assert job.phase is Phase.RUNNING
    status = job.rules.status()
    assert "no other node would be left" in status["refused"]
    assert status["nodes"]["n0"]["kept"]


def test_what_was_refused_of_one_node_is_not_said_of_the_next() -> None:
    job = running(3, 1)
    job.take(job.rules.drain("n1"))
    job.refuse()
    assert job.rules.status()["refused"] == "rank 1 cannot be spared: too few devices"
    job.take(job.rules.drain("n2"))
    status = job.rules.status()
    assert (status["refused"], status["under_way"]) == ("", "ranks 1, 2 drained")
    assert not any(node["kept"] for node in status["nodes"].values())


def test_a_drained_node_that_cannot_be_spared_does_not_keep_newcomers_out() -> None:
    job = running(3, 1)
    job.die(2)
    job.recover()
    job.take(job.rules.drain("n1"))
    job.refuse()
    job.prepare(2)
    job.plan()
    assert job.said(say.Propose)[2].members == (0, 1, 2)


def test_newcomers_of_a_drained_node_are_ended() -> None:
    job = grown("proposed")
    job.take(job.rules.drain("n1"))
    assert job.said(say.Withdraw).keys() == {0, 1, 2, 3}
    assert [kill.rank for _, kill in job.told(say.Kill)] == [3]


def test_a_second_thought_about_a_drain() -> None:
    job = drained("proposed")
    job.take(job.rules.readmit("n1"))
    assert job.said(say.Withdraw).keys() == {0, 1, 2, 3}
    assert job.wait(10.0) == []


def test_unknown_nodes_are_named_by_an_error() -> None:
    job = running()
    for call in (job.rules.drain, job.rules.readmit):
        with pytest.raises(KeyError):
            call("nowhere")
