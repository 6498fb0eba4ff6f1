"""py-libp2p's Swarm with its connection faults handled (rows 1, 8, 9, 12, 13 and 17 of docs/libp2p-faults.md).

* 1: whatever escapes a stream handler resets that stream, not the host;
* 8, 9: dialling tries the likeliest address first and the next soon after, without a negative cache;
* 13: inbound upgrades have a short deadline, and one address cannot take all the pending slots;
* 17: little is read of a connection before the other side has shown its key (metered.py);
* the auto-connector, which dials whatever was ever heard of, is off.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import trio
from libp2p.abc import IMuxedConn, INetConn, INetStream, IRawConnection, ISecureConn
from libp2p.custom_types import StreamHandlerFn, TMuxerOptions, TProtocol
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.pnet.protector import new_protected_conn
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from swarmd.net.handles import is_scarce
from swarmd.net.interfaces import expand_wildcards, own_networks
from swarmd.net.libp2p.metered import MeteredConnection, traffic_of
from swarmd.net.libp2p.noise import remote_of
from swarmd.net.libp2p.own_port import connect_from, reserve_port
from swarmd.net.libp2p.yamux import YamuxConnection, YamuxStream
from swarmd.net.libp2p.yamux_core import WindowBudget
from swarmd.net.traffic import Traffic, UsedUpError
from swarmd.plan.links.dial_budget import DialBudget
from swarmd.plan.links.dialing import Attempt, is_circuit, order_attempts, origin_of

logger = logging.getLogger(__name__)

YAMUX = TProtocol("/yamux/1.0.0")
UPGRADE_TIMEOUT_S = 3.0  # Noise and yamux; a silent socket is given up
OWN_PORT_TIMEOUT_S = 6.0  # for all addresses together: two that are silent, or a row that answer fast
MAX_PENDING_PER_CALLER = 4  # through relays: one that is made, and others that were given up a moment ago
MAX_PENDING_PER_ADDRESS = 48  # a household behind one NAT fits, a flood of sockets does not

PORT_TAKEN_ERRORS = (
    errno.EADDRNOTAVAIL,
    errno.EADDRINUSE,
)  # another connection from this port to that address is there


def connection_config() -> ConnectionConfig:
    """Short deadlines, many connections, and none that the library makes by itself."""
    return ConnectionConfig(
        min_connections=0,
        low_watermark=0,
        high_watermark=900,
        max_connections=1_000,
        dial_timeout=UPGRADE_TIMEOUT_S,
        inbound_upgrade_timeout=UPGRADE_TIMEOUT_S,
        outbound_upgrade_timeout=UPGRADE_TIMEOUT_S,
    )


def retry_config() -> RetryConfig:
    """One attempt: whether to try again is decided above."""
    return RetryConfig(max_retries=0)


class HandshakeError(SwarmException):
    """Somebody listens there, but the upgrade to an encrypted connection failed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What became of one address; ``is_garbled``: something answered that is not of this swarm."""

    text: str
    is_garbled: bool


class OurMuxer(MuxerMultistream):
    """Negotiates yamux as the library does, then builds our connection instead of the library's."""

    def __init__(self, traffic: Traffic | None) -> None:
        self._traffic = traffic
        self._window_budget = WindowBudget()
        options: TMuxerOptions = {YAMUX: YamuxConnection}
        super().__init__(options, int(UPGRADE_TIMEOUT_S))

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        """Negotiate a muxer over an encrypted connection, and build it."""
        protocol, _ = await self._selector.select(conn, conn.is_initiator, self.negotiate_timeout)
        muxed = YamuxConnection(conn, peer_id, traffic_of(conn, self._traffic), self._window_budget)
        return self._annotate_connection(muxed, conn, protocol)


class IdleConnector(AutoConnector):
    """Connects to nobody: whom to know is the directory's decision."""

    async def run_background_task(self, nursery: trio.Nursery) -> None:
        return

    async def maybe_connect(self) -> None:
        return


