"""Who is in the swarm: announces this peer's records, exchanges records with others, and finds the swarm again.

The DHT is used to join, to be found by newcomers, and when nobody else answers; requests never wait for it.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import trio

from swarmd.errors import ConfigError, IntegrityError, PeerError, RemoteProtocolError
from swarmd.net.api import Network, RecordStore, TaskStatus
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Rpc
from swarmd.plan.chains.view import SwarmView
from swarmd.protocol.membership import records
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.records import AnyRecord, ExchangeBody, PeerRecord, RunRecord, SpanRecord
from swarmd.protocol.untrusted import decode, read_json
from swarmd.protocol.wire.messages import Ping
from swarmd.status import DirectoryStatus
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

EXCHANGE_INTERVAL_S = 2.0  # news crosses a swarm in a few of these
QUIET_EXCHANGE_S = 8.0  # where pushes reach all and exchanges bring nothing: a seventh of a record's life
ANNOUNCE_INTERVAL_S = 20.0  # a third of a record's life: two may be lost
RENDEZVOUS_INTERVAL_S = 40.0  # in the DHT, until it has worked and others are known
SETTLED_RENDEZVOUS_S = 600.0  # from then on: it is for peers that know nobody, and keeps addresses for half an hour
PROBE_INTERVAL_S = 30.0  # of round trips and bandwidth to one peer: routes change slowly
PROBE_BYTES = 1 << 16  # of the first: half a second at 1 Mbit/s
MOST_PROBE_BYTES = 4 << 20  # of the last: 0.3 s at 100 Mbit/s
MUCH_FASTER = 1.25  # than the one before: windows still open
PROBE_S = 0.5  # that the last may take: windows on the way have opened by then, and nobody feels it
NEAR_S = 0.003  # of a round trip within one building; between homes of one town it takes 5 ms and more
ANSWER_S = 5.0  # for a peer that is there to say so
MOST_ASKED = 64  # at once, whether they are there
N_PUSHED_TO = 6  # of an urgent record: all hear of it in log6(n) steps
MAX_REMEMBERED = 64  # addresses of peers to begin with after a restart


@dataclass(slots=True)
class Links:
    """Measured links: round trips by peer, and bandwidth each way as the best probe saw it. None: not measured."""

    round_trip_s: dict[PeerId, float]
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None

    def near(self) -> frozenset[PeerId]:
        """Who is at the same site, by its round trip."""
        return frozenset(peer for peer, took_s in self.round_trip_s.items() if took_s < NEAR_S)


Describe = Callable[[], list[dict[str, Any]]]
"""This peer's records without what all records share; "kind" says which it is."""


