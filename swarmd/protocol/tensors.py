"""How an op's payload is laid out: hidden states, positions, padding mask. Pure byte arithmetic, no torch."""

from __future__ import annotations

from dataclasses import dataclass

from swarmd.errors import RemoteProtocolError
from swarmd.protocol.messages import TensorMeta

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Layout:
    """Byte ranges of one payload: hidden [b, t, d], int32 positions [b, t], uint8 mask [b, t] or nothing."""

    hidden: slice
    positions: slice
    mask: slice | None
    total_bytes: int


def layout_untrusted(meta: TensorMeta, payload_bytes: int) -> Layout:
    """Work out where the parts lie and check that they fill the payload exactly.

    Raises RemoteProtocolError for an unknown dtype or a payload of another size than the shape needs.
    """
    item = ITEM_BYTES.get(meta.dtype)
    if item is None:
        raise RemoteProtocolError(f"expected a dtype among {', '.join(ITEM_BYTES)}, got {meta.dtype!r}")
    n_tokens = meta.b * meta.t
    hidden = n_tokens * meta.d * item
    positions = hidden + 4 * n_tokens
    total = positions + (n_tokens if meta.has_mask else 0)
    if total != payload_bytes:
        raise RemoteProtocolError(
            f"shape [{meta.b}, {meta.t}, {meta.d}] {meta.dtype} needs {total} B of payload, got {payload_bytes}"
        )
    return Layout(slice(0, hidden), slice(hidden, positions), slice(positions, total) if meta.has_mask else None, total)


def max_tokens_per_frame(batch: int, hidden: int, dtype: str, limit_bytes: int) -> int:
    """Tell how many tokens of each row fit one frame of at most ``limit_bytes``."""
    return max(1, limit_bytes // (batch * (hidden * ITEM_BYTES[dtype] + 5)))
