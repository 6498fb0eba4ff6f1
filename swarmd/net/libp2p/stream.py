"""A stream of one libp2p connection as swarmd's Stream."""

from __future__ import annotations

import contextlib

import trio
from libp2p.abc import INetStream
from libp2p.network.stream.exceptions import StreamError
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError

from swarmd.errors import Unreachable
from swarmd.net.libp2p.yamux import READ_BYTES, YamuxStream
from swarmd.values import PeerId


class Libp2pStream:
    """A byte stream over one yamux stream, by the contract of ``net.api.Stream``."""

    def __init__(self, peer: PeerId, net_stream: INetStream, purpose: str) -> None:
        self.peer = peer
        self._net_stream = net_stream
        muxed = getattr(net_stream, "muxed_stream", None)
        assert isinstance(muxed, YamuxStream)
        self._muxed = muxed
        muxed.agree()
        muxed.is_bulk = purpose in ("bulk", "weights", "training", "averaging")

    async def send(self, data: bytes) -> None:
        """See ``net.api.Stream``."""
        await trio.lowlevel.checkpoint_if_cancelled()
        is_sent = False
        try:
            await self._muxed.write(data)
            is_sent = True
        except MuxedStreamError:
            raise Unreachable(f"the stream to {self.peer} is gone") from None
        finally:
            if not is_sent:  # half a frame may have left: nothing after it would make sense (row 2)
                with trio.CancelScope(shield=True):
                    await self.reset()

    def can_send(self, n_bytes: int) -> bool:
        """See ``net.api.Stream``."""
        return self._muxed.can_write(n_bytes)

    async def receive(self) -> bytes:
        """See ``net.api.Stream``."""
        try:
            return await self._muxed.read_some(READ_BYTES)
        except MuxedStreamEOF:
            return b""
        except MuxedStreamError:
            raise Unreachable(f"the stream from {self.peer} is gone") from None

    async def aclose(self) -> None:
        """See ``net.api.Stream``."""
        with trio.move_on_after(1), contextlib.suppress(MuxedStreamError, StreamError):
            await self._net_stream.close()

    async def reset(self) -> None:
        """See ``net.api.Stream``."""
        with trio.move_on_after(1), contextlib.suppress(MuxedStreamError, StreamError):
            await self._net_stream.reset()

    async def read_exactly(self, n: int) -> bytes:
        """Return ``n`` bytes and leave what follows. Raises Unreachable when it ends before."""
        try:
            data = await self._muxed.read(n)
        except (MuxedStreamEOF, MuxedStreamError):
            data = b""
        if len(data) < n:
            raise Unreachable(f"the stream from {self.peer} ended")
        return data

    def yield_to_others(self, is_bulk: bool) -> None:
        """Let other streams of its connection write before this one, or no longer."""
        self._muxed.is_bulk = is_bulk

    @property
    def remote_address(self) -> tuple[str, int] | None:
        """Where its connection comes from; None for one through a relay."""
        return self._muxed.get_remote_address()
