"""The next hop, which a client names: only what its own record announces is dialled, and failures all look alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import PeerTimeout, RemoteProtocolError, Unreachable
from swarmd.node.serving.next_hop import AGAIN_AFTER_S, LOST_S, PUSH_TIMEOUT_S, NextHopDialer
from swarmd.node.serving.replies import Replies
from swarmd.plan.chains.hop import HopState, SessionHop, WaitingOps
from swarmd.protocol.wire.messages import OpenSession, Reroute
from swarmd.values import PeerId, Span

ME = PeerId("me")
CLIENT = PeerId("client")
NEXT = PeerId("successor")
ITS_OWN = ("/ip4/192.0.2.7/tcp/4001",)


class PlayedDialling:
    """Records, and a network in which dialling fails in some way; None: it succeeds."""

    def __init__(self, failure: Exception | None = None, after_s: float = 0.0) -> None:
        self.failure = failure
        self.after_s = after_s
        self.announced: dict[PeerId, tuple[str, ...]] = {}
        self.learnt: list[tuple[str, ...]] = []
        self.n_dialled = 0
        self.is_connected = False
        network = SimpleNamespace(peer_id=ME, learn=lambda _, addresses: self.learnt.append(addresses))
        network.way_to = lambda peer: "direct" if self.is_connected else None
        rpc: Any = SimpleNamespace(find_channel=lambda *_: None, channel=self.channel, network=network)
        exchange: Any = SimpleNamespace(addresses_of=lambda peer: self.announced.get(peer, ()))
        self.onward = NextHopDialer(rpc, exchange)

    async def channel(self, peer: PeerId, purpose: str) -> None:
        self.n_dialled += 1
        await trio.sleep(self.after_s)
        if self.failure is not None:
            raise self.failure


@pytest.mark.parametrize(
    ("failure", "after_s", "is_announced"),
    [
        (Unreachable("connection refused"), 0.0, True),
        (RemoteProtocolError("the handshake failed: SSH-2.0"), 0.2, True),
        (PeerTimeout("no answer"), 100.0, True),
        (None, 0.0, False),
    ],
    ids=["closed", "something else", "silent", "no record"],
)
async def test_whatever_is_there_the_client_hears_the_same_after_the_same_time(
    virtual_time: MockClock, failure: Exception | None, after_s: float, is_announced: bool
) -> None:
    world = PlayedDialling(failure, after_s)
    begun = trio.current_time()
    if is_announced:
        world.announced[NEXT] = ITS_OWN
    decision = await world.onward.reach("interactive", CLIENT, NEXT)
    assert trio.current_time() - begun == pytest.approx(PUSH_TIMEOUT_S)
    assert not decision.action
    assert decision.reason == "returns to the client: uccessor cannot be reached from here"
    assert world.n_dialled == is_announced
    assert world.learnt == [ITS_OWN] * is_announced


async def test_a_record_that_comes_meanwhile_is_enough(virtual_time: MockClock) -> None:
    world = PlayedDialling()
    async with trio.open_nursery() as nursery:

        async def announce() -> None:
            await trio.sleep(1)
            world.announced[NEXT] = ITS_OWN

        nursery.start_soon(announce)
        assert (await world.onward.reach("training", CLIENT, NEXT)).action
    assert world.learnt == [ITS_OWN]


async def test_who_is_connected_needs_no_record(virtual_time: MockClock) -> None:
    world = PlayedDialling()
    world.is_connected = True
    decision = await world.onward.reach("interactive", CLIENT, NEXT)
    assert (decision.action, decision.reason) == (True, "pushes straight to uccessor")
    assert not world.learnt


async def test_who_could_not_be_reached_is_dialled_again_after_a_while_or_at_another_place(
    virtual_time: MockClock,
) -> None:
    world = PlayedDialling(Unreachable("connection refused"))
    world.announced[NEXT] = ITS_OWN
    for _ in range(10):
        await world.onward.reach("interactive", CLIENT, NEXT)
    assert world.n_dialled == 1
    world.announced[NEXT] = ("/ip4/192.0.2.8/tcp/4001",)
    await world.onward.reach("interactive", CLIENT, NEXT)
    assert world.n_dialled == 2
    await trio.sleep(AGAIN_AFTER_S)
    world.failure = None
    assert (await world.onward.reach("interactive", CLIENT, NEXT)).action


@pytest.mark.parametrize(("successor", "why"), [(None, "answers"), (CLIENT, "answers"), (ME, "is here too")])
async def test_the_client_and_this_server_are_not_dialled(successor: PeerId | None, why: str) -> None:
    world = PlayedDialling()
    decision = await world.onward.reach("interactive", CLIENT, successor)
    assert decision.action
    assert why in decision.reason
    assert not world.n_dialled


async def test_of_a_peer_that_was_just_lost_it_is_said_at_once_and_without_a_dial(virtual_time: MockClock) -> None:
    """Repairs wait for it. A connection beside the channel may look alive for a moment: its end is noticed later."""
    world = PlayedDialling()
    begun = trio.current_time()
    world.announced[NEXT] = ITS_OWN
    world.is_connected = True
    world.onward.note_lost(NEXT, "interactive")
    decision = await world.onward.reach("interactive", CLIENT, NEXT)
    assert decision.reason == "returns to the client: uccessor cannot be reached from here"
    assert (trio.current_time(), world.n_dialled) == (begun, 0)
    assert (await world.onward.reach("training", CLIENT, NEXT)).action, "a channel of another purpose says nothing"
    await trio.sleep(LOST_S)
    assert (await world.onward.reach("interactive", CLIENT, NEXT)).action


async def test_what_comes_late_of_a_former_successor_says_nothing_of_the_present_one(virtual_time: MockClock) -> None:
    """A repair gives a hop another successor while the first is still dialled in vain."""
    world = PlayedDialling(Unreachable("connection refused"))
    world.announced[NEXT] = ITS_OWN
    sent: list[bytes] = []
    worker: Any = SimpleNamespace(loaded=None)
    outbox: Any = SimpleNamespace(tell=lambda _, frame: sent.append(frame))
    channel: Any = SimpleNamespace(peer=CLIENT)
    hop = SessionHop(HopState(CLIENT, CLIENT), Span(0, 3), NEXT, WaitingOps(0, 0))
    replies = Replies(world.onward, worker, outbox)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(replies.reply_opened, channel, OpenSession(id=1), hop)
        await trio.sleep(1)
        hop.successor = ME
        await replies.reply_rerouted(channel, Reroute(id=2), hop)
        assert (hop.push, hop.why) == (True, "the next hop is here too")
    assert trio.current_time() >= PUSH_TIMEOUT_S
    assert (hop.push, hop.why) == (True, "the next hop is here too")
    assert len(sent) == 2
