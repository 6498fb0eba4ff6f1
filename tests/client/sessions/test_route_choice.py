"""Whom a session asks: the most trusted first, then others, and who said no only when nobody else is left."""

from __future__ import annotations

import math

import msgspec
import pytest
import trio
from trio.testing import MockClock

from swarmd.client.links.link import SessionOptions
from swarmd.client.sessions.route_choice import RouteChoice
from swarmd.errors import NoRoute
from swarmd.plan.trust.reputation import Trust
from swarmd.plan.trust.standing import SECOND_CHANCE_S
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import PeerId, Span
from tests.client.sessions.test_chain import MODEL, A, B, C, PlayedSwarm, serves

BLOCKS = Span(0, 6)
FAST = 1000.0


class RatedSwarm(PlayedSwarm):
    """A swarm whose members have probed some servers."""

    def __init__(self, *spans: SpanRecord, **trust: Trust) -> None:
        super().__init__(*spans)
        self.ratings = {(peer, 0): rating for peer, rating in trust.items()}

    def trust(self) -> dict[tuple[str, int], Trust]:
        return self.ratings


def fast(peer: PeerId, start: int = 0, end: int = 6) -> SpanRecord:
    """A server that announces more speed than the others."""
    return msgspec.structs.replace(serves(peer, start, end), decode_tokens_per_s=FAST)


def choose(choice: RouteChoice) -> list[str]:
    return [str(hop.peer) for hop in choice.choose_route(BLOCKS).hops]


def options(head: bool = False) -> SessionOptions:
    return SessionOptions(MODEL, 6, 1, 100, head=head)


@pytest.mark.parametrize(
    ("trust", "chosen"),
    [
        ({"a": Trust.PROVEN, "b": Trust.UNKNOWN}, ["a"]),
        ({"a": Trust.UNKNOWN, "b": Trust.DOUBTED}, ["a"]),
        ({"a": Trust.DOUBTED, "b": Trust.DOUBTED}, ["b"]),
        ({}, ["b"]),
    ],
)
async def test_speed_that_is_announced_counts_among_equally_trusted_servers_only(
    trust: dict[str, Trust], chosen: list[str], virtual_time: MockClock
) -> None:
    swarm = RatedSwarm(serves(A, 0, 6), fast(B), **trust)
    assert choose(RouteChoice(swarm, options())) == chosen


async def test_a_server_with_a_head_comes_first_where_logits_are_wanted(virtual_time: MockClock) -> None:
    with_head = msgspec.structs.replace(serves(A, 0, 6), head=True)
    swarm = RatedSwarm(with_head, fast(B))
    assert choose(RouteChoice(swarm, options(head=True))) == ["a"]
    assert choose(RouteChoice(swarm, options())) == ["b"]


async def test_who_said_no_for_a_while_is_asked_again_when_nobody_else_is_left(virtual_time: MockClock) -> None:
    choice = RouteChoice(RatedSwarm(serves(A, 0, 6), fast(B)), options())
    choice.back_off(B, 60.0)
    assert choose(choice) == ["a"]
    choice.back_off(A, math.inf)
    with pytest.raises(NoRoute):
        choose(choice)
    await trio.sleep(SECOND_CHANCE_S)
    assert choose(choice) == ["b"]


async def test_a_hand_over_needs_one_holder_of_all_blocks(virtual_time: MockClock) -> None:
    choice = RouteChoice(RatedSwarm(serves(A, 0, 6), fast(B, 0, 3), fast(C, 3, 6)), options())
    assert [hop.peer for hop in choice.choose_route(BLOCKS, is_single_hop=True).hops] == [A]


async def test_blocks_that_only_those_hold_who_cannot_are_refused_for_good(virtual_time: MockClock) -> None:
    choice = RouteChoice(RatedSwarm(serves(A, 0, 6)), options())
    assert not choice.is_refused_for_good()
    choice.back_off(A, 60.0)
    assert not choice.is_refused_for_good(), "for a while only"
    choice.back_off(A, math.inf)
    assert choice.is_refused_for_good()
