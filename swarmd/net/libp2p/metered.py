"""Connections whose bytes are bounded before their other side has shown its key (row 17), and counted ever after."""

from __future__ import annotations

import math

from libp2p.abc import IRawConnection
from libp2p.network.connection.exceptions import RawConnError

from swarmd.net.libp2p.noise import OverConnection, remote_of
from swarmd.net.traffic import Traffic

MAX_READ_OF_STRANGER = 4_096  # at a time
MAX_BYTES_OF_STRANGER = 65_536  # a handshake takes 2 KiB


class MeteredConnection(OverConnection):
    """A connection of which little is read before the other side has shown its key; ``traffic`` counts its bytes.

    py-libp2p reads as many bytes as a stranger's length prefix says, up to 2^64.
    """

    def __init__(self, raw: IRawConnection, is_initiator: bool, traffic: Traffic | None) -> None:
        super().__init__(raw, is_initiator)
        self._traffic = traffic
        self._n_read: float = 0
        if traffic is not None:
            traffic.connected()

    def trust(self) -> None:
        """The other side has shown its key: from now on this costs nothing where nothing is counted."""
        self._n_read = -math.inf
        if self._traffic is None:
            self.read = self.raw.read  # type: ignore[method-assign]
            self.write = self.raw.write  # type: ignore[method-assign]

    async def read(self, n: int | None = None) -> bytes:
        """Read some bytes, few of a stranger's. Raises RawConnError when a stranger has sent too much."""
        is_trusted = self._n_read < 0
        data = await self.raw.read(n if is_trusted else min(n or MAX_READ_OF_STRANGER, MAX_READ_OF_STRANGER))
        if self._traffic is not None:
            self._traffic.received(len(data))
        self._n_read += len(data)
        if self._n_read > MAX_BYTES_OF_STRANGER:
            raise RawConnError(f"more than {MAX_BYTES_OF_STRANGER} B before a key was shown")
        return data

    async def write(self, data: bytes) -> None:
        """Count the bytes, then send them. Raises UsedUpError instead when the month's are used up."""
        if self._traffic is not None:
            self._traffic.sent(len(data))
        await self.raw.write(data)


def traffic_of(connection: IRawConnection, traffic: Traffic | None) -> Traffic | None:
    """What counts the bytes of a connection; None within the home, and through a relay, whose own connection counts."""
    if traffic is None:
        return None
    remote = remote_of(connection)
    return traffic.counter_for(remote[0]) if remote is not None else None
