"""The third member of a circuit: who is relayed for, how much each may take, and the bytes that pass.

``circuits`` says what a relay is for, and has its messages. Only members are relayed, in limited number, and each
sponsor (the key that answers for a peer) has a share: a hundred identities of one sponsor get no more than it. Clients
announce nothing, so nobody could use a reservation of theirs, and they get none. A circuit that moves much lets all
others go first.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial

import trio

from swarmd.errors import PeerError, Unreachable
from swarmd.net.api import MayRelay, Relayed
from swarmd.net.libp2p.circuits import ANSWER_TIMEOUT_S, CIRCUIT, RELAY, Caller, RelayGrant, RelayRequest
from swarmd.net.libp2p.connections import Host
from swarmd.net.libp2p.prefixed_messages import read_message, write_message
from swarmd.net.libp2p.stream import Libp2pStream
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

MAX_RESERVATIONS = 128  # members that a relay keeps reachable
MAX_RESERVATIONS_OF_SPONSOR = 32  # a quarter: whoever brings in many leaves room for others
MAX_CIRCUITS = 256  # of a relay, at once
MAX_CIRCUITS_OF_PEER = 32  # that one member asked for: as many peers as a long chain has, and some more
MAX_CIRCUITS_OF_SPONSOR = 64  # a quarter: identities cost nothing
LOOK_INTERVAL_S = 30.0  # whether those that are relayed are still members
BULK_BYTES_PER_S = 262_144  # a circuit that moves more lets others go first: tokens move less


class RelayShares:
    """What each member and each sponsor has of a relay now; decides whether one may have more."""

    def __init__(self) -> None:
        self._reserved: Counter[PeerId] = Counter()
        self._circuits: Counter[PeerId] = Counter()
        self._sponsors: dict[PeerId, bytes] = {}  # of those that are relayed for now

    @property
    def n_circuits(self) -> int:
        """How many circuits go through the relay now."""
        return self._circuits.total()

    @contextmanager
    def reservation(self, peer: PeerId, sponsor: bytes) -> Iterator[None]:
        """Count a reservation while the block lasts."""
        with self._counted(self._reserved, peer, sponsor):
            yield

    @contextmanager
    def circuit(self, peer: PeerId, sponsor: bytes) -> Iterator[None]:
        """Count a circuit that a peer asked for while the block lasts."""
        with self._counted(self._circuits, peer, sponsor):
            yield

    @contextmanager
    def _counted(
        self,
        counts: Counter[PeerId],
        peer: PeerId,
        sponsor: bytes,
    ) -> Iterator[None]:
        self._sponsors[peer] = sponsor
        counts[peer] += 1
        try:
            yield
        finally:
            counts[peer] -= 1
            if not counts[peer]:
                del counts[peer]
            if peer not in self._reserved and peer not in self._circuits:
                self._sponsors.pop(peer, None)

    def why_no_circuit(self, peer: PeerId, relayed: Relayed, target: PeerId) -> str:
        """Why a peer gets no circuit to another; "" when it does."""
        if target not in self._reserved:
            return f"{target} has no reservation here"
        of_peer = self._circuits[peer]
        of_sponsor = sum(n for p, n in self._circuits.items() if self._sponsors.get(p) == relayed.sponsor)
        is_full = self.n_circuits >= MAX_CIRCUITS or of_sponsor >= MAX_CIRCUITS_OF_SPONSOR
        if is_full or of_peer >= MAX_CIRCUITS_OF_PEER:
            return f"{of_peer} circuits of yours, {of_sponsor} of your sponsor and {self.n_circuits} in all are open"
        return ""

    def why_no_reservation(self, peer: PeerId, relayed: Relayed) -> str:
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


# What one request goes through (the picture in circuits.py shows the three members):
#
#     asked --why not--> refused
#       |---- for a reservation --> kept, until its stream ends -------------.
#       `---- for a circuit ------> target told --> bytes pass, both ways ---+--> over
#                                                                            |
#     every LOOK_INTERVAL_S: the asker is no member, or this peer relays no more


class Relay:
    """Relays for those of whom ``may_relay``, shown their certificate, says so; None: for nobody."""

    def __init__(self, host: Host) -> None:
        self.may_relay: MayRelay | None = None
        self.shares = RelayShares()
        self._host = host
        host.serve(RELAY, self._serve_request)

    async def _serve_request(self, stream: Libp2pStream) -> None:
        """Somebody asks this peer to relay."""
        with trio.fail_after(ANSWER_TIMEOUT_S):
            request = await read_message(stream, RelayRequest)
        relayed = self._judge(stream.peer, request)
        if isinstance(relayed, str):
            await write_message(stream, RelayGrant(relayed))
            await stream.aclose()
        elif request.target:
            with self.shares.circuit(stream.peer, relayed.sponsor):
                connect = partial(self._connect_circuit, stream, PeerId(request.target))
                await self._while_member(request, stream, connect)
        else:
            with self.shares.reservation(stream.peer, relayed.sponsor):
                await self._while_member(request, stream, partial(self._keep_reservation, stream))

    def _judge(self, peer: PeerId, request: RelayRequest) -> Relayed | str:
        """For whom this peer relays, or why it does not."""
        if self.may_relay is None:
            return "this member does not relay"
        relayed = self.may_relay(peer, request.certificate)
        if relayed is None:
            return "you are no member"
        if request.target:
            why_not = self.shares.why_no_circuit(peer, relayed, PeerId(request.target))
        else:
            why_not = self.shares.why_no_reservation(peer, relayed)
        return why_not or relayed

    async def _while_member(
        self, request: RelayRequest, stream: Libp2pStream, relay: Callable[[], Awaitable[None]]
    ) -> None:
        """Relay until it ends, or until who asked is no member any more, or this peer relays no more."""
        async with trio.open_nursery() as nursery:

            async def look() -> None:
                while self.may_relay is not None and self.may_relay(stream.peer, request.certificate):
                    await trio.sleep(LOOK_INTERVAL_S)
                nursery.cancel_scope.cancel()

            nursery.start_soon(look)
            try:
                await relay()
            except PeerError as error:
                logger.debug("relaying for %s ended: %s", stream.peer, error)
            nursery.cancel_scope.cancel()

    async def _keep_reservation(self, stream: Libp2pStream) -> None:
        try:
            await write_message(stream, RelayGrant(seen_at=stream.remote_address))
            await stream.receive()
        finally:
            with trio.CancelScope(shield=True):
                await stream.reset()

    async def _connect_circuit(self, stream: Libp2pStream, target: PeerId) -> None:
        target_stream: Libp2pStream | None = None
        try:
            if not self._host.connections(target):  # a relay never dials
                raise Unreachable(f"{target} is not connected")
            target_stream = await self._host.open(target, CIRCUIT)
            await write_message(target_stream, Caller(stream.peer))
            await write_message(stream, RelayGrant(seen_at=stream.remote_address))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_copy_bytes, stream, target_stream, nursery.cancel_scope)
                nursery.start_soon(_copy_bytes, target_stream, stream, nursery.cancel_scope)
        except PeerError as error:
            if target_stream is None:
                await write_message(stream, RelayGrant(f"{target} is gone: {error}"[:200]))
        finally:
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