# Four loops, each with its own pace, so that none waits for another:
#
#     announce     sign this peer's records, push them to a few members   every 20 s, at once when something changed
#     exchange     swap what one other member lacks (anti-entropy)        every 2 s, 8 s while nothing is new
#     rendezvous   be found, and find, through the DHT                    rarely
#     probe        measure round trips, and bandwidth to one member       every 30 s
#
# Pushes make news fast (log6 of the members steps), exchanges make it certain: a member that missed a push hears it
# from anybody. Nothing that a peer sends is believed here: ``exchange`` checks signatures, and the DHT's values are
# records like any other.
class Directory:
    """See the module."""

    def __init__(
        self,
        identity: Identity,
        certificate: tuple[bytes, ...],
        network: Network,
        rpc: Rpc,
        store: RecordStore,
        exchange: Exchange,
        *,
        wall_clock: Callable[[], float],
        rng: random.Random,
        bootstrap: dict[PeerId, tuple[str, ...]],
        memory_file: Path | None = None,
        is_exchange_on: bool = True,
    ) -> None:
        self.exchange = exchange
        self.links = Links({})
        self._identity = identity
        self._certificate = certificate
        self._network = network
        self._rpc = rpc
        self._store = store
        self._wall_clock = wall_clock
        self._rng = rng
        self._memory_file = memory_file
        self._known = dict(bootstrap)
        self._known.pop(network.peer_id, None)
        self._known |= self._recall()
        self._is_exchange_on = is_exchange_on
        self._describe: Describe = list
        self._likely_next: Callable[[], set[PeerId]] = set
        self._announce_now = trio.Event()
        self._sequence = 0
        self._told_of_catalog: tuple[int, int, int] | None = None
        self._exchanged_at: float | None = None
        self._reason = "starting"
        self._is_indexed: bool | None = None
        self._index = "the DHT has not been asked yet"

    def view(self) -> SwarmView:
        """Give the frozen picture of all records that count."""
        return self.exchange.view()

    def snapshot(self) -> DirectoryStatus:
        ago = None if self._exchanged_at is None else trio.current_time() - self._exchanged_at
        return DirectoryStatus(
            known_peers=len(self._others()),
            last_exchange_s=ago,
            reason=self._reason,
            is_indexed=self._is_indexed,
            index=self._index,
        )

    def announce_soon(self) -> None:
        """Announce this peer's records as soon as changes that come together have come."""
        self._announce_now.set()

    def address_book(self) -> dict[PeerId, tuple[str, ...]]:
        """Addresses to give to newcomers: those of live members first."""
        records_of = self.view().peers.items()
        live = {peer: record.addresses for peer, record in records_of if record.addresses}
        remembered = {peer: addresses for peer, addresses in self._known.items() if peer not in live}
        return {**live, **remembered}

    async def run(
        self,
        describe: Describe,
        likely_next: Callable[[], set[PeerId]] = set,
        task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Announce what ``describe`` says of this peer, and exchange; links to ``likely_next`` matter most."""
        self._describe = describe
        self._likely_next = likely_next
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._announce_loop)
            nursery.start_soon(self._rendezvous_loop)
            nursery.start_soon(self._probe_loop)
            if self._is_exchange_on:
                nursery.start_soon(self._exchange_loop)
            task_status.started()

    async def _exchange_loop(self) -> None:
        """Exchange with somebody, less and less often while it brings nothing to either side and no run needs news."""
        interval_s = EXCHANGE_INTERVAL_S
        while True:
            is_quiet = await self._exchange_once()
            if any(run.peer == self._network.peer_id for run in self.view().runs):
                is_quiet = False
            interval_s = min(QUIET_EXCHANGE_S, 2 * interval_s) if is_quiet else EXCHANGE_INTERVAL_S
            await trio.sleep(interval_s * self._rng.uniform(0.75, 1.25))

    async def _exchange_once(self) -> bool:
        """Exchange with one peer; did both sides know all?"""
        members = self._others()
        targets = sorted(members)
        strangers = [peer for peer in self._known if peer not in members and peer != self._network.peer_id]
        if strangers and (not targets or self._rng.random() < 0.1):
            targets = strangers
        if not targets:
            self._reason = "alone: nobody is known yet"
            return False
        peer = self._rng.choice(targets)
        self._network.learn(peer, self._addresses_of(peer))
        try:
            is_news = await self.exchange.pull(self._rpc, peer)
        except PeerError as error:
            self._reason = f"the last exchange, with {peer[-8:]}, failed: {error}"
            logger.debug("exchange with %s failed: %s", peer, error)
            return False
        self._exchanged_at = trio.current_time()
        self._reason = f"exchanged with {peer[-8:]}"
        self._remember()
        return not is_news

    async def _announce_loop(self) -> None:
        while True:
            self._announce_now = trio.Event()
            await self.announce()
            with trio.move_on_after(ANNOUNCE_INTERVAL_S):
                await self._announce_now.wait()
            await trio.sleep(0.2)  # changes that come together go out together

    async def announce(self) -> None:
        """Sign this peer's own records anew and tell some of those it is connected with."""
        raws = [records.sign(record, self._identity) for record in self._own_records()]
        connected: list[PeerId] = []
        if self._is_exchange_on:
            connected = sorted(self._rpc.peers() - {self._network.peer_id})
        receivers = self._rng.sample(connected, min(N_PUSHED_TO, len(connected)))
        newest = self.exchange.book.catalog.rank
        await self.exchange.push(self._rpc, raws, receivers, catalog=newest != self._told_of_catalog)
        if receivers:
            self._told_of_catalog = newest

    def _own_records(self) -> list[AnyRecord]:
        now = int(self._wall_clock())
        self._sequence = max(self._sequence + 1, int(self._wall_clock() * 1000))
        common: dict[str, Any] = {
            "peer": self._identity.peer_id,
            "sequence": self._sequence,
            "issued_at": now,
            "expires_at": records.expiry_of(now, self.exchange.roster.pass_of(self._certificate).ends_at),
            "certificate": self._certificate,
        }
        kinds: dict[str, type[AnyRecord]] = {"peer": PeerRecord, "span": SpanRecord, "run": RunRecord}
        own_records: list[AnyRecord] = []
        for description in self._describe():
            record_type = kinds[description["kind"]]
            fields = {name: value for name, value in description.items() if name != "kind"}
            own_records.append(record_type(**common, **fields))
        return own_records

    async def _rendezvous_loop(self) -> None:
        """Be found and find, through the DHT: soon after the start, then rarely."""
        delay_s = 0.5
        while True:
            await trio.sleep(delay_s)
            try:
                await self._enter_index()
                await self._find_others()
                swarm_id = self.exchange.keys.swarm_id
                await self._store.put(record_key(swarm_id, self._network.peer_id), self._own_value())
                await self._store.provide(swarm_id)
                self._is_indexed = True
                self._index = "the DHT keeps this member's record"
            except PeerError as error:
                logger.debug("rendezvous: %s", error)
                self._is_indexed = False if self._others() else None  # None: nobody is there who could keep it
                self._index = f"the DHT: {error}"
            if delay_s >= RENDEZVOUS_INTERVAL_S and self._is_indexed and self._others():
                delay_s = SETTLED_RENDEZVOUS_S * self._rng.uniform(0.75, 1.25)
            else:
                delay_s = min(RENDEZVOUS_INTERVAL_S, delay_s * 4)

    async def _enter_index(self) -> None:
        """Connect to a known member, and enter the DHT through all that are connected."""
        candidates = self.address_book()
        candidates.pop(self._network.peer_id, None)
        for peer, addresses in candidates.items():
            if self._rpc.peers() - {self._network.peer_id}:
                break
            self._network.learn(peer, addresses)
            try:
                await self._rpc.channel(peer, "bulk")
            except PeerError as error:
                self._reason = f"nobody answers yet; {error}"
        await self._store.join(sorted(self._rpc.peers()))

    async def _find_others(self) -> None:
        providers = await self._store.find_providers(self.exchange.keys.swarm_id)
        for peer, addresses in providers.items():
            if peer in self.view().peers:
                continue
            self._network.learn(peer, addresses)
            self._known.setdefault(peer, addresses)
            value = await self._store.get(record_key(self.exchange.keys.swarm_id, peer))
            if value is None:
                continue
            try:
                await self.exchange.merge_body_untrusted(memoryview(value))
            except RemoteProtocolError as error:
                logger.info("ignoring a value of %s in the DHT: %s", peer, error)

    def _own_value(self) -> bytes:
        envelopes = [records.sign(record, self._identity) for record in self._own_records()]
        return msgspec.msgpack.encode(ExchangeBody(envelopes=envelopes))

    async def _probe_loop(self) -> None:
        """Measure round trips to a few peers now and then, and bandwidth to one."""
        while True:
            await trio.sleep(1.5 if not self.links.round_trip_s else PROBE_INTERVAL_S)
            other_peers = sorted(self._others())
            likely = sorted(self._likely_next().intersection(other_peers))
            previous_links = (set(self.links.round_trip_s), self.links.up_bytes_per_s)
            chosen = set(self._rng.sample(likely, min(8, len(likely))))
            chosen |= set(self._rng.sample(other_peers, min(8, len(other_peers))))
            for peer in sorted(chosen):
                try:
                    self.links.round_trip_s[peer] = await self.ping(peer)
                except PeerError:
                    self.links.round_trip_s.pop(peer, None)
            if other_peers and self.links.up_bytes_per_s is None:
                await self._probe_bandwidth(self._rng.choice(other_peers))
            if previous_links != (set(self.links.round_trip_s), self.links.up_bytes_per_s):
                self.announce_soon()  # else the next announcement says how they have changed

    async def ping(self, peer: PeerId, timeout_s: float = 5.0) -> float:
        """Measure one round trip in seconds. Raises PeerError."""
        self._network.learn(peer, self._addresses_of(peer))
        return await self._rpc.round_trip_s(peer, timeout_s)

    async def find_answering(self, peers: set[PeerId]) -> set[PeerId]:
        """Which of these peers answer now, this one included; of very many those that are asked."""
        alive = peers & {self._network.peer_id}

        async def ask(peer: PeerId) -> None:
            with suppress(PeerError):
                await self.ping(peer, ANSWER_S)
                alive.add(peer)

        candidates = sorted(peers - alive)
        async with trio.open_nursery() as nursery:
            for peer in self._rng.sample(candidates, min(MOST_ASKED, len(candidates))):
                nursery.start_soon(ask, peer)
        return alive

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

    def _addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """The addresses that a peer announces, or those that are remembered of it."""
        return self.exchange.addresses_of(peer) or self._known.get(peer, ())

    def _others(self) -> set[PeerId]:
        return set(self.view().peers) - {self._network.peer_id}

    def _recall(self) -> dict[PeerId, tuple[str, ...]]:
        if self._memory_file is None or not self._memory_file.is_file():
            return {}
        try:
            return read_json(self._memory_file, dict[PeerId, tuple[str, ...]], "it is made anew")
        except ConfigError as error:
            logger.warning("%s", error)
            return {}

    def _remember(self) -> None:
        fresh = {peer: record.addresses for peer, record in self.view().peers.items()}
        fresh.pop(self._network.peer_id, None)
        if all(self._known.get(peer) == addresses for peer, addresses in fresh.items()):
            return
        older = {peer: addresses for peer, addresses in self._known.items() if peer not in fresh}
        merged = {**fresh, **older}
        self._known = dict(list(merged.items())[:MAX_REMEMBERED])
        if self._memory_file is None:
            return
        try:
            self._memory_file.write_text(json.dumps(self._known))
        except OSError as error:
            logger.warning("cannot remember addresses in %s: %s", self._memory_file, error.strerror)


def record_key(swarm_id: str, peer: PeerId) -> str:
    """The DHT key that only ``peer`` can write."""
    return f"/swarmd/{swarm_id}/{peer}"


def value_validator(exchange: Exchange, wall_clock: Callable[[], float]) -> Callable[[str, bytes], int]:
    """Make the DHT's validator: a value must hold records of the peer that its key names, and nothing else.

    A DHT server stores values for strangers. Without this check anyone could replace a member's value by an older one,
    or by another member's records. The highest sequence wins where two values are valid.
    """

    def sequence(key: str, value: bytes) -> int:
        body = decode(value, ExchangeBody, "a value", IntegrityError)
        if body.catalog is not None:
            raise IntegrityError("a catalog in a value of the DHT")
        highest = 0
        for raw in body.envelopes:
            verified = records.read_untrusted(raw, exchange.roster.admission.founders.ever, wall_clock())
            if record_key(exchange.keys.swarm_id, PeerId(verified.record.peer)) != key:
                raise IntegrityError(f"a record of {verified.record.peer} under the key {key}")
            highest = max(highest, verified.record.sequence)
        return highest

    return sequence
