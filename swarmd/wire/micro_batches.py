"""Micro-batches of fine-tuning as frames: what goes forward, the gradients that come back, and parameters in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.tensors import max_tokens_per_frame
from swarmd.protocol.wire.tuning import Backward, Forward, MicroBatchRow
from swarmd.wire.changes import Changes
from swarmd.wire.tensors import pack, pack_gradient, unpack_untrusted, unpack_values_untrusted

PART_BYTES = 1 << 20  # one frame: others come between two of them


def forward_frames(
    message: Forward,
    start: int,
    hidden: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor | None] | None,
    codec: str,
    changes: Changes | None = None,
) -> Iterator[bytes]:
    """Frame hidden states [b, t, d] for block ``start``; ``places`` are positions and mask, None for the client.

    With ``changes`` rows that the message names travel as such.
    """
    # With changes, all parts are made before the first one leaves: what the receiver will come to has to be noted
    # before anything waits, since the same row may be sent again meanwhile.
    rows: tuple[MicroBatchRow, ...] = ()
    base: torch.Tensor | None = None
    decoded = []
    frames = []
    if changes is not None and message.rows:
        rows, base = changes.before(message.rows, hidden)
        hidden = hidden.detach().cpu() - base
    for part, n_parts, window in _windows(hidden):
        positions = None
        mask = None
        if places is not None:
            positions = places[0][:, window]
            mask = None if places[1] is None else places[1][:, window]
        meta, payload = pack(hidden[:, window], positions, mask, codec)
        header = Forward(
            message.session,
            start,
            message.seq,
            (part, n_parts),
            meta,
            message.keep,
            message.tuned,
            message.settled,
            () if part else rows,
        )
        frame = messages.encode_frame(header, payload)
        if base is None:
            yield frame
            continue
        decoded.append(read_values(meta, memoryview(payload)))
        frames.append(frame)
    if changes is not None and base is not None:
        changes.note(rows, base + torch.cat(decoded, 1))
    yield from frames


def backward_frames(
    session: bytes,
    start: int,
    seq: int,
    gradient: torch.Tensor,
    codec: str,
) -> Iterator[bytes]:
    """Frame the gradient [b, t, d] by what enters block ``start``; in int8 where hidden states travel in int4."""
    codec = "int8" if codec == "int4" else codec
    for part, n_parts, window in _windows(gradient):
        meta, payload, scale = pack_gradient(gradient[:, window], codec)
        header = Backward(session, start, seq, (part, n_parts), meta, scale)
        yield messages.encode_frame(header, payload)


def pieces(raw: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Cut bytes into (number, how many, piece) that fit a frame each."""
    n = max(1, -(-len(raw) // PART_BYTES))
    for number in range(n):
        yield number, n, raw[number * PART_BYTES : (number + 1) * PART_BYTES]


def read_values(meta: TensorMeta, payload: memoryview) -> torch.Tensor:
    """Return the hidden states in a payload, whatever follows them. Raises RemoteProtocolError."""
    return unpack_untrusted(meta, payload)[0] if meta.has_positions else unpack_values_untrusted(meta, payload)


def _windows(values: torch.Tensor) -> Iterator[tuple[int, int, slice]]:
    """Cut values [b, t, d] into tokens that fit a frame: (number, how many, slice of t)."""
    b, t, d = values.shape
    dtype = str(values.dtype).removeprefix("torch.")
    step = max_tokens_per_frame(b, d, dtype, PART_BYTES)
    n = -(-t // step)
    for number in range(n):
        yield number, n, slice(number * step, (number + 1) * step)
