"""What one peer can do to a run, by accident or on purpose, in virtual time: the others go on at their pace."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from swarmd.errors import Code, Refused
from swarmd.plan.runs.outcome import Outcome
from swarmd.plan.runs.progress import leader_order
from swarmd.plan.trust import standing
from swarmd.protocol.fields import Message
from swarmd.protocol.runs.recipe import Batch, Optimizer
from swarmd.protocol.wire.rounds import Accepted, Beat, Group, Prepare, Propose, Pulse, Received
from swarmd.train.rounds.following import LONGEST_GATHER_S
from swarmd.train.rounds.leader import Leader
from swarmd.train.rounds.versions import GroupVersions
from swarmd.train.store.chronicle import Chronicle
from swarmd.train.store.proposer import RoundFailed
from swarmd.train.vectors.state import Vector
from swarmd.values import PeerId
from tests.train.world import training

Choose = Callable[[bytes, bool, float], PeerId]


async def test_two_that_follow_each_other_no_more_meet_again(virtual_time: MockClock) -> None:
    """Each alone, their commits would wait for a minute."""
    async with training(seed=9, n=2) as world:
        await world.until(2)
        one, other = (m.trainer for m in world.trainers())
        for trainer, peer in ((one, other.me), (other, one.me)):
            trainer.joining.leaders.pass_over(peer, trainer.ledger.head, trio.current_time())
        await world.until(world.epoch + 3, within_s=30)
        assert all(len(peers) == 2 for peers in world.contributors(world.epoch))


# --- what it computes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", [lambda v: v * math.nan, lambda v: v + 1e4])
async def test_round_goes_on_without_a_liar(virtual_time: MockClock, lie: Callable[[Vector], Vector]) -> None:
    async with training(seed=5, n=3) as world:
        honest = world.trainers()
        liar = world.add()
        assert liar.source is not None
        liar.source.spoil = lie
        await trio.sleep(60)
        assert world.epoch > 5
        assert not any(liar.peer in peers for peers in world.contributors(world.epoch))
        assert all(np.isfinite(m.trainer.state.parameters).all() for m in honest if m.trainer.state is not None)


async def test_whoever_gives_faulty_numbers_again_loses_its_standing(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it, follows it or counts on its samples any more; after a while it may try again."""
    monkeypatch.setattr(standing, "HALF_LIFE_S", 90.0)
    async with training(seed=14, n=3) as world:
        honest = world.trainers()
        liar = world.add()
        assert liar.source is not None
        liar.source.spoil = lambda v: v * math.nan
        while not all(m.trainer.members.shunned() == [liar.peer] for m in honest):
            await trio.sleep(1)
        for member in honest:
            member.trainer.joining.counters.last = None
        await world.pace(4)
        last = [times for m in honest if (times := m.trainer.joining.counters.last) is not None]
        assert last
        assert not any(times.left_out for times in last)
        liar.source.spoil = lambda v: v
        await trio.sleep(90)
        await world.pace(4)
        assert any(liar.peer in peers for peers in world.contributors(4))


async def test_who_is_left_out_as_it_leads_still_clips_for_all(virtual_time: MockClock) -> None:
    """Its own numbers are refused; the factor that its commit names is that of the others' average."""
    async with training(seed=6, n=3, optimizer=Optimizer(kind="sgd", learning_rate=0.001, clip_norm=1.0)) as world:
        liar = world.add()
        assert liar.source is not None
        peers = [member.peer for member in world.trainers()]

        def leads() -> bool:  # else it would be left out before its turn comes
            return leader_order(liar.trainer.ledger.head, peers)[0] == liar.peer

        liar.source.spoil = lambda v: v * math.nan if leads() else v
        await world.until(1)
        while not (leads() or liar.trainer.joining.counters.led):
            await trio.sleep(0.1)
        n_led = liar.trainer.joining.counters.led
        while liar.trainer.joining.counters.led == n_led:
            await trio.sleep(1)
        assert all(s.commit.clip < 0.5 for s in liar.trainer.ledger.sealed)
        led = [s.commit for s in liar.trainer.ledger.sealed if leader_order(s.commit.parent, peers)[0] == liar.peer]
        assert liar.peer not in {c.peer for c in led[-1].contributors}


# --- what it says --------------------------------------------------------------------------------------------------


