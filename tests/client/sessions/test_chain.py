"""What a session asks of its hops when repairs follow each other; the hops are played by a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
import torch
import trio
from trio.testing import MockClock

from swarmd.client.links.link import SessionOptions
from swarmd.client.links.ops import StepInput
from swarmd.client.sessions.session import ChainSession
from swarmd.errors import Code, ConfigError, PeerError, Refused, Unreachable
from swarmd.net.standing import Standing
from swarmd.plan.chains.routing import Hop
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.trust.blame import Blame
from swarmd.plan.trust.reputation import Trust
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import (
    AnyMessage,
    CloseSession,
    HandedOver,
    HandOver,
    Inherited,
    Leaving,
    Op,
    Opened,
    OpenSession,
    Refusal,
    Replay,
    Replayed,
    Reroute,
    Rerouted,
    WantReceipt,
)
from swarmd.values import ModelId, PeerId, Span
from swarmd.wire.history import Budget
from swarmd.wire.tensors import pack

MODEL = ModelId("m" * 64)
A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


def serves(peer: PeerId, start: int, end: int) -> SpanRecord:
    times: dict[str, Any] = {"sequence": 1, "issued_at": 0, "expires_at": 60, "certificate": ()}
    return SpanRecord(peer=peer, model=MODEL, start=start, end=end, state="online", free_cache_tokens=10_000, **times)


@dataclass
class RecordingChannel:
    """A channel to one peer, which keeps what is told."""

    swarm: PlayedSwarm
    peer: PeerId

    async def send(self, message: AnyMessage) -> None:
        self.swarm.told.append((self.peer, message))


class PlayedSwarm:
    """Stands for the swarm and its rpc: answers calls by ``received``, and keeps what was asked."""

    def __init__(self, *spans: SpanRecord) -> None:
        self.rpc: Any = self
        self.network: Any = self
        self.peer_id = PeerId("me")
        self.audits = True
        self.identity = Identity(bytes(32))
        self.standing = Standing()
        self.asked: list[tuple[PeerId, AnyMessage]] = []
        self.told: list[tuple[PeerId, AnyMessage]] = []
        self.dead: set[PeerId] = set()
        self.relayed: set[PeerId] = set()
        self.left_relays: list[PeerId] = []
        self.refuse: dict[PeerId, Refused] = {}
        self.received: dict[PeerId, int] = {}
        self.reached_after_s: dict[PeerId, float] = {}
        self.reached: set[PeerId] = set()
        self.on_replay: Callable[[PeerId], None] = lambda peer: None
        self.session: ChainSession
        self._spans = spans

    def view(self) -> SwarmView:
        return SwarmView({}, tuple(s for s in self._spans if s.peer not in self.dead), Catalog())

    def wall_clock(self) -> float:
        return 0.0

    def locate(self, spans: list[SpanRecord]) -> None:
        return None

    def trips(self, spans: list[SpanRecord]) -> dict[tuple[str, str], float]:
        return {}

    def trust(self) -> dict[tuple[str, int], Trust]:
        return {}

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        return ()

    async def refresh(self) -> None: ...

    def learn(self, *args: Any) -> None: ...

    def find_channel(self, peer: PeerId) -> RecordingChannel | None:
        return RecordingChannel(self, peer) if peer in self.reached else None

    def start_soon(self, run: Callable[[], Any]) -> None:
        trio.lowlevel.spawn_system_task(run)

    def leave_relay(self, peer: PeerId) -> bool:
        self.left_relays.append(peer)
        return peer in self.relayed

    async def channel(self, peer: PeerId) -> PlayedSwarm:
        if peer in self.dead:
            raise Unreachable(f"{peer} is dead")
        return self

    async def send_raw(self, raw: bytes) -> None:
        """What the client gives to its first hop comes back from the last one at once, or a dead hop is noticed."""
        (frame,) = FrameDecoder().feed_untrusted(raw)
        op = messages.decode_untrusted(frame.header)
        assert isinstance(op, Op)
        for peer in self.dead.intersection(link.hop.peer for link in self.session.chain.links):
            self.session.on_gone(peer)
            return
        await self.answer(op.seq)

    async def answer(self, seq: int) -> None:
        meta, payload = pack(torch.ones(1, 1, 8), torch.zeros(1, 1), None, "raw")
        epoch = self.session.chain.epoch
        raw = messages.encode_frame(Op(session=self.session.key, start=6, epoch=epoch, seq=seq, tensor=meta), payload)
        (frame,) = FrameDecoder().feed_untrusted(raw)
        op = messages.decode_untrusted(frame.header)
        await self.session.on_message(self.session.chain.links[-1].hop.peer, op, frame)

    async def hear(self, peer: PeerId, message: messages.Message) -> None:
        """Have the session hear what a hop says."""
        (frame,) = FrameDecoder().feed_untrusted(messages.encode_frame(message))
        await self.session.on_message(peer, messages.decode_untrusted(frame.header), frame)

    async def call(
        self,
        peer: PeerId,
        message: Any,
        timeout_s: float,
    ) -> tuple[AnyMessage, None]:
        await trio.sleep(0 if peer in self.reached else self.reached_after_s.get(peer, 0))
        if peer in self.dead:
            raise PeerError(f"{peer} is dead")
        self.reached.add(peer)
        self.asked.append((peer, message))
        if peer in self.refuse:
            raise self.refuse[peer]
        if isinstance(message, OpenSession):
            self.received[peer] = 0
            return Opened(re=1, push=True, why="", numerics="", layer_arity=0), None
        if isinstance(message, Reroute):
            return Rerouted(re=1, received=self.received[peer], push=True, why=""), None
        if isinstance(message, HandOver):
            done = Inherited(session=message.session, start=message.start, epoch=message.epoch, seq=self.received[peer])
            trio.lowlevel.spawn_system_task(self.hear, PeerId(message.to), done)
            return HandedOver(re=1, n_bytes=1), None
        if isinstance(message, WantReceipt):
            raise PeerError(f"{peer} signs nothing")
        assert isinstance(message, Replay)
        self.on_replay(peer)
        return Replayed(re=1, ops=1, tokens=3), None


async def step(session: ChainSession) -> None:
    hidden = torch.ones(1, 1, 8)
    await session.step(StepInput(hidden, torch.zeros(1, 1, dtype=torch.int32)))


async def test_a_new_hop_whose_replay_was_lost_is_opened_again(virtual_time: MockClock) -> None:
    swarm = PlayedSwarm(serves(A, 0, 4), serves(B, 4, 6), serves(C, 4, 6))
    chain = (Hop(A, Span(0, 4)), Hop(B, Span(4, 6)))
    session = swarm.session = ChainSession(swarm, SessionOptions(MODEL, 6, 1, 100, route=chain), Budget())
    await session.open()
    for _ in range(3):
        await step(session)
    swarm.received = {A: 4, B: 3}

    n_replays = 0

    def lose_the_first(sender: PeerId) -> None:
        """A new epoch begins before what was sent arrives: the hop drops it as old."""
        nonlocal n_replays
        n_replays += 1
        if n_replays == 1:
            trio.lowlevel.spawn_system_task(stumble)
        else:
            swarm.received[C] = 4
            trio.lowlevel.spawn_system_task(swarm.answer, 4)

    async def stumble() -> None:
        await trio.sleep(0.01)
        session.on_gone(C)

    swarm.on_replay = lose_the_first
    swarm.dead = {B}
    with trio.fail_after(30):
        await step(session)
    replays = [m for _, m in swarm.asked if isinstance(m, Replay)]
    assert [m.have for m in replays] == [None, None], "the merged history too: without it later ops have a gap"
    assert [peer for peer, m in swarm.asked if isinstance(m, OpenSession)].count(C) == 2
    assert [link.hop.peer for link in session.chain.links] == [A, C]


async def test_the_last_holder_of_a_block_gets_a_second_chance_soon(virtual_time: MockClock) -> None:
    swarm = PlayedSwarm(serves(A, 0, 4), serves(B, 4, 6))
    session = swarm.session = ChainSession(swarm, SessionOptions(MODEL, 6, 1, 100), Budget())
    await session.open()
    await step(session)
    swarm.received = {A: 1, B: 1}
    swarm.on_replay = lambda sender: trio.lowlevel.spawn_system_task(swarm.answer, 2) and None
    session.chain.exclude(session.chain.links[1], Blame.SILENT, "a moment of silence")
    started_at = trio.current_time()
    await session._repairs.run()
    assert trio.current_time() - started_at < 2, "nobody else holds its blocks: it is not left out for 20 s"


async def test_a_relay_is_to_blame_for_silence_and_not_for_wrong_numbers(virtual_time: MockClock) -> None:
    swarm = PlayedSwarm(serves(A, 0, 4), serves(B, 4, 6))
    swarm.relayed = {A, B}
    session = swarm.session = ChainSession(swarm, SessionOptions(MODEL, 6, 1, 100), Budget())
    await session.open()
    first, last = session.chain.links
    session.chain.exclude(first, Blame.FAILING, "wrong numbers")
    session.chain.exclude(last, Blame.SILENT, "a moment of silence")
    assert swarm.left_relays == [B]
    assert not swarm.standing.allows(A, is_last_resort=True)
    assert swarm.standing.allows(B, is_last_resort=True), "by another way, at once"


async def test_what_a_former_hop_refuses_costs_no_repair(virtual_time: MockClock) -> None:
    swarm = PlayedSwarm(serves(A, 0, 4), serves(B, 4, 6))
    session = swarm.session = ChainSession(swarm, SessionOptions(MODEL, 6, 1, 100), Budget())
    await session.open()
    refusal = Refusal(code=Code.NO_SESSION.value, message="closed already", session=session.key, start=4)
    (frame,) = FrameDecoder().feed_untrusted(messages.encode_frame(refusal))
    await session.on_message(C, refusal, frame)
    await step(session)
    assert not session.statistics.repairs
    await session.on_message(B, refusal, frame)
    assert session.chain.links[1].is_lost


async def test_an_heir_is_known_by_its_worker(virtual_time: MockClock) -> None:
    """Audits look up what a worker announces by peer and slot, and found nothing for a second worker's heir."""
    second_worker = msgspec.structs.replace(serves(C, 4, 6), slot=1)
    swarm = PlayedSwarm(serves(A, 0, 4), serves(B, 4, 6), second_worker)
    chain = (Hop(A, Span(0, 4)), Hop(B, Span(4, 6)))
    session = swarm.session = ChainSession(swarm, SessionOptions(MODEL, 6, 1, 100, route=chain), Budget())
    await session.open()
    await step(session)
    swarm.received = {A: 1, B: 1}
    await swarm.hear(B, Leaving(session=session.key, start=4, epoch=session.chain.epoch))
    await trio.sleep(1)
    heir = session.chain.links[1]
    assert heir.is_heir
    assert heir.hop == Hop(C, Span(4, 6), slot=1)


