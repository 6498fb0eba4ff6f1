"""py-libp2p's Swarm with its connection faults handled (rows 1, 12, 13, 17 and 25 of docs/libp2p-faults.md).

* 1: whatever escapes a stream handler resets that stream, not the host;
* 13: inbound upgrades have a short deadline, and one address cannot take all the pending slots;
* 17: little is read of a connection before the other side has shown its key (metered.py);
* 25: a connection whose muxer has ended is none, though the library lists it for a moment longer;
* the auto-connector, which dials whatever was ever heard of, is off.
"""

from __future__ import annotations

import logging
from collections import Counter
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
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream
from multiaddr import Multiaddr

from swarmd.net.inbound import is_scarce
from swarmd.net.libp2p.dialler import UPGRADE_TIMEOUT_S, Dialler
from swarmd.net.libp2p.metered import MeteredConnection, traffic_of
from swarmd.net.libp2p.noise import remote_of
from swarmd.net.libp2p.yamux import YamuxConnection, YamuxStream
from swarmd.net.libp2p.yamux_core import WindowBudget
from swarmd.net.traffic import Traffic, UsedUpError
from swarmd.plan.links.dialing import origin_of

logger = logging.getLogger(__name__)

YAMUX = TProtocol("/yamux/1.0.0")
MAX_PENDING_PER_CALLER = 4  # through relays: one that is made, and others that were given up a moment ago
MAX_PENDING_PER_ADDRESS = 48  # a household behind one NAT fits, a flood of sockets does not


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

    def _init_connection_management(self) -> None:
        super()._init_connection_management()
        self.auto_connector = IdleConnector(swarm=self)
        self._pending_by_address: Counter[str] = Counter()
        self.dialler = Dialler(self, self.is_used_up)
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

    def is_used_up(self) -> bool:
        """May nothing more pass this month?"""
        return self.traffic is not None and self.traffic.is_used_up

    def live_connections(self, peer_id: ID) -> list[INetConn]:
        """Those of a peer that can carry streams.

        The library lists a connection until it has closed it, a moment after its muxer has ended: whoever learns from
        a stream that a peer is gone asks in that moment.
        """
        return [c for c in self.get_connections(peer_id) if not (c.is_closed or c.muxed_conn.is_closed)]

    async def dial_peer(self, peer_id: ID) -> list[INetConn]:
        """Reuse a live connection, or make one. Raises SwarmException."""
        if live := self.live_connections(peer_id):
            return live
        if len(self.get_connections()) >= self.connection_config.max_connections:
            raise SwarmException(f"{self.connection_config.max_connections} connections are open already")
        return [await self.dialler.dial(peer_id)]

    async def upgrade_inbound_raw_conn(self, raw_conn: IRawConnection, maddr: Multiaddr) -> IMuxedConn:
        """Let in a connection that another peer began, if there is room for one from there. Raises SwarmException."""
        if is_scarce(_file_handle(raw_conn)):
            await raw_conn.close()
            raise SwarmException("the last file handles are kept for what is needed")
        if self.is_used_up():
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
