"""A server's own sessions through its worker: it computes for itself what another claims, beside everybody's work."""

from __future__ import annotations

import os

import numpy as np
import trio

from swarmd.errors import Code, PeerTimeout, Refused
from swarmd.node.serving.served import ServedBlocks
from swarmd.node.worker.worker_link import WorkerLink
from swarmd.protocol.wire.arrays import Floats, pack_array, unpack_array_untrusted
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import CloseSession, Op, OpenSession, Refusal, encode_frame
from swarmd.values import Span

TIMEOUT_S = 60.0  # others' work comes first
TOKENS_AT_ONCE = 64  # in one op: decoding goes on between


class Recompute:
    """See the module. ``take`` is given what the worker says of sessions that are nobody else's."""

    def __init__(self, served: ServedBlocks, worker: WorkerLink) -> None:
        self._served = served
        self._worker = worker
        self._parts: dict[bytes, trio.MemorySendChannel[Floats | Refusal]] = {}

    @property
    def hidden_size(self) -> int:
        """How many numbers travel of a token; 0 while no worker is loaded."""
        return self._worker.loaded.hidden if self._worker.loaded else 0

    @property
    def n_digits(self) -> int:
        """How many of the last of these numbers are digits of a token's id."""
        return self._worker.loaded.digits if self._worker.loaded else 0

    async def compute(self, span: Span, hidden: Floats) -> Floats:
        """What these blocks make of [b, t, d]. Raises WorkerLost, Refused, PeerTimeout."""
        key = os.urandom(16)
        n_tokens = hidden.shape[1]
        parts, coming = trio.open_memory_channel[Floats | Refusal](n_tokens)
        self._parts[key] = parts
        opening = OpenSession(
            session=key,
            model=self._served.model,
            start=span.start,
            end=span.end,
            epoch=1,
            batch=hidden.shape[0],
            max_tokens=n_tokens + 1,
            dtype=self._served.dtype,
        )
        try:
            with trio.fail_after(TIMEOUT_S):
                await self._worker.send(encode_frame(opening))
                return await self._run(key, span.start, hidden, coming)
        except trio.TooSlowError:
            raise PeerTimeout(f"the worker here did not compute that within {TIMEOUT_S:.0f} s") from None
        finally:
            del self._parts[key]
            with trio.CancelScope(shield=True):
                if self._worker.is_online:
                    await self._worker.send(encode_frame(CloseSession(session=key, start=span.start)))

    async def _run(
        self, key: bytes, start: int, hidden: Floats, coming: trio.MemoryReceiveChannel[Floats | Refusal]
    ) -> Floats:
        outputs: list[Floats] = []
        for seq, offset in enumerate(range(0, hidden.shape[1], TOKENS_AT_ONCE), 1):
            window = hidden[:, offset : offset + TOKENS_AT_ONCE]
            meta, payload = pack_array(window, self._served.dtype, offset)
            op = Op(
                session=key,
                start=start,
                epoch=1,
                seq=seq,
                settled=seq - 1,
                tensor=meta,
            )
            await self._worker.send(encode_frame(op, payload))
            answer = await coming.receive()
            if isinstance(answer, Refusal):
                raise Refused(Code(answer.code), answer.message)
            outputs.append(answer)
        return np.concatenate(outputs, 1)

    def take(self, message: Op | Refusal, frame: Frame | None) -> bool:
        """Take what is for a session of this server's own."""
        waiting = self._parts.get(message.session or b"")
        if waiting is None:
            return False
        if isinstance(message, Refusal):
            waiting.send_nowait(message)
        elif message.tensor is not None and frame is not None:
            waiting.send_nowait(unpack_array_untrusted(message.tensor, frame.payload))
        return True
