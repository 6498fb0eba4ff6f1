"""Large messages that are lost where small ones pass are noticed, and nothing else is taken for that."""

from __future__ import annotations

import random
from typing import Any

import trio
from trio.testing import MockClock

from swarmd.errors import PeerError, PeerTimeout, Unreachable
from swarmd.node.members.checkin import explain_silence
from swarmd.node.members.link_probes import LOST_FOR_S, LinkProbes
from swarmd.protocol.wire.messages import Ping, Pong
from swarmd.values import PeerId

PEER = PeerId("12D3KooWpeer")


class NarrowLink:
    """An Rpc and its network in one, whose only link loses what is larger than ``most_bytes``, and all behind it."""

    def __init__(
        self, most_bytes: int = 1_000, is_stuck: bool = False, ends_with: type[PeerError] = PeerTimeout
    ) -> None:
        self.ends_with = ends_with
        self.network = self
        self.most_bytes = most_bytes
        self.is_stuck = is_stuck  # behind something large
        self.n_disconnected = 0

    async def call(self, peer: PeerId, request: Ping, payload: bytes, timeout_s: float, purpose: str) -> object:
        self.is_stuck = self.is_stuck or max(len(payload), request.want_bytes) > self.most_bytes
        if self.is_stuck:
            await trio.sleep(timeout_s)
            raise self.ends_with(f"{peer} did not answer within {timeout_s:.1f} s")
        return Pong(), None

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None: ...

    async def disconnect(self, peer: PeerId) -> None:
        self.is_stuck = False
        self.n_disconnected += 1


def probes_over(link: NarrowLink) -> LinkProbes:
    return LinkProbes(link, random.Random(0), lambda peer: ())  # type: ignore[arg-type]


async def test_large_messages_that_are_lost_are_noticed_until_one_comes(virtual_time: MockClock) -> None:
    probes = probes_over(NarrowLink())
    await probes.probe_sizes(PEER, may_reconnect=False)
    assert probes.n_losing_large() == 1
    probes.note_answer(PEER)
    assert probes.n_losing_large() == 0


async def test_a_connection_that_ends_with_a_large_message_has_lost_it(virtual_time: MockClock) -> None:
    """Over libp2p the muxer's pings, which wait behind it, end the connection sooner than the answer is given up."""
    probes = probes_over(NarrowLink(ends_with=Unreachable))
    await probes.probe_sizes(PEER, may_reconnect=False)
    assert probes.n_losing_large() == 1


async def test_what_was_found_counts_for_a_while(virtual_time: MockClock) -> None:
    probes = probes_over(NarrowLink())
    await probes.probe_sizes(PEER, may_reconnect=False)
    await trio.sleep(LOST_FOR_S)
    assert probes.n_losing_large() == 0


async def test_a_connection_that_is_stuck_is_made_anew_where_nothing_else_needs_it(virtual_time: MockClock) -> None:
    link = NarrowLink(is_stuck=True)
    probes = probes_over(link)
    await probes.probe_sizes(PEER, may_reconnect=False)
    assert (probes.n_losing_large(), link.n_disconnected) == (0, 0), "it may be busy, and sessions may be on it"
    await probes.probe_sizes(PEER, may_reconnect=True)
    assert (probes.n_losing_large(), link.n_disconnected) == (1, 1)


async def test_a_slow_member_and_one_that_is_gone_lose_nothing(virtual_time: MockClock) -> None:
    wide = NarrowLink(most_bytes=10**6)
    probes = probes_over(wide)
    await probes.probe_sizes(PEER, may_reconnect=True)
    assert probes.n_losing_large() == 0, "what came late was not lost"

    async def refuse(*_: object) -> object:
        raise Unreachable("it is off")

    gone = NarrowLink()
    gone.call = refuse  # type: ignore[method-assign]
    probes = probes_over(gone)
    await probes.probe_sizes(PEER, may_reconnect=True)
    assert probes.n_losing_large() == 0


async def test_who_joins_over_a_narrow_link_is_told_what_it_is(virtual_time: MockClock) -> None:
    """A hello is small, and a catalog is not."""
    link: Any = NarrowLink(is_stuck=True)
    assert "small messages pass, large ones do not: MTU? a link on the way" in await explain_silence(link, PEER, ())
    wide: Any = NarrowLink(most_bytes=1 << 20, is_stuck=True)
    assert await explain_silence(wide, PEER, ()) == ""
