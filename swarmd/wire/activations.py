"""What travels between the stages of a run: hidden states of a micro-batch, and the gradients that come back."""

from __future__ import annotations

import msgspec
import torch

from swarmd.errors import RemoteProtocolError
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.untrusted import decode
from swarmd.wire.tensors import is_finite, pack, pack_gradient, unpack_values_untrusted


class Activations(msgspec.Struct, frozen=True, array_like=True):
    """Values [b, t, d] as they are coded; ``scale``: what a gradient was multiplied by."""

    meta: TensorMeta
    scale: float
    values: bytes


def encode_activations(hidden: torch.Tensor, codec: str) -> bytes:
    """Encode hidden states [b, t, d] in a recipe's codec."""
    meta, values = pack(hidden, None, None, "raw" if codec == "none" else codec)
    return msgspec.msgpack.encode(Activations(meta, 1.0, values))


def encode_gradient(gradient: torch.Tensor, codec: str) -> bytes:
    """Encode a gradient [b, t, d]; in int8 where hidden states travel in int4."""
    of_gradients = {"none": "raw", "int4": "int8"}
    meta, values, scale = pack_gradient(gradient, of_gradients.get(codec, codec))
    return msgspec.msgpack.encode(Activations(meta, scale, values))


def decode_untrusted(raw: bytes, shape: tuple[int, int, int]) -> torch.Tensor:
    """Read values of a known shape [b, t, d], float32. Raises RemoteProtocolError."""
    coded = decode(raw, Activations, "activations")
    found = (coded.meta.b, coded.meta.t, coded.meta.d)
    if found != shape or coded.meta.dtype != "float32" or not coded.scale > 0:
        raise RemoteProtocolError(f"expected {shape} float32 values, got {found} {coded.meta.dtype}")
    values = unpack_values_untrusted(coded.meta, memoryview(coded.values)) / coded.scale
    if not is_finite(values):
        raise RemoteProtocolError("values that are not finite")
    return values
