"""Micro-batches and what goes wrong with them: retried elsewhere, exact, counted once. The test plays the servers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
import trio
from trio.testing import MockClock

from swarmd.client.links.client_parameters import TunedParameters
from swarmd.client.links.link import SessionOptions
from swarmd.client.tuning.lane import Lane
from swarmd.client.tuning.lane_holders import CheckHistory
from swarmd.client.tuning.lane_pass import MicroBatch, is_finite_gradient
from swarmd.client.tuning.pipeline import WRONG, Pipeline
from swarmd.client.tuning.ticket import ForwardTicket
from swarmd.errors import Code, ConfigError, NoRoute, PeerTimeout, Refused, SwarmError, SwarmUnavailable
from swarmd.net.standing import Standing
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.trust.reputation import Trust
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import Opened, Refusal
from swarmd.protocol.wire.tuning import Backward, Forward, Gradients, PutTuned, TunedHeld
from swarmd.values import ModelId, PeerId
from swarmd.wire.changes import Changes
from swarmd.wire.micro_batches import backward_frames, forward_frames
from swarmd.wire.tensors import unpack_untrusted, unpack_values_untrusted

MODEL = ModelId("m" * 64)
NOTHING = TunedParameters({}, {})
Answer = Callable[["World", PeerId, messages.AnyMessage, memoryview], list[bytes]]


def doubling(world: World, peer: PeerId, message: messages.AnyMessage, payload: memoryview) -> list[bytes]:
    """An honest server of the whole model: y = 2 x, whose own parameter's gradient is the sum of what came back."""
    if isinstance(message, Forward):
        hidden, _, _ = unpack_untrusted(message.tensor, payload)
        return list(forward_frames(message, 2, 2 * hidden, None, "raw"))
    assert isinstance(message, Backward)
    gradient = unpack_values_untrusted(message.tensor, payload) / message.scale
    world.backwards.append((peer, message.seq))
    frames = list(backward_frames(message.session, 0, message.seq, 2 * gradient, "raw"))
    if not world.has_own:
        return frames
    header = Gradients(message.session, 0, message.seq)
    gradients = safetensors.torch.save({"w": gradient.sum().reshape(1)})
    return [messages.encode_frame(header, gradients), *frames]


def not_finite(world: World, peer: PeerId, message: messages.AnyMessage, payload: memoryview) -> list[bytes]:
    if isinstance(message, Forward):
        hidden, _, _ = unpack_untrusted(message.tensor, payload)
        return list(forward_frames(message, 2, hidden * float("nan"), None, "raw"))
    return doubling(world, peer, message, payload)


def silent(world: World, peer: PeerId, message: messages.AnyMessage, payload: memoryview) -> list[bytes]:
    return []


def refusing(code: Code, only: type = Forward) -> Answer:
    def answer(world: World, peer: PeerId, message: messages.AnyMessage, payload: memoryview) -> list[bytes]:
        if isinstance(message, only):
            return [messages.encode_frame(messages.refusal_for(message, Refused(code, "no")))]
        return doubling(world, peer, message, payload)

    return answer


def wrong_shape(world: World, peer: PeerId, message: messages.AnyMessage, payload: memoryview) -> list[bytes]:
    assert isinstance(message, Forward)
    return list(forward_frames(message, 2, torch.zeros(1, 1, 4), None, "raw"))


def endless(world: World, peer: PeerId, message: messages.AnyMessage, payload: memoryview) -> list[bytes]:
    """Part after part of one answer."""
    assert isinstance(message, Forward)
    (single,) = forward_frames(message, 2, torch.zeros(1, 3, 4), None, "raw")
    (frame,) = FrameDecoder().feed_untrusted(single)
    head = messages.decode_untrusted(frame.header)
    return [messages.encode_frame(msgspec.structs.replace(head, part=(n, 4_000)), frame.payload) for n in range(4)]


