"""The Kademlia DHT as swarmd's RecordStore: a private namespace whose keys only their owner can write.

Works round what was measured of py-libp2p's: the local copy never answers for the network, a tie prefers the newer
bytes, the inbound limiter is widened, provider lists are deduplicated, and the routing table is refreshed each four
hours and not each ten minutes, which was most of what an idle member moved.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import trio
from libp2p.kad_dht import kad_dht
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.peer.id import ID
from libp2p.records.validator import Validator
from libp2p.tools.anyio_service import background_trio_service

from swarmd.errors import SwarmError, Unreachable
from swarmd.net.libp2p.host import OPEN_ERRORS, Libp2pNetwork
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

NAMESPACE = "swarmd"
REFRESH_S = 14_400  # between two rounds of lookups that fill the routing table: members know each other by records
LOOKUP_TIMEOUT_S = 10.0  # some rounds of queries, with dead peers among them
Sequence = Callable[[str, bytes], int]
"""Check a value against its key and return its sequence number; raises SwarmError."""


class OwnedValues(Validator):
    """Accepts a value only when ``sequence`` does; among several the highest sequence wins, the last on a tie."""

    def __init__(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def validate(self, key: str, value: bytes) -> None:
        """Raise ValueError for a value that does not belong to its key."""
        try:
            self._sequence(key, value)
        except SwarmError as error:
            raise ValueError(str(error)) from None

    def select(self, key: str, values: list[bytes]) -> int:
        """The index of the newest valid value; 0 where none is valid."""
        best = 0
        best_sequence = -1
        for index, value in enumerate(values):
            try:
                sequence = self._sequence(key, value)
            except SwarmError:
                continue
            if sequence >= best_sequence:
                best = index
                best_sequence = sequence
        return best


class KademliaStore:
    """See ``net.api.RecordStore``. Keys are ``/swarmd/...``."""

    def __init__(self, network: Libp2pNetwork, sequence: Sequence, is_server: bool = True) -> None:
        self._network = network
        kad_dht.ROUTING_TABLE_REFRESH_INTERVAL = REFRESH_S
        self._entered: set[PeerId] = set()
        self._dht = KadDHT(network.host, DHTMode.SERVER if is_server else DHTMode.CLIENT, strict_validation=True)
        self._dht.register_validator(NAMESPACE, OwnedValues(sequence))
        self._dht._inbound_limiter = trio.CapacityLimiter(256)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Take part in the DHT until the end of the block."""
        async with background_trio_service(self._dht):
            yield

    async def join(self, peers: list[PeerId]) -> None:
        """Enter through peers that are connected already, and fill the routing table, if one of them is new."""
        for peer in peers:
            await self._dht.add_peer(ID.from_base58(peer), skip_server_mode_check=True)
        if self._entered.issuperset(peers):
            return
        with trio.move_on_after(LOOKUP_TIMEOUT_S) as lookup:
            await self._dht.refresh_routing_table()
        if not lookup.cancelled_caught:
            self._entered.update(peers)

    async def put(self, key: str, value: bytes) -> None:
        """Store a value with the peers nearest to its key. Raises Unreachable."""
        with _dht_call(f"storing {key}"):
            self._dht.value_store.remove(key.encode())
            await self._dht.put_value(key, value)

    async def get(self, key: str) -> bytes | None:
        """Look a value up at other peers; the copy here never answers for them. Raises Unreachable."""
        with _dht_call(f"looking up {key}"):
            self._dht.value_store.remove(key.encode())
            return await self._dht.get_value(key)

    async def provide(self, key: str) -> None:
        """Announce this peer under a key. Raises Unreachable."""
        with _dht_call(f"providing {key}"):
            await self._dht.provide(key)

    async def find_providers(self, key: str) -> dict[PeerId, tuple[str, ...]]:
        """See ``net.api.RecordStore``. Raises Unreachable."""
        providers: dict[PeerId, tuple[str, ...]] = {}
        with _dht_call(f"finding providers of {key}"):
            for info in await self._dht.find_providers(key):
                peer = PeerId(info.peer_id.to_base58())
                if peer != self._network.peer_id:
                    providers[peer] = tuple(f"{str(a).split('/p2p/')[0]}/p2p/{peer}" for a in info.addrs)
        return providers


@contextmanager
def _dht_call(action: str) -> Iterator[None]:
    """Bound a DHT call and translate what the library raises at this border."""
    try:
        with trio.fail_after(LOOKUP_TIMEOUT_S):
            yield
    except trio.TooSlowError:
        raise Unreachable(f"{action} in the DHT took more than {LOOKUP_TIMEOUT_S} s") from None
    except (*OPEN_ERRORS, ValueError) as error:
        raise Unreachable(f"{action} in the DHT failed: {error}") from error
