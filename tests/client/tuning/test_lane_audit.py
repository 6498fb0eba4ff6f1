"""Micro-batches that are computed twice: what is right goes on, who was wrong is named, nobody else is."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from trio.testing import MockClock

from swarmd.client.links.checks import Checks
from swarmd.client.links.client_parameters import TunedParameters
from swarmd.client.links.link import SessionOptions
from swarmd.client.tuning.lane_audit import LaneAudits, compare_answers
from swarmd.client.tuning.lane_pass import MicroBatch
from swarmd.client.tuning.ticket import ForwardTicket, OtherHolders
from swarmd.errors import Code, NoRoute
from swarmd.net.standing import Standing
from swarmd.plan.chains.routing import Hop
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.trust.audits import ALWAYS_BELOW
from swarmd.plan.trust.equality import BOUNDS
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.tuning import Backward, Forward, Gradients
from swarmd.values import PeerId, Span
from swarmd.wire.micro_batches import backward_frames, forward_frames
from swarmd.wire.tensors import unpack_untrusted, unpack_values_untrusted
from tests.client.tuning.test_pipeline import MODEL, Answer, World, batches, both_ways, doubling, pipeline, refusing

OWN = TunedParameters({"w": torch.zeros(1)}, {"w": 0})


@dataclass
class Client:
    """Everybody came by an invite of his own, but for whom ``vouchers`` name."""

    vouchers: dict[str, bytes] = field(default_factory=dict)
    checks: Checks = field(default_factory=lambda: Checks(random.Random(1)))

    def voucher_of(self, peer: PeerId) -> bytes:
        return self.vouchers.get(peer, peer.encode())


def altered_server(
    forward: Callable[[torch.Tensor], torch.Tensor] = lambda hidden: 2 * hidden,
    backward: Callable[[torch.Tensor], torch.Tensor] = lambda gradient: 2 * gradient,
    factor: float = 1.0,
) -> Answer:
    """A server that computes something else than 2 x."""

    def answer(world: World, peer: PeerId, message: Any, payload: memoryview) -> list[bytes]:
        if isinstance(message, Forward):
            hidden, _, _ = unpack_untrusted(message.tensor, payload)
            return list(forward_frames(message, 2, forward(hidden), None, "raw"))
        assert isinstance(message, Backward)
        gradient = unpack_values_untrusted(message.tensor, payload) / message.scale
        header = Gradients(message.session, 0, message.seq)
        gradients = safetensors.torch.save({"w": factor * gradient.sum().reshape(1)})
        frames = backward_frames(message.session, 0, message.seq, backward(gradient), "raw")
        return [messages.encode_frame(header, gradients), *frames] if world.has_own else [*frames]

    return answer


LIARS = {
    "a little more": altered_server(lambda hidden: 2.001 * hidden),
    "the input": altered_server(lambda hidden: hidden),
    "another gradient": altered_server(backward=lambda gradient: -2 * gradient),
    "a gradient that is no number elsewhere": altered_server(backward=lambda gradient: gradient.roll(1, 1)),
    "gradients of parameters": altered_server(factor=1.01),
}


@pytest.mark.parametrize("lie", LIARS)
async def test_who_computes_wrongly_is_named_and_nothing_wrong_is_trained_with(
    lie: str, virtual_time: MockClock
) -> None:
    client = Client()
    world = World({"a": doubling, "b": LIARS[lie], "c": doubling, "d": doubling}, has_own=True)
    async with pipeline(world, history=client) as lanes:
        for _ in range(4):
            sent = batches(4, OWN)
            tickets = await lanes.forward(sent)
            assert all(torch.equal(t.out, 2 * b.hidden) for t, b in zip(tickets, sent, strict=True))
            gradient = torch.ones(1, 3, 4) + torch.arange(3).view(1, 3, 1)
            for entering, by_name in await lanes.backward(tickets, [gradient] * 4):
                assert torch.equal(entering, 2 * gradient)
                assert float(by_name["w"]) == float(gradient.sum())
        assert not world.standing.allows(PeerId("b"))
        assert all(world.standing.allows(PeerId(peer)) for peer in "acd")
        assert [doubt for doubt in lanes.statistics.doubts if "b[0,2)" in doubt or "b " in doubt]
        assert client.checks.outcomes["wrong"] >= 1


class Chains:
    """Lanes as a table: chains of hops whose servers double, on the way back too, but for "l", and whoever is free."""

    lies_alone = True  # "l": where it is asked for its blocks only, too

    def __init__(
        self,
        *free: tuple[Hop, ...],
        formats: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        signed = {"sequence": 1, "issued_at": 0, "expires_at": 10, "certificate": (), "state": "online"}
        span = {"start": 0, "end": 3, "training_bytes": 1}
        spans = tuple(
            SpanRecord(peer=p, model=MODEL, quantize=formats.get(p, "none"), **span, **signed)  # type: ignore[arg-type]
            for p in "ablcd"
        )
        self.standing = Standing()
        self.client = Client()
        self.free = free
        rpc = SimpleNamespace(standing=self.standing)
        view = SwarmView({}, spans, Catalog())
        swarm: Any = SimpleNamespace(rpc=rpc, view=lambda: view)
        self.audits = LaneAudits(swarm, self.client, SessionOptions(MODEL, 3, 1, 1, codec="raw"), self, [])

    def ticket(self, batch: MicroBatch, hops: tuple[Hop, ...]) -> ForwardTicket:
        lane: Any = SimpleNamespace(hops=hops, codec=SimpleNamespace(action="raw"), live=set())
        return ForwardTicket(batch, 2 * batch.hidden, lane, 1, OtherHolders())

    async def recompute(
        self, batch: MicroBatch, without: frozenset[PeerId], quantize: str, limit_s: float
    ) -> ForwardTicket:
        for hops in self.free:
            if not without & {hop.peer for hop in hops}:
                return self.ticket(batch, hops)
        raise NoRoute("nobody else")

    async def send_back(
        self, ticket: ForwardTicket, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        lies = sum(len(hop.span) for hop in ticket.lane.hops if hop.peer == "l")
        return (2 + lies / 10) * gradient, {}

    async def compute_alone(
        self, span: Span, peer: PeerId, quantize: str, batch: MicroBatch, gradient: torch.Tensor
    ) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        answer = await self.send_back(self.ticket(batch, (Hop(peer, span),)), gradient)
        return [(2 * batch.hidden, {}), answer if self.lies_alone else (2 * gradient, {})]

    def back_off(self, peers: Any) -> None: ...

    async def counted(self, ticket: ForwardTicket) -> Any:
        gradient = torch.ones(1, 3, 4)
        return await self.audits.backward(ticket, gradient, await self.send_back(ticket, gradient), 1.0)


A, L, B = (Hop(PeerId(peer), Span(block, block + 1)) for block, peer in enumerate("alb"))


async def test_no_answer_counts_where_the_liar_had_a_part_in_both(virtual_time: MockClock) -> None:
    """Too few are free to do without all of a chain; there the liar stands for others, too."""
    lanes = Chains((Hop(PeerId("l"), Span(0, 3)),))
    ticket = await lanes.audits.forward(lanes.ticket(batches(1)[0], (A, L, B)), 1.0)
    assert ticket is not None
    assert {duplicate.audited for duplicate in ticket.duplicates} == {(A,), (B,)}, "the liar itself stands in for these"
    assert await lanes.counted(ticket) is None
    assert not lanes.standing.allows(PeerId("l"))


async def test_each_hop_is_looked_at_where_there_are_too_few_for_all(virtual_time: MockClock) -> None:
    """One that was not, because its neighbour was, could go on with what it does."""
    first, middle, last = (Hop(PeerId("c"), Span(i, i + 1)) for i in range(3))
    lanes = Chains((A, L, last), (A, middle, B), (first, L, B))
    ticket = await lanes.audits.forward(lanes.ticket(batches(1)[0], (A, L, B)), 1.0)
    assert ticket is not None
    assert {duplicate.audited for duplicate in ticket.duplicates} == {(A,), (L,), (B,)}
    (entering, _) = await lanes.counted(ticket)
    assert torch.equal(entering, 2 * torch.ones(1, 3, 4))
    assert not lanes.standing.allows(PeerId("l"))


async def test_what_went_another_way_than_was_looked_at_is_looked_at(virtual_time: MockClock) -> None:
    """Else whoever ends his lanes after each forward would never be."""
    lanes = Chains((Hop(PeerId("c"), Span(0, 3)),), (Hop(PeerId("d"), Span(0, 3)),))
    ticket = lanes.ticket(batches(1)[0], (A, L, B))
    ticket.was_resent = True
    (entering, _) = await lanes.counted(ticket)
    assert torch.equal(entering, 2 * torch.ones(1, 3, 4))
    assert not lanes.standing.allows(PeerId("l"))


async def test_what_was_found_wrong_does_not_count_because_the_other_is_banned_meanwhile(
    virtual_time: MockClock,
) -> None:
    """It took a third chain to tell, so nobody of the first is banned."""
    chains = [(Hop(PeerId(peer), Span(0, 3)),) for peer in "cd"]
    lanes = Chains(*chains)
    ticket = await lanes.audits.forward(lanes.ticket(batches(1)[0], (A, L, B)), 1.0)
    assert ticket is not None
    lanes.lies_alone = False
    third = lanes.recompute

    async def recompute(*args: Any) -> ForwardTicket:
        lanes.standing.fault(PeerId("c"), Fault.WRONG_RESULTS, "elsewhere")
        return await third(*args)

    lanes.recompute = recompute  # type: ignore[method-assign]
    assert await lanes.counted(ticket) is None
    assert not lanes.standing.ban_left_s(PeerId("l"))


async def test_where_formats_differ_nothing_counts_of_who_is_banned_either(virtual_time: MockClock) -> None:
    lanes = Chains(formats={"l": "int8"})
    lanes.standing.fault(PeerId("l"), Fault.WRONG_RESULTS, "elsewhere")
    assert await lanes.audits.forward(lanes.ticket(batches(1)[0], (A, L, B)), 1.0) is None


async def test_a_record_beside_the_one_that_serves_hides_nobody(virtual_time: MockClock) -> None:
    signed = {"sequence": 1, "issued_at": 0, "expires_at": 10, "certificate": (), "state": "online"}
    dummy = SpanRecord(peer="b", model=MODEL, start=0, end=2, slot=1, quantize="int8", **signed)  # type: ignore[arg-type]
    world = World({"a": doubling, "b": LIARS["the input"], "c": doubling, "d": doubling}, more=(dummy,))
    async with pipeline(world, history=Client()) as lanes:
        for _ in range(3):
            await both_ways(lanes, batches(4))
    assert not world.standing.allows(PeerId("b"))


async def test_honest_servers_of_two_formats_are_no_liars_beside_one(virtual_time: MockClock) -> None:
    """Whose weights are rounded answers a little else; a liar sets one kind against the other in vain."""
    rounded = altered_server(lambda hidden: 2.01 * hidden)
    peers = {"a": doubling, "b": doubling, "c": rounded, "d": rounded, "z": LIARS["the input"]}
    client = Client()
    world = World(peers, formats={"c": "int8", "d": "int8"})
    async with pipeline(world, history=client) as lanes:
        for _ in range(10):
            tickets = await lanes.forward(batches(5))
            await lanes.backward(tickets, [torch.ones(1, 3, 4)] * 5)
    assert all(world.standing.allows(PeerId(peer)) for peer in "abcd")


async def test_a_twin_that_loses_its_lane_does_not_make_the_liar_his_own_judge(virtual_time: MockClock) -> None:
    """Whoever computes again refuses each backward; the liar's gradients must not be compared with his own."""
    forgetful = refusing(Code.SESSION_LOST, only=Backward)
    client = Client()
    world = World({"a": forgetful, "b": LIARS["another gradient"], "c": forgetful})
    async with pipeline(world, history=client) as lanes:
        for _ in range(3):
            tickets = await lanes.forward(batches(3))
            await lanes.backward(tickets, [torch.ones(1, 3, 4)] * 3)
    assert client.checks.outcomes["right"] == 0