def other_gradients(world: World, peer: PeerId, message: messages.AnyMessage, payload: memoryview) -> list[bytes]:
    if not isinstance(message, Backward):
        return doubling(world, peer, message, payload)
    wrong = safetensors.torch.save({"w": torch.zeros(5, 3, dtype=torch.float64)})
    return [messages.encode_frame(Gradients(message.session, 0, message.seq), wrong)]


def forgets_once(world: World, peer: PeerId, message: messages.AnyMessage, payload: memoryview) -> list[bytes]:
    if isinstance(message, Backward) and not world.backwards:
        world.backwards.append((peer, -1))
        return [messages.encode_frame(messages.refusal_for(message, Refused(Code.NOT_HELD, "gone")))]
    return doubling(world, peer, message, payload)


@dataclass
class World:
    """The swarm around a pipeline: peers that hold the whole model, each with its way to answer."""

    peers: dict[str, Answer]
    has_own: bool = False
    opened: list[PeerId] = field(default_factory=list)
    backwards: list[tuple[PeerId, int]] = field(default_factory=list)
    deaf: set[PeerId] = field(default_factory=set)
    away: set[PeerId] = field(default_factory=set)
    listeners: dict[bytes, Any] = field(default_factory=dict)
    nursery: trio.Nursery | None = None
    standing: Standing = field(default_factory=Standing)
    formats: dict[str, str] = field(default_factory=dict)
    more: tuple[SpanRecord, ...] = ()
    send_s: float = 0.0  # that a frame takes to leave
    n_sent: int = 0

    # the rpc
    peer_id = PeerId("me")

    @property
    def rpc(self) -> World:
        return self

    network = rpc

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None: ...

    async def channel(self, peer: PeerId, purpose: str) -> Channel:
        return Channel(self, peer)

    def find_channel(self, peer: PeerId, purpose: str) -> None:
        return None

    async def call(self, peer: PeerId, request: Any, timeout_s: float) -> None:
        if peer in self.deaf:
            await trio.sleep(timeout_s)
            raise PeerTimeout("silence")

    # the swarm
    def view(self) -> SwarmView:
        common = {"sequence": 1, "issued_at": 0, "expires_at": 10, "certificate": (), "state": "online"}
        spans = [
            SpanRecord(peer=p, model=MODEL, start=0, end=2, training_bytes=1, prefill_tokens_per_s=100.0, **common)  # type: ignore[arg-type]
            for p in sorted(self.peers)
        ]
        formatted = (msgspec.structs.replace(s, quantize=self.formats.get(s.peer, "none")) for s in spans)
        return SwarmView({}, (*formatted, *self.more), Catalog())

    def wall_clock(self) -> float:
        return 0.0

    def locate(self, spans: list[SpanRecord]) -> None:
        return None

    def trips(self, spans: list[SpanRecord]) -> dict[tuple[str, str], float]:
        return {}

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        return ()

    def trust(self) -> dict[tuple[str, int], Trust]:
        return {}

    async def refresh(self) -> None: ...

    def start_soon(self, function: Any) -> None:
        assert self.nursery is not None
        self.nursery.start_soon(function)


@dataclass
class Channel:
    """What a lane sends to a peer is answered at once, by a task of its own."""

    world: World
    peer: PeerId

    async def call(
        self,
        message: Any,
        payload: bytes = b"",
        timeout_s: float = 0,
    ) -> tuple[Any, None]:
        if self.peer in self.world.away:
            await trio.sleep_forever()
        if isinstance(message, PutTuned):
            return TunedHeld(), None
        self.world.opened.append(self.peer)
        return Opened(layer_arity=1), None

    async def send_raw(self, raw: bytes) -> None:
        assert self.world.nursery is not None
        if self.world.send_s:
            await trio.sleep(self.world.send_s)
        self.world.n_sent += 1
        self.world.nursery.start_soon(self._answer, raw)

    async def _answer(self, raw: bytes) -> None:
        (frame,) = FrameDecoder().feed_untrusted(raw)
        message = messages.decode_untrusted(frame.header)
        await trio.sleep(0.01)
        for answer in self.world.peers[self.peer](self.world, self.peer, message, frame.payload):
            (out,) = FrameDecoder().feed_untrusted(answer)
            listener = self.world.listeners.get(getattr(message, "session", b""))
            if listener is not None:
                await listener.on_message(self.peer, messages.decode_untrusted(out.header), out)


