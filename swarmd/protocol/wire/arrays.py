"""Hidden states as numpy arrays, for who looks at numbers without torch: float32 [b, t, d] to payloads and back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from swarmd.errors import RemoteProtocolError
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.wire.tensors import layout_untrusted

Floats = NDArray[np.float32]
_HALF = np.uint32(0x7FFF)  # added before the lower half goes: rounds to nearest, and to even with the bit above it


def pack_array(hidden: Floats, dtype: str, first_position: int = 0) -> tuple[TensorMeta, bytes]:
    """Encode hidden states [b, t, d] in ``dtype``, not coded, with positions from ``first_position`` on."""
    b, t, d = hidden.shape
    row = np.arange(first_position, first_position + t, dtype=np.int32)
    positions = np.broadcast_to(row, (b, t))
    return TensorMeta(b, t, d, dtype), _to_bytes(hidden, dtype) + positions.tobytes()


def unpack_array_untrusted(meta: TensorMeta, payload: memoryview) -> Floats:
    """Decode what came without a codec. Raises RemoteProtocolError."""
    layout = layout_untrusted(meta, len(payload))
    if meta.codec != "raw":
        raise RemoteProtocolError(f"expected hidden states as they are, got {meta.codec}")
    raw = payload[layout.hidden]
    if meta.dtype == "bfloat16":
        bits = np.frombuffer(raw, np.uint16).astype(np.uint32) << 16
        values = bits.view(np.float32)
    else:
        dtype = np.float16 if meta.dtype == "float16" else np.float32
        values = np.frombuffer(raw, dtype).astype(np.float32)
    return values.reshape(meta.b, meta.t, meta.d)


def round_to_dtype(hidden: Floats, dtype: str) -> Floats:
    """The same as it is after a journey in ``dtype``."""
    meta, payload = pack_array(hidden, dtype)
    return unpack_array_untrusted(meta, memoryview(payload))


def _to_bytes(hidden: Floats, dtype: str) -> bytes:
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(hidden, np.float32).view(np.uint32)
        lowest_kept_bit = bits >> 16 & 1
        rounded_bits = (bits + _HALF + lowest_kept_bit) >> 16
        return rounded_bits.astype(np.uint16).tobytes()
    return hidden.astype(np.float16 if dtype == "float16" else np.float32).tobytes()
