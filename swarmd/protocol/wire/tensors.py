"""How an op's payload is laid out: hidden states, positions, padding mask. Pure byte arithmetic, no torch.

Hidden states travel as they are ("raw"), in half precision, as int8 with one float32 scale for each block of 64 values
of a token, or as int4, two to a byte, with one float16 scale for each 32. docs/protocol.md, "Codecs", gives the error
bounds; tests/wire/test_tensors.py holds them.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmd.errors import RemoteProtocolError
from swarmd.protocol.fields import TensorMeta

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CODECS = ("raw", "float16", "bfloat16", "int8", "int4")
CHANGES = "aqsgd"  # for fine-tuning: rows that were sent before travel as changes (wire.changes)
INT8_BLOCK = 64  # values that share a scale: 6 % more bytes, and outliers spoil 64 values only
INT4_BLOCK = 32  # the same of 4 bits, which outliers spoil more: an eighth more bytes


# A payload of b rows, t tokens, d values a token; what a codec adds is part of the hidden states:
#
#     | values, all tokens | scales (int8, int4) | positions int32 [b, t] | mask uint8 [b, t] |
#     |<---------- hidden [b, t, d] ------------>|     has_positions      |     has_mask      |
#
# Its size follows from the header, so a payload of another size is refused before any of it is read.


@dataclass(frozen=True, slots=True)
class PayloadLayout:
    """Byte ranges of one payload: hidden [b, t, d], int32 positions [b, t] or nothing, uint8 mask likewise."""

    hidden: slice
    positions: slice
    mask: slice | None
    total_bytes: int


def layout_untrusted(meta: TensorMeta, payload_bytes: int) -> PayloadLayout:
    """Work out where the parts lie and check that they fill the payload exactly.

    Raises RemoteProtocolError for an unknown dtype or codec, or a payload of another size than the shape needs.
    """
    if meta.dtype not in ITEM_BYTES:
        raise RemoteProtocolError(f"expected a dtype among {', '.join(ITEM_BYTES)}, got {meta.dtype!r}")
    if meta.codec not in CODECS:
        raise RemoteProtocolError(f"expected a codec among {', '.join(CODECS)}, got {meta.codec!r}")
    n_tokens = meta.b * meta.t
    hidden = n_tokens * token_bytes(meta.d, meta.dtype, meta.codec)
    positions = hidden + (4 * n_tokens if meta.has_positions else 0)
    total = positions + (n_tokens if meta.has_mask else 0)
    if total != payload_bytes:
        raise RemoteProtocolError(
            f"shape [{meta.b}, {meta.t}, {meta.d}] {meta.dtype} as {meta.codec} needs {total} B of payload, "
            f"got {payload_bytes}"
        )
    mask = slice(positions, total) if meta.has_mask else None
    return PayloadLayout(slice(0, hidden), slice(hidden, positions), mask, total)


def token_bytes(hidden: int, dtype: str, codec: str) -> int:
    """Bytes of one token's hidden states on the wire."""
    if codec == "int8":
        return hidden + 4 * -(-hidden // INT8_BLOCK)
    if codec == "int4":
        return (INT4_BLOCK // 2 + 2) * -(-hidden // INT4_BLOCK)
    return hidden * ITEM_BYTES[dtype if codec == "raw" else codec]


def token_parts(meta: TensorMeta) -> tuple[tuple[int, int], ...]:
    """Where what there is of token 0 of row 0 begins, and its bytes: values, perhaps scales, position and mask."""
    if meta.codec == "int8":
        parts = [meta.d, 4 * -(-meta.d // INT8_BLOCK)]
    elif meta.codec == "int4":
        n_blocks = -(-meta.d // INT4_BLOCK)
        parts = [INT4_BLOCK // 2 * n_blocks, 2 * n_blocks]
    else:
        parts = [token_bytes(meta.d, meta.dtype, meta.codec)]
    parts += [4] * meta.has_positions + [1] * meta.has_mask
    n_tokens = meta.b * meta.t
    starts = [sum(parts[:i]) * n_tokens for i in range(len(parts))]
    return tuple(zip(starts, parts, strict=True))


def max_tokens_per_frame(batch: int, hidden: int, dtype: str, limit_bytes: int) -> int:
    """Tell how many tokens of each row fit one frame of at most ``limit_bytes``."""
    return max(1, limit_bytes // (batch * (hidden * ITEM_BYTES[dtype] + 5)))
