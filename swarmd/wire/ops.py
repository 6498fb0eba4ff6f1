"""Ops of a session as frames: one by one, and all that a successor lacks."""

from __future__ import annotations

from collections.abc import Iterator

from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.messages import Op
from swarmd.protocol.wire.tensors import max_tokens_per_frame
from swarmd.wire.history import History, SentOp
from swarmd.wire.tensors import pack

REPLAY_FRAME_BYTES = 4 * 2**20  # four ops' worth: a replay is in a hurry


def replay_frames(
    history: History,
    target: tuple[bytes, int, int],
    have: int | None,
    marks: Op,
    codec: str,
) -> Iterator[bytes]:
    """Encode what a successor lacks; ``target`` is (session, its first block, epoch), ``have`` its last op or None.

    ``marks`` carries silent_through and replay_end.
    """
    session, start, epoch = target
    settled = history.base_seq

    def encode(sent: SentOp, base: tuple[int, int] | None) -> bytes:
        return encode_op(
            session,
            start,
            epoch,
            settled=settled,
            sent=sent,
            marks=marks,
            base=base,
            codec=codec,
        )

    if have is None:
        first = next((sent for _, _, sent in history.base(1)), None)
        if first is not None and first.hidden is not None:
            b, _, d = first.hidden.shape
            dtype = str(first.hidden.dtype).removeprefix("torch.")
            step = max_tokens_per_frame(b, d, dtype, REPLAY_FRAME_BYTES)
            for part, n_parts, sent in history.base(step):
                yield encode(sent, (part, n_parts))
    for sent in history.after(have or 0):
        yield encode(sent, None)


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
    """Frame one op for the hop that starts at ``start``; what it asks for besides comes from ``marks``."""
    meta: TensorMeta | None = None
    payload = b""
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
    return messages.encode_frame(header, payload)