async def test_reducer_that_blames_everybody_is_left_out_itself(virtual_time: MockClock) -> None:
    async with training(seed=5) as world:
        liar, honest = world.add("reduce"), world.trainers()  # as a leader its own word would do, for its round
        await world.until(6)
        tell = liar.trainer.joining.participation._tell

        async def blame(peer: PeerId, message: Message, payload: bytes = b"") -> None:
            if isinstance(message, Beat):
                received = tuple(Received(r.member, r.n_elements, None, "bad") for r in message.received)
                message = replace(message, received=received)
            await tell(peer, message, payload)

        liar.trainer.joining.participation._tell = blame
        await world.pace(8)
        assert all({m.peer for m in honest} <= peers for peers in world.contributors(7))
        assert {p for m in honest for p in m.trainer.members.shunned()} <= {liar.peer}, "one word is not enough"


async def test_claimed_bandwidth_sets_nobodys_deadline(virtual_time: MockClock) -> None:
    """It says that its link carries next to nothing, and then sends nothing: that is not waited for."""
    async with training(seed=7, n=3) as world:
        crawler = world.add(bytes_per_s=0.0)
        await world.until(6)
        joining = crawler.trainer.joining
        take_group = joining.participation.take_group

        async def send_nothing(peer: PeerId) -> None:
            await trio.sleep_forever()

        async def take_and_be_silent(peer: PeerId, group: Group) -> None:
            await take_group(peer, group)
            if joining.round is not None:
                joining.round._sending._send_contribution = send_nothing  # type: ignore[method-assign]

        joining.participation.take_group = take_and_be_silent  # type: ignore[method-assign]
        assert max(await world.pace(4)) < 60


async def test_many_named_successors_are_forgotten(virtual_time: MockClock) -> None:
    async with training(seed=8) as world:
        await world.until(6)
        flooder, victim = world.trainers()[:2]
        channel = await flooder.rpc.channel(victim.peer, "bulk")
        for i in range(2000):
            await channel.send(Pulse(run=world.run.id, parent=b"x" * 32, successor=f"nobody{i}"))
        await trio.sleep(5)
        assert len(victim.trainer.joining.leaders._leading) <= len(world.members)


async def test_anchor_that_says_yes_and_does_not_sign_stops_nobody(virtual_time: MockClock) -> None:
    async with training(seed=5, n_anchors=3) as world:
        await world.until(6)
        usual_s = np.mean(await world.pace())
        chronicle = world.members[world.anchors[0].peer_id].trainer.chronicle
        be_anchor = chronicle.be_anchor

        async def say_yes(peer: PeerId, message: Prepare | Propose, payload: memoryview) -> tuple[Message, bytes]:
            if isinstance(message, Propose):
                return Accepted(re=message.id, promised=message.ballot), b""
            return await be_anchor(peer, message, payload)

        chronicle.be_anchor = say_yes  # type: ignore[method-assign]
        assert np.mean(await world.pace()) < 5 * usual_s


async def test_join_before_the_agreed_time_is_refused(virtual_time: MockClock) -> None:
    """Fewer samples were there than forecast, and all compute on: no word that came late keeps one from that."""
    async with training(seed=9, n=2) as world:
        await world.until(6)
        caller, called = world.trainers()
        called.trainer.joining.following.retry_at = trio.current_time() + 20
        with pytest.raises(Refused, match="fewer samples") as refused:
            called.trainer.joining.take_join(caller.peer, caller.trainer.joining.participation.make_join())
        assert refused.value.retry_after_s == pytest.approx(20)
        assert called.trainer.joining.leader is None
        called.trainer.joining.following.retry_at = 0.0


# --- what it lacks -------------------------------------------------------------------------------------------------


async def test_what_somebody_has_is_not_lost_though_it_does_not_answer(virtual_time: MockClock) -> None:
    """A newcomer that reaches nobody must not take the run back to what it has itself."""
    async with training(seed=5, n=3) as world:
        await world.until(3)
        me, *others = world.trainers()
        now = trio.current_time()
        for other in others:
            me.trainer.members.suspect(other.peer, now)
        assert not {m.peer for m in others} & me.trainer.members.look(now).keys()
        assert min(me.trainer.members.states()[m.peer] for m in others) >= 2


# --- when it leads -------------------------------------------------------------------------------------------------


