"""Ops of a session as frames: one by one, and all that a successor lacks."""

from __future__ import annotations

from collections.abc import Iterator

from swarmd.protocol.wire import messages
from swarmd.protocol.wire.messages import Op
from swarmd.protocol.wire.tensors import max_tokens_per_frame
from swarmd.wire.history import History, SentOp
from swarmd.wire.tensors import pack

REPLAY_FRAME_BYTES = 4 * 2**20  # four ops' worth: a replay is in a hurry


def replay_frames(
    history: History, at: tuple[bytes, int, int], have: int | None, marks: Op, codec: str
) -> Iterator[bytes]:
    """Encode what a successor lacks; ``at`` is (session, its first block, epoch).

    ``marks`` carries silent_through and replay_end.
    """
    settled = history.base_seq
    if have is None:
        first = next((s for _, _, s in history.base(1)), None)
        if first is not None and first.hidden is not None:
            b, _, d = first.hidden.shape
            dtype = str(first.hidden.dtype).removeprefix("torch.")
            step = max_tokens_per_frame(b, d, dtype, REPLAY_FRAME_BYTES)
            for part, n_parts, sent in history.base(step):
                yield encode_op(*at, settled, sent, marks, (part, n_parts), codec)
    for sent in history.after(have or 0):
        yield encode_op(*at, settled, sent, marks, None, codec)


def encode_op(
    session: bytes,
    start: int,
    epoch: int,
    settled: int,
    sent: SentOp,
    marks: Op,
    base: tuple[int, int] | None,
    codec: str,
) -> bytes:
    """Frame one op for the hop that starts at ``start``."""
    meta, payload = None, b""
    if sent.hidden is not None and sent.positions is not None:
        meta, payload = pack(sent.hidden, sent.positions, sent.mask, codec)
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
        want=marks.want,
        times=marks.times,
        top=marks.top,
        logits=marks.logits,
    )
    return messages.framed(header, payload)
