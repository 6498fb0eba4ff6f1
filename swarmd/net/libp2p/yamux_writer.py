"""What one connection writes: whole frames, one at a time, with interactive streams before bulk ones.

Handles row 2 of the table of faults: a write that is cancelled never leaves half a record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio
from libp2p.abc import ISecureConn
from libp2p.io.exceptions import IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedStreamReset

from swarmd.net.write_lock import WriteLock

logger = logging.getLogger(__name__)

MAX_OWED_BYTES = 64 * 1024  # 5,000 answers to pings
WRITE_TIMEOUT_S = 10.0  # a peer that reads nothing for so long is gone
CONNECTION_ERRORS = (IOException, RawConnError, trio.BrokenResourceError, trio.ClosedResourceError, OSError, ValueError)


class FrameWriter:
    """The writing half of a connection; calls ``end`` when the connection has to end, maybe more than once.

    What is *owed* (pings, credit, the beginnings and ends of streams) leaves with the next write or soon by itself.
    Nobody waits for that: reading would wait for the other side to read, and who is cancelled would lose it.
    """

    def __init__(
        self,
        secured: ISecureConn,
        peer_id: ID,
        end: Callable[[], None],
    ) -> None:
        self._secured = secured
        self._peer_id = peer_id
        self._end = end
        self._lock = WriteLock()
        self._owed = bytearray()
        self._owing = trio.Event()
        self._is_closed = False

    @property
    def is_writing(self) -> bool:
        """Is somebody in the midst of a frame?"""
        return self._lock.is_held

    def close(self) -> None:
        """Write nothing from now on."""
        self._is_closed = True

    def owe(self, frames: bytes) -> None:
        """Have small frames sent soon. A peer that asks for more than it reads loses the connection."""
        if not frames or self._is_closed:
            return
        self._owed += frames
        self._owing.set()
        if len(self._owed) > MAX_OWED_BYTES:
            logger.warning("closing the connection to %s: it asks for more answers than it reads", self._peer_id)
            self._end()

    async def run(self) -> None:
        """Send what is owed, until the connection is gone."""
        while not self._is_closed:
            await self._owing.wait()
            await self._lock.acquire(is_bulk=False)
            try:
                await self._write_and_release(b"")
            except MuxedStreamReset:
                return

    async def send(self, next_frame: Callable[[], bytes], is_bulk: bool) -> int:
        """Write the frame that ``next_frame`` makes when its turn has come; returns its bytes, 0 where it is empty.

        Raises MuxedStreamReset.
        """
        await self._lock.acquire(is_bulk)
        frame = next_frame()
        if not frame:
            self._lock.release()
            return 0
        await self._write_and_release(frame)
        return len(frame)

    async def _write_and_release(self, frame: bytes) -> None:
        """Write whole frames; once begun they are finished even if the caller is cancelled (row 2)."""
        try:
            if self._is_closed:
                raise MuxedStreamReset
            if self._owed:
                frame = bytes(self._owed) + frame
                self._owed.clear()
                self._owing = trio.Event()
            with trio.CancelScope(shield=True, deadline=trio.current_time() + WRITE_TIMEOUT_S) as scope:
                await self._secured.write(frame)
            if scope.cancelled_caught:
                self._end()
                raise MuxedStreamReset
        except CONNECTION_ERRORS as error:
            logger.debug("write to %s failed: %s", self._peer_id, error)
            self._end()
            raise MuxedStreamReset from error
        finally:
            self._lock.release()