@pytest.mark.parametrize("ends_after_s", [0.0, 0.05, 0.2, 1.0])
async def test_a_session_that_ends_while_it_moves_gives_back_what_it_opened(
    ends_after_s: float, virtual_time: MockClock
) -> None:
    """A hop that is opened after all were given back keeps its server's room for as long as its client is there."""
    swarm = PlayedSwarm(serves(A, 0, 4), serves(B, 4, 6), serves(C, 4, 6))
    swarm.reached_after_s = {C: 0.1}
    chain = (Hop(A, Span(0, 4)), Hop(B, Span(4, 6)))
    session = swarm.session = ChainSession(swarm, SessionOptions(MODEL, 6, 1, 100, route=chain), Budget())
    await session.open()
    await step(session)
    swarm.received = {A: 1, B: 1}
    await swarm.hear(B, Leaving(session=session.key, start=4, epoch=session.chain.epoch))
    await trio.sleep(ends_after_s)
    await session.close()
    await trio.sleep(60)
    opened = {peer for peer, message in swarm.asked if isinstance(message, OpenSession)}
    assert opened == ({A, B} if ends_after_s < 0.1 else {A, B, C})
    assert {peer for peer, message in swarm.told if isinstance(message, CloseSession)} == opened


async def test_a_step_of_a_session_that_is_closed_ends(virtual_time: MockClock) -> None:
    """Else it would repair what nobody gives back any more."""
    swarm = PlayedSwarm(serves(A, 0, 4), serves(B, 4, 6))
    session = swarm.session = ChainSession(swarm, SessionOptions(MODEL, 6, 1, 100), Budget())
    await session.open()

    async def no_answer(seq: int) -> None: ...

    swarm.answer = no_answer  # type: ignore[method-assign]

    async def close() -> None:
        await trio.sleep(1)
        await session.close()

    trio.lowlevel.spawn_system_task(close)
    with trio.fail_after(5), pytest.raises(ConfigError, match="closed"):
        await step(session)
    with pytest.raises(ConfigError, match="closed"):
        await step(session)


