"""A server's lanes: who may put what in, how much may wait, and that nobody can end more than their own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio

from swarmd.errors import Code, Refused
from swarmd.node.serving.lanes import ServerLanes
from swarmd.node.serving.next_hop import NextHopDialer
from swarmd.node.serving.served import ServedBlocks
from swarmd.node.worker.worker_link import WorkerReply
from swarmd.protocol.fields import Request, TensorMeta
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.wire import messages
from swarmd.protocol.wire import worker as worker_messages
from swarmd.protocol.wire.frames import Frame, FrameDecoder
from swarmd.protocol.wire.messages import AnyMessage, Opened, Refusal
from swarmd.protocol.wire.tuning import Backward, CloseLane, Forward, Gradients, OpenLane, PutTuned, TunedHeld
from swarmd.usage_ledger import UsageLedger
from swarmd.values import ModelId, PeerId, Span

KEY = b"l" * 16
CLIENT, BEFORE, AFTER, STRANGER = (Identity(bytes([n]) * 32).peer_id for n in range(4))


class LaneScene:
    """What is around the lanes of one server: a worker that remembers, peers that hear."""

    def __init__(self, limit_bytes: int = 1_000) -> None:
        self.to_worker: list[AnyMessage] = []
        self.heard: list[tuple[PeerId, AnyMessage]] = []
        self.opened: list[AnyMessage] = []
        rpc = SimpleNamespace(
            find_channel=self.find_channel, channel=self.channel, network=SimpleNamespace(), sponsor_of=str.encode
        )
        rpc.network = SimpleNamespace(peer_id=PeerId("me"), learn=lambda *_: None)
        roster = SimpleNamespace(principal=lambda peer: peer.encode(), require_member=lambda *_: None)
        exchange = SimpleNamespace(roster=roster, addresses_of=lambda _: ())
        served = ServedBlocks(Identity(bytes(32)), UsageLedger(None), ModelId("m"), Span(0, 4), "float32", limit_bytes)
        onward = NextHopDialer(rpc, exchange)  # type: ignore[arg-type]
        attributes = {"served": served, "require_serving": lambda *_: None, "onward": onward}
        self.server: Any = SimpleNamespace(is_draining=False, **attributes)
        worker: Any = SimpleNamespace(send=self.send, ask=self.ask, loaded=None, is_online=True)
        self.answers: list[WorkerReply] = []
        self.lanes = ServerLanes(rpc, exchange, self.server, worker, self.deliver)  # type: ignore[arg-type]

    async def deliver(self, peer: PeerId, message: AnyMessage, frame: Frame) -> None:
        await self.lanes.handle(peer, message, frame, None)

    async def ask(self, request: Request, payload: bytes) -> WorkerReply:
        self.answers.append(WorkerReply())
        await self.send(messages.encode_frame(msgspec.structs.replace(request, id=len(self.answers)), payload))
        return self.answers[-1]

    async def send(self, raw: bytes) -> None:
        (frame,) = FrameDecoder().feed_untrusted(raw)
        self.to_worker.append(worker_messages.decode(frame.header))

    def find_channel(self, peer: PeerId, purpose: str) -> Any:
        async def send_raw(raw: bytes) -> None:
            await trio.lowlevel.checkpoint()
            for frame in FrameDecoder().feed_untrusted(raw):
                message = messages.decode_untrusted(frame.header)
                if isinstance(message, Opened):
                    self.opened.append(message)
                else:
                    self.heard.append((peer, message))

        return SimpleNamespace(send_raw=send_raw, can_send=lambda _: True)

    async def channel(self, peer: PeerId, purpose: str) -> Any:
        return self.find_channel(peer, purpose)

    async def give(self, peer: PeerId, message: AnyMessage, payload: bytes = b"") -> None:
        """Have ``peer`` send something."""
        (frame,) = FrameDecoder().feed_untrusted(messages.encode_frame(message, payload))
        channel = SimpleNamespace(peer=peer, is_open=True)
        assert await self.lanes.handle(peer, message, frame, channel)  # type: ignore[arg-type]

    async def worker_says(self, message: AnyMessage) -> bool:
        (frame,) = FrameDecoder().feed_untrusted(messages.encode_frame(message))
        if isinstance(message, Refusal):
            known = self.lanes.take_worker_refusal(message, frame)
        elif handler := self.lanes.worker_handlers().get(type(message)):
            known = True
            await handler(message, frame, False)
        await trio.testing.wait_all_tasks_blocked()
        return known


@asynccontextmanager
async def lanes(limit_bytes: int = 1_000) -> AsyncIterator[LaneScene]:
    """A server with one lane, over blocks [1, 3)."""
    world = LaneScene(limit_bytes)
    async with trio.open_nursery() as nursery:
        await nursery.start(world.lanes.run)
        await world.give(CLIENT, OpenLane(1, KEY, "m", 1, 3, predecessor=BEFORE, successor=AFTER))
        await trio.testing.wait_all_tasks_blocked()
        assert len(world.opened) == 1
        yield world
        nursery.cancel_scope.cancel()


def forward(seq: int = 1, start: int = 1) -> Forward:
    return Forward(KEY, start, seq, tensor=TensorMeta(1, 1, 1))


async def refused(world: LaneScene, peer: PeerId, message: AnyMessage, payload: bytes = b"") -> Code:
    with pytest.raises(Refused) as failure:
        await world.give(peer, message, payload)
    return failure.value.code


async def test_only_neighbours_and_the_client_put_something_in() -> None:
    async with lanes() as world:
        for peer in (CLIENT, BEFORE):
            await world.give(peer, forward())
        for peer in (CLIENT, AFTER):
            await world.give(peer, Backward(KEY, 3, 1))
        for peer, message in ((STRANGER, forward()), (AFTER, forward()), (BEFORE, Backward(KEY, 3, 1))):
            assert await refused(world, peer, message) is Code.STRANGER
        assert await refused(world, CLIENT, forward(start=2)) is Code.NO_SESSION
        assert await refused(world, STRANGER, OpenLane(1, KEY, "m", 0, 2)) is Code.STRANGER
        await world.give(STRANGER, CloseLane(KEY, 1))
        assert world.lanes.snapshot().lanes == 1, "who did not open a lane does not close it"


async def test_what_comes_out_goes_to_the_neighbours_and_parameters_to_the_client() -> None:
    async with lanes() as world:
        assert await world.worker_says(Forward(KEY, 3, 1))
        assert await world.worker_says(Backward(KEY, 1, 1))
        assert await world.worker_says(Gradients(KEY, 1, 1))
        assert [peer for peer, _ in world.heard] == [AFTER, BEFORE, CLIENT]
        assert not await world.worker_says(Refusal(session=b"s" * 16, start=1)), "a session's, not a lane's"


async def test_what_waits_is_bounded_and_a_refusal_frees_its_own_kind_only() -> None:
    async with lanes(limit_bytes=1_000) as world:
        await world.give(CLIENT, forward(seq=7), bytes(600))
        assert await refused(world, CLIENT, forward(seq=8), bytes(600)) is Code.NO_CAPACITY
        await world.give(CLIENT, Backward(KEY, 3, 7))
        await world.worker_says(Refusal(session=KEY, start=3, seq=7, code="not_held"))
        assert await refused(world, CLIENT, forward(seq=8), bytes(600)) is Code.NO_CAPACITY
        await world.worker_says(Refusal(session=KEY, start=1, seq=7, code="not_finite"))
        await world.give(CLIENT, forward(seq=8), bytes(600))


async def test_a_neighbour_that_is_gone_ends_the_lane_and_the_client_hears_it_once() -> None:
    async with lanes() as world:
        world.lanes.on_peer_gone(AFTER)
        world.lanes.on_peer_gone(BEFORE)
        await trio.testing.wait_all_tasks_blocked()
        ((peer, refusal),) = world.heard
        assert peer == CLIENT
        assert isinstance(refusal, Refusal)
        assert refusal.code == Code.SESSION_LOST
        assert isinstance(world.to_worker[-1], CloseLane)
        assert world.lanes.snapshot().lanes == 0


async def test_a_client_that_is_gone_leaves_nothing_behind() -> None:
    async with lanes() as world:
        world.lanes.on_peer_gone(CLIENT)
        await trio.testing.wait_all_tasks_blocked()
        assert isinstance(world.to_worker[-1], CloseLane)
        assert await refused(world, BEFORE, forward()) is Code.NO_SESSION


async def test_a_lane_that_is_opened_again_forgets_where_it_ended() -> None:
    async with lanes() as world:
        await world.give(CLIENT, OpenLane(2, KEY, "m", 1, 4, predecessor=BEFORE))
        assert await refused(world, CLIENT, Backward(KEY, 3, 1)) is Code.NO_SESSION
        await world.give(CLIENT, Backward(KEY, 4, 1))


async def test_a_server_that_drains_takes_backwards_only() -> None:
    async with lanes() as world:
        world.server.is_draining = True
        assert await refused(world, CLIENT, forward()) is Code.NOT_SERVING
        await world.give(CLIENT, Backward(KEY, 3, 1))


async def test_clients_hear_that_a_server_stops_before_it_does() -> None:
    """Else a micro-batch that waits for one further down the chain waits until silence is suspicious."""
    async with lanes() as world:
        await world.lanes.drain(0.0)
    ((peer, refusal),) = world.heard
    assert (peer, Code(refusal.code)) == (CLIENT, Code.SESSION_LOST)  # type: ignore[union-attr]


async def test_parameters_are_answered_to_whoever_gave_them_and_only_the_last_piece_asks() -> None:
    async with lanes() as world:
        for number in range(3):
            await world.give(CLIENT, PutTuned(5, b"v", 1, 3, (number, 3)))
        puts = [m for m in world.to_worker if isinstance(m, PutTuned)]
        assert [bool(put.id) for put in puts] == [False, False, True]
        assert all(put.client == CLIENT.encode() for put in puts)
        world.answers[puts[-1].id - 1].arrive(TunedHeld(re=puts[-1].id))
        await trio.testing.wait_all_tasks_blocked()
        assert world.heard == [(CLIENT, TunedHeld(re=5))]
        assert await refused(world, CLIENT, PutTuned(5, b"v", 3, 9)) is Code.NOT_SERVING


async def test_a_server_without_memory_for_it_takes_no_training_work() -> None:
    world = LaneScene(limit_bytes=0)
    async with trio.open_nursery() as nursery:
        await nursery.start(world.lanes.run)
        assert await refused(world, CLIENT, OpenLane(1, KEY, "m", 1, 3)) is Code.UNSUPPORTED
        assert await refused(world, CLIENT, PutTuned(1, b"v", 1, 3)) is Code.UNSUPPORTED
        nursery.cancel_scope.cancel()
