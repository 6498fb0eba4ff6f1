"""Frames on their way to one worker process, and whether it makes progress with them."""

from __future__ import annotations

from typing import Protocol

import trio

MAX_WAITING_BYTES = 64 * 2**20  # of frames for the worker: beyond it senders wait


class FrameTaker(Protocol):
    """What frames are written to: a worker's process."""

    async def send(self, data: bytes) -> None: ...


# Frames of one turn of the loop are written together: the worker computes what it reads at once as one batch. The
# queue counts frames that it was given and frames that the worker has dealt with (its ticks). Only while some are
# outstanding is silence suspicious, so an idle worker is never killed.
class FrameQueue:
    """See the module. A process has a queue of its own: what waits for one that ended is not for the next."""

    def __init__(self) -> None:
        self.heard_at = trio.current_time()
        self.n_handled = 0
        self._n_sent = 0
        self._frames: list[bytes] = []
        self._n_bytes = 0
        self._is_closed = False
        self._wake = trio.Event()
        self._drained = trio.Event()
        self._busy = trio.Event()

    @property
    def is_outstanding(self) -> bool:
        """Has the worker frames that it has not dealt with?"""
        return self._n_sent > self.n_handled

    def put(self, frame: bytes) -> None:
        """Queue a frame, and wait for nothing."""
        if self._n_sent == self.n_handled:
            self.heard_at = trio.current_time()
            self._busy.set()
        self._n_sent += 1
        self._frames.append(frame)
        self._n_bytes += len(frame)
        self._wake.set()

    async def wait_for_room(self) -> None:
        """Wait while much is on its way, and the process is there."""
        while self._n_bytes > MAX_WAITING_BYTES and not self._is_closed:
            await self._drained.wait()

    async def wait_until_busy(self) -> None:
        """Wait until the worker has something to deal with."""
        if self._n_sent == self.n_handled:
            self._busy = trio.Event()
            await self._busy.wait()

    async def pass_on(self, process: FrameTaker) -> None:
        """Write what waits, all at once, until cancelled. Raises WorkerLost."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            data = b"".join(self._frames)
            self._frames = []
            await process.send(data)
            self._n_bytes -= len(data)
            self._drained.set()
            self._drained = trio.Event()

    def close(self) -> None:
        """Let those go on that wait for room: the process is gone."""
        self._is_closed = True
        self._drained.set()