@asynccontextmanager
async def pipeline(world: World, codec: str = "auto", history: CheckHistory | None = None) -> Any:
    async with trio.open_nursery() as world.nursery:
        yield Pipeline(world, world.listeners, SessionOptions(MODEL, 2, 1, 1, codec=codec), history)  # type: ignore[arg-type]
        world.nursery.cancel_scope.cancel()


def batches(n: int, tuned: TunedParameters = NOTHING) -> list[MicroBatch]:
    positions = torch.arange(3, dtype=torch.int32).expand(1, 3)
    return [MicroBatch(torch.randn(1, 3, 4), positions, None, tuned, keep=True) for _ in range(n)]


async def test_what_does_not_count_is_sent_again(virtual_time: MockClock) -> None:
    """There and back, until audits say that it does."""
    verdicts = {"forward": [False, True], "backward": [False, False, True]}
    world = World({"a": doubling, "b": doubling})
    async with pipeline(world) as lanes:

        async def forward(ticket: ForwardTicket, took_s: float) -> ForwardTicket | None:
            return ticket if verdicts["forward"].pop(0) else None

        async def backward(ticket: ForwardTicket, gradient: torch.Tensor, answer: Any, took_s: float) -> Any:
            return answer if verdicts["backward"].pop(0) else None

        lanes._audits = SimpleNamespace(forward=forward, backward=backward)
        (ticket,) = await lanes.forward(batches(1))
        ((entering, _),) = await lanes.backward([ticket], [torch.ones(1, 3, 4)])
        assert torch.equal(entering, 2 * torch.ones(1, 3, 4))
        assert ticket.was_resent, "so that it is looked at"
        assert lanes.statistics.retries == [WRONG] * 3
        assert lanes.statistics.backwards == 1
    assert verdicts == {"forward": [], "backward": []}


async def both_ways(lanes: Pipeline, sent: list[MicroBatch]) -> list[ForwardTicket]:
    tickets = await lanes.forward(sent)
    gradients = [torch.randn_like(batch.hidden) for batch in sent]
    results = await lanes.backward(tickets, gradients)
    for batch, ticket, gradient, (entering, _) in zip(sent, tickets, gradients, results, strict=True):
        assert torch.equal(ticket.out, 2 * batch.hidden)
        assert torch.equal(entering, 2 * gradient)
    return tickets


async def test_two_peers_share_the_work(virtual_time: MockClock) -> None:
    world = World({"a": doubling, "b": doubling})
    async with pipeline(world) as lanes:
        await both_ways(lanes, batches(10))
        assert sorted(world.opened) == ["a", "b"]
        assert {peer for peer, _ in world.backwards} == {"a", "b"}
        assert not lanes.statistics.retries


@pytest.mark.parametrize(
    "bad",
    [not_finite, refusing(Code.SESSION_LOST), refusing(Code.NO_CAPACITY), refusing(Code.NOT_SERVING), wrong_shape],
)
async def test_a_bad_peer_costs_its_micro_batches_a_retry(virtual_time: MockClock, bad: Answer) -> None:
    world = World({"bad": bad, "good": doubling})
    async with pipeline(world) as lanes:
        tickets = await both_ways(lanes, batches(10))
        assert {ticket.lane.hops[0].peer for ticket in tickets} == {"good"}
        assert 0 < len(lanes.statistics.retries) <= 10
        assert len(world.backwards) == 10


async def test_a_peer_that_falls_silent_is_noticed_and_left_out(virtual_time: MockClock) -> None:
    world = World({"deaf": silent, "good": doubling}, deaf={PeerId("deaf")})
    async with pipeline(world) as lanes:
        started_at = trio.current_time()
        await both_ways(lanes, batches(4))
        assert trio.current_time() - started_at < 8