async def test_unsupported_is_final_for_that_server_and_others_are_asked(virtual_time: MockClock) -> None:
    swarm = PlayedSwarm(serves(A, 0, 6), serves(B, 0, 6))
    swarm.refuse = {A: Refused(Code.UNSUPPORTED, "too old for that"), B: Refused(Code.NO_CAPACITY, "busy", 3.0)}
    session = swarm.session = ChainSession(swarm, SessionOptions(MODEL, 6, 1, 100), Budget())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(session.open)
        await trio.sleep(10)
        del swarm.refuse[B]
    assert [peer for peer, _ in swarm.asked].count(A) == 1, "whoever cannot is not asked again"
    assert session.chain.links[0].hop.peer == B


async def test_a_session_that_nobody_supports_ends_at_once(virtual_time: MockClock) -> None:
    """It was tried for 60 s before."""
    for route in ((), (Hop(A, Span(0, 6)),)):
        swarm = PlayedSwarm(serves(A, 0, 6))
        swarm.refuse = {A: Refused(Code.UNSUPPORTED, "too old for that")}
        started_at = trio.current_time()
        with pytest.raises(Refused, match="too old for that"):
            await ChainSession(swarm, SessionOptions(MODEL, 6, 1, 100, route=route), Budget()).open()
        assert trio.current_time() - started_at < 1
