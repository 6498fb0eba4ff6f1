"""The caches and history of a session that another worker hands over, part by part, until they are whole."""

from __future__ import annotations

import hashlib

from swarmd.compute.serving.engine import Engine
from swarmd.errors import Code, Refused
from swarmd.protocol.wire.messages import CachePart
from swarmd.values import Span

PART_BYTES = 1 << 20  # so much of the history at a time, that decode steps come between
KEPT_TIMES = 4  # ops that are cropped again are kept too: in the exact grade all of them
OP_BYTES = 64  # of a token in the history, beside its hidden state


class IncomingState:
    """The parts that came, for a session of so many rows and tokens at a hop.

    A member could announce more parts than a session can have, or send others than it announced. Neither takes memory:
    an ``example`` that the engine computed says how much caches and history can be.
    """

    def __init__(self, engine: Engine, hop: Span, n_rows: int, max_tokens: int) -> None:
        self.example = engine.example_cache(hop)
        self._engine = engine
        self._parts: list[bytes] = []
        bytes_of_one = self.example.n_bytes()
        bytes_of_two = engine.example_cache(hop, 2).n_bytes()
        history_bytes = (KEPT_TIMES + 1) * (engine.hidden_size * engine.dtype.itemsize + OP_BYTES)
        token_bytes = max(0, bytes_of_two - bytes_of_one) + self.example.recorded_bytes() + history_bytes
        self.limit_bytes = n_rows * (bytes_of_one + max_tokens * token_bytes) + PART_BYTES  # states do not grow with it

    def take_part(self, part: CachePart, payload: memoryview) -> bytes | None:
        """Take one part; returns the whole with the last one. Raises Refused."""
        if part.part != len(self._parts) or part.part >= part.n_parts:
            text = f"part {part.part} of caches; expected {len(self._parts)} of a new session"
            raise Refused(Code.SESSION_LOST, text)
        if (part.n_parts - 1) * PART_BYTES > self.limit_bytes or len(payload) > PART_BYTES:
            text = f"caches of {part.n_parts} parts; this session has room for {self.limit_bytes} B"
            raise Refused(Code.TOO_LONG, text)
        self._parts.append(bytes(payload))
        if len(self._parts) < part.n_parts:
            return None
        raw = b"".join(self._parts)
        self._parts = []
        self._engine.on_block()  # this takes a while, and is progress
        if hashlib.sha256(raw).digest() != part.digest:
            raise Refused(Code.SESSION_LOST, "the caches do not have the digest that was announced")
        self._engine.on_block()
        return raw
