"""The worker process: torch and no network. It loads a span and executes ops, one frame after the other.

Started by the daemon as ``python -m swarmd.compute.worker FD`` with one end of a Unix socketpair. It ends when the
socket does. What goes wrong with an op is answered with a refusal; what goes wrong with the load ends the worker.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from swarmd.compute.history import Budget
from swarmd.compute.session import HopSession
from swarmd.compute.span import LoadedSpan, device_description, pick_device
from swarmd.compute.wire import DTYPES
from swarmd.errors import Code, ConfigError, Refused, RemoteProtocolError
from swarmd.protocol import messages
from swarmd.protocol.frames import Frame, FrameDecoder
from swarmd.protocol.messages import (
    CloseSession,
    Loaded,
    LoadSpan,
    Message,
    Op,
    OpenSession,
    Replay,
    Replayed,
    Tick,
    WorkerFailed,
)
from swarmd.values import Span

logger = logging.getLogger(__name__)

TICK_INTERVAL_S = 0.5
_RECEIVE_BYTES = 4 * 2**20


class Worker:
    """Reads frames, executes them in order, answers."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = FrameDecoder()
        self._sessions: dict[tuple[bytes, int], HopSession] = {}
        self._budget = Budget()
        self._span: LoadedSpan | None = None
        self._ticked_at = 0.0

    def run(self) -> None:
        while data := self._connection.recv(_RECEIVE_BYTES):
            for frame in self._decoder.feed_untrusted(data):
                for answer in self._handle(frame):
                    self._connection.sendall(answer)

    def _handle(self, frame: Frame) -> Iterator[bytes]:
        message = messages.decode_untrusted(frame.header)
        try:
            if isinstance(message, Op):
                yield from self._find(message.session, message.start).apply(message, frame.payload)
            elif isinstance(message, OpenSession):
                self._open(message)
            elif isinstance(message, CloseSession):
                self._close(message)
            elif isinstance(message, Replay):
                yield from self._replay(message)
            elif isinstance(message, LoadSpan):
                yield messages.framed(self._load(message))
        except (Refused, RemoteProtocolError) as error:
            refused = error if isinstance(error, Refused) else Refused(Code.MALFORMED, str(error))
            yield messages.framed(messages.refusal_for(message, refused))
        except torch.OutOfMemoryError as error:
            self._sessions.pop((getattr(message, "session", b""), getattr(message, "start", 0)), None)  # half changed
            yield messages.framed(messages.refusal_for(message, Refused(Code.SESSION_LOST, f"out of memory: {error}")))

    def _find(self, session: bytes, start: int) -> HopSession:
        found = self._sessions.get((session, start))
        if found is None:
            raise Refused(Code.NO_SESSION, f"no session {session.hex()[:8]} at block {start} in this worker")
        return found

    def _open(self, opened: OpenSession) -> None:
        assert self._span is not None, "the daemon opens sessions after Loaded"
        key = (opened.session, opened.start)
        if key in self._sessions:
            self._sessions.pop(key).close()
        self._sessions[key] = HopSession(self._span, opened, self._budget)

    def _close(self, closing: CloseSession) -> None:
        found = self._sessions.pop((closing.session, closing.start), None)
        if found is not None:
            found.close()

    def _replay(self, request: Replay) -> Iterator[bytes]:
        session = self._find(request.session, request.start)
        n_ops = 0
        for frame in session.replay(request):
            n_ops += 1
            yield frame
        yield messages.framed(Replayed(re=request.id, ops=n_ops, tokens=session.history.n_tokens))

    def _load(self, request: LoadSpan) -> Message:
        if request.threads:
            torch.set_num_threads(request.threads)
        self._budget = Budget(request.history_bytes or 1 << 30, Path(request.spill_folder or "/tmp"))
        device = pick_device()
        try:
            span = LoadedSpan(Path(request.path), Span(request.start, request.end), DTYPES[request.dtype], device)
            span.on_block = self._tick
            span.self_test()
            decode, prefill = span.measure()
        except (ConfigError, torch.OutOfMemoryError) as error:
            return WorkerFailed(message=str(error)[:4000])
        self._span = span
        name, memory_bytes = device_description(device)
        return Loaded(
            device=name,
            device_memory_bytes=memory_bytes,
            numerics=span.numerics(request.model),
            hidden=span.hidden_size,
            layer_arity=span.layer_arity,
            cache_bytes_per_token=span.cache_bytes_per_token(),
            decode_tokens_per_s=decode,
            prefill_tokens_per_s=prefill,
        )

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked_at >= TICK_INTERVAL_S:
            self._ticked_at = now
            self._connection.sendall(messages.framed(Tick()))


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="worker %(process)d: %(message)s")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        try:
            Worker(connection).run()
        except (BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    main()