async def test_honest_servers_are_looked_at_less_and_less_and_nobody_is_doubted(virtual_time: MockClock) -> None:
    client = Client()
    world = World({"a": doubling, "b": doubling, "c": doubling})
    async with pipeline(world, history=client) as lanes:
        for _ in range(40):
            await both_ways(lanes, batches(6))
        n_backwards = len(world.backwards)
        n_given = 240
        assert not lanes.statistics.doubts
        assert set(client.checks.outcomes) == {"right"}
        assert 3 * ALWAYS_BELOW <= n_backwards - n_given <= n_given / 2
        assert all(world.standing.allows(PeerId(peer)) for peer in "abc")


@pytest.mark.parametrize("vouchers", [{}, {"c": b"a"}])
async def test_where_nobody_can_decide_the_user_is_told_and_nobody_is_blamed(
    vouchers: dict[str, bytes], virtual_time: MockClock
) -> None:
    """Two servers alone; or a third that came by the invite of one of the two."""
    client = Client(vouchers)
    peers = {"a": doubling, "b": LIARS["the input"], **dict.fromkeys(vouchers, doubling)}
    world = World(peers)
    async with pipeline(world, history=client) as lanes:
        await lanes.backward(await lanes.forward(batches(6)), [torch.ones(1, 3, 4)] * 6)
        assert "disagree on a micro-batch" in lanes.statistics.doubts[0]
        assert client.checks.outcomes["wrong"] == 0
        assert all(world.standing.allows(PeerId(peer)) for peer in peers)


async def test_alone_nothing_is_checked_and_that_is_said_once(virtual_time: MockClock) -> None:
    client = Client()
    async with pipeline(World({"a": doubling}), history=client) as lanes:
        for _ in range(3):
            await both_ways(lanes, batches(3))
    assert client.checks.outcomes == {"inconclusive": 1}


def test_parameters_that_hardly_matter_make_nobody_a_liar() -> None:
    hidden = torch.ones(1, 2, 4)
    ones = torch.ones(3)
    tiny = {"a": ones, "b": 1e-9 * ones}

    def is_right(**changes: torch.Tensor) -> bool:
        audited = (2 * hidden, {**tiny, **changes})
        return compare_answers(hidden, audited, (2 * hidden, tiny), BOUNDS["float32"]).action

    assert is_right(b=2e-9 * ones)
    assert not is_right(a=1.01 * ones)
    assert not is_right(a=ones * float("nan"))
