"""Measures links to other members: round trips to a few of them now and then, and bandwidth each way to one."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import trio

from swarmd.errors import PeerError, PeerTimeout, Unreachable
from swarmd.net.api import Purpose
from swarmd.net.rpc import Rpc
from swarmd.protocol.wire.messages import Ping
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

PROBE_INTERVAL_S = 30.0  # of round trips and bandwidth to one peer, while who is there changes
QUIET_PROBE_S = 240.0  # while it does not: routes change slowly
FIRST_PROBE_S = 1.5  # until something is known
N_PROBED = 8  # likely neighbours at a time, and as many others, of those that are connected where these are as many
PROBE_BYTES = 1 << 16  # of the first: half a second at 1 Mbit/s
MOST_PROBE_BYTES = 4 << 20  # of the last: 0.3 s at 100 Mbit/s
MUCH_FASTER = 1.25  # than the one before: windows still open
PROBE_S = 0.5  # that the last may take: windows on the way have opened by then, and nobody feels it
NEAR_S = 0.003  # of a round trip within one building; between homes of one town it takes 5 ms and more
ANSWER_S = 5.0  # for a peer that is there to say so
MOST_ASKED = 64  # at once, whether they are there
LARGE_BYTES = 1 << 12  # three packets of Ethernet's: what is lost where a link on the way takes smaller ones
SIZES_TIMEOUT_S = 4.0  # for a message of either size to be answered
LOST_FOR_S = 600.0  # since large messages were last found to be lost: exchanges fail meanwhile, and it is tried again


@dataclass(slots=True)
class Links:
    """Measured links: round trips by peer, and bandwidth each way as the best probe saw it. None: not measured."""

    round_trip_s: dict[PeerId, float]
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None

    def near(self) -> frozenset[PeerId]:
        """Who is at the same site, by its round trip."""
        return frozenset(peer for peer, took_s in self.round_trip_s.items() if took_s < NEAR_S)


class LinkProbes:
    """See the module. ``addresses_of`` tells where a peer is dialled."""

    def __init__(
        self,
        rpc: Rpc,
        rng: random.Random,
        addresses_of: Callable[[PeerId], tuple[str, ...]],
    ) -> None:
        self.links = Links({})
        self._lost_at: dict[PeerId, float] = {}
        self._rpc = rpc
        self._rng = rng
        self._addresses_of = addresses_of

    async def run(
        self,
        others: Callable[[], set[PeerId]],
        likely_next: Callable[[], set[PeerId]],
        on_change: Callable[[], None],
    ) -> None:
        """Probe some of ``others``, those of ``likely_next`` first, until cancelled; ``on_change`` hears of news."""
        links = self.links
        interval_s = FIRST_PROBE_S
        while True:
            await trio.sleep(interval_s)
            other_peers = sorted(others())
            connected = sorted(self._rpc.peers().intersection(other_peers))
            likely = sorted(likely_next().intersection(other_peers))
            previous_links = (set(links.round_trip_s), links.up_bytes_per_s)
            chosen = set(self._rng.sample(likely, min(N_PROBED, len(likely))))
            candidates = connected if len(connected) >= N_PROBED else other_peers
            chosen |= set(self._rng.sample(candidates, min(N_PROBED, len(candidates))))
            for peer in sorted(chosen):
                try:
                    links.round_trip_s[peer] = await self.ping(peer)
                except PeerError:
                    links.round_trip_s.pop(peer, None)
            if other_peers and links.up_bytes_per_s is None:
                await self._probe_bandwidth(self._rng.choice(other_peers))
            is_news = previous_links != (set(links.round_trip_s), links.up_bytes_per_s)
            if is_news:
                on_change()  # else the next announcement says how they have changed
            if not links.round_trip_s:
                interval_s = FIRST_PROBE_S
            else:
                interval_s = PROBE_INTERVAL_S if is_news else min(QUIET_PROBE_S, 2 * interval_s)

    async def ping(self, peer: PeerId, timeout_s: float = 5.0) -> float:
        """Measure one round trip in seconds. Raises PeerError."""
        self._rpc.network.learn(peer, self._addresses_of(peer))
        return await self._rpc.round_trip_s(peer, timeout_s)

    async def find_answering(self, peers: set[PeerId]) -> set[PeerId]:
        """Which of these peers answer now, this one included; of very many those that are asked."""
        alive = peers & {self._rpc.network.peer_id}

        async def ask(peer: PeerId) -> None:
            with suppress(PeerError):
                self.links.round_trip_s[peer] = await self.ping(peer, ANSWER_S)
                alive.add(peer)

        candidates = sorted(peers - alive)
        async with trio.open_nursery() as nursery:
            for peer in self._rng.sample(candidates, min(MOST_ASKED, len(candidates))):
                nursery.start_soon(ask, peer)
        return alive

    # Somewhere on the way a link takes smaller packets than this machine sends (net.libp2p.segments), and the message
    # that says so is lost. The connection stays up, and what is small passes. A large message is sent again and again,
    # with all that comes after it on the same connection waiting behind it. So an answer that does not come is followed
    # by a small question, over another connection where that is needed, and by a large one.
    async def probe_sizes(self, peer: PeerId, may_reconnect: bool) -> None:
        """Find out whether it is for its size that a message was not answered."""
        is_small_answered = await self._is_answered(peer, 0)
        if not is_small_answered and may_reconnect:
            await self._rpc.network.disconnect(peer)
            self._rpc.network.learn(peer, self._addresses_of(peer))
            is_small_answered = await self._is_answered(peer, 0)
        if is_small_answered and not await self._is_answered(peer, LARGE_BYTES):
            logger.warning("small messages to %s pass, large ones do not: swarmd doctor says what to do", peer[-8:])
            self._lost_at[peer] = trio.current_time()

    def note_answer(self, peer: PeerId) -> None:
        """A large message of a peer has come."""
        self._lost_at.pop(peer, None)

    def n_losing_large(self) -> int:
        """With how many members large messages are lost."""
        now = trio.current_time()
        self._lost_at = {peer: lost_at for peer, lost_at in self._lost_at.items() if now - lost_at < LOST_FOR_S}
        return len(self._lost_at)

    async def _is_answered(self, peer: PeerId, n_bytes: int) -> bool:
        """Is a message of so many bytes, with an answer of as many, answered in time? A refusal is an answer, too."""
        purpose: Purpose = "bulk" if n_bytes else "interactive"
        try:
            await self._rpc.call(peer, Ping(want_bytes=n_bytes), bytes(n_bytes), SIZES_TIMEOUT_S, purpose)
        except (PeerTimeout, Unreachable):  # the muxer's own pings may end a connection that is stuck before that
            return False
        except PeerError as error:
            logger.debug("%s answers: %s", peer[-8:], error)
        return True

    async def _probe_bandwidth(self, peer: PeerId) -> None:
        try:
            trip_s = await self.ping(peer)
            up_bytes_per_s = await self._measure(peer, trip_s, is_up=True)
            down_bytes_per_s = await self._measure(peer, trip_s, is_up=False)
            self.links.up_bytes_per_s = up_bytes_per_s
            self.links.down_bytes_per_s = down_bytes_per_s
        except PeerError as error:
            logger.debug("no bandwidth measured with %s: %s", peer, error)

    async def _measure(self, peer: PeerId, trip_s: float, is_up: bool) -> float:
        """Measure bytes/s to or from a peer, by more bytes each time, until windows no longer count.

        A short probe measures how TCP's window opens, not the link. So the size grows until one probe fills PROBE_S and
        is hardly faster than the one before. Raises PeerError.
        """
        n_bytes = PROBE_BYTES
        previous_rate = 0.0
        while True:
            rate = await self._rate(peer, trip_s, n_bytes, is_up)
            is_steady = n_bytes >= rate * PROBE_S and rate < MUCH_FASTER * previous_rate
            if n_bytes == MOST_PROBE_BYTES or is_steady:
                return max(rate, previous_rate)
            n_bytes = min(MOST_PROBE_BYTES, max(2 * n_bytes, int(rate * PROBE_S)))
            previous_rate = rate

    async def _rate(self, peer: PeerId, trip_s: float, n_bytes: int, is_up: bool) -> float:
        begun = trio.current_time()
        sent = bytes(n_bytes if is_up else 0)
        request = Ping(want_bytes=n_bytes - len(sent))
        await self._rpc.call(peer, request, sent, 30.0, "bulk")
        took_s = trio.current_time() - begun - trip_s
        return n_bytes / max(took_s, 1e-6)
