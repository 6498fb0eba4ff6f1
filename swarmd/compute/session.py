"""One session at one hop, inside a worker: apply ops to its cache, padding and history, in order.

Which ops may come, from whom and in what order is decided in the daemon (``plan.session``); here an op is executed.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swarmd.compute.history import Budget, History, Sent
from swarmd.compute.span import LoadedSpan
from swarmd.compute.wire import pack, unpack_untrusted
from swarmd.errors import Code, Refused
from swarmd.protocol import messages
from swarmd.protocol.messages import Done, Edit, Op, OpenSession, Replay
from swarmd.protocol.tensors import max_tokens_per_frame
from swarmd.values import Span

REPLAY_FRAME_BYTES = 4 * 2**20
MAX_TOKENS_PER_PASS = 512
KEPT_TIMES = 4  # ops that are cropped again are kept too: in the exact grade all of them


class HopSession:
    """Caches of one session for one hop of the loaded span."""

    def __init__(self, span: LoadedSpan, opened: OpenSession, budget: Budget) -> None:
        self.hop = Span(opened.start, opened.end)
        self.session = opened.session
        self.history = History(opened.grade == "exact", budget)
        self._span = span
        self._max_tokens = opened.max_tokens
        self._batch = opened.batch
        self._cache = span.new_cache(self.hop)
        self._mask: torch.Tensor | None = None
        self._n_tokens = 0

    def apply(self, op: Op, payload: memoryview) -> Iterator[bytes]:
        """Execute one op: yields the frame to send (the next hop's op, or Done), then keeps it. Raises Refused."""
        entering = self._read_untrusted(op, payload)
        for edit in op.edits:
            self._edit(edit)
        if op.record_past:
            self._cache.record_past()
        sent = Sent(op.seq, op.edits, None, None, None, op.record_past)
        if entering is not None:
            hidden, positions, mask = entering
            out = self._append(hidden, positions, mask)
            sent = Sent(op.seq, op.edits, out.cpu(), positions, mask, op.record_past)
        if op.seq <= op.silent_through and self.hop.end >= op.replay_end:
            yield messages.framed(Done(session=self.session, start=self.hop.start, seq=op.seq))
        else:
            yield encode_op(self.session, self.hop.end, op.epoch, op.settled, sent, op, op.base)
        self.history.add(sent)  # after the frame is on its way: the next hop need not wait for this
        self.history.settle(op.seq if op.base else op.settled)

    def replay(self, request: Replay) -> Iterator[bytes]:
        """Yield the op frames that bring a successor from ``request.have`` (None: nothing) up to date."""
        marks = Op(silent_through=request.silent_through, replay_end=request.replay_end)
        yield from replay_frames(self.history, self.session, self.hop.end, request.epoch, request.have, marks)

    def close(self) -> None:
        self.history.close()

    def _read_untrusted(
        self, op: Op, payload: memoryview
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
        """Check an op against this session before anything changes. Raises Refused or RemoteProtocolError."""
        n_tokens = self._n_tokens
        for edit in op.edits:
            if edit.crop is not None:
                n_tokens -= edit.crop
            if edit.rows is not None and (len(edit.rows) != self._batch or max(edit.rows) >= self._batch):
                raise Refused(Code.BAD_SHAPE, f"a reorder of {len(edit.rows)} rows in a batch of {self._batch}")
        if n_tokens < 0:
            raise Refused(Code.BAD_SHAPE, f"a crop past the start: the session holds {self._n_tokens} tokens")
        if op.tensor is None:
            return None
        shape = (op.tensor.b, op.tensor.d, op.tensor.dtype)
        expected = (self._batch, self._span.hidden_size, str(self._span.dtype).removeprefix("torch."))
        if shape != expected:
            raise Refused(Code.BAD_SHAPE, f"expected (batch, hidden, dtype) {expected}, got {shape}")
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

    def _edit(self, edit: Edit) -> None:
        if edit.crop is not None:
            try:
                self._cache.crop(edit.crop)
            except RuntimeError as error:
                raise Refused(Code.UNSUPPORTED, f"this model's cache cannot be cropped: {error}") from None
            self._n_tokens -= edit.crop
            if self._mask is not None:
                self._mask = self._mask[:, : self._n_tokens]
        if edit.rows is not None:
            rows = torch.tensor(edit.rows, device=self._span.device)
            self._cache.reorder(rows)
            if self._mask is not None:
                self._mask = self._mask[rows]

    def _append(self, hidden: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        self._extend_mask(hidden.shape[1], mask)
        device = self._span.device
        hidden, positions = hidden.to(device), positions.long().to(device)
        outs = []
        for at in range(0, hidden.shape[1], MAX_TOKENS_PER_PASS):
            window = slice(at, at + MAX_TOKENS_PER_PASS)
            piece = hidden[:, window]
            seen = None if self._mask is None else self._mask[:, : self._n_tokens + piece.shape[1]]
            outs.append(self._span.forward(piece, positions[:, window], seen, self._cache, self._n_tokens, self.hop))
            self._n_tokens += piece.shape[1]
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _extend_mask(self, n_new: int, mask: torch.Tensor | None) -> None:
        if mask is None and self._mask is None:
            return
        device = self._span.device
        past = self._mask if self._mask is not None else torch.ones(self._batch, self._n_tokens, device=device)
        new = torch.ones(self._batch, n_new) if mask is None else mask
        self._mask = torch.cat([past.long(), new.long().to(device)], 1)


def replay_frames(
    history: History, session: bytes, start: int, epoch: int, have: int | None, marks: Op
) -> Iterator[bytes]:
    """Encode what a successor starting at block ``start`` lacks; ``marks`` carries silent_through and replay_end."""
    settled = history.base_seq
    if have is None:
        first = next((s for _, _, s in history.base(1)), None)
        if first is not None and first.hidden is not None:
            b, _, d = first.hidden.shape
            dtype = str(first.hidden.dtype).removeprefix("torch.")
            step = max_tokens_per_frame(b, d, dtype, REPLAY_FRAME_BYTES)
            for part, n_parts, sent in history.base(step):
                yield encode_op(session, start, epoch, settled, sent, marks, (part, n_parts))
    for sent in history.after(have or 0):
        yield encode_op(session, start, epoch, settled, sent, marks, None)


def encode_op(
    session: bytes, start: int, epoch: int, settled: int, sent: Sent, marks: Op, base: tuple[int, int] | None
) -> bytes:
    """Frame one op for the hop that starts at ``start``."""
    meta, payload = None, b""
    if sent.hidden is not None and sent.positions is not None:
        meta, payload = pack(sent.hidden, sent.positions, sent.mask)
    header = Op(
        session=session,
        start=start,
        epoch=epoch,
        seq=sent.seq,
        settled=settled,
        edits=sent.edits,
        tensor=meta,
        record_past=sent.record_past,
        silent_through=marks.silent_through,
        replay_end=marks.replay_end,
        base=base,
    )
    return messages.framed(header, payload)
