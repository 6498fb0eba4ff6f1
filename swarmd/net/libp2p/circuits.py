"""Connections through a third member, for peers that nobody can dial: one asks a relay, which knows the other.

As in libp2p's circuit relay v2, a peer that cannot be dialled holds a *reservation* with a relay, by a stream that it
keeps open. A peer that wants to reach it asks that relay for a *circuit*. Both make their own encrypted connection over
it, so that the relay sees bytes only. py-libp2p's own closes the circuits of others (row 15) and cannot be dialled
(row 14). Here are the two ends, and the messages; ``relay`` is the third member.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

import msgspec
import trio
from libp2p.abc import INetConn, IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from swarmd.errors import PeerError, Unreachable
from swarmd.net.libp2p.connections import Host, end_unused
from swarmd.net.libp2p.prefixed_messages import read_message, write_message
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.plan.links.dialing import relay_of
from swarmd.protocol.fields import Certificate, Name, Text
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

RELAY = "relay"  # a protocol: asking a relay
CIRCUIT = "circuit"  # a protocol: a relay brings somebody
ANSWER_TIMEOUT_S = 3.0  # for a relay that has the other peer at hand


class RelayRequest(msgspec.Struct, frozen=True, array_like=True):
    """To a relay: a circuit to ``target``, or, if that is empty, a reservation; with the asker's ``certificate``."""

    target: Name = ""
    certificate: Certificate = ()


class RelayGrant(msgspec.Struct, frozen=True, array_like=True):
    """From a relay: ``why_not`` is empty, and the bytes of the other side follow; ``seen_at``: where you come from."""

    why_not: Text = ""
    seen_at: tuple[Text, int] | None = None


class Caller(msgspec.Struct, frozen=True, array_like=True):
    """From a relay to who holds a reservation: the bytes of ``peer`` follow."""

    peer: Name = ""


#     A (behind a router)                relay R                        B (behind a router)
#                                          <-- RelayRequest() ----------  holds a reservation: this stream stays open
#     RelayRequest(target=B) ------------>
#                                          -- Caller(A) --------------->
#       <------------- RelayGrant(), seen_at
#     Noise and yamux between A and B  <== _copy_bytes, both ways ==>
#
# R sees encrypted bytes only, and cannot pretend to be either: A and B prove their keys to each other over it. What a
# member could try is to make R work for it alone, so everything is counted for its sponsor and for R as a whole. The
# certificate is looked at again each LOOK_INTERVAL_S, so that a revoked member loses what it has.


