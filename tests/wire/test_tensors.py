"""Codecs hold their error bounds, and what they cannot hold travels as it is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmd.errors import RemoteProtocolError
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.wire.tensors import CODECS, INT4_BLOCK, INT8_BLOCK, token_bytes
from swarmd.wire.tensors import is_finite, pack, unpack_untrusted

RELATIVE = {"float16": 2**-11, "bfloat16": 2**-8}
SMALLEST_FLOAT16 = 2**-24  # below it, steps are absolute


def there_and_back(hidden: torch.Tensor, codec: str) -> tuple[TensorMeta, torch.Tensor]:
    b, t, _ = hidden.shape
    positions = torch.arange(b * t, dtype=torch.int32).view(b, t)
    mask = torch.ones(b, t, dtype=torch.uint8)
    meta, payload = pack(hidden, positions, mask, codec)
    decoded, got_positions, got_mask = unpack_untrusted(meta, memoryview(payload))
    assert torch.equal(got_positions, positions)
    assert got_mask is not None
    assert torch.equal(got_mask, mask)
    assert decoded.dtype == hidden.dtype
    return meta, decoded


@given(
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(1, 200),
    st.floats(1e-3, 1e3),
    st.integers(0, 2**31),
    st.booleans(),
)
def test_codecs_keep_within_their_bounds(b: int, t: int, d: int, scale: float, seed: int, outlier: bool) -> None:
    hidden = scale * torch.randn(b, t, d, generator=torch.Generator().manual_seed(seed))
    if outlier:
        hidden[0, 0, 0] *= 20
    assert torch.equal(there_and_back(hidden, "raw")[1], hidden)
    for codec, bound in RELATIVE.items():
        meta, decoded = there_and_back(hidden, codec)
        assert meta.codec == codec
        assert ((decoded - hidden).abs() <= bound * hidden.abs() + SMALLEST_FLOAT16).all()
    for codec, block, steps in (("int8", INT8_BLOCK, 254), ("int4", INT4_BLOCK, 14)):
        _, decoded = there_and_back(hidden, codec)
        pad = torch.nn.functional.pad(hidden, (0, -d % block)).view(b, t, -1, block)
        bound = (pad.abs().amax(-1, keepdim=True) / steps).expand(pad.shape).flatten(2)[..., :d]
        assert ((decoded - hidden).abs() <= bound * 1.001 + SMALLEST_FLOAT16 * 7).all()


@pytest.mark.parametrize("codec", CODECS)
def test_coding_again_what_was_decoded_gives_the_same_bytes(codec: str) -> None:
    hidden = torch.randn(2, 3, 100)
    positions = torch.zeros(2, 3, dtype=torch.int32)
    assert pack(hidden, positions, None, codec) == pack(hidden.clone(), positions, None, codec)
    if codec not in ("int8", "int4"):
        _, once = there_and_back(hidden, codec)
        assert torch.equal(there_and_back(once, codec)[1], once)


def test_values_beyond_half_precision_travel_raw() -> None:
    hidden = torch.full((1, 1, 8), 70_000.0)
    meta, decoded = there_and_back(hidden, "float16")
    assert meta.codec == "raw"
    assert torch.equal(decoded, hidden)


def test_sizes_and_unknown_codecs_are_checked() -> None:
    assert token_bytes(4_096, "float32", "raw") == 16_384
    assert token_bytes(4_096, "float32", "float16") == 8_192
    assert token_bytes(4_096, "float32", "int8") == 4_096 + 256
    assert token_bytes(4_096, "float32", "int4") == 2_048 + 256
    assert token_bytes(33, "float32", "int4") == 36
    with pytest.raises(RemoteProtocolError, match="codec among"):
        unpack_untrusted(TensorMeta(1, 1, 4, codec="zip"), memoryview(b"x" * 20))
    with pytest.raises(RemoteProtocolError, match="needs 12 B"):
        unpack_untrusted(TensorMeta(1, 1, 4, codec="int8"), memoryview(b"x" * 20))
    with pytest.raises(RemoteProtocolError, match="needs 22 B"):
        unpack_untrusted(TensorMeta(1, 1, 4, codec="int4"), memoryview(b"x" * 20))


@given(st.integers(1, 5_000), st.data(), st.sampled_from([*map(float, ("nan", "inf", "-inf"))]))
def test_one_value_that_is_no_number_is_found(n: int, data: st.DataObject, bad: float) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    values = torch.full((n,), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(values)
    values[data.draw(st.integers(0, n - 1))] = bad
    assert not is_finite(values)
