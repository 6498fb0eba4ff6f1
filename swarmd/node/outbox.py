"""Frames to other peers: in order for each peer, small ones at once, and never holding up anybody else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import trio

from swarmd.errors import PeerError
from swarmd.net.rpc import Rpc
from swarmd.values import PeerId

SMALL_BYTES = 64 * 1024
SEND_TIMEOUT_S = 5.0
MAX_WAITING_BYTES = 256 * 2**20


class Outbox:
    """One queue for each peer, drained by a task while it is not empty. ``failed`` hears of frames that were lost."""

    def __init__(self, rpc: Rpc, nursery: trio.Nursery, failed: Callable[[PeerId, str], None]) -> None:
        self._rpc = rpc
        self._nursery = nursery
        self._failed = failed
        self._waiting: dict[PeerId, deque[bytes]] = {}

    async def put(self, peer: PeerId, frame: bytes) -> None:
        """Send ``frame`` to ``peer``, now or soon."""
        waiting = self._waiting.get(peer)
        if waiting is None and len(frame) <= SMALL_BYTES and (channel := self._rpc.existing(peer)) is not None:
            try:
                with trio.CancelScope(deadline=trio.current_time() + SEND_TIMEOUT_S) as scope:
                    await channel.send_raw(frame)
            except PeerError as error:
                self._failed(peer, str(error))
            if scope.cancelled_caught:
                self._failed(peer, f"it took nothing for {SEND_TIMEOUT_S} s")
            return
        if waiting is None:
            waiting = self._waiting[peer] = deque()
            self._nursery.start_soon(self._drain, peer)
        waiting.append(frame)
        if sum(map(len, waiting)) > MAX_WAITING_BYTES:
            waiting.clear()
            self._failed(peer, f"more than {MAX_WAITING_BYTES >> 20} MiB wait for it")

    async def _drain(self, peer: PeerId) -> None:
        waiting = self._waiting[peer]
        try:
            while waiting:
                channel = await self._rpc.channel(peer)
                while waiting:
                    await channel.send_raw(waiting.popleft())
        except PeerError as error:
            self._failed(peer, str(error))
        finally:
            del self._waiting[peer]