async def test_a_peer_that_answers_pings_but_nothing_else_is_left_out_longer_each_time(virtual_time: MockClock) -> None:
    world = World({"mute": silent, "good": doubling})
    async with pipeline(world) as lanes:
        for _ in range(6):
            started_at = trio.current_time()
            await both_ways(lanes, batches(4))
            assert trio.current_time() - started_at < 24
            await trio.sleep(30)
        assert world.standing._histories[PeerId("mute")].strikes == 3, (
            "it was tried in the first, the second and the fourth round"
        )


async def test_on_a_slow_link_a_frame_has_the_time_that_it_takes(virtual_time: MockClock) -> None:
    world = World({"a": doubling}, send_s=5.0)
    async with pipeline(world) as lanes:
        await both_ways(lanes, batches(2))
        assert not lanes.statistics.retries


async def test_a_frame_that_was_begun_is_sent_whole_when_its_lane_ends_within_bounds(virtual_time: MockClock) -> None:
    """Half a frame would end the channel, and all lanes that use it."""
    for send_s, n_sent in ((2.0, 1), (60.0, 0)):
        world = World({"a": doubling}, send_s=send_s)
        async with pipeline(world) as lanes:
            began_at = trio.current_time()
            with trio.move_on_after(1):
                await lanes.forward(batches(1))
            assert trio.current_time() - began_at < 5
            assert world.n_sent == n_sent


async def test_an_unreachable_peer_costs_one_wait_not_one_for_each_micro_batch(virtual_time: MockClock) -> None:
    world = World({"away": doubling, "good": doubling}, away={PeerId("away")})
    async with pipeline(world) as lanes:
        started_at = trio.current_time()
        await both_ways(lanes, batches(8))
        assert trio.current_time() - started_at < 9


async def test_servers_that_send_too_much_or_the_wrong_gradients_are_left(virtual_time: MockClock) -> None:
    tuned = TunedParameters({"w": torch.zeros(1)}, {"w": 0})
    for bad in (endless, other_gradients):
        world = World({"bad": bad, "good": doubling}, has_own=True)
        async with pipeline(world) as lanes:
            tickets = await lanes.forward(batches(4, tuned))
            results = await lanes.backward(tickets, [torch.ones(1, 3, 4)] * 4)
            assert [float(g["w"]) for _, g in results] == [12.0] * 4
            assert {ticket.lane.hops[0].peer for ticket in tickets} == {"good"}


async def test_what_was_settled_is_told(virtual_time: MockClock) -> None:
    world = World({"a": doubling})
    async with pipeline(world) as lanes:
        tickets = await both_ways(lanes, batches(3))
        lane = tickets[0].lane
        assert not lane.live
        pending = await lanes.forward(batches(2))
        assert lane.live == {t.seq for t in pending}
        del pending
        assert not lane.live


