"""One session at one hop, inside a worker: apply ops to its cache, padding and history, in order.

Which ops may come, from whom and in what order is decided in the daemon (``plan.chains.session``); when an op is
computed, and with which others, is the engine's. Here an op is begun, computed in one or several shares, answered and
kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from swarmd.compute.cache.handover import StateShape, pack_state, unpack_state_untrusted
from swarmd.compute.cache.kvcache import SpanCache
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.passes.ragged import LONG_PAST
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.client_parameters import NOTHING, ClientParameters
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
PART_BYTES = 1 << 20  # so much of the history at a time, that decode steps come between
KEPT_TIMES = 4  # ops that are cropped again are kept too: in the exact grade all of them
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
    ahead: PrefixExtension | None = None  # the session's beginning with these tokens
    outs: list[torch.Tensor] = field(default_factory=list)


class HopSession:
    """Caches of one session for one hop of the loaded span."""

    def __init__(
        self, span: LoadedSpan, opened: OpenSession, budget: Budget, tuned: ClientParameters = NOTHING
    ) -> None:
        self.hop = Span(opened.start, opened.end)
        self.session = opened.session
        self.client = opened.client
        self.n_rows = opened.batch
        self.history = History(opened.grade == "exact", budget)
        self._span = span
        self._max_tokens = opened.max_tokens
        self._codec = opened.codec
        adapter = span.adapters.get(opened.adapter) if opened.adapter else None
        self._lora = tuned.lora if tuned.lora.updates else adapter
        self._cache = span.new_cache(self.hop, opened.max_tokens)
        if not opened.inherit:  # else it comes with the caches
            with torch.inference_mode():
                tuned.fill(self._cache, self.hop.blocks(), opened.batch)
        self._mask: torch.Tensor | None = None
        self._n_tokens = tuned.n_prefix
        self._begun: _OpInProgress | None = None
        self._reached = 0  # the last op that is part of the caches
        self._parts: list[bytes] = []
        self._epoch = opened.epoch
        self._like: SpanCache | None = None
        about = (opened.client, repr(self.hop).encode(), opened.adapter.encode())
        can_reuse = span.can_batch and self._cache.is_plain and opened.batch == 1
        is_alone = self.history.is_exact or opened.inherit or opened.tuned
        self._prefix = Prefix(about) if can_reuse and not is_alone else None

    @property
    def is_computing(self) -> bool:
        """Is an op begun, with tokens to compute or just computed?"""
        return self._begun is not None and self._begun.hidden is not None

    @property
    def tokens_left(self) -> int:
        """Tokens of each row that the begun op still needs."""
        begun = self._begun
        return 0 if begun is None or begun.hidden is None else begun.hidden.shape[1] - begun.n_done

    @property
    def is_begun(self) -> bool:
        return self._begun is not None and self._begun.n_done > 0

    @property
    def is_complete(self) -> bool:
        return self._begun is not None and not self.tokens_left

    @property
    def can_share(self) -> bool:
        """May other sessions be in the same pass? Not in the exact grade, and not with padding."""
        return not self.history.is_exact and self._mask is None

    @property
    def goes_aside(self) -> bool:
        """May the rest of its op be computed in the midst of another pass?"""
        n_tokens = self.n_rows * self.tokens_left
        return self.can_share and self._lora is None and self._span.is_by_one_call(n_tokens, self.hop, self._cache)

    @property
    def is_long(self) -> bool:
        """Does attention in two parts pay? The plain pass knows none, and would copy what is shared."""
        return self._n_tokens >= LONG_PAST or self._cache.is_shared

    @property
    def marks(self) -> tuple[bytes, ...]:
        """What its cache begins with, for others that begin so too."""
        return self._prefix.reached.marks if self._prefix else ()

    @property
    def wanted_marks(self) -> tuple[bytes, ...]:
        """What its cache will begin with once the begun op is computed; none where it cannot come from another."""
        begun = self._begun
        return begun.ahead.marks if begun is not None and begun.ahead is not None and not begun.n_done else ()

    def reuse(self, other: HopSession, n_tokens: int) -> None:
        """Have another session's cache and answers for the first ``n_tokens``, which are the same in both."""
        start = self._n_tokens
        if n_tokens > start:
            self._cache.take_over(other._cache, start, n_tokens, self._span.shares_beginnings)
            self.put(other.history.tokens(start, n_tokens).to(self._span.device))

    def begin(self, op: Op, payload: memoryview, came_at: float = 0.0) -> None:
        """Check an op and apply its edits. Raises Refused or RemoteProtocolError before anything changed."""
        entering = self._read_untrusted(op, payload)
        self._edit(op.edits)
        if op.record_past:
            self._cache.record_past()
        self._begun = _OpInProgress(op, came_at)
        if entering is not None:
            hidden, positions, mask = entering
            self._begun = _OpInProgress(op, came_at, hidden, positions, mask)
            self._look_ahead(self._begun)
            self._extend_mask(hidden.shape[1], mask)

    def piece(self, n_tokens: int) -> SessionTokens:
        """The next ``n_tokens`` of each row, for a pass with others. ``put`` must follow."""
        assert self._begun is not None
        assert self._begun.hidden is not None
        assert self._begun.positions is not None
        window = slice(self._begun.n_done, self._begun.n_done + n_tokens)
        device = self._span.device
        hidden, positions = self._begun.hidden[:, window].to(device), self._begun.positions[:, window].long().to(device)
        return SessionTokens(hidden, positions, self._cache, self._n_tokens, self._lora)

    def put(self, out: torch.Tensor) -> None:
        """Take what a pass gave for ``piece``."""
        assert self._begun is not None
        self._begun.outs.append(out)
        self._begun.n_done += out.shape[1]
        self._n_tokens += out.shape[1]

    def spent(self, seconds: float) -> None:
        """A pass that it was part of took so long."""
        assert self._begun is not None
        self._begun.computed_s += seconds

    def compute(self, n_tokens: int) -> None:
        """Compute ``n_tokens`` of each row alone, by the family's own way of masking; the exact grade, a whole op."""
        n_left = self.tokens_left if self.history.is_exact else n_tokens
        while n_left:
            piece = self.piece(min(n_left, MAX_TOKENS_PER_PASS))
            n_new = piece.hidden.shape[1]
            seen = None if self._mask is None else self._mask[:, : self._n_tokens + n_new]
            at, lora = self._n_tokens, self._lora
            self.put(self._span.forward(piece.hidden, piece.positions, seen, self._cache, at, self.hop, lora))
            n_left -= n_new

    def asked_of_head(self) -> torch.Tensor | None:
        """Of a complete op: what left of the tokens [t, d] whose largest logits its client asks for, if it does."""
        begun = self._begun
        assert begun is not None
        op, n = begun.op, begun.op.want or 0
        is_last = self.hop.end == self._span.n_layers and op.seq > op.silent_through
        if not (op.top and is_last and begun.outs and 0 < self.n_rows * n <= MOST_WITH_LOGITS):
            return None
        hidden = self._sent(begun).last(n).hidden
        return None if hidden is None or hidden.shape[1] != n else hidden.flatten(0, 1)

    def answer(self, now: float = 0.0, logits: bytes = b"") -> bytes:
        """The frame that the complete op leads to: the next hop's op, or Done. ``logits`` go with it."""
        begun = self._begun
        assert begun is not None
        op = begun.op
        if op.seq <= op.silent_through and self.hop.end >= op.replay_end:
            return messages.framed(Done(session=self.session, start=self.hop.start, seq=op.seq))
        sent = self._sent(begun)
        if op.want is not None and self.hop.end == self._span.n_layers:
            sent = sent.last(op.want)
        if op.times is not None and len(op.times) < MOST_HOPS_TIMED:
            computed, here = int(1e6 * begun.computed_s), int(1e6 * (now - begun.came_at))
            times = (*op.times, (self.hop.start, max(0, here - computed), computed))
            op = msgspec.structs.replace(op, times=times)
        if op.logits or logits:
            op = msgspec.structs.replace(op, logits=logits)
        return encode_op(self.session, self.hop.end, op.epoch, op.settled, sent, op, op.base, self._codec)

    def keep(self) -> None:
        """Add the answered op to the history; the session is ready for the next."""
        begun = self._begun
        assert begun is not None
        self._begun = None
        self._reached = begun.op.seq
        self.history.add(self._sent(begun))
        if begun.ahead is not None and self._prefix is not None:
            self._prefix.reached = begun.ahead
        self.history.settle(begun.op.seq if begun.op.base else begun.op.settled)

    @staticmethod
    def _sent(begun: _OpInProgress) -> SentOp:
        op = begun.op
        if begun.hidden is None:
            return SentOp(op.seq, op.edits, None, None, None, op.record_past)
        if len(begun.outs) > 1:
            begun.outs = [torch.cat(begun.outs, 1)]
        begun.outs[0] = begun.outs[0].cpu()
        return SentOp(op.seq, op.edits, begun.outs[0], begun.positions, begun.mask, op.record_past)

    def replay(self, request: Replay) -> Iterator[bytes]:
        """Yield the op frames that bring a successor from ``request.have`` (None: nothing) up to date."""
        marks = Op(silent_through=request.silent_through, replay_end=request.replay_end)
        at = (self.session, self.hop.end, request.epoch)
        yield from replay_frames(self.history, at, request.have, marks, self._codec)

    def shown(self, request: WantTokens) -> bytes:
        """What left this hop of some tokens, with their positions. Raises Refused."""
        d, b = self._span.hidden_size, self.n_rows
        dtype = str(self._span.dtype).removeprefix("torch.")
        if request.n > max_tokens_per_frame(b, d, dtype, PART_BYTES * 4):
            raise Refused(Code.TOO_LONG, f"{request.n} tokens do not fit one answer")
        try:
            hidden, positions = self.history.placed(request.first, request.first + request.n)
        except LookupError as error:
            raise Refused(Code.NOT_HELD, str(error)) from None
        meta, payload = pack(hidden, positions, None)
        return messages.framed(TokensAre(re=request.id, tensor=meta), payload)

    def hand_over(self, request: HandOver) -> Iterator[bytes]:
        """Yield the caches and the history as parts, for a worker that holds the same blocks. Raises Refused."""
        raw = pack_state(self._cache, self.history, self._mask, self._n_tokens)
        self._span.on_block()  # this takes a while, and is progress
        digest, n_parts = hashlib.sha256(raw).digest(), -(-len(raw) // PART_BYTES)
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
            yield messages.framed(header, memoryview(raw)[part * PART_BYTES : (part + 1) * PART_BYTES])
        yield messages.framed(HandedOver(re=request.id, n_bytes=len(raw)))

    def inherit(self, part: CachePart, payload: memoryview) -> Iterator[bytes]:
        """Take one part; with the last one, check the whole and put it in place. Raises Refused."""
        if self._reached or part.part != len(self._parts) or part.part >= part.n_parts:
            text = f"part {part.part} of caches; expected {len(self._parts)} of a new session"
            raise Refused(Code.SESSION_LOST, text)
        like = self._like = self._like or self._span.example_cache(self.hop)
        limit = self.n_rows * self._max_tokens * (like.n_bytes() + self._history_bytes_per_token()) + PART_BYTES
        if (part.n_parts - 1) * PART_BYTES > limit or len(payload) > PART_BYTES:
            raise Refused(Code.TOO_LONG, f"caches of {part.n_parts} parts; this session has room for {limit} B")
        self._parts.append(bytes(payload))
        if len(self._parts) < part.n_parts:
            return
        raw, self._parts = b"".join(self._parts), []
        self._span.on_block()  # this takes a while, and is progress
        if hashlib.sha256(raw).digest() != part.digest:
            raise Refused(Code.SESSION_LOST, "the caches do not have the digest that was announced")
        self._span.on_block()
        shape = StateShape(self.n_rows, self._max_tokens, self._span.hidden_size, self._span.dtype, part.seq)
        self._n_tokens, mask = unpack_state_untrusted(raw, self._cache, self.history, like, shape)
        self._mask = None if mask is None else mask.to(self._span.device)
        self._reached = part.seq
        done = Inherited(self.session, self.hop.start, self._epoch, seq=part.seq, tokens=self.history.n_kept)
        yield messages.framed(done)

    def _history_bytes_per_token(self) -> int:
        return (KEPT_TIMES + 1) * (self._span.hidden_size * self._span.dtype.itemsize + 64)

    def close(self) -> None:
        self.history.close()

    def _read_untrusted(
        self, op: Op, payload: memoryview
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Check an op against this session before anything changes. Raises Refused or RemoteProtocolError."""
        n_cropped = count_cropped(op.edits)
        n_tokens = self._n_tokens - n_cropped
        for edit in op.edits:
            if edit.rows is not None and (len(edit.rows) != self.n_rows or max(edit.rows) >= self.n_rows):
                raise Refused(Code.BAD_SHAPE, f"a reorder of {len(edit.rows)} rows in a batch of {self.n_rows}")
        if n_tokens < 0:
            raise Refused(Code.BAD_SHAPE, f"a crop past the start: the session holds {self._n_tokens} tokens")
        if n_cropped and (why := self._cache.refuses_crop(n_cropped)):
            raise Refused(Code.UNSUPPORTED, f"{n_cropped} tokens cannot be taken back: {why}")
        if (
            self.history.recent_edits + messages.count_changes(op.edits, op.tensor is not None)
            > LEAST_KEPT_EDITS + KEPT_TIMES * self._max_tokens
        ):
            text = f"{self.history.recent_edits} edits of separate ops are kept for replay already"
            raise Refused(Code.TOO_LONG, text)
        if op.tensor is None:
            return None
        shape = (op.tensor.b, op.tensor.d, op.tensor.dtype)
        expected = (self.n_rows, self._span.hidden_size, str(self._span.dtype).removeprefix("torch."))
        if shape != expected:
            raise Refused(Code.BAD_SHAPE, f"expected (batch, hidden, dtype) {expected}, got {shape}")
        n_bytes = op.tensor.b * op.tensor.t * (op.tensor.d * self._span.dtype.itemsize + POSITION_BYTES)
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

    def _look_ahead(self, begun: _OpInProgress) -> None:
        """Note what the cache will begin with: until something else than a part of a long prompt comes."""
        prefix, hidden, positions = self._prefix, begun.hidden, begun.positions
        if prefix is None or prefix.is_over or hidden is None or positions is None:
            return
        if begun.op.record_past or begun.mask is not None or hidden.shape[1] < BLOCK_TOKENS:
            prefix.is_over = True
            return
        rows, places = hidden[0].contiguous().view(torch.uint8).numpy(), positions[0].contiguous().numpy()
        begun.ahead = prefix.ahead([row.tobytes() + at.tobytes() for row, at in zip(rows, places, strict=True)])

    def _edit(self, edits: tuple[Edit, ...]) -> None:
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
            rows = torch.tensor(order, device=self._span.device)
            self._cache.reorder(rows)
            self._span.on_block()  # of a large cache it takes a while, and is progress
            if self._mask is not None:
                self._mask = self._mask[rows]

    def _extend_mask(self, n_new: int, mask: torch.Tensor | None) -> None:
        if mask is None and self._mask is None:
            return
        device = self._span.device
        past = self._mask if self._mask is not None else torch.ones(self.n_rows, self._n_tokens, device=device)
        new = torch.ones(self.n_rows, n_new) if mask is None else mask
        self._mask = torch.cat([past.long(), new.long().to(device)], 1)
