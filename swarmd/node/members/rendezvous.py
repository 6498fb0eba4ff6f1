"""Being found, and finding the swarm, through the DHT: on joining, and when nobody else answers.

Requests never wait for it. What the DHT keeps is signed records like any other; strangers store it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable

import trio

from swarmd.errors import IntegrityError, PeerError, RemoteProtocolError
from swarmd.net.api import RecordStore
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Rpc
from swarmd.node.members.address_memory import AddressMemory
from swarmd.protocol.membership import records
from swarmd.protocol.membership.records import ExchangeBody
from swarmd.protocol.untrusted import decode
from swarmd.values import Decision, PeerId

logger = logging.getLogger(__name__)

FIRST_RENDEZVOUS_S = 0.5  # after the start
RENDEZVOUS_INTERVAL_S = 40.0  # in the DHT, until it has worked and others are known
SETTLED_RENDEZVOUS_S = 7_200.0  # from then on: it is for peers that know nobody, and all of it is some 300 KB for eight


class Rendezvous:
    """See the module. ``state`` says whether the DHT knows this member; None: it cannot be said."""

    def __init__(
        self,
        store: RecordStore,
        rpc: Rpc,
        exchange: Exchange,
        memory: AddressMemory,
        rng: random.Random,
    ) -> None:
        self.state: Decision[bool | None] = Decision(None, "the DHT has not been asked yet")
        self._rpc = rpc
        self._store = store
        self._exchange = exchange
        self._memory = memory
        self._rng = rng

    async def run(
        self,
        own_value: Callable[[], bytes],
        on_unanswered: Callable[[str], None],
    ) -> None:
        """Be found and find: soon after the start, then rarely, until cancelled.

        ``own_value``: what the DHT is to keep. ``on_unanswered`` hears why a known member was not reached.
        """
        me = self._rpc.network.peer_id
        swarm_id = self._exchange.keys.swarm_id
        delay_s = FIRST_RENDEZVOUS_S
        while True:
            await trio.sleep(delay_s)
            try:
                await self._enter_index(on_unanswered)
                await self._find_others()
                await self._store.put(record_key(swarm_id, me), own_value())
                await self._store.provide(swarm_id)
                self.state = Decision(True, "the DHT knows this member")
            except PeerError as error:
                logger.debug("rendezvous: %s", error)
                is_indexed = False if self._knows_others() else None  # None: nobody is there who could keep it
                self.state = Decision(is_indexed, f"the DHT: {error}")
            if delay_s >= RENDEZVOUS_INTERVAL_S and self.state.action and self._knows_others():
                delay_s = SETTLED_RENDEZVOUS_S * self._rng.uniform(0.75, 1.25)
            else:
                delay_s = min(RENDEZVOUS_INTERVAL_S, delay_s * 4)

    def address_book(self) -> dict[PeerId, tuple[str, ...]]:
        """Addresses to give to newcomers: those of live members first."""
        records_of = self._exchange.view().peers.items()
        live = {peer: record.addresses for peer, record in records_of if record.addresses}
        remembered = {peer: addresses for peer, addresses in self._memory.known.items() if peer not in live}
        return {**live, **remembered}

    def _knows_others(self) -> bool:
        return bool(set(self._exchange.view().peers) - {self._rpc.network.peer_id})

    async def _enter_index(self, on_unanswered: Callable[[str], None]) -> None:
        """Connect to a known member, and enter the DHT through all that are connected."""
        network = self._rpc.network
        candidates = self.address_book()
        candidates.pop(network.peer_id, None)
        for peer, addresses in candidates.items():
            if self._rpc.peers() - {network.peer_id}:
                break
            network.learn(peer, addresses)
            try:
                await self._rpc.channel(peer, "bulk")
            except PeerError as error:
                on_unanswered(f"nobody answers yet; {error}")
        await self._store.join(sorted(self._rpc.peers()))

    async def _find_others(self) -> None:
        swarm_id = self._exchange.keys.swarm_id
        providers = await self._store.find_providers(swarm_id)
        for peer, addresses in providers.items():
            if peer in self._exchange.view().peers:
                continue
            self._rpc.network.learn(peer, addresses)
            self._memory.known.setdefault(peer, addresses)
            value = await self._store.get(record_key(swarm_id, peer))
            if value is None:
                continue
            try:
                await self._exchange.merge_body_untrusted(memoryview(value))
            except RemoteProtocolError as error:
                logger.info("ignoring a value of %s in the DHT: %s", peer, error)


def record_key(swarm_id: str, peer: PeerId) -> str:
    """The DHT key that only ``peer`` can write."""
    return f"/swarmd/{swarm_id}/{peer}"


def value_validator(
    exchange: Exchange,
    wall_clock: Callable[[], float],
) -> Callable[[str, bytes], int]:
    """Make the DHT's validator: a value must hold records of the peer that its key names, and nothing else.

    A DHT server stores values for strangers. Without this check anyone could replace a member's value by an older one,
    or by another member's records. The highest sequence wins where two values are valid.
    """

    def sequence(key: str, value: bytes) -> int:
        body = decode(value, ExchangeBody, "a value", IntegrityError)
        if body.catalog is not None:
            raise IntegrityError("a catalog in a value of the DHT")
        beats = {beat.chain: beat for beat in body.beats}
        highest = 0
        for raw in body.envelopes:
            verified = records.read_untrusted(raw, exchange.roster.admission.founders.ever, wall_clock(), beats)
            if record_key(exchange.keys.swarm_id, PeerId(verified.record.peer)) != key:
                raise IntegrityError(f"a record of {verified.record.peer} under the key {key}")
            highest = max(highest, verified.record.sequence)
        return highest

    return sequence
