"""Tensors to payload bytes and back; the layout is ``protocol.tensors``'s."""

from __future__ import annotations

import torch

from swarmd.protocol.messages import TensorMeta
from swarmd.protocol.tensors import layout_untrusted

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pack(hidden: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> tuple[TensorMeta, bytes]:
    """Encode hidden [b, t, d], int32 positions [b, t] and, for padded batches, uint8 mask [b, t]."""
    b, t, d = hidden.shape
    name = str(hidden.dtype).removeprefix("torch.")
    parts = [_raw(hidden), _raw(positions)]
    if mask is not None:
        parts.append(_raw(mask))
    return TensorMeta(b, t, d, name, mask is not None), b"".join(parts)


def unpack_untrusted(meta: TensorMeta, payload: memoryview) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Decode a payload into CPU tensors of its own. Raises RemoteProtocolError when sizes disagree."""
    layout = layout_untrusted(meta, len(payload))
    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    hidden = data[layout.hidden].view(DTYPES[meta.dtype]).view(meta.b, meta.t, meta.d)
    positions = data[layout.positions].view(torch.int32).view(meta.b, meta.t)
    mask = data[layout.mask].view(meta.b, meta.t) if layout.mask is not None else None
    return hidden, positions, mask


def _raw(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().contiguous().cpu().view(torch.uint8).reshape(-1).numpy()
    return memoryview(flat.data)