class Circuits:
    """The circuits that one peer makes, and those that are brought to it; ``certificate`` shows relays who asks."""

    def __init__(self, host: Host, certificate: tuple[bytes, ...]) -> None:
        self._host = host
        self._certificate = certificate
        self._relays: Counter[PeerId] = Counter()  # that hold a reservation for this peer
        self._reserving: dict[PeerId, INetConn] = {}  # connections that were made to hold one
        host.serve(CIRCUIT, self._serve_call)

    async def reserve(self, relay: PeerId, on_held: Callable[[], None]) -> None:
        """Hold a reservation until it ends; calls ``on_held`` when it holds. Raises PeerError."""
        try:
            await self._hold_reservation(relay, on_held)
        finally:
            connection = self._reserving.pop(relay, None)
            if connection is not None:
                await end_unused(connection)

    async def _hold_reservation(self, relay: PeerId, on_held: Callable[[], None]) -> None:
        stream = await self._open_for_reservation(relay)
        self._relays[relay] += 1  # it may bring somebody before its answer has been read
        try:
            granted = await self._ask_relay(stream, RelayRequest(certificate=self._certificate))
            self._host.own_addresses.seen_at = granted.seen_at
            on_held()
            await stream.receive()
        finally:
            self._relays = self._relays - Counter([relay])
            with trio.CancelScope(shield=True):
                await stream.reset()

    async def _open_for_reservation(self, relay: PeerId) -> Libp2pStream:
        """A stream to a relay from the port that this peer listens on: the router learns it, as punching needs."""
        await self._host.connect(relay)
        try:
            connection = await self._host.swarm.dialler.dial_from_own_port(ID.from_base58(relay))
            self._reserving[relay] = connection
            return await self._host.open(relay, RELAY, connection)
        except SwarmException as error:
            logger.debug("nobody will meet this peer at a port that %s sees: %s", relay, error)
            return await self._host.open(relay, RELAY)

    async def dial_address(self, address: str, target: ID) -> IRawConnection:
        """The wire of a connection through the relay that an address names. Raises OpenConnectionError."""
        named = relay_of(address)
        peer = PeerId(target.to_base58())
        if named is None or named[0] in (self._host.peer_id, peer):
            raise OpenConnectionError("no relay is named")
        relay = PeerId(named[0])
        try:
            if not self._host.connections(relay) and not self._host.swarm.dialler.knows(ID.from_base58(relay)):
                self._host.learn(relay, (named[1],))
            return await self.dial(relay, peer)
        except (PeerError, ValueError) as error:
            raise OpenConnectionError(str(error)) from None

    async def dial(self, relay: PeerId, target: PeerId) -> IRawConnection:
        """Have a relay connect this peer to another. Raises PeerError."""
        stream = await self.open_to_relay(relay)
        granted = await self._ask_relay(stream, RelayRequest(target, self._certificate))
        if not self._host.own_addresses.ports():  # else the connection comes from another port than reservations
            self._host.own_addresses.seen_at = granted.seen_at
        return Circuit(stream, is_initiator=True)

    async def open_to_relay(self, relay: PeerId) -> Libp2pStream:
        """A stream to ask a relay with; dials it. Raises PeerError."""
        await self._host.connect(relay)
        return await self._host.open(relay, RELAY)

    async def _ask_relay(self, stream: Libp2pStream, ask: RelayRequest) -> RelayGrant:
        is_granted = False
        try:
            with trio.fail_after(ANSWER_TIMEOUT_S):
                await write_message(stream, ask)
                granted = await read_message(stream, RelayGrant)
            is_granted = not granted.why_not
        except trio.TooSlowError:
            raise Unreachable(f"the relay {stream.peer} did not answer within {ANSWER_TIMEOUT_S} s") from None
        finally:
            if not is_granted:
                with trio.CancelScope(shield=True):
                    await stream.reset()
        if granted.why_not:
            raise Unreachable(f"the relay {stream.peer} says: {granted.why_not}")
        return granted

    async def _serve_call(self, stream: Libp2pStream) -> None:
        """A relay brings somebody who wants to connect to this peer."""
        is_in_circuit = stream.remote_address is None
        if is_in_circuit or stream.peer not in self._relays:
            await stream.reset()
            return
        with trio.fail_after(ANSWER_TIMEOUT_S):
            caller = await read_message(stream, Caller)
        circuit = Circuit(stream, False, f"{caller.peer} through {stream.peer}")
        try:
            await self._host.swarm.upgrade_inbound_raw_conn(circuit, Multiaddr("/p2p-circuit"))
        except SwarmException as error:
            raise Unreachable(f"a circuit came to nothing: {error}") from None


class Circuit(IRawConnection):
    """A stream of a relay as the wire of a connection; ``caller`` is who began it, as the relay says."""

    def __init__(self, stream: Libp2pStream, is_initiator: bool, caller: str = "") -> None:
        self.is_initiator = is_initiator
        self.caller = caller
        self._stream = stream
        self._rest = b""

    async def write(self, data: bytes) -> None:
        """Send all of ``data``. Raises ConnectionClosedError."""
        try:
            await self._stream.send(data)
        except PeerError as error:
            raise ConnectionClosedError(str(error)) from None

    async def read(self, n: int | None = None) -> bytes:
        """At most ``n`` bytes. Raises ConnectionClosedError when the relay's stream is gone."""
        if not self._rest:
            try:
                self._rest = await self._stream.receive()
            except PeerError as error:
                raise ConnectionClosedError(str(error)) from None
        data = self._rest[:n]
        self._rest = self._rest[n:] if n is not None else b""
        return data

    async def close(self) -> None:
        """End the relay's stream, and with it the circuit."""
        await self._stream.reset()

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def get_transport_addresses(self) -> list[Multiaddr]:
        return []

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.RELAYED
