"""The worker's end of its socket to the daemon, and the time that it does not wait there: that is work.

Of its time the owner gives the worker a share (``plan.owner.duty``); who waits for a frame uses none of it.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterable, Iterator

from swarmd.plan.owner.duty import Duty
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame, FrameDecoder, next_read_bytes
from swarmd.protocol.wire.worker import Tick

TICK_INTERVAL_S = 0.5  # an eighth of the silence after which the daemon gives a worker up


class DaemonSocket:
    """Frames from the daemon and to it; each send is a sign of life, too."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = FrameDecoder()
        self._duty = Duty()
        self._woke_at = time.monotonic()
        self._ticked_at = 0.0

    # --- frames ----------------------------------------------------------------------------------------------

    def has_frame(self, timeout_s: float = 0) -> bool:
        """Is there something to receive, or will there be before the timeout?"""
        readable, _, _ = select.select([self._connection], [], [], timeout_s)
        return bool(readable)

    def wait_for_frame(self, seconds: float) -> bool:
        """Wait for a frame; has one come?"""
        self.count_work()
        has_come = self.has_frame(seconds)
        self.begin_work()
        return has_come

    def receive(self, *, wait: bool) -> Iterator[Frame]:
        """Yield what has arrived; wait for something only if there is nothing else to do. Raises EOFError."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        data = b""
        while True:
            if not flags:
                self.count_work()
            try:
                data = self._connection.recv(next_read_bytes(data), flags)
            except BlockingIOError:
                return
            if not data:
                raise EOFError
            if not flags:
                self.begin_work()  # it has waited
            yield from self._decoder.feed_untrusted(data)
            if self._decoder.is_between_frames:
                flags = socket.MSG_DONTWAIT

    def send(self, frames: Iterable[bytes], tick: Tick) -> None:
        """Send frames, and with them how much is done."""
        self._connection.sendall(b"".join((*frames, messages.encode_frame(tick))))
        self._ticked_at = time.monotonic()

    @property
    def is_tick_due(self) -> bool:
        """Is the last sign of life old enough for another one?"""
        return time.monotonic() - self._ticked_at >= TICK_INTERVAL_S

    # --- time ------------------------------------------------------------------------------------------------

    def count_work(self) -> None:
        """Count all the time since it last waited as work."""
        now = time.monotonic()
        self._duty.worked(now - self._woke_at, now)
        self._woke_at = now

    def begin_work(self) -> None:
        """Count time from now on: what was before is nobody's debt."""
        self._woke_at = time.monotonic()

    def set_share(self, share: float) -> None:
        """Work so large a share of the time."""
        self._duty = Duty(share)
        self.begin_work()

    def rest_s(self) -> float:
        """How long to do nothing now, so that no more than the share is used."""
        return self._duty.wait_s(time.monotonic())
