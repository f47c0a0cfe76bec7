"""What a worker hears from the coordinator, and its waits; and how it says how far it is."""

from __future__ import annotations

import threading
import time

import pytest

from megatron.resilience.recovery import member as member_module
from megatron.resilience.recovery.abort import Abort
from megatron.resilience.recovery.member import Member, StoppedError, SupersededError
from megatron.resilience.recovery.pace import Pace
from resihp_ext.control import messages as say
from resihp_ext.control.messages import Message
from resihp_ext.errors import ResiHPError

pytestmark = pytest.mark.unit

LONG_S = 10.0
SOON_S = 0.1


class Sent(list[Message]):
    """A link that keeps what it is given."""

    send = list[Message].append


def worker(rank: int = 1) -> tuple[Member, Sent]:
    member, sent = Member(rank, Abort()), Sent()
    member.link = sent
    return member, sent


def view(epoch: int, *members: int) -> say.View:
    losses = (say.Loss(rank=0, cause="was killed by signal 9 (SIGKILL)"),)
    return say.View(epoch=epoch, members=members or (1, 2), losses=losses)


def go(epoch: int) -> say.Go:
    return say.Go(epoch=epoch, plan="{}", region=0, result=(), version=0, reason="rank 0 is lost")


def propose(number: int, epoch: int = 5) -> say.Propose:
    return say.Propose(number=number, epoch=epoch, members=(0, 1), plan="{}", reason="rank 0 joins")


def later(member: Member, *messages: Message) -> None:
    """The link's thread hears something a moment from now."""

    def hear() -> None:
        time.sleep(0.05)
        for message in messages:
            member.hear(message)

    threading.Thread(target=hear, daemon=True).start()


def test_a_view_breaks_off_what_is_waited_for_before_anybody_asks() -> None:
    member, _ = worker()
    before_s = time.perf_counter()
    member.hear(view(1))
    assert member.abort.raised
    assert before_s <= member.heard_s <= time.perf_counter()
    assert member.newer_view(0.0)
    assert member.epoch == 0, "until the main thread goes over to it"
    assert member.enter_view() == view(1)
    assert member.epoch == 1
    assert not member.newer_view(0.0), "each view is entered once"


def test_the_newest_view_counts() -> None:
    member, _ = worker()
    member.hear(view(1))
    member.hear(view(3, 1))
    member.hear(view(2))
    assert member.enter_view() == view(3, 1)
    member.abort.forget()
    for old in (view(1), view(3)):
        member.hear(old)
    assert not member.newer_view(0.0)
    assert not member.abort.raised


def test_who_waits_for_a_view_is_woken() -> None:
    member, _ = worker()
    assert not member.newer_view(0.01)
    begun_s = time.perf_counter()
    later(member, view(1))
    assert member.newer_view(LONG_S)
    assert time.perf_counter() - begun_s < LONG_S / 2


def test_a_go_counts_in_its_own_epoch_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    member, _ = worker()
    member.hear(view(2))
    member.enter_view()
    member.hear(go(1))
    later(member, go(2))
    assert member.wait_for_go() == go(2)
    monkeypatch.setattr(member_module, "GO_TIMEOUT_S", 0.01)
    with pytest.raises(ResiHPError, match=r"rank 1: the coordinator .* epoch 2"):
        member.wait_for_go()


def test_a_loss_while_waiting_for_a_go_begins_again() -> None:
    member, _ = worker()
    member.hear(view(1))
    member.enter_view()
    later(member, view(2))
    with pytest.raises(SupersededError, match="epoch 2 has begun"):
        member.wait_for_go()
    member.enter_view()
    member.hear(go(1))
    later(member, go(2))
    assert member.wait_for_go().epoch == 2, "a late word of the epoch before is not taken"


def test_a_go_that_a_loss_overtakes_is_void(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "GO_TIMEOUT_S", 0.01)
    member, _ = worker()
    member.hear(go(1))
    member.hear(view(1))
    member.enter_view()
    with pytest.raises(ResiHPError, match="has not answered"):
        member.wait_for_go()


def test_a_stop_ends_every_wait_and_breaks_off_work() -> None:
    for wait in (
        lambda member: member.newer_view(LONG_S),
        lambda member: member.wait_for_go(),
        lambda member: member.wait_to_enter(1),
    ):
        member, _ = worker()
        later(member, say.Stop(exit_code=75, cause="not enough devices are left"))
        with pytest.raises(StoppedError, match="not enough devices") as stopped:
            wait(member)
        assert stopped.value.exit_code == 75
        assert member.abort.raised


def test_a_proposal_lasts_until_it_is_withdrawn_taken_or_void() -> None:
    member, _ = worker()
    member.hear(propose(4))
    member.hear(say.Withdraw(number=3))
    assert member.proposal == propose(4)
    member.hear(say.Withdraw(number=4))
    assert member.proposal is None
    member.hear(propose(5))
    assert not member.abort.raised, "nobody stops for a proposal"
    assert member.take_proposal() == propose(5)
    assert member.epoch == 5
    assert member.proposal is member.take_proposal() is None
    member.hear(propose(6, epoch=6))
    member.hear(view(7))
    assert member.proposal is None, "a loss makes void what was proposed"


@pytest.mark.parametrize("enter_first", [True, False])
def test_a_newcomer_needs_the_proposal_and_the_step(enter_first: bool) -> None:
    member, sent = worker(3)
    enter = say.Enter(number=2, step=7, loop="{}")
    wrong, right = propose(1), propose(2)
    later(member, *((enter, wrong, right) if enter_first else (wrong, right, enter)))
    assert member.wait_to_enter(3) == enter
    assert member.proposal == right
    assert sent == [say.Ready(rank=3)]


def test_a_newcomer_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_module, "ENTER_TIMEOUT_S", 0.05)
    member, _ = worker(3)
    member.hear(say.Enter(number=2, step=7, loop="{}"))
    member.hear(propose(1))
    with pytest.raises(ResiHPError, match="rank 3: not taken in"):
        member.wait_to_enter(3)


def test_without_a_link_words_are_lost_and_others_are_ignored() -> None:
    member = Member(0, Abort())
    member.tell(say.Armed(rank=0))
    member.hear(say.Armed(rank=1))
    assert not member.newer_view(0.0)


# -- pace ----------------------------------------------------------------------


def test_every_phase_is_a_tick_and_goes_out_as_it_is() -> None:
    pace = Pace(2)
    pace.step = 9
    pace.enter("backward", 3)
    first = pace.told()
    expected = {"rank": 2, "step": 9, "micro_batch": 3, "phase": "backward", "waiting": False}
    assert first == say.Progress(**expected, ticks=1)
    pace.enter("vote", waiting=True)
    assert pace.told().waiting
    pace.enter("optimizer", -1)
    last = pace.told()
    assert (last.waiting, last.micro_batch, last.ticks) == (False, 0, 3)
    assert say.decode(say.encode(last)) == last, "within the limits of the schema"


def test_a_wait_is_seen_while_it_lasts_and_ends_with_a_tick() -> None:
    pace, seen = Pace(0), []

    def attempt() -> None:
        with pace.wait():
            seen.append(pace.told())
            raise ConnectionError

    with pytest.raises(ConnectionError):
        attempt()
    assert (seen[0].waiting, seen[0].ticks) == (True, 0)
    assert (pace.told().waiting, pace.told().ticks) == (False, 1)
