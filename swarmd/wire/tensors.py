"""Tensors to payload bytes and back; the layout is ``protocol.wire.tensors``'s."""

from __future__ import annotations

import math

import torch

from swarmd.errors import RemoteProtocolError
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.wire.tensors import INT4_BLOCK, INT8_BLOCK, layout_untrusted

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What an op brings: hidden [b, t, d], positions [b, t], and a mask [b, t] where rows are padded."""
LARGEST_HALF = 2.0**15  # what gradients are scaled up to in half precision


def pack(
    hidden: torch.Tensor,
    positions: torch.Tensor | None,
    mask: torch.Tensor | None,
    codec: str = "raw",
) -> tuple[TensorMeta, bytes]:
    """Encode hidden [b, t, d], int32 positions [b, t] if any and, for padded batches, uint8 mask [b, t].

    Values that ``codec`` cannot hold (beyond the range of float16) make this op travel raw.
    """
    b, t, d = hidden.shape
    name = str(hidden.dtype).removeprefix("torch.")
    coded = _encode_values(hidden, codec)
    if coded is None:
        codec = "raw"
        coded = [hidden]
    parts = [raw_bytes(part) for part in (*coded, positions, mask) if part is not None]
    meta = TensorMeta(
        b,
        t,
        d,
        name,
        mask is not None,
        codec,
        positions is not None,
    )
    return meta, b"".join(parts)


def pack_gradient(gradient: torch.Tensor, codec: str) -> tuple[TensorMeta, bytes, float]:
    """Encode a gradient [b, t, d] times a power of two, which is returned: small ones vanish in half precision."""
    largest = float(gradient.abs().max())
    scale = 1.0
    if codec == "float16" and largest > 0 and math.isfinite(largest):
        scale = 2.0 ** min(120, math.floor(math.log2(LARGEST_HALF / largest)))
    meta, payload = pack(
        gradient * scale if scale != 1.0 else gradient,
        None,
        None,
        codec,
    )
    return meta, payload, scale


def unpack_values_untrusted(meta: TensorMeta, payload: memoryview) -> torch.Tensor:
    """Decode what has neither positions nor mask: [b, t, d]. Raises RemoteProtocolError when sizes disagree."""
    if meta.has_positions or meta.has_mask:
        raise RemoteProtocolError("expected values without positions and mask")
    layout = layout_untrusted(meta, len(payload))
    return _decode_values(bytearray(payload), layout.hidden.stop, meta)


def unpack_untrusted(
    meta: TensorMeta,
    payload: memoryview,
) -> Inputs:
    """Decode a payload into CPU tensors of its own. Raises RemoteProtocolError when sizes disagree."""
    if not meta.has_positions:
        raise RemoteProtocolError("expected hidden states with their positions")
    layout = layout_untrusted(meta, len(payload))
    owned = bytearray(payload)
    hidden = _decode_values(owned, layout.hidden.stop, meta)
    start = layout.positions.start
    # an odd number of half-precision values may be before them
    raw_positions, start = (owned[layout.positions], 0) if start % 4 else (owned, start)
    positions = torch.frombuffer(raw_positions, dtype=torch.int32, count=meta.b * meta.t, offset=start)
    mask = None
    if layout.mask is not None:
        mask = torch.frombuffer(owned, dtype=torch.uint8, offset=layout.mask.start).view(meta.b, meta.t)
    return hidden, positions.view(meta.b, meta.t), mask


# int8 travels as all quantised values [b, t, d], then a float32 scale for each block of INT8_BLOCK values of one token.
# The scale is a 127th of the block's largest; a block of zeros has scale 0, and stays zero.
def _encode_values(hidden: torch.Tensor, codec: str) -> list[torch.Tensor] | None:
    """Return what travels in place of hidden states [b, t, d]; None where they have to travel raw."""
    if codec == "raw" or str(hidden.dtype) == f"torch.{codec}":
        return None
    if codec == "int4":
        return _encode_int4(hidden)
    if codec == "int8":
        blocks = _cut_blocks(hidden.float(), INT8_BLOCK)
        scales = blocks.abs().amax(-1, keepdim=True) / 127
        if not is_finite(scales):
            return None
        quantised = torch.where(scales > 0, blocks / scales, 0.0).round().to(torch.int8)
        return [quantised.flatten(2)[..., : hidden.shape[2]], scales]
    halved = hidden.to(DTYPES[codec])
    return [halved] if is_finite(halved) else None


def _decode_values(payload: bytearray, n_bytes: int, meta: TensorMeta) -> torch.Tensor:
    """Read hidden states [b, t, d] of the first bytes, whose number was checked."""
    shape = (meta.b, meta.t, meta.d)
    n_values = meta.b * meta.t * meta.d
    if meta.codec not in ("int8", "int4"):
        dtype = DTYPES[meta.dtype if meta.codec == "raw" else meta.codec]
        return torch.frombuffer(payload, dtype=dtype, count=n_values).view(shape).to(DTYPES[meta.dtype])
    data = torch.frombuffer(payload, dtype=torch.uint8, count=n_bytes)
    if meta.codec == "int8":
        quantised = data[:n_values].view(torch.int8).view(shape)
        scales = data[n_values:].clone().view(torch.float32)
        scales = scales.view(meta.b, meta.t, -1, 1)
        blocks = _cut_blocks(quantised.float(), INT8_BLOCK) * scales
        decoded = blocks.flatten(2)[..., : meta.d]
    else:
        decoded = _decode_int4(data, meta)
    return decoded.to(DTYPES[meta.dtype])


# A block of int4 is INT4_BLOCK values of one token: two of -7 to 7 in a byte, the first in its low half, each 8 more
# than it is; the scales of all blocks follow, in float16. A 7th of the largest is the scale, so that zero stays zero.
def _encode_int4(hidden: torch.Tensor) -> list[torch.Tensor] | None:
    blocks = _cut_blocks(hidden.float(), INT4_BLOCK)
    largest = blocks.abs().amax(-1, keepdim=True)
    scales = (largest / 7).to(torch.float16)
    if not is_finite(scales):
        return None
    quantised = torch.where(scales > 0, blocks / scales.float(), 0.0)
    quantised = quantised.round().clamp(-7, 7)
    shifted = (quantised + 8).to(torch.uint8)
    pairs = shifted.view(*shifted.shape[:-1], -1, 2)
    low = pairs[..., 0]
    high = pairs[..., 1] << 4
    return [low | high, scales]


def _decode_int4(data: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    n_blocks = meta.b * meta.t * -(-meta.d // INT4_BLOCK)
    n_pairs = n_blocks * INT4_BLOCK // 2
    pairs = data[:n_pairs]
    unpacked = torch.stack([pairs & 15, pairs >> 4], -1)
    quantised = unpacked.view(n_blocks, INT4_BLOCK).float() - 8
    scales = data[n_pairs:].clone().view(torch.float16).float()
    values = quantised * scales.view(n_blocks, 1)
    return values.view(meta.b, meta.t, -1)[..., : meta.d]


def _cut_blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return [b, t, d] as [b, t, blocks, size], padded with zeros at the end."""
    b, t, d = values.shape
    padded = torch.nn.functional.pad(values, (0, -d % size))
    return padded.view(b, t, -1, size)


def first_tokens(inputs: Inputs, n_tokens: int) -> Inputs:
    """Return the first ``n_tokens`` of each row."""
    hidden, positions, mask = inputs
    if n_tokens == hidden.shape[1]:
        return inputs
    return hidden[:, :n_tokens], positions[:, :n_tokens], None if mask is None else mask[:, :n_tokens]


def is_finite(values: torch.Tensor) -> bool:
    """Is every one of them a number? By their least and their largest, in a fiftieth of the time of ``isfinite``."""
    if not values.numel():
        return True
    return all(math.isfinite(end) for end in torch.aminmax(values.detach()))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return what a tensor's numbers are made of, as they lie in memory; a copy where they do not lie together."""
    dense = tensor.detach().contiguous().cpu()
    return dense.view(-1).view(torch.uint8).numpy().data
