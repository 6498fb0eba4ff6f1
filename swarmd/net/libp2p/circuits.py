"""Connections through a third member, for peers that nobody can dial: one asks a relay, which knows the other.

As in libp2p's circuit relay v2, a peer that cannot be dialled holds a *reservation* with a relay, by a stream that it
keeps open. A peer that wants to reach it asks that relay for a *circuit*. Both make their own encrypted connection over
it, so that the relay sees bytes only. py-libp2p's own closes the circuits of others (row 15) and cannot be dialled
(row 14). Only members are relayed, in limited number, and each sponsor (the key that answers for a peer) has a share:
a hundred identities of one sponsor get no more than it. Clients announce nothing, so nobody could use a reservation of
theirs, and they get none. A circuit that moves much lets all others go first.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import msgspec
import trio
from libp2p.abc import IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.io.exceptions import ConnectionClosedError
from multiaddr import Multiaddr

from swarmd.errors import PeerError, Unreachable
from swarmd.net.api import MayRelay, Relayed
from swarmd.net.libp2p.prefixed_messages import read_message, write_message
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.protocol.fields import Certificate, Name, Text
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

MAX_RESERVATIONS = 128  # members that a relay keeps reachable
MAX_RESERVATIONS_OF_SPONSOR = 32  # a quarter: whoever brings in many leaves room for others
MAX_CIRCUITS = 256  # of a relay, at once
MAX_CIRCUITS_OF_PEER = 32  # that one member asked for: as many peers as a long chain has, and some more
MAX_CIRCUITS_OF_SPONSOR = 64  # a quarter: identities cost nothing
LOOK_INTERVAL_S = 30.0  # whether those that are relayed are still members
ANSWER_TIMEOUT_S = 3.0  # for a relay that has the other peer at hand
BULK_BYTES_PER_S = 262_144  # a circuit that moves more lets others go first: tokens move less


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


class Streams(Protocol):
    """What circuits need of the network that they belong to."""

    async def open_for_relay(self, peer: PeerId) -> Libp2pStream:
        """A stream to ask a relay with; dials it."""

    async def open_for_reservation(self, relay: PeerId) -> Libp2pStream:
        """The same over a connection from the port that this peer listens on, where that can be."""

    def announced_ports(self) -> tuple[int, ...]:
        """Where it listens."""

    def note_seen_at(self, place: tuple[str, int] | None) -> None:
        """A relay sees this peer come from there."""

    async def open_to_reserved(self, peer: PeerId) -> Libp2pStream:
        """A stream to who holds a reservation here; never dials."""

    async def take_in(self, connection: IRawConnection) -> None:
        """Upgrade a connection that somebody else began."""


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
    """One network's circuits. ``may_relay`` says for whom, with which certificate, this peer relays; None: nobody."""

    def __init__(self, network: Streams, certificate: tuple[bytes, ...]) -> None:
        self.may_relay: MayRelay | None = None
        self._certificate = certificate
        self._network = network
        self._relays: Counter[PeerId] = Counter()
        self._reserved: Counter[PeerId] = Counter()
        self._asked: Counter[PeerId] = Counter()
        self._sponsors: dict[PeerId, bytes] = {}  # of those that are relayed for now

    @property
    def n_open(self) -> int:
        """How many circuits go through this peer now."""
        return self._asked.total()

    # --- as one of the two ends ------------------------------------------------------------------------------

    async def reserve(self, relay: PeerId, on_held: Callable[[], None]) -> None:
        """Hold a reservation until it ends; calls ``on_held`` when it holds. Raises PeerError."""
        stream = await self._network.open_for_reservation(relay)
        self._relays[relay] += 1  # it may bring somebody before its answer has been read
        try:
            granted = await self._ask_relay(stream, RelayRequest(certificate=self._certificate))
            self._network.note_seen_at(granted.seen_at)
            on_held()
            await stream.receive()
        finally:
            self._relays = self._relays - Counter([relay])
            with trio.CancelScope(shield=True):
                await stream.reset()

    async def dial(self, relay: PeerId, target: PeerId) -> IRawConnection:
        """Have a relay connect this peer to another. Raises PeerError."""
        stream = await self._network.open_for_relay(relay)
        granted = await self._ask_relay(stream, RelayRequest(target, self._certificate))
        if not self._network.announced_ports():  # else the connection comes from another port than reservations
            self._network.note_seen_at(granted.seen_at)
        return Circuit(stream, is_initiator=True)

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

    async def serve_call(self, stream: Libp2pStream) -> None:
        """A relay brings somebody who wants to connect to this peer."""
        is_in_circuit = stream.remote_address is None
        if is_in_circuit or stream.peer not in self._relays:
            await stream.reset()
            return
        with trio.fail_after(ANSWER_TIMEOUT_S):
            caller = await read_message(stream, Caller)
        await self._network.take_in(Circuit(stream, False, f"{caller.peer} through {stream.peer}"))

    # --- as the relay ----------------------------------------------------------------------------------------

    async def serve_request(self, stream: Libp2pStream) -> None:
        """Somebody asks this peer to relay."""
        with trio.fail_after(ANSWER_TIMEOUT_S):
            ask = await read_message(stream, RelayRequest)
        relayed = self.may_relay(stream.peer, ask.certificate) if self.may_relay else None
        why_not = self._why_not(stream.peer, ask, relayed)
        if relayed is None or why_not:
            await write_message(stream, RelayGrant(why_not))
            await stream.aclose()
            return
        self._sponsors[stream.peer] = relayed.sponsor
        try:
            if ask.target:
                await self._while_member(ask, stream, partial(self._connect_circuit, stream, PeerId(ask.target)))
            else:
                await self._while_member(ask, stream, partial(self._keep_reservation, stream))
        finally:
            if not self._reserved[stream.peer] and not self._asked[stream.peer]:
                self._sponsors.pop(stream.peer, None)

    async def _while_member(
        self, ask: RelayRequest, stream: Libp2pStream, relay: Callable[[], Awaitable[None]]
    ) -> None:
        """Relay until it ends, or until who asked is no member any more, or this peer relays no more."""
        async with trio.open_nursery() as nursery:

            async def look() -> None:
                while self.may_relay is not None and self.may_relay(stream.peer, ask.certificate):
                    await trio.sleep(LOOK_INTERVAL_S)
                nursery.cancel_scope.cancel()

            nursery.start_soon(look)
            try:
                await relay()
            except PeerError as error:
                logger.debug("relaying for %s ended: %s", stream.peer, error)
            nursery.cancel_scope.cancel()

    def _why_not(self, peer: PeerId, ask: RelayRequest, relayed: Relayed | None) -> str:
        """Why this peer does not do what it is asked; "" when it does."""
        if self.may_relay is None:
            return "this member does not relay"
        if relayed is None:
            return "you are no member"
        if not ask.target:
            return self._why_not_kept(peer, relayed)
        if ask.target not in self._reserved:
            return f"{ask.target} has no reservation here"
        counts = [n for peer, n in self._asked.items() if self._sponsors.get(peer) == relayed.sponsor]
        of_sponsor = sum(counts)
        is_full = self.n_open >= MAX_CIRCUITS or of_sponsor >= MAX_CIRCUITS_OF_SPONSOR
        if is_full or self._asked[peer] >= MAX_CIRCUITS_OF_PEER:
            return (
                f"{self._asked[peer]} circuits of yours, {of_sponsor} of your sponsor and {self.n_open} in all are open"
            )
        return ""

    def _why_not_kept(self, peer: PeerId, relayed: Relayed) -> str:
        """Why a peer gets no reservation; "" when it does."""
        if not relayed.may_reserve:
            return "a client announces nothing, so nobody would look for it here: only members get reservations"
        if peer in self._reserved:
            return ""
        of_sponsor = sum(self._sponsors.get(p) == relayed.sponsor for p in self._reserved)
        if of_sponsor >= MAX_RESERVATIONS_OF_SPONSOR:
            return f"{of_sponsor} members that came as you did have reservations here, which is their share"
        is_full = len(self._reserved) >= MAX_RESERVATIONS
        return f"{MAX_RESERVATIONS} members have reservations here" if is_full else ""

    async def _keep_reservation(self, stream: Libp2pStream) -> None:
        peer = stream.peer
        self._reserved[peer] += 1
        try:
            await write_message(stream, RelayGrant(seen_at=stream.remote_address))
            await stream.receive()
        finally:
            self._reserved = self._reserved - Counter([peer])
            with trio.CancelScope(shield=True):
                await stream.reset()

    async def _connect_circuit(self, stream: Libp2pStream, target: PeerId) -> None:
        self._asked[stream.peer] += 1
        target_stream: Libp2pStream | None = None
        try:
            target_stream = await self._network.open_to_reserved(target)
            await write_message(target_stream, Caller(stream.peer))
            await write_message(stream, RelayGrant(seen_at=stream.remote_address))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_copy_bytes, stream, target_stream, nursery.cancel_scope)
                nursery.start_soon(_copy_bytes, target_stream, stream, nursery.cancel_scope)
        except PeerError as error:
            if target_stream is None:
                await write_message(stream, RelayGrant(f"{target} is gone: {error}"[:200]))
        finally:
            self._asked = self._asked - Counter([stream.peer])
            with trio.CancelScope(shield=True):
                await stream.reset()
                if target_stream is not None:
                    await target_stream.reset()


async def _copy_bytes(source: Libp2pStream, sink: Libp2pStream, scope: trio.CancelScope) -> None:
    """Pass bytes on until either end is gone, which ends the other direction as well."""
    since = trio.current_time()
    n_moved = 0
    try:
        data = await source.receive()
        while data:
            now = trio.current_time()
            if now - since > 1.0:
                since = now
                n_moved = 0
            n_moved += len(data)
            sink.yield_to_others(n_moved > BULK_BYTES_PER_S)
            await sink.send(data)
            data = await source.receive()
    except PeerError:
        pass
    finally:
        scope.cancel()


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