async def test_an_adapter_of_the_catalog_is_not_tuned_upon(virtual_time: MockClock) -> None:
    lanes = Pipeline(World({}), {}, SessionOptions(MODEL, 2, 1, 1, adapter="x"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="adapter of the catalog"):
        await lanes.forward(batches(1))


async def test_a_forward_that_was_forgotten_is_done_again(virtual_time: MockClock) -> None:
    world = World({"a": forgets_once})
    async with pipeline(world) as lanes:
        await both_ways(lanes, batches(3))
        assert lanes.statistics.forwards == 4
        assert len(lanes.statistics.retries) == 1
        assert lanes.lanes[0].is_open, "the lane goes on"


async def test_rows_are_sent_whole_once_a_server_has_lost_what_they_are_changes_of(virtual_time: MockClock) -> None:
    """Its own answers, which are on their way as changes meanwhile, are still read as such."""
    times: list[list[int]] = []
    ends = (Changes(), Changes())

    def remembers(world: World, peer: PeerId, message: messages.AnyMessage, payload: memoryview) -> list[bytes]:
        if not isinstance(message, Forward):
            return doubling(world, peer, message, payload)
        times.append([row.times for row in message.rows])
        if len(times) == 3:
            return [messages.encode_frame(messages.refusal_for(message, Refused(Code.NOT_HELD, "gone")))]
        hidden = unpack_untrusted(message.tensor, payload)[0]
        hidden = ends[0].take(message.rows, hidden) if message.rows else hidden
        return list(forward_frames(message, 2, 2 * hidden, None, "raw", ends[1]))

    world = World({"a": remembers})
    async with pipeline(world, "aqsgd") as lanes:
        sent = batches(2)
        for _ in range(3):
            tickets = await lanes.forward(sent)
            await lanes.backward(tickets, [torch.zeros_like(batch.hidden) for batch in sent])
            for batch, ticket in zip(sent, tickets, strict=True):
                assert (ticket.out - 2 * batch.hidden).abs().max() <= 0.3 * batch.hidden.abs().max()
    assert times[:4] == [[0], [0], [1], [1]]
    assert times[4:] == [[]] * 3, "whole, from the refusal on"


async def test_gradients_of_own_parameters_are_those_of_the_last_try(virtual_time: MockClock) -> None:
    tuned = TunedParameters({"w": torch.zeros(1)}, {"w": 0})
    world = World({"a": forgets_once}, has_own=True)
    async with pipeline(world) as lanes:
        sent = batches(2, tuned)
        tickets = await lanes.forward(sent)
        gradients = [torch.full((1, 3, 4), 1.0), torch.full((1, 3, 4), 2.0)]
        sums = [float(g["w"]) for _, g in await lanes.backward(tickets, gradients)]
        assert sums == [12.0, 24.0]


async def test_what_comes_late_or_twice_is_nobodys(virtual_time: MockClock) -> None:
    world = World({"a": doubling})
    async with pipeline(world) as lanes:
        (ticket,) = await lanes.forward(batches(1))
        late = Forward(ticket.lane.key, 2, ticket.seq)
        for raw in forward_frames(late, 2, torch.ones(1, 3, 4), None, "raw"):
            (frame,) = FrameDecoder().feed_untrusted(raw)
            await ticket.lane.on_message(PeerId("a"), messages.decode_untrusted(frame.header), frame)
        assert ticket.lane.is_open
        assert torch.equal(ticket.out, 2 * ticket.batch.hidden)


async def test_without_anybody_who_can_it_ends_with_the_reason(virtual_time: MockClock) -> None:
    async with pipeline(World({"a": refusing(Code.TOO_LONG)})) as lanes:
        with pytest.raises(SwarmUnavailable, match=r"no chain computes this micro-batch.*: no"):
            await lanes.forward(batches(1))
        assert len([r for r in lanes.statistics.retries if r.endswith(": no")]) == 3
    async with pipeline(World({})) as lanes:
        with pytest.raises(NoRoute):
            await lanes.forward(batches(1))


async def test_a_refusal_from_nowhere_does_not_end_the_client(virtual_time: MockClock) -> None:
    world = World({"a": doubling})
    async with pipeline(world) as lanes:
        (ticket,) = await lanes.forward(batches(1))
        lane: Lane = ticket.lane
        for refusal in (Refusal(code="?", seq=9, start=7), Refusal(code="session_lost")):
            await lane.on_message(PeerId("a"), refusal, None)  # type: ignore[arg-type]
        assert not lane.is_open
        results = await lanes.backward([ticket], [torch.ones(1, 3, 4)])
        assert torch.equal(results[0][0], torch.full((1, 3, 4), 2.0))


def test_errors_are_of_the_tree() -> None:
    from swarmd.client.tuning.lane_failure import LaneFailed

    assert issubclass(LaneFailed, SwarmError)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int64, torch.bool])
def test_a_servers_gradients_in_a_type_that_nobody_computes_in_are_refused(dtype: torch.dtype) -> None:
    assert not is_finite_gradient(torch.zeros(2, 2).to(dtype)), "without an error that would end the client"
    assert is_finite_gradient(torch.zeros(2, 2))
    assert not is_finite_gradient(torch.full((2,), torch.nan))
