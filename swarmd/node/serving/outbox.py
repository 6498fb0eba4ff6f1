"""Frames to other peers: in order for each peer, and without ever delaying the task that hands them over.

``put`` only queues; a task for each peer that has frames waiting sends them, small ones together. ``send`` writes at
once, but only where there is credit and nobody else is writing. So a peer that does not read delays nobody else, and
the worker's answers are always taken at once. Frames to this very peer go through a queue as well: a hop whose
successor is on the same server must not wait for the worker inside the worker's own reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from swarmd.errors import PeerError
from swarmd.net.api import Purpose, TaskStatus
from swarmd.net.rpc import Rpc
from swarmd.net.tasks import Tasks
from swarmd.values import PeerId

SEND_TIMEOUT_S = 20.0  # a peer that takes no byte for so long is lost to those who wait for its frames
MAX_WAITING_BYTES = 256 * 2**20  # for all peers together
MAX_SHARE = 0.25  # of what is left, for one sponsor: a prefill's activations on a slow link fit, a stopped reader's not
STALLED_S = 3.0  # a peer that has taken nothing for so long, and has much waiting, gets no more
MUCH_BYTES = 16 * 2**20  # waiting: one frame of the largest size
TOGETHER_BYTES = 256 * 1024  # in one write: more gives nothing, and would delay the next frame's start


@dataclass(slots=True)
class _QueuedFrames:
    """Frames for one peer, whose sponsor it has (``net.outbound``), and when it last took any."""

    sponsor: bytes
    took_at: float
    frames: deque[bytes] = field(default_factory=deque)
    n_bytes: int = 0


# Memory for frames that wait is one budget for all peers, so a peer that stops reading could take it all:
#
#     |<---------------- MAX_WAITING_BYTES ---------------->|
#     [ of other sponsors' peers ][        room             ]
#                                 [ one sponsor: a quarter ]    and never less than one frame of the largest size
#
# Shares are counted by sponsor (the key that brought a peer in), not by peer: keys of one's own cost nothing. The share
# is a part of what the others leave, so the more waits, the less a further sponsor may add. A peer that takes nothing
# at all loses its frames sooner, after STALLED_S.
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
        self._waiting: dict[PeerId, _QueuedFrames] = {}
        self._is_sent = trio.Event()  # something that waited, or its peer is lost

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the tasks that send, until cancelled."""
        async with self._tasks.open():
            task_status.started()
            await trio.sleep_forever()

    def tell(self, client: PeerId, frame: bytes) -> None:
        """Queue ``frame`` for a client on the channel that it opened; one that is gone hears nothing."""
        if self._rpc.find_channel(client, self._purpose) is not None:
            self.put(client, frame)

    def put(self, peer: PeerId, frame: bytes) -> None:
        """Queue ``frame`` for ``peer``; it leaves as soon as those before it have."""
        if not self._tasks.is_open:
            return
        waiting = self._waiting.get(peer)
        if waiting is None:
            waiting = _QueuedFrames(self._rpc.sponsor_of(peer), trio.current_time())
            self._waiting[peer] = waiting
            self._tasks.start_soon(self._drain, peer, waiting)
        if refusal := self._why_not(waiting, len(frame)):
            self._failed(peer, refusal)
            return
        waiting.frames.append(frame)
        waiting.n_bytes += len(frame)

    def _why_not(self, waiting: _QueuedFrames, n_bytes: int) -> str:
        """Why a frame cannot wait with those for peers of the same sponsor; "" when it can."""
        of_others = 0
        of_sponsor = 0
        for queue in self._waiting.values():
            if queue.sponsor == waiting.sponsor:
                of_sponsor += queue.n_bytes
            else:
                of_others += queue.n_bytes
        room_bytes = MAX_WAITING_BYTES - of_others
        share_bytes = max(MUCH_BYTES, MAX_SHARE * room_bytes)
        if of_sponsor + n_bytes > min(share_bytes, room_bytes):
            return f"{of_sponsor >> 20} MiB wait to be sent, and that is its share"
        stalled_s = trio.current_time() - waiting.took_at
        if waiting.n_bytes + n_bytes > MUCH_BYTES and stalled_s > STALLED_S:
            return f"it has taken nothing for {stalled_s:.0f} s, and {waiting.n_bytes >> 20} MiB wait"
        return ""

    def is_waiting(self, peer: PeerId) -> bool:
        """Are frames for ``peer`` on their way?"""
        return peer in self._waiting

    async def flush(self) -> None:
        """Wait until all that was queued has left."""
        while self._waiting:
            await self._is_sent.wait()

    async def send(self, peer: PeerId, frame: bytes) -> None:
        """Send at once what need not wait for anybody, which saves a task switch on the way of every token."""
        channel = self._rpc.find_channel(peer, self._purpose)
        if channel is None or peer in self._waiting or not channel.can_send(len(frame)):
            self.put(peer, frame)
            return
        try:
            await channel.send_raw(frame)
        except PeerError as error:
            self._failed(peer, str(error))

    async def _drain(self, peer: PeerId, waiting: _QueuedFrames) -> None:
        try:
            while waiting.frames:
                frames = _leading(waiting.frames, 1 if peer == self._rpc.network.peer_id else TOGETHER_BYTES)
                with trio.CancelScope(deadline=trio.current_time() + SEND_TIMEOUT_S) as scope:
                    await self._send(peer, b"".join(frames))
                if scope.cancelled_caught:
                    self._failed(peer, f"it took nothing for {SEND_TIMEOUT_S:.0f} s")
                    return
                waiting.took_at = trio.current_time()
                for _ in frames:
                    waiting.n_bytes -= len(waiting.frames.popleft())
        except PeerError as error:
            self._failed(peer, str(error))
        finally:
            del self._waiting[peer]
            self._is_sent.set()
            self._is_sent = trio.Event()

    async def _send(self, peer: PeerId, frame: bytes) -> None:
        if peer == self._rpc.network.peer_id:
            await self._to_self(frame)
        else:
            channel = self._rpc.find_channel(peer, self._purpose)
            if channel is None:
                channel = await self._rpc.channel(peer, self._purpose)
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
