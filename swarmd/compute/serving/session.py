"""One session at one hop, inside a worker: apply ops to its cache, padding and history, in order.

Which ops may come, from whom and in what order is decided in the daemon (``plan.chains.hop``); when an op is
computed, and with which others, is the scheduler's. Here an op is begun, computed in one or several shares, answered
and kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from swarmd.compute.cache.handover import StateShape, pack_state, unpack_state_untrusted
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.serving.client_parameters import NOTHING, ClientParameters
from swarmd.compute.serving.engine import Engine
from swarmd.compute.serving.incoming_state import KEPT_TIMES, PART_BYTES, IncomingState
from swarmd.errors import Code, Refused
from swarmd.plan.chains.batching import MAX_TOKENS_PER_PASS
from swarmd.plan.chains.prefixes import BLOCK_TOKENS, Prefix, PrefixExtension
from swarmd.protocol.fields import MOST_HOPS_TIMED
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import MAX_PAYLOAD_BYTES
from swarmd.protocol.wire.messages import (
    CachePart,
    Edit,
    HandedOver,
    HandOver,
    Inherited,
    Op,
    OpenSession,
    Replay,
    TokensAre,
    WantTokens,
    count_cropped,
)
from swarmd.protocol.wire.tensors import max_tokens_per_frame
from swarmd.protocol.wire.worker import Done
from swarmd.values import Span
from swarmd.wire.history import Budget, History, SentOp
from swarmd.wire.ops import encode_op, replay_frames
from swarmd.wire.tensors import pack, unpack_untrusted
from swarmd.wire.top import MOST_WITH_LOGITS

POSITION_BYTES = 5  # of a token: where it is, and whether it is padding
LEAST_KEPT_EDITS = 64  # of a session, however short: each takes what a token of each row does


@dataclass(slots=True)
class _OpInProgress:
    """An op whose edits are applied and whose tokens are being computed."""

    op: Op
    came_at: float = 0.0
    hidden: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    n_done: int = 0
    computed_s: float = 0.0
    extension: PrefixExtension | None = None  # the session's prefix with these tokens
    outs: list[torch.Tensor] = field(default_factory=list)


# States of a session, and what moves it from one to the next:
#
#     idle --begin--> begun --piece, put, ...--> complete --answer--> answered --keep--> idle
#                       |                           ^
#                       +-- an op without tokens ---+
#
# ``_n_tokens`` counts the tokens that the caches hold, those of the begun op included as they are computed. The
# history, from which a successor would be rebuilt, gets an op after its answer was sent, so that nobody waits for the
# copy. Until then the session counts as computing: no replay and no hand-over sees caches that the history lacks.
class HopSession:
    """One session at one hop of an engine's blocks."""

    def __init__(
        self,
        engine: Engine,
        request: OpenSession,
        budget: Budget,
        tuned: ClientParameters = NOTHING,
    ) -> None:
        self.hop = Span(request.start, request.end)
        self.session = request.session
        self.client = request.client
        self.n_rows = request.batch
        self.history = History(request.grade == "exact", budget)
        self._engine = engine
        self._max_tokens = request.max_tokens
        self._codec = request.codec
        adapter = engine.adapters.get(request.adapter) if request.adapter else None
        self._lora = tuned.lora if tuned.lora.updates else adapter
        self._cache = engine.new_cache(self.hop, request.max_tokens)
        if not request.inherit:  # else it comes with the caches
            with torch.inference_mode():
                tuned.fill(self._cache, self.hop.blocks(), request.batch)
        self._mask: torch.Tensor | None = None
        self._n_tokens = tuned.n_prefix
        self._begun: _OpInProgress | None = None
        self._reached = 0  # the last op that is part of the caches
        self._epoch = request.epoch
        self._incoming: IncomingState | None = None
        hop_name = repr(self.hop).encode()
        identity = (request.client, hop_name, request.adapter.encode())
        can_reuse = engine.can_batch and self._cache.is_plain and request.batch == 1
        is_private = self.history.is_exact or request.inherit or request.tuned
        self._prefix = Prefix(identity) if can_reuse and not is_private else None

    @property
    def is_computing(self) -> bool:
        """Is an op begun, with tokens to compute or just computed?"""
        return self._begun is not None and self._begun.hidden is not None

    @property
    def tokens_left(self) -> int:
        """Tokens of each row that the begun op still needs."""
        begun = self._begun
        if begun is None or begun.hidden is None:
            return 0
        return begun.hidden.shape[1] - begun.n_done

    @property
    def is_begun(self) -> bool:
        """Is an op begun of which some tokens are computed?"""
        return self._begun is not None and self._begun.n_done > 0

    @property
    def is_complete(self) -> bool:
        """Is an op begun of which nothing is left to compute?"""
        return self._begun is not None and not self.tokens_left

    @property
    def can_share(self) -> bool:
        """May other sessions be in the same pass? Not in the exact grade, and not with padding."""
        return not self.history.is_exact and self._mask is None

    @property
    def is_interleavable(self) -> bool:
        """May the rest of its op be computed in the midst of another pass?"""
        if not self.can_share or self._lora is not None:
            return False
        n_tokens = self.n_rows * self.tokens_left
        return self._engine.can_interleave(n_tokens, self.hop, self._cache)

    @property
    def marks(self) -> tuple[bytes, ...]:
        """What its cache begins with, for others that begin so too."""
        return self._prefix.reached.marks if self._prefix else ()

    @property
    def wanted_marks(self) -> tuple[bytes, ...]:
        """What its cache will begin with once the begun op is computed; none where it cannot come from another."""
        begun = self._begun
        if begun is None or begun.extension is None or begun.n_done:
            return ()
        return begun.extension.marks

    def reuse(self, other: HopSession, n_tokens: int) -> None:
        """Take another session's cache and answers for the first ``n_tokens``, which are the same in both."""
        start = self._n_tokens
        if n_tokens > start:
            self._cache.take_over(other._cache, start, n_tokens, self._engine.shares_prefixes)
            self.put(other.history.tokens(start, n_tokens).to(self._engine.device))

    def begin(
        self,
        op: Op,
        payload: memoryview,
        came_at: float = 0.0,
    ) -> None:
        """Check an op and apply its edits. Raises Refused or RemoteProtocolError before anything changed."""
        inputs = self._read_untrusted(op, payload)
        self._apply_edits(op.edits)
        if op.record_past:
            self._cache.record_past()
        self._begun = _OpInProgress(op, came_at)
        if inputs is not None:
            hidden, positions, mask = inputs
            self._begun = _OpInProgress(op, came_at, hidden, positions, mask)
            self._extend_prefix(self._begun)
            self._extend_mask(hidden.shape[1], mask)

    def piece(self, n_tokens: int) -> SessionTokens:
        """Return the next ``n_tokens`` of each row, for a pass with others. ``put`` must follow."""
        assert self._begun is not None
        assert self._begun.hidden is not None
        assert self._begun.positions is not None
        window = slice(self._begun.n_done, self._begun.n_done + n_tokens)
        device = self._engine.device
        hidden = self._begun.hidden[:, window].to(device)
        positions = self._begun.positions[:, window].long().to(device)
        mask = None if self._mask is None else self._mask[:, : self._n_tokens + hidden.shape[1]]
        return SessionTokens(
            hidden,
            positions,
            self._cache,
            self._n_tokens,
            self._lora,
            mask,
            self.history.is_exact,
        )

    def put(self, out: torch.Tensor) -> None:
        """Take what a pass gave for ``piece``."""
        assert self._begun is not None
        self._begun.outs.append(out)
        self._begun.n_done += out.shape[1]
        self._n_tokens += out.shape[1]

    def add_time(self, seconds: float) -> None:
        """Count the time of a pass that it was part of."""
        assert self._begun is not None
        self._begun.computed_s += seconds

    def compute_whole_op(self) -> None:
        """Compute all that is left of the op, in passes of a fixed size: the exact grade repeats them to the bit."""
        while n_left := self.tokens_left:
            (out,) = self._engine.run([self.piece(min(n_left, MAX_TOKENS_PER_PASS))], self.hop)
            self.put(out)

    def head_input(self) -> torch.Tensor | None:
        """Return what left of the tokens [t, d] of a complete op whose largest logits its client asks for, if any."""
        begun = self._begun
        assert begun is not None
        op = begun.op
        n = op.want or 0
        is_last = self.hop.end == self._engine.n_layers and op.seq > op.silent_through
        if not (op.top and is_last and begun.outs and 0 < self.n_rows * n <= MOST_WITH_LOGITS):
            return None
        hidden = self._sent_op(begun).last(n).hidden
        return None if hidden is None or hidden.shape[1] != n else hidden.flatten(0, 1)

    def answer(self, now: float = 0.0, logits: bytes = b"") -> bytes:
        """Return the frame that the complete op leads to: the next hop's op, or Done. ``logits`` go with it."""
        begun = self._begun
        assert begun is not None
        op = begun.op
        if op.seq <= op.silent_through and self.hop.end >= op.replay_end:
            done = Done(session=self.session, start=self.hop.start, seq=op.seq)
            return messages.encode_frame(done)
        sent = self._sent_op(begun)
        if op.want is not None and self.hop.end == self._engine.n_layers:
            sent = sent.last(op.want)
        if op.times is not None and len(op.times) < MOST_HOPS_TIMED:
            computed_us = int(1e6 * begun.computed_s)
            elapsed_us = int(1e6 * (now - begun.came_at))
            waited_us = max(0, elapsed_us - computed_us)
            times = (*op.times, (self.hop.start, waited_us, computed_us))
            op = msgspec.structs.replace(op, times=times)
        header = msgspec.structs.replace(op, session=self.session, start=self.hop.end, logits=logits, needs=())
        return encode_op(header, sent, self._codec)

    def keep(self) -> None:
        """Add the answered op to the history; the session is ready for the next."""
        begun = self._begun
        assert begun is not None
        self._begun = None
        self._reached = begun.op.seq
        self.history.add(self._sent_op(begun))
        if begun.extension is not None and self._prefix is not None:
            self._prefix.reached = begun.extension
        self.history.settle(begun.op.seq if begun.op.base else begun.op.settled)

    @staticmethod
    def _sent_op(begun: _OpInProgress) -> SentOp:
        """Return a complete op as it leaves this hop; what was computed in parts is put together once."""
        op = begun.op
        if begun.hidden is None:
            return SentOp(
                op.seq,
                op.edits,
                None,
                None,
                None,
                op.record_past,
            )
        if len(begun.outs) > 1:
            begun.outs = [torch.cat(begun.outs, 1)]
        hidden = begun.outs[0].cpu()
        begun.outs[0] = hidden
        return SentOp(
            op.seq,
            op.edits,
            hidden,
            begun.positions,
            begun.mask,
            op.record_past,
        )

    def replay(self, request: Replay) -> Iterator[bytes]:
        """Yield the op frames that bring a successor from ``request.have`` (None: nothing) up to date."""
        header = Op(
            session=self.session,
            start=self.hop.end,
            epoch=request.epoch,
            silent_through=request.silent_through,
            replay_end=request.replay_end,
        )
        yield from replay_frames(self.history, header, request.have, self._codec)

    def show_tokens(self, request: WantTokens) -> bytes:
        """Return a frame with what left this hop of some tokens, and their positions. Raises Refused."""
        d = self._engine.hidden_size
        b = self.n_rows
        dtype = str(self._engine.dtype).removeprefix("torch.")
        if request.n > max_tokens_per_frame(b, d, dtype, PART_BYTES * 4):
            raise Refused(Code.TOO_LONG, f"{request.n} tokens do not fit one answer")
        try:
            hidden, positions = self.history.placed(request.first, request.first + request.n)
        except LookupError as error:
            raise Refused(Code.NOT_HELD, str(error)) from None
        meta, payload = pack(hidden, positions, None)
        return messages.encode_frame(TokensAre(re=request.id, tensor=meta), payload)

    def hand_over(self, request: HandOver) -> Iterator[bytes]:
        """Yield the caches and the history as parts, for a worker that holds the same blocks. Raises Refused."""
        raw = pack_state(self._cache, self.history, self._mask, self._n_tokens)
        self._engine.on_block()  # this takes a while, and is progress
        digest = hashlib.sha256(raw).digest()
        n_parts = -(-len(raw) // PART_BYTES)
        for part in range(n_parts):
            header = CachePart(
                session=self.session,
                start=self.hop.start,
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
        if self._reached:
            raise Refused(Code.SESSION_LOST, f"part {part.part} of caches; expected 0 of a new session")
        if self._incoming is None:
            self._incoming = IncomingState(self._engine, self.hop, self.n_rows, self._max_tokens)
        raw = self._incoming.take_part(part, payload)
        if raw is None:
            return
        shape = StateShape(
            n_rows=self.n_rows,
            max_tokens=self._max_tokens,
            hidden=self._engine.hidden_size,
            dtype=self._engine.dtype,
            seq=part.seq,
        )
        self._n_tokens, mask = unpack_state_untrusted(
            raw,
            self._cache,
            self.history,
            self._incoming.example,
            shape,
        )
        self._incoming = None
        self._mask = None if mask is None else mask.to(self._engine.device)
        self._reached = part.seq
        n_kept = self.history.n_kept
        done = Inherited(
            self.session,
            self.hop.start,
            self._epoch,
            seq=part.seq,
            tokens=n_kept,
        )
        yield messages.encode_frame(done)

    def close(self) -> None:
        """Give back what the history takes."""
        self.history.close()

    # An op could name rows that are not there, crop more than there is, bring other shapes than the session's, numbers
    # that are not finite, or positions without end (rotary tables grow with them). It could also be small and cost
    # much: codes that unpack to more than a frame, edits by the thousand that the history has to keep. All of that is
    # refused here, before the caches are touched, so that a session stays usable after a refusal.
    def _read_untrusted(
        self,
        op: Op,
        payload: memoryview,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Check an op against this session before anything changes. Raises Refused or RemoteProtocolError."""
        n_cropped = count_cropped(op.edits)
        n_tokens = self._n_tokens - n_cropped
        for edit in op.edits:
            if edit.rows is None:
                continue
            if len(edit.rows) != self.n_rows or max(edit.rows) >= self.n_rows:
                raise Refused(Code.BAD_SHAPE, f"a reorder of {len(edit.rows)} rows in a batch of {self.n_rows}")
        if n_tokens < 0:
            raise Refused(Code.BAD_SHAPE, f"a crop past the start: the session holds {self._n_tokens} tokens")
        if n_cropped and (why := self._cache.refuses_crop(n_cropped)):
            raise Refused(Code.UNSUPPORTED, f"{n_cropped} tokens cannot be taken back: {why}")
        n_edits = self.history.recent_edits + messages.count_changes(op.edits, op.tensor is not None)
        if n_edits > LEAST_KEPT_EDITS + KEPT_TIMES * self._max_tokens:
            text = f"{self.history.recent_edits} edits of separate ops are kept for replay already"
            raise Refused(Code.TOO_LONG, text)
        if op.tensor is None:
            return None
        shape = (op.tensor.b, op.tensor.d, op.tensor.dtype)
        dtype_name = str(self._engine.dtype).removeprefix("torch.")
        expected = (self.n_rows, self._engine.hidden_size, dtype_name)
        if shape != expected:
            raise Refused(Code.BAD_SHAPE, f"expected (batch, hidden, dtype) {expected}, got {shape}")
        token_bytes = op.tensor.d * self._engine.dtype.itemsize + POSITION_BYTES
        n_bytes = op.tensor.b * op.tensor.t * token_bytes
        if n_bytes > MAX_PAYLOAD_BYTES:  # however small it came: its answer may not be coded
            raise Refused(Code.BAD_SHAPE, f"an op of {n_bytes} B when it is not coded; at most {MAX_PAYLOAD_BYTES}")
        if n_tokens + op.tensor.t > self._max_tokens:
            raise Refused(
                Code.TOO_LONG, f"{n_tokens} tokens and {op.tensor.t} more, this session reserved {self._max_tokens}"
            )
        if self.history.recent_tokens > KEPT_TIMES * self._max_tokens:
            raise Refused(
                Code.TOO_LONG, f"{self.history.recent_tokens} tokens of separate ops are kept for replay already"
            )
        hidden, positions, mask = unpack_untrusted(op.tensor, payload)
        if not torch.isfinite(hidden).all():
            raise Refused(Code.NOT_FINITE, f"op {op.seq} holds values that are not finite")
        if positions.min() < 0 or positions.max() > self._max_tokens:
            raise Refused(Code.BAD_SHAPE, f"positions outside 0 to {self._max_tokens}")
        return hidden, positions, mask

    def _extend_prefix(self, begun: _OpInProgress) -> None:
        """Note what the cache will begin with: until something else than a part of a long prompt comes."""
        prefix = self._prefix
        hidden = begun.hidden
        positions = begun.positions
        if prefix is None or prefix.is_over or hidden is None or positions is None:
            return
        if begun.op.record_past or begun.mask is not None or hidden.shape[1] < BLOCK_TOKENS:
            prefix.is_over = True
            return
        # A token's name is its bytes: equal names have equal hidden states at equal positions, and so equal caches.
        rows = hidden[0].contiguous().view(torch.uint8).numpy()
        places = positions[0].contiguous().numpy()
        tokens = zip(rows, places, strict=True)
        names = [row.tobytes() + place.tobytes() for row, place in tokens]
        begun.extension = prefix.ahead(names)

    def _apply_edits(self, edits: tuple[Edit, ...]) -> None:
        """Crop once and reorder once: which tokens stay and which rows have nothing to do with each other."""
        if not edits:
            return
        n_cropped = count_cropped(edits)
        if self._prefix is not None:
            self._prefix.crop(self._n_tokens - n_cropped)
        if any(edit.crop is not None for edit in edits):
            self._cache.crop(n_cropped)
            self._n_tokens -= n_cropped
            if self._mask is not None:
                self._mask = self._mask[:, : self._n_tokens]
        order: Sequence[int] = range(self.n_rows)
        for edit in edits:
            order = [order[row] for row in edit.rows] if edit.rows is not None else order
        if any(edit.rows is not None for edit in edits):
            rows = torch.tensor(order, device=self._engine.device)
            self._cache.reorder(rows)
            self._engine.on_block()  # of a large cache it takes a while, and is progress
            if self._mask is not None:
                self._mask = self._mask[rows]

    def _extend_mask(self, n_new: int, mask: torch.Tensor | None) -> None:
        """Have the mask cover new tokens; there is none until something is padded."""
        if mask is None and self._mask is None:
            return
        device = self._engine.device
        past = self._mask
        if past is None:
            past = torch.ones(self.n_rows, self._n_tokens, device=device)
        new = torch.ones(self.n_rows, n_new) if mask is None else mask
        new = new.long().to(device)
        self._mask = torch.cat([past.long(), new], 1)
