"""Who is in the swarm: announces this peer's records and exchanges records with others.

The swarm is found again through the DHT by ``rendezvous``; links are measured by ``link_probes``.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import trio

from swarmd.errors import PeerError, PeerTimeout, Unreachable
from swarmd.net.api import RecordStore, TaskStatus
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Rpc
from swarmd.node.members.address_memory import AddressMemory
from swarmd.node.members.link_probes import LinkProbes
from swarmd.node.members.record_signer import RecordSigner
from swarmd.node.members.rendezvous import Rendezvous
from swarmd.plan.chains.routing import gather_trips, observe
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.layouts.nearness import Surroundings
from swarmd.plan.links.coordinates import WORST_ERROR, NetworkPoint, locate
from swarmd.plan.members.pacing import news_s, next_exchange_s
from swarmd.plan.members.partners import Suspects, choose_partners
from swarmd.protocol.membership.records import ExchangeBody, SpanRecord
from swarmd.protocol.understanding import BEATS
from swarmd.status import DirectoryStatus
from swarmd.values import Decision, PeerId

logger = logging.getLogger(__name__)

ANNOUNCE_INTERVAL_S = 20.0  # a third of a record's life where there are no beats: two may be lost
N_PUSHED_TO = 6  # of an urgent record: all hear of it in log6(n) steps

Describe = Callable[[], list[dict[str, Any]]]
"""This peer's records without what all records share; "kind" says which it is."""


@dataclass(frozen=True, slots=True)
class DirectoryServices:
    """What a directory uses of its daemon. ``index`` is the DHT."""

    rpc: Rpc
    exchange: Exchange
    index: RecordStore
    rng: random.Random


