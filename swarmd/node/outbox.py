"""Frames to other peers: in order for each peer, and never holding up whoever hands them over.

``put`` only queues; a task for each peer that has frames waiting sends them, small ones together. ``send`` writes at
once, but only where there is credit and nobody else is writing. So a peer that does not read delays nobody else, and
the worker's answers are always taken at once. Frames to this very peer go through a queue as well: a hop whose
successor is on the same server must not wait for the worker inside the worker's own reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable

import trio

from swarmd.errors import PeerError
from swarmd.net.api import Purpose, TaskStatus
from swarmd.net.rpc import Rpc
from swarmd.net.tasks import Tasks
from swarmd.values import PeerId

SEND_TIMEOUT_S = 20.0  # a peer that takes no byte for so long is lost to those who wait for its frames
MAX_WAITING_BYTES = 256 * 2**20  # for one peer: a prefill's activations on a slow link fit, a stopped reader's do not
TOGETHER_BYTES = 256 * 1024  # in one write: more gives nothing, and would delay the next frame's start


class Outbox:
    """A queue for each peer. ``failed`` hears of frames that were lost, ``to_self`` takes those for this peer.

    Before and after ``run`` nothing is sent and nobody is told: connections end after what they served.
    """

    def __init__(
        self,
        rpc: Rpc,
        failed: Callable[[PeerId, str], None],
        to_self: Callable[[bytes], Awaitable[None]],
        purpose: Purpose = "interactive",
    ) -> None:
        self._rpc = rpc
        self._tasks = Tasks()
        self._failed = failed
        self._to_self = to_self
        self._purpose = purpose
        self._waiting: dict[PeerId, deque[bytes]] = {}
        self._waiting_bytes = 0

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the tasks that send, until cancelled."""
        async with self._tasks.open():
            task_status.started()
            await trio.sleep_forever()

    def tell(self, client: PeerId, frame: bytes) -> None:
        """Queue ``frame`` for a client on the channel that it opened; one that is gone hears nothing."""
        if self._rpc.existing(client, self._purpose) is not None:
            self.put(client, frame)

    def put(self, peer: PeerId, frame: bytes) -> None:
        """Queue ``frame`` for ``peer``; it leaves as soon as those before it have."""
        if not self._tasks.is_open:
            return
        if self._waiting_bytes + len(frame) > MAX_WAITING_BYTES:
            self._failed(peer, f"more than {MAX_WAITING_BYTES >> 20} MiB wait to be sent")
            return
        waiting = self._waiting.get(peer)
        if waiting is None:
            waiting = self._waiting[peer] = deque()
            self._tasks.start_soon(self._drain, peer, waiting)
        waiting.append(frame)
        self._waiting_bytes += len(frame)

    def is_waiting(self, peer: PeerId) -> bool:
        """Are frames for ``peer`` on their way?"""
        return peer in self._waiting

    async def send(self, peer: PeerId, frame: bytes) -> None:
        """Send at once what need not wait for anybody, which saves a task switch on the way of every token."""
        channel = self._rpc.existing(peer, self._purpose)
        if channel is None or peer in self._waiting or not channel.can_send(len(frame)):
            self.put(peer, frame)
            return
        try:
            await channel.send_raw(frame)
        except PeerError as error:
            self._failed(peer, str(error))

    async def _drain(self, peer: PeerId, waiting: deque[bytes]) -> None:
        try:
            while waiting:
                frames = _leading(waiting, 1 if peer == self._rpc.network.peer_id else TOGETHER_BYTES)
                with trio.CancelScope(deadline=trio.current_time() + SEND_TIMEOUT_S) as scope:
                    await self._send(peer, b"".join(frames))
                if scope.cancelled_caught:
                    self._failed(peer, f"it took nothing for {SEND_TIMEOUT_S:.0f} s")
                    return
                for _ in frames:
                    self._waiting_bytes -= len(waiting.popleft())
        except PeerError as error:
            self._failed(peer, str(error))
        finally:
            self._waiting_bytes -= sum(map(len, waiting))
            del self._waiting[peer]

    async def _send(self, peer: PeerId, frame: bytes) -> None:
        if peer == self._rpc.network.peer_id:
            await self._to_self(frame)
        else:
            channel = self._rpc.existing(peer, self._purpose) or await self._rpc.channel(peer, self._purpose)
            await channel.send_raw(frame)


def _leading(waiting: deque[bytes], n_bytes: int) -> list[bytes]:
    """The first frames that make up at most ``n_bytes``, and at least one."""
    frames = [waiting[0]]
    size = len(waiting[0])
    for frame in list(waiting)[1:64]:
        size += len(frame)
        if size > n_bytes:
            break
        frames.append(frame)
    return frames
