"""Caches on their way from this server's worker to another server: parts go out on the bulk channel, in order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import trio

from swarmd.errors import Code, PeerError
from swarmd.net.rpc import Rpc
from swarmd.protocol.fields import Message
from swarmd.protocol.messages import HandedOver, HandOver, Refusal
from swarmd.values import PeerId

SEND_TIMEOUT_S = 60.0
FIRST_ID = 1 << 40  # apart from the ids of replays, which the worker answers by the same field


@dataclass(slots=True)
class _Transfer:
    key: tuple[bytes, int]
    original: int
    done: Callable[[Message], None]
    parts: trio.MemorySendChannel[bytes | Message]


class Handovers:
    """All transfers under way. ``begin`` gives the request for the worker; what that answers is put in."""

    def __init__(self, rpc: Rpc) -> None:
        self._rpc = rpc
        self._transfers: dict[int, _Transfer] = {}
        self._next_id = FIRST_ID

    def begin(self, nursery: trio.Nursery, request: HandOver, to: PeerId, done: Callable[[Message], None]) -> HandOver:
        self._next_id += 1
        parts, outgoing = trio.open_memory_channel[bytes | Message](math.inf)
        transfer = _Transfer((request.session, request.start), request.id, done, parts)
        self._transfers[self._next_id] = transfer
        nursery.start_soon(self._send, to, transfer, outgoing)
        return msgspec.structs.replace(request, id=self._next_id)

    def is_under_way(self, key: tuple[bytes, int]) -> bool:
        return any(transfer.key == key for transfer in self._transfers.values())

    def fail_all(self, reason: str) -> None:
        """The worker is gone: nothing more will come."""
        for transfer_id in list(self._transfers):
            self.fail(Refusal(re=transfer_id, code=Code.SESSION_LOST.value, message=reason[:500]))

    def put(self, key: tuple[bytes, int], frame: bytes) -> None:
        """Take one part that the worker gave."""
        for transfer in self._transfers.values():
            if transfer.key == key:
                transfer.parts.send_nowait(frame)

    def finish(self, answer: HandedOver) -> None:
        transfer = self._transfers.pop(answer.re, None)
        if transfer is not None:
            transfer.parts.send_nowait(HandedOver(re=transfer.original, n_bytes=answer.n_bytes))
            transfer.parts.close()

    def fail(self, refusal: Refusal) -> bool:
        """Pass on that the worker cannot hand over; False when the refusal is about something else."""
        transfer = self._transfers.pop(refusal.re, None)
        if transfer is not None:
            transfer.parts.send_nowait(Refusal(re=transfer.original, code=refusal.code, message=refusal.message))
            transfer.parts.close()
        return transfer is not None

    async def _send(
        self, to: PeerId, transfer: _Transfer, outgoing: trio.MemoryReceiveChannel[bytes | Message]
    ) -> None:
        """Send parts as they come; the last thing is the answer for the client, once all parts have left."""
        failure: str | None = None
        with trio.move_on_after(SEND_TIMEOUT_S):
            async for part in outgoing:
                if not isinstance(part, bytes):
                    answer = part if failure is None else self._refusal(transfer, failure)
                    transfer.done(answer)
                    return
                if failure is None:
                    try:
                        channel = await self._rpc.channel(to, "bulk")
                        await channel.send_raw(part)
                    except PeerError as error:
                        failure = f"the caches could not be sent to {to[-8:]}: {error}"
        transfer.done(self._refusal(transfer, failure or f"{to[-8:]} took too long to take the caches"))

    @staticmethod
    def _refusal(transfer: _Transfer, reason: str) -> Refusal:
        return Refusal(re=transfer.original, code=Code.REFUSED.value, message=reason[:500])