# Five loops, each with its own pace, so that none waits for another:
#
#     announce     sign what is new, push it to a few members; a beat     every 20 s or more, at once when it changed
#     exchange     swap what one other member lacks (anti-entropy)        every 2 s, 3 to 12 s while nothing is new
#     rendezvous   be found, and find, through the DHT                    rarely
#     silent       was a message too large to pass, as it was not answered?  after an exchange that timed out
#     probe        measure round trips, and bandwidth to one member       every 30 s, 4 minutes while all are there
#
# Pushes make news fast (log6 of the members steps), exchanges make it certain: a member that missed a push hears it
# from anybody. Nothing that a peer sends is believed here: ``exchange`` checks signatures, and the DHT's values are
# records like any other.
class Directory:
    """See the module. ``signer`` signs this peer's records, ``memory`` knows where to begin."""

    def __init__(
        self, services: DirectoryServices, signer: RecordSigner, memory: AddressMemory, is_exchange_on: bool = True
    ) -> None:
        rpc = services.rpc
        self.exchange = services.exchange
        self.probes = LinkProbes(rpc, services.rng, self._addresses_of)
        self.links = self.probes.links
        self.rendezvous = Rendezvous(services.index, rpc, services.exchange, memory, services.rng)
        self._rpc = rpc
        self._rng = services.rng
        self._signer = signer
        self._memory = memory
        self._is_exchange_on = is_exchange_on
        self._describe: Describe = list
        self._suspects = Suspects()
        self._announce_now = trio.Event()
        self._told_of_catalog: tuple[int, int, int] | None = None
        self._exchanged_at: float | None = None
        self._is_clock_wrong = False
        self._alone_since: float | None = None
        self._silent, self._to_probe = trio.open_memory_channel[PeerId](0)
        self._point = NetworkPoint()
        self._reason = "starting"

    def view(self) -> SwarmView:
        """Give the frozen picture of all records that count."""
        return self.exchange.view()

    def locate(self) -> NetworkPoint:
        """Say where this machine is in the net, by the round trips measured so far; nearer to it each time."""
        self._point = locate(self._point, observe(self.view().spans, self.links.round_trip_s))
        return self._point

    def look_around(self, spans: Sequence[SpanRecord], n_blocks: int) -> Surroundings:
        """Say what this machine knows of the way to those who serve a model, and between them."""
        half_trips_s = {peer: trip_s / 2 for peer, trip_s in self.links.round_trip_s.items()}
        point = self.locate()
        trips = gather_trips(spans, self._rpc.network.peer_id, half_trips_s)
        return Surroundings(spans, n_blocks, trips, point if point.error < WORST_ERROR else None)

    def snapshot(self) -> DirectoryStatus:
        now = trio.current_time()
        others = self._others()
        self._note_company()
        index = self.rendezvous.state if others else Decision(None, "nobody else is there who could keep a record")
        return DirectoryStatus(
            known_peers=len(others),
            last_exchange_s=None if self._exchanged_at is None else now - self._exchanged_at,
            reason=self._reason,
            is_indexed=index.action,
            index=index.reason,
            alone_s=None if self._alone_since is None else now - self._alone_since,
        )

    def _note_company(self) -> None:
        """Note since when no other member is known."""
        if self._others():
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = trio.current_time()

    def announce_soon(self) -> None:
        """Announce this peer's records as soon as changes that come together have come."""
        self._announce_now.set()

    async def run(
        self,
        describe: Describe,
        likely_next: Callable[[], set[PeerId]] = set,
        task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Announce what ``describe`` says of this peer, and exchange; links to ``likely_next`` matter most."""
        self._describe = describe
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._announce_loop)
            nursery.start_soon(self.rendezvous.run, self._own_value, self._note_reason)
            nursery.start_soon(self.probes.run, self._others, likely_next, self.announce_soon)
            if self._is_exchange_on:
                nursery.start_soon(self._exchange_loop)
                nursery.start_soon(self._probe_silent)
            task_status.started()

    async def meet(self, given: Mapping[PeerId, tuple[str, ...]]) -> tuple[PeerId, ...]:
        """Take more ways to members, try them all at once, and return who answered."""
        self._memory.add(given)
        answered: list[PeerId] = []

        async def try_member(peer: PeerId) -> None:
            if await self._exchange_with(peer) is not None:
                answered.append(peer)

        async with trio.open_nursery() as nursery:
            for peer in given:
                if peer != self._rpc.network.peer_id:
                    nursery.start_soon(try_member, peer)
        return tuple(answered)

    async def _probe_silent(self) -> None:
        """Look whether it is for their size that messages are not answered, at one member after the other."""
        async for peer in self._to_probe:
            await self.probes.probe_sizes(peer, may_reconnect=peer not in self._others())

    async def _exchange_loop(self) -> None:
        """Exchange with somebody, more rarely while it brings nothing but beats and no run needs news."""
        interval_s = 0.0
        while True:
            is_quiet = await self._exchange_once()
            n_members = len(self.view().peers)
            if any(run.peer == self._rpc.network.peer_id for run in self.view().runs):
                is_quiet = False
            least_s = news_s(n_members)
            interval_s = next_exchange_s(n_members, interval_s, is_quiet)
            with trio.move_on_after((interval_s - least_s) * self._rng.uniform(0.75, 1.25)):
                await self.exchange.next_record()
            await trio.sleep(least_s * self._rng.uniform(0.75, 1.25))  # news that comes together goes together

    async def _exchange_once(self) -> bool:
        """Exchange with one peer; did both sides know all but beats?"""
        partner = self._choose_partner()
        if partner is None:
            self._reason = "alone: nobody is known yet"
            return False
        is_news = await self._exchange_with(partner)
        return is_news is False

    def _choose_partner(self) -> PeerId | None:
        me, members = self._rpc.network.peer_id, self._others()
        strangers = self._memory.known.keys() - members - {me}
        unasked = self._suspects.list_unasked(self.exchange.book.overdue(self.exchange.now()))
        partners = choose_partners(members, self._rpc.peers() - {me}, strangers, unasked, self._rng.random())
        if not partners:
            return None
        partner = self._rng.choice(partners)
        self._suspects.note_asked(partner)
        return partner

    async def _exchange_with(self, peer: PeerId) -> bool | None:
        """Exchange with a peer; was there news for either side? None: it did not answer."""
        self._rpc.network.learn(peer, self._addresses_of(peer))
        try:
            is_news = await self.exchange.pull(self._rpc, peer)
        except PeerError as error:
            self._warn_of_clock()
            self._reason = f"the last exchange, with {peer[-8:]}, failed: {error}"
            logger.debug("exchange with %s failed: %s", peer, error)
            if peer in self.exchange.roster.met and isinstance(error, (PeerTimeout, Unreachable)):
                with suppress(trio.WouldBlock):  # the size of another one's messages is looked at already
                    self._silent.send_nowait(peer)
            return None
        self.probes.note_answer(peer)
        self._warn_of_clock()
        self._exchanged_at = trio.current_time()
        self._reason = f"exchanged with {peer[-8:]}"
        me = self._rpc.network.peer_id
        fresh = {peer: record.addresses for peer, record in self.view().peers.items() if peer != me}
        self._memory.remember(fresh)
        return is_news

    def _warn_of_clock(self) -> None:
        """Say it once when most members' clocks say that this machine's is wrong."""
        wrong_clock = self.exchange.describe_wrong_clock()
        if wrong_clock and not self._is_clock_wrong:
            logger.warning("%s", wrong_clock)
        self._is_clock_wrong = bool(wrong_clock)

    async def _announce_loop(self) -> None:
        while True:
            self._announce_now = trio.Event()
            await self.announce()
            until_beat_s = self._signer.next_beat_s()
            with trio.move_on_after(ANNOUNCE_INTERVAL_S if until_beat_s is None else until_beat_s) as waiting:
                await self._announce_now.wait()
            if not waiting.cancelled_caught:
                await trio.sleep(0.2)  # changes that come together go out together

    async def announce(self) -> None:
        """Sign what is new of this peer and tell some of those it is connected with; show that it is there."""
        self._note_company()
        members = self.view().peers
        know_beats = all(record.minor >= BEATS for record in members.values())
        announcement = self._signer.renew(self._describe(), len(members), know_beats)
        connected: list[PeerId] = []
        if self._is_exchange_on:
            connected = sorted(self._rpc.peers() - {self._rpc.network.peer_id})
        receivers = self._rng.sample(connected, min(N_PUSHED_TO, len(connected)))
        newest = self.exchange.book.catalog.rank
        is_told = newest == self._told_of_catalog
        await self.exchange.push(self._rpc, announcement.news, receivers, not is_told, announcement.beats)
        if receivers:
            self._told_of_catalog = newest

    def _own_value(self) -> bytes:
        """What the DHT keeps of this peer: its records."""
        raws, beats = self._signer.current(self._describe())
        return msgspec.msgpack.encode(ExchangeBody(envelopes=raws, beats=beats))

    def _note_reason(self, reason: str) -> None:
        self._reason = reason

    def _addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """The addresses that a peer announces, or those that are remembered of it."""
        return self.exchange.addresses_of(peer) or self._memory.known.get(peer, ())

    def _others(self) -> set[PeerId]:
        return set(self.view().peers) - {self._rpc.network.peer_id}
