"""Micro-batches of fine-tuning as frames: what goes forward, the gradients that come back, and parameters in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from swarmd.protocol import messages
from swarmd.protocol.messages import Backward, Forward
from swarmd.protocol.tensors import max_tokens_per_frame
from swarmd.wire.tensors import pack, pack_gradient

PART_BYTES = 1 << 20  # one frame: others come between two of them


def forward_frames(
    message: Forward,
    start: int,
    hidden: torch.Tensor,
    places: tuple[torch.Tensor, torch.Tensor | None] | None,
    codec: str,
) -> Iterator[bytes]:
    """Frame hidden states [b, t, d] for block ``start``; ``places`` are positions and mask, None for the client."""
    for part, n_parts, window in _windows(hidden):
        positions = None if places is None else places[0][:, window]
        mask = None if places is None or places[1] is None else places[1][:, window]
        meta, payload = pack(hidden[:, window], positions, mask, codec)
        header = Forward(
            message.session, start, message.seq, (part, n_parts), meta, message.keep, message.tuned, message.settled
        )
        yield messages.framed(header, payload)


def backward_frames(session: bytes, start: int, seq: int, gradient: torch.Tensor, codec: str) -> Iterator[bytes]:
    """Frame the gradient [b, t, d] by what enters block ``start``; in int8 where hidden states travel in int4."""
    codec = "int8" if codec == "int4" else codec
    for part, n_parts, window in _windows(gradient):
        meta, payload, scale = pack_gradient(gradient[:, window], codec)
        yield messages.framed(Backward(session, start, seq, (part, n_parts), meta, scale), payload)


def pieces(raw: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Cut bytes into (number, how many, piece) that fit a frame each."""
    n = max(1, -(-len(raw) // PART_BYTES))
    for number in range(n):
        yield number, n, raw[number * PART_BYTES : (number + 1) * PART_BYTES]


def _windows(values: torch.Tensor) -> Iterator[tuple[int, int, slice]]:
    b, t, d = values.shape
    step = max_tokens_per_frame(b, d, str(values.dtype).removeprefix("torch."), PART_BYTES)
    n = -(-t // step)
    for number in range(n):
        yield number, n, slice(number * step, (number + 1) * step)