async def test_leader_that_never_begins_is_replaced(virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with training(seed=10) as world:
        await world.until(6)
        idler, *others = world.trainers()
        lead = Leader.lead

        async def never(leader: Leader) -> Outcome:
            if leader._me == idler.peer:
                await trio.sleep_forever()
            return await lead(leader)

        monkeypatch.setattr(Leader, "lead", never)
        assert max(await world.pace(8, others)) < LONGEST_GATHER_S + 10, "it was waited for more than once"


async def test_after_a_round_that_failed_all_join_anew_at_once(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(seed=4) as world:
        await world.until(12)
        usual_s = np.mean(await world.pace())
        average, failed = Leader._average, []

        async def fail_once(leader: Leader, versions: GroupVersions) -> bytes:
            if not failed:
                failed.append(leader)
                raise RoundFailed("once")
            return await average(leader, versions)

        monkeypatch.setattr(Leader, "_average", fail_once)
        begun = trio.current_time()
        await world.until(world.epoch + 1)
        assert trio.current_time() - begun < 2 * usual_s + 1.0
        assert failed
        assert world.contributors(1) == [{m.peer for m in world.trainers()}]


async def test_who_joined_what_its_leader_gave_up_without_a_word_joins_anew(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears that its leader lives, and would wait for 30 s for a round that it is not in."""
    async with training(seed=9, n=2) as world:
        await world.until(6)
        usual_s = np.mean(await world.pace())
        gather, given_up = Leader._gather_members, []

        async def give_up_once(leader: Leader) -> None:
            await gather(leader)
            if not given_up:
                given_up.append(set(leader.joined))
                raise Refused(Code.STALE_EPOCH, "there is more, says an anchor")

        async def find_nothing(chronicle: Chronicle, peers: list[PeerId]) -> bool:
            return False

        monkeypatch.setattr(Leader, "_gather_members", give_up_once)
        monkeypatch.setattr(Chronicle, "sync_commits", find_nothing)
        begun = trio.current_time()
        await world.until(world.epoch + 1)
        assert given_up == [{m.peer for m in world.trainers()}]
        assert trio.current_time() - begun < 2 * usual_s + 3.0
        assert world.contributors(1) == [{m.peer for m in world.trainers()}]


async def test_two_who_begin_to_lead_come_to_one(virtual_time: MockClock) -> None:
    """Half of them take one peer for the first by the rule, half another: no round waits for that."""
    async with training(seed=7) as world:
        await world.until(6)
        usual_s = np.mean(await world.pace())
        everybody = [m.peer for m in world.trainers()]

        def takes(place: int, choose: Choose) -> Choose:
            seen = set[bytes]()

            def chosen(parent: bytes, may_lead: bool, now: float) -> PeerId:
                if parent in seen:
                    return choose(parent, may_lead, now)
                seen.add(parent)
                return leader_order(parent, everybody)[place]

            return chosen

        for i, member in enumerate(world.trainers()):
            leaders = member.trainer.joining.leaders
            leaders.choose = takes(i % 2, leaders.choose)  # type: ignore[method-assign]
        assert max(await world.pace(12)) < 1.5 * usual_s, "somebody waited for who follows another"
        assert all(len(peers) == 4 for peers in world.contributors(12))


async def test_silence_of_leaders_is_noticed_however_long_updates_take(virtual_time: MockClock) -> None:
    """The time between two rounds is no gap between signs of life."""
    async with training(seed=33, n=3, batch=Batch(target=400, micro=2, tokens=8)) as world:
        await world.until(20)
        assert all(m.trainer.joining.following.pulses.limit_s() < 3 for m in world.trainers())


async def test_two_who_take_each_other_for_lost_find_each_other(virtual_time: MockClock) -> None:
    """Each begins a round of its own, and no anchor signs either while both live."""
    async with training(seed=12, n=2) as world:
        await world.until(6)
        usual_s = np.mean(await world.pace())
        one, other = world.trainers()
        for _ in range(4):
            now = trio.current_time()
            one.trainer.members.suspect(other.peer, now)
            other.trainer.members.suspect(one.peer, now)
            await world.until(world.epoch + 1)
        begun = trio.current_time()
        await world.until(world.epoch + 4)
        assert trio.current_time() - begun < 8 * usual_s
