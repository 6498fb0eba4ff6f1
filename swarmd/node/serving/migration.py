"""KV-cache migration: the caches of a session's hop on their way from this server to another, and from another here.

A server that stops serving sends them, in parts on the bulk channel and in order, when the session's client asks for
it; the heir opened the hop with ``inherit`` and says when all is in place. docs/protocol.md, "Leaving".
"""

from __future__ import annotations

import math

import trio

from swarmd.errors import Code, PeerError
from swarmd.net.rpc import Rpc
from swarmd.net.tasks import Tasks
from swarmd.node.serving.hops import Key
from swarmd.node.serving.next_hop import NextHopDialer
from swarmd.node.serving.outbox import Outbox
from swarmd.node.worker.worker_link import WorkerLink, WorkerLost, WorkerReply
from swarmd.protocol.fields import Message
from swarmd.protocol.wire.messages import HandedOver, HandOver, Refusal, encode_frame
from swarmd.values import PeerId

SEND_TIMEOUT_S = 60.0  # for all caches of one hop


#     client --HandOver--> this server --HandOver--> its worker
#                          this server <--CachePart, CachePart, ...-- worker
#                          this server --CachePart, ... (bulk channel)--> heir
#     client <--HandedOver, or a refusal, once the last part has left--
#
# The queue of parts has no bound: the worker's reader must not wait for a slow heir, or every session's answers would.
# What waits is at most one hop's caches, and SEND_TIMEOUT_S ends it.
class Migrations:
    """The caches that leave one server. ``outbox`` reaches the clients that asked for it."""

    def __init__(
        self,
        rpc: Rpc,
        onward: NextHopDialer,
        worker: WorkerLink,
        outbox: Outbox,
        tasks: Tasks,
    ) -> None:
        self._rpc = rpc
        self._onward = onward
        self._worker = worker
        self._outbox = outbox
        self._tasks = tasks
        self._parts: dict[Key, trio.MemorySendChannel[bytes]] = {}

    def is_under_way(self, key: Key) -> bool:
        """Are the caches of a hop on their way out?"""
        return key in self._parts

    async def begin(self, client: PeerId, request: HandOver) -> None:
        """Have the worker give a hop's caches, and send them on; the client hears how it ended. Raises WorkerLost."""
        key = (request.session, request.start)
        parts, outgoing = trio.open_memory_channel[bytes](math.inf)
        self._parts[key] = parts
        try:
            answer = await self._worker.ask(request)
        except WorkerLost:
            del self._parts[key]
            raise
        self._tasks.start_soon(self._migrate, client, request, answer, outgoing)

    def put(self, key: Key, frame: bytes) -> None:
        """Take one part that the worker gave."""
        if key in self._parts:
            self._parts[key].send_nowait(frame)

    async def _migrate(
        self, client: PeerId, request: HandOver, answer: WorkerReply, outgoing: trio.MemoryReceiveChannel[bytes]
    ) -> None:
        """Send parts as they come; the last thing is the answer for the client, once all parts have left."""
        answers: list[Message] = []
        failure = f"{request.to[-8:]} took too long to take the caches"
        with trio.move_on_after(SEND_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._close_when_answered, request, answer, answers)
                failure = await self._send_all(PeerId(request.to), outgoing)
        self._parts.pop((request.session, request.start), None)
        if failure or not answers:
            code = Code.REFUSED.value
            answers = [Refusal(re=request.id, code=code, message=failure[:500])]
        self._outbox.tell(client, encode_frame(answers[0]))

    async def _close_when_answered(self, request: HandOver, answer: WorkerReply, answers: list[Message]) -> None:
        def handed(answered: HandedOver) -> HandedOver:
            return HandedOver(re=request.id, n_bytes=answered.n_bytes)

        answers.append(await answer.reply(request.id, handed))
        self._parts[request.session, request.start].close()

    async def _send_all(self, heir: PeerId, outgoing: trio.MemoryReceiveChannel[bytes]) -> str:
        """Send all parts; returns why that failed, or "". After a failure the rest is taken and dropped."""
        unsent = f"the caches could not be sent to {heir[-8:]}"
        is_connected = await self._onward.connect("bulk", heir)
        failure = "" if is_connected else f"{unsent}: it cannot be reached from here"
        async for part in outgoing:
            if not failure:
                try:
                    channel = await self._rpc.channel(heir, "bulk")
                    await channel.send_raw(part)
                except PeerError:
                    failure = f"{unsent}: the connection ended"
        return failure