class GuardedSwarm(Swarm):
    """A Swarm that a remote peer cannot end."""

    circuits_of: dict[ID, tuple[str, ...]]
    """Addresses through relays, which are not in the peerstore: the library would read them as the relays' own."""
    dial_circuit: Callable[[str, ID], Awaitable[IRawConnection]]

    def _init_connection_management(self) -> None:
        super()._init_connection_management()
        self.auto_connector = IdleConnector(swarm=self)
        self._pending_by_address: Counter[str] = Counter()
        self._tcp = TCP()
        self.circuits_of = {}
        self._dial_budget = DialBudget()
        self._own_port = 0
        self._listens = True
        self.traffic: Traffic | None = None

    def set_stream_handler(self, stream_handler: StreamHandlerFn) -> None:
        """Whatever escapes the handler resets its stream, and nothing else."""

        async def guarded(stream: INetStream) -> None:
            try:
                await stream_handler(stream)
            except Exception as error:  # noqa: BLE001 - the stream-handler guard: row 1
                logger.debug("a stream handler ended with %r", error)
                with trio.CancelScope(shield=True), trio.move_on_after(1):
                    await stream.reset()

        super().set_stream_handler(guarded)

    async def notify_opened_stream(self, stream: INetStream) -> None:
        """Let a stream of ours know its protocol, as soon as the library does."""
        muxed = getattr(stream, "muxed_stream", None)
        if isinstance(muxed, YamuxStream):
            muxed.protocol_of = stream.get_protocol
        await super().notify_opened_stream(stream)

    async def dial_peer(self, peer_id: ID) -> list[INetConn]:
        """Reuse a live connection, or try all known addresses, the likeliest first (plan.links.dialing)."""
        live = [c for c in self.get_connections(peer_id) if not c.is_closed]
        if live:
            return live
        if len(self.get_connections()) >= self.connection_config.max_connections:
            raise SwarmException(f"{self.connection_config.max_connections} connections are open already")
        addresses = (*self._known_addresses(peer_id), *self.circuits_of.get(peer_id, ()))
        return [await self.dial_addresses(addresses, peer_id)]

    async def dial_addresses(self, addresses: tuple[str, ...], peer_id: ID) -> INetConn:
        """Make a connection, the likeliest address first. Raises SwarmException with what became of each."""
        return await self._race_attempts(order_attempts(addresses, own_networks(), self._own_addresses()), peer_id)

    async def dial_over(self, version: int, peer_id: ID) -> INetConn:
        """Make a connection over one version of IP, 4 or 6. Raises SwarmException."""
        kinds = (f"/ip{version}/", f"/dns{version}/", "/dns/")
        addresses = tuple(address for address in self._known_addresses(peer_id) if address.startswith(kinds))
        return await self.dial_addresses(addresses, peer_id)

    def knows(self, peer_id: ID) -> bool:
        """Is there an address of a peer?"""
        return bool(self._known_addresses(peer_id))

    def _known_addresses(self, peer_id: ID) -> list[str]:
        try:
            return [str(address) for address in self.peerstore.addrs(peer_id)]
        except PeerStoreError:
            return []

    # --- from the port that others know ----------------------------------------------------------------------

    @contextmanager
    def own_port(self) -> Iterator[None]:
        """Keep a port to dial from, as routers know who dials by it: the one that it listens on, or any.

        Who listens dials from that port only where a router has to know it: two that dialled each other from there in
        the same moment would make one connection, on which both begin.
        """
        listening = self._listen_addresses()
        self._listens = bool(listening)
        with reserve_port(listening) as self._own_port:
            yield

    async def dial_from_own_port(self, peer_id: ID) -> INetConn:
        """A connection beside those that there are. Raises SwarmException."""
        with trio.move_on_after(OWN_PORT_TIMEOUT_S):
            for attempt in order_attempts(self._known_addresses(peer_id), own_networks(), self._own_addresses()):
                with suppress(OpenConnectionError, SwarmException), trio.move_on_after(UPGRADE_TIMEOUT_S):
                    return await self._upgrade_wire(await self._from_own_port(attempt.address), peer_id)
        raise SwarmException(f"{peer_id} cannot be dialled from port {self._own_port}")

    async def punch(self, address: str, peer_id: ID, is_initiator: bool) -> None:
        """Connect with who connects here in the same moment. Raises SwarmException."""
        try:
            raw = await self._from_own_port(address)
        except OpenConnectionError as error:
            raise SwarmException(f"no connection to {address}: {error}") from None
        if is_initiator:
            await self._upgrade_wire(raw, peer_id)
            return
        with _as_swarm_failure():
            muxed = await self.upgrade_inbound_raw_conn(raw, Multiaddr(address))
        if muxed.peer_id != peer_id:
            await muxed.close()
            raise SwarmException(f"{muxed.peer_id} answers at {address}, not {peer_id}")

    async def _from_own_port(self, address: str) -> IRawConnection:
        """Raises OpenConnectionError."""
        return await connect_from(self._own_port, _parse_untrusted(address))

    async def _upgrade_wire(self, raw: IRawConnection, peer_id: ID) -> INetConn:
        """Upgrade what this side began; it is closed when that fails. Raises SwarmException."""
        made: INetConn | None = None
        try:
            with _as_swarm_failure():
                made = await self.upgrade_outbound_raw_conn(self._protect_wire(raw), peer_id)
                return made
        finally:
            if made is None:
                with trio.CancelScope(shield=True), trio.move_on_after(1):
                    await raw.close()

    def _protect_wire(self, raw: IRawConnection) -> IRawConnection:
        return new_protected_conn(raw, self.psk) if self.psk is not None else raw

    # --- one after the other ---------------------------------------------------------------------------------

    def _listen_addresses(self) -> list[Multiaddr]:
        return [address for listener in self.listeners.values() for address in listener.get_addrs()]

    def _own_addresses(self) -> list[str]:
        return list(expand_wildcards(tuple(map(str, self._listen_addresses()))))

    async def _race_attempts(self, planned: list[Attempt], peer_id: ID) -> INetConn:
        """The connection of whichever attempt succeeds first. Raises SwarmException with what became of each."""
        # "Happy eyeballs" (RFC 8305): each attempt has its own task. It begins at its time, or as soon as one before it
        # has failed, so that a refused address costs no wait. The first that succeeds cancels all others.
        won: list[INetConn] = []
        failed: dict[int, Failure] = {}
        turns = [trio.Event() for _ in planned]

        async def wait_and_try(index: int, attempt: Attempt) -> None:
            with trio.move_on_after(attempt.after_s):
                await turns[index].wait()
            connection, failure = await self._attempt_dial(attempt.address, peer_id)
            if connection is not None:
                won.append(connection)
                nursery.cancel_scope.cancel()
            elif failure is not None:
                failed[index] = failure
                following = next((i for i in range(len(planned)) if i not in failed), None)
                if following is not None:
                    turns[following].set()

        async with trio.open_nursery() as nursery:
            for index, attempt in enumerate(planned):
                nursery.start_soon(wait_and_try, index, attempt)
        if won:
            return won[0]
        failures = [failed[index].text for index in sorted(failed)]
        outcomes = ", ".join(failures) or "no address of it is known that leads there"
        if any(failure.is_garbled for failure in failed.values()):
            raise HandshakeError(f"the swarm key does not match, or something else listens at {outcomes}")
        raise SwarmException(f"cannot reach {peer_id}: {outcomes}")

    async def _attempt_dial(
        self,
        address: str,
        peer_id: ID,
    ) -> tuple[INetConn | None, Failure | None]:
        """One attempt: the connection, or why there is none."""
        peer = peer_id.to_base58()
        is_relayed = is_circuit(address)
        wait_s = 0.0 if is_relayed else self._dial_budget.take(address, peer, trio.current_time())
        if wait_s:
            return None, Failure(f"{address} (dialled for others just now; again in {wait_s:.0f} s)", is_garbled=False)
        is_connected = False
        cause = "no answer in time"
        with trio.move_on_after(UPGRADE_TIMEOUT_S):
            try:
                raw = await self._open_wire(address, peer_id)
                is_connected = True
                connection = await self._upgrade_wire(raw, peer_id)
                self._dial_budget.met(address, peer)
                return connection, None
            except OpenConnectionError as error:
                cause = str(error) if is_relayed else "connection refused"
            except SwarmException as error:
                root = _cause_chain(error)[-1]
                if isinstance(root, PeerIDMismatchesPubkey):
                    return None, Failure(f"{address} (another peer answers there)", is_garbled=False)
                if not isinstance(root, trio.TooSlowError):
                    cause = f"the handshake failed: {type(root).__name__}"
        return None, Failure(f"{address} ({cause})", is_garbled=is_connected and not is_relayed)

    async def answers(self, address: str, peer_id: ID) -> bool:
        """Does a peer answer at an address, with its key, over a connection made and ended for that?"""
        raw: IRawConnection | None = None
        try:
            raw = await self._open_wire(address, peer_id)
            with _as_swarm_failure():
                await self.upgrader.upgrade_security(self._protect_wire(raw), True, peer_id)
        except (OpenConnectionError, SwarmException):
            return False
        finally:
            if raw is not None:
                with trio.CancelScope(shield=True), trio.move_on_after(1):
                    await raw.close()
        return True

    async def _open_wire(self, address: str, peer_id: ID) -> IRawConnection:
        """The bytes of a connection, before anything is said over them. Raises OpenConnectionError.

        Who does not listen dials from its own port: a relay then sees where others can meet it.
        """
        if self.traffic is not None and self.traffic.is_used_up:
            raise OpenConnectionError(str(UsedUpError()))
        if is_circuit(address):
            return await self.dial_circuit(address, peer_id)
        if not self._listens and address.startswith("/ip4/"):
            try:
                return await self._from_own_port(address)
            except OpenConnectionError as error:
                root = _cause_chain(error)[-1]
                if not isinstance(root, OSError) or root.errno not in PORT_TAKEN_ERRORS:
                    raise
        return await self._tcp.dial(_parse_untrusted(address))

    async def upgrade_inbound_raw_conn(self, raw_conn: IRawConnection, maddr: Multiaddr) -> IMuxedConn:
        """Let in a connection that another peer began, if there is room for one from there. Raises SwarmException."""
        if is_scarce(_file_handle(raw_conn)):
            await raw_conn.close()
            raise SwarmException("the last file handles are kept for what is needed")
        if self.traffic is not None and self.traffic.is_used_up:
            await raw_conn.close()
            raise SwarmException(str(UsedUpError()))
        # A stranger's pending handshakes are counted by where it comes from; one that comes through a relay, by what
        # the relay says of it. So a flood of sockets from one place takes the slots of that place only.
        remote = remote_of(raw_conn)
        caller = getattr(raw_conn, "caller", "")
        address = origin_of(remote[0]) if remote else caller
        limit = MAX_PENDING_PER_CALLER if caller else MAX_PENDING_PER_ADDRESS
        if self._pending_by_address[address] >= limit:
            await raw_conn.close()
            raise SwarmException(f"{address} has {limit} connections pending already")
        self._pending_by_address[address] += 1
        metered = MeteredConnection(raw_conn, False, traffic_of(raw_conn, self.traffic))
        try:
            muxed = await super().upgrade_inbound_raw_conn(metered, maddr)
        finally:
            self._pending_by_address[address] -= 1
        metered.trust()
        return muxed

    async def upgrade_outbound_raw_conn(
        self, raw_conn: IRawConnection, peer_id: ID, pre_scope: Any = None
    ) -> SwarmConn:
        """Upgrade a connection that this side began, with little read before the other has shown its key."""
        metered = MeteredConnection(raw_conn, True, traffic_of(raw_conn, self.traffic))
        upgraded = await super().upgrade_outbound_raw_conn(metered, peer_id, pre_scope)
        metered.trust()
        return upgraded


def _file_handle(raw_conn: IRawConnection) -> int:
    """The file handle of a TCP connection; -1 for what has none."""
    stream = getattr(getattr(raw_conn, "stream", None), "stream", None)
    return stream.socket.fileno() if isinstance(stream, trio.SocketStream) else -1


@contextmanager
def _as_swarm_failure() -> Iterator[None]:
    """Whatever the other side's bytes make the library raise in a handshake is a SwarmException (row 18)."""
    try:
        yield
    except SwarmException:
        raise
    except Exception as error:
        raise SwarmException(f"the handshake failed: {type(error).__name__}") from error


def _parse_untrusted(address: str) -> Multiaddr:
    """Raises OpenConnectionError for what is no address."""
    try:
        return Multiaddr(address)
    except (ValueError, LookupError, TypeError):
        raise OpenConnectionError(f"{address[:80]!r} is no address") from None


def _cause_chain(error: BaseException) -> list[BaseException]:
    """An error, and what caused it, the root last."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain
