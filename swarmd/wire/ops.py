"""Ops of a session as frames: one by one, and all that a successor lacks."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.messages import Op
from swarmd.protocol.wire.tensors import max_tokens_per_frame
from swarmd.wire.history import History, SentOp
from swarmd.wire.tensors import pack

REPLAY_FRAME_BYTES = 4 * 2**20  # four ops' worth: a replay is in a hurry


def replay_frames(history: History, header: Op, have: int | None, codec: str) -> Iterator[bytes]:
    """Encode what a successor lacks, ``have`` being its last op, or None.

    ``header`` says where to: session, the successor's first block, epoch; and silent_through and replay_end.
    """
    header = msgspec.structs.replace(header, settled=history.base_seq)
    if have is None:
        first = next((sent for _, _, sent in history.base(1)), None)
        if first is not None and first.hidden is not None:
            b, _, d = first.hidden.shape
            dtype = str(first.hidden.dtype).removeprefix("torch.")
            step = max_tokens_per_frame(b, d, dtype, REPLAY_FRAME_BYTES)
            for part, n_parts, sent in history.base(step):
                yield encode_op(msgspec.structs.replace(header, base=(part, n_parts)), sent, codec)
    for sent in history.after(have or 0):
        yield encode_op(header, sent, codec)


def encode_op(header: Op, sent: SentOp, codec: str) -> bytes:
    """Frame one op. ``header`` says where it goes and what is asked for; the rest is ``sent``."""
    meta: TensorMeta | None = None
    payload = b""
    if sent.hidden is not None and sent.positions is not None:
        meta, payload = pack(sent.hidden, sent.positions, sent.mask, codec)
    op = msgspec.structs.replace(
        header,
        seq=sent.seq,
        edits=sent.edits,
        tensor=meta,
        record_past=sent.record_past,
        absent=sent.n_absent,
        alternatives=sent.alternatives,
    )
    return messages.encode_frame(op, payload)
