"""One session at one hop, inside a worker: apply ops to its cache, padding and history, in order.

Which ops may come, from whom and in what order is decided in the daemon (``plan.chains.hop``); when an op is
computed, and with which others, is the scheduler's. Between its beginning and its answer an op is an ``OpInProgress``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from swarmd.compute.cache.handover import StateShape, pack_state, unpack_state_untrusted
from swarmd.compute.serving.client_parameters import NOTHING, ClientParameters
from swarmd.compute.serving.engine import Engine
from swarmd.compute.serving.incoming_state import PART_BYTES, IncomingState
from swarmd.compute.serving.op_check import read_op_untrusted
from swarmd.compute.serving.op_in_progress import OpInProgress, drop_tokens, is_void, leave_out_alternatives
from swarmd.compute.serving.session_state import SessionState
from swarmd.errors import Code, Refused
from swarmd.plan.chains.prefixes import BLOCK_TOKENS, Prefix, PrefixExtension
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.alternatives import count_alternative_tokens
from swarmd.protocol.wire.messages import (
    CachePart,
    HandedOver,
    HandOver,
    Inherited,
    Op,
    OpenSession,
    Replay,
    Replayed,
    TokensAre,
    WantTokens,
    count_cropped,
)
from swarmd.protocol.wire.tensors import max_tokens_per_frame
from swarmd.values import Span
from swarmd.wire.history import Budget, History
from swarmd.wire.ops import replay_frames
from swarmd.wire.tensors import first_tokens, pack, raw_bytes


class HopSession:
    """One session at one hop of an engine's blocks. What it keeps is its ``state``."""

    def __init__(
        self,
        engine: Engine,
        request: OpenSession,
        budget: Budget,
        tuned: ClientParameters = NOTHING,
    ) -> None:
        adapter = engine.adapters.get(request.adapter) if request.adapter else None
        hop = Span(request.start, request.end)
        self.client = request.client
        self.state = SessionState(
            engine,
            request.session,
            hop,
            request.batch,
            request.max_tokens,
            request.codec,
            history=History(request.grade == "exact", budget),
            cache=engine.new_cache(hop, request.max_tokens, is_exact=request.grade == "exact"),
            lora=tuned.lora if tuned.lora.updates else adapter,
            n_tokens=tuned.n_prefix,
        )
        if not request.inherit:  # else it comes with the caches
            with torch.inference_mode():
                tuned.fill(self.state.cache, hop.blocks(), request.batch)
        self._reached = 0  # the last op that is part of the caches
        self._epoch = request.epoch
        self._incoming: IncomingState | None = None
        identity = (request.client, repr(hop).encode(), request.adapter.encode())
        can_reuse = engine.can_batch and self.state.cache.is_plain and request.batch == 1
        is_private = self.state.history.is_exact or request.inherit or request.tuned
        self._prefix = Prefix(identity) if can_reuse and not is_private else None

    @property
    def marks(self) -> tuple[bytes, ...]:
        """What its cache begins with, for others that begin so too."""
        return self._prefix.reached.marks if self._prefix else ()

    def begin(self, op: Op, payload: memoryview, came_at: float = 0.0) -> OpInProgress:
        """Check an op and apply its edits. Raises Refused or RemoteProtocolError before anything changed.

        Of one that is void by now the tokens are absent.
        """
        if is_void(self.state, op):
            op = drop_tokens(op)
        inputs = read_op_untrusted(self.state, op, payload)
        if op.edits and self._prefix is not None:
            self._prefix.crop(self.state.n_tokens - self.state.count_cached(count_cropped(op.edits)))
        self.state.apply_edits(op.edits)
        self.state.n_absent += op.absent
        if op.record_past:
            self.state.cache.record_past()
        if inputs is None:
            return OpInProgress(self.state, op, came_at)
        if op.alternatives and not self.state.can_try_alternatives:
            op, inputs = leave_out_alternatives(op, inputs)
        n_kept = inputs[0].shape[1] - count_alternative_tokens(op.alternatives)
        hidden, positions, mask = first_tokens(inputs, n_kept)
        is_usual = not op.record_past and mask is None
        extension = self._extend_prefix(hidden, positions, is_usual)
        self.state.extend_mask(hidden.shape[1], mask)
        return OpInProgress(self.state, op, came_at, inputs, extension)

    def void(self, first: int, last: int) -> None:
        """Compute no tokens of ops ``first`` to ``last``, where they are not begun."""
        self.state.void.add(first, last, self._reached)

    def keep(self, done: OpInProgress) -> None:
        """Add an answered op to the history; the session is ready for the next."""
        op = done.op
        self._reached = op.seq
        self.state.history.add(done.sent())
        if done.extension is not None and self._prefix is not None:
            self._prefix.reached = done.extension.reached
        self.state.history.settle(op.seq if op.base else op.settled)

    def replay(self, request: Replay) -> Iterator[bytes]:
        """Yield the op frames that bring a successor from ``request.have`` (None: nothing) up to date."""
        state = self.state
        header = Op(
            session=state.session,
            start=state.hop.end,
            epoch=request.epoch,
            silent_through=request.silent_through,
            replay_end=request.replay_end,
        )
        n_ops = 0
        for frame in replay_frames(state.history, header, request.have, state.codec):
            n_ops += 1
            state.engine.on_block()  # a long history takes a while, and is progress
            yield frame
        yield messages.encode_frame(Replayed(re=request.id, ops=n_ops, tokens=state.history.n_tokens))

    def show_tokens(self, request: WantTokens) -> bytes:
        """Return a frame with what left this hop of some tokens, and their positions. Raises Refused."""
        state = self.state
        d = state.engine.hidden_size
        b = state.n_rows
        dtype = str(state.engine.dtype).removeprefix("torch.")
        if request.n > max_tokens_per_frame(b, d, dtype, PART_BYTES * 4):
            raise Refused(Code.TOO_LONG, f"{request.n} tokens do not fit one answer")
        try:
            hidden, positions = state.history.placed(request.first, request.first + request.n)
        except LookupError as error:
            raise Refused(Code.NOT_HELD, str(error)) from None
        meta, payload = pack(hidden, positions, None)
        return messages.encode_frame(TokensAre(re=request.id, tensor=meta), payload)

    def hand_over(self, request: HandOver) -> Iterator[bytes]:
        """Yield the caches and the history as parts, for a worker that holds the same blocks. Raises Refused."""
        state = self.state
        raw = pack_state(state.cache, state.history, state.mask, state.n_tokens)
        state.engine.on_block()  # this takes a while, and is progress
        digest = hashlib.sha256(raw).digest()
        n_parts = -(-len(raw) // PART_BYTES)
        for part in range(n_parts):
            header = CachePart(
                session=state.session,
                start=state.hop.start,
                epoch=request.epoch,
                part=part,
                n_parts=n_parts,
                seq=self._reached,
                digest=digest,
            )
            piece = memoryview(raw)[part * PART_BYTES : (part + 1) * PART_BYTES]
            yield messages.encode_frame(header, piece)
        yield messages.encode_frame(HandedOver(re=request.id, n_bytes=len(raw)))

    def inherit(self, part: CachePart, payload: memoryview) -> Iterator[bytes]:
        """Take one part; with the last one, check the whole and put it in place. Raises Refused."""
        state = self.state
        if self._reached:
            raise Refused(Code.SESSION_LOST, f"part {part.part} of caches; expected 0 of a new session")
        if self._incoming is None:
            self._incoming = IncomingState(state.engine, state.hop, state.n_rows, state.max_tokens)
        raw = self._incoming.take_part(part, payload)
        if raw is None:
            return
        shape = StateShape(
            n_rows=state.n_rows,
            max_tokens=state.max_tokens,
            hidden=state.engine.hidden_size,
            dtype=state.engine.dtype,
            seq=part.seq,
        )
        state.n_tokens, mask = unpack_state_untrusted(
            raw,
            state.cache,
            state.history,
            self._incoming.example,
            shape,
        )
        self._incoming = None
        state.mask = None if mask is None else mask.to(state.engine.device)
        self._reached = part.seq
        n_kept = state.history.n_kept
        done = Inherited(
            state.session,
            state.hop.start,
            self._epoch,
            seq=part.seq,
            tokens=n_kept,
        )
        yield messages.encode_frame(done)

    def close(self) -> None:
        """Give back what the history takes."""
        self.state.history.close()

    def _extend_prefix(self, hidden: torch.Tensor, positions: torch.Tensor, is_usual: bool) -> PrefixExtension | None:
        """Return what the cache will begin with, until something else than a part of a long prompt comes."""
        prefix = self._prefix
        if prefix is None or prefix.is_over:
            return None
        if not is_usual or hidden.shape[1] < BLOCK_TOKENS:
            prefix.is_over = True
            return None
        # A token's name is its bytes: equal names have equal hidden states at equal positions, and so equal caches.
        rows, places = raw_bytes(hidden[0]), raw_bytes(positions[0])
        n, n_place = hidden[0, 0].nbytes, positions.itemsize
        tokens = range(hidden.shape[1])
        return prefix.ahead([(rows[n * i : n * (i + 1)], places[n_place * i : n_place * (i + 1)]) for i in tokens])
