"""Weights that are quantised as they are published, made plain: the numbers behind ``protocol.models.quantised``.

Each rule is that of the format's own tool, which is named beside it; numbers are float32 until a model is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from swarmd.errors import ConfigError
from swarmd.protocol.models.quantised import AWQ, GPTQ, WORD_BITS, PlainTensor

SCALES = re.compile(r"\.(weight_scale_inv|weight_scale|weight_global_scale|scales)$")
SCALE_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
Read = Callable[[str], torch.Tensor]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the eight magnitudes of 4 bits (OCP Microscaling 1.0)
EXPONENT_BIAS = 127  # of a scale that is a byte: the power of two of float32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each value of a word, the lowest bits first


class UnpackedTensor:
    """A tensor that is made plain once it is read; transformers reads it as it reads a slice of safetensors."""

    def __init__(self, plain: PlainTensor, read: Read) -> None:
        self._plain = plain
        self._read = read

    def get_shape(self) -> list[int]:
        """The shape that it will have."""
        return list(self._plain.shape)

    def get_dtype(self) -> str:
        """What kind of numbers it will hold, by safetensors' name."""
        return self._plain.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return unpack(self._plain, self._read)[index]


@torch.no_grad()
def unpack(plain: PlainTensor, read: Read) -> torch.Tensor:
    """Make a tensor plain, float32; ``read`` gives a stored one by its name. Raises ConfigError."""
    parts = {role: read(name) for role, name in plain.parts.items()}
    check_scales(plain, parts)
    made = RULES[plain.rule](plain, parts)
    assert tuple(made.shape) == plain.shape, "shapes were worked out before"
    return made.contiguous()


def check_scales(plain: PlainTensor, parts: dict[str, torch.Tensor]) -> None:
    """Refuse scales that are zero or no numbers, and another shape than was worked out. Raises ConfigError."""
    for role in ("scale", "global"):
        if role not in parts or parts[role].dtype == torch.uint8:
            continue
        _check_numbers(plain.parts[role], parts[role])
    if "shape" in parts and tuple(parts["shape"].tolist()) != plain.shape:
        raise ConfigError(
            f"{plain.parts['shape']} says {parts['shape'].tolist()}, and {plain.parts['weight']} holds "
            f"{list(plain.shape)}"
        )
    if "group" in parts:
        n_groups = parts["scale"].shape[0]
        if not bool(((parts["group"] >= 0) & (parts["group"] < n_groups)).all()):
            raise ConfigError(f"{plain.parts['group']} names groups beyond the {n_groups} that there are")


def check_stored_scales(name: str, kind: str, data: bytes) -> None:
    """Do the same for a piece of a stored tensor, if that is one of scales. Raises ConfigError."""
    dtype = SCALE_DTYPES.get(kind)
    if dtype is not None and SCALES.search(name):
        _check_numbers(name, torch.frombuffer(bytearray(data), dtype=dtype))


def _check_numbers(name: str, scales: torch.Tensor) -> None:
    numbers = scales.float()
    if not bool((numbers.isfinite() & (numbers != 0)).all()):
        raise ConfigError(f"{name} holds a scale that is zero or no number: what it scales is lost")


def _scaled(plain: PlainTensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """(w - zero) * scale, whatever the scale is of."""
    weight = parts["weight"].float()
    scale = _read_scale(parts["scale"])
    if plain.block[0]:
        scale = _spread(scale, plain.block, weight.shape)
        if "zero" in parts:
            weight = weight - _spread(parts["zero"].float(), plain.block, weight.shape)
        return weight * scale
    if scale.ndim == 1 and weight.ndim == 3 and scale.numel() > 1:
        scale = scale[:, None, None]
    return (weight - parts["zero"].float() if "zero" in parts else weight) * scale


def _experts(plain: PlainTensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """gpt-oss (transformers' MXFP4): groups of 32 values in 16 bytes, each with an exponent."""
    values = _read_small_floats(parts["weight"])  # [E, out, groups, 32]
    values *= _read_scale(parts["scale"]).unsqueeze(-1)
    return values.flatten(2).transpose(1, 2)


def _small_floats(plain: PlainTensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """compressed-tensors' NVFP4 and MXFP4; NVFP4's scale of the tensor divides."""
    scale = _read_scale(parts["scale"])
    if "global" in parts:
        scale = scale / parts["global"].float()
    return _read_small_floats(parts["weight"]) * scale.repeat_interleave(plain.block[1], 1)


def _packed(plain: PlainTensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """compressed-tensors' pack-quantized: values along the inputs, zero points along the outputs, both offset."""
    values = unpack_bits(parts["weight"], plain.bits, 1)
    half = 1 << (plain.bits - 1)
    zero = torch.full((1, 1), half)
    if "zero" in parts:
        zero = unpack_bits(parts["zero"], plain.bits, 0)[: plain.shape[0]]
        zero = zero.repeat_interleave(plain.block[1], 1)
    return (values - zero).float() * parts["scale"].float().repeat_interleave(plain.block[1], 1)


def _gptq(plain: PlainTensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """GPTQ: values along the inputs, zero points along the outputs; in the first format these are one too small."""
    values = unpack_bits(parts["weight"], plain.bits, 0)  # [in, out]
    n_out, n_in = plain.shape
    zeros = parts["zero"]
    if plain.zeros_lag and WORD_BITS % plain.bits == 0:  # taken off whole words, which borrow
        ones = sum(1 << at for at in range(0, WORD_BITS, plain.bits))
        zeros = ((zeros.long() + ones) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    zero = unpack_bits(zeros, plain.bits, 1)[:, :n_out]
    if plain.zeros_lag and WORD_BITS % plain.bits:
        zero = (zero + 1) % (1 << plain.bits)
    group = parts["group"].long() if "group" in parts else torch.arange(n_in) // plain.block[1]
    return ((values - zero[group]).float() * parts["scale"].float()[group]).T


def _awq(plain: PlainTensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """AWQ for GEMM: values and zero points along the outputs, the eight of a word in an order of their own."""
    order = torch.tensor(AWQ_ORDER).argsort()
    values, zero = (
        unpack_bits(parts[role], plain.bits, 1).view(len(parts[role]), -1, len(AWQ_ORDER))[..., order].flatten(1)
        for role in ("weight", "zero")
    )
    scale = parts["scale"].float()
    group = plain.block[1]
    zero, scale = (each.repeat_interleave(group, 0) for each in (zero, scale))
    return ((values - zero).float() * scale).T


RULES: dict[str, Callable[[PlainTensor, dict[str, torch.Tensor]], torch.Tensor]] = {
    "scaled": _scaled,
    "experts": _experts,
    "small floats": _small_floats,
    "packed": _packed,
    GPTQ: _gptq,
    AWQ: _awq,
}


def unpack_bits(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Read the values of ``bits`` bits that words of 32 hold along a dimension, the lowest bits first; int32."""
    words = words.movedim(dim, -1)
    if WORD_BITS % bits == 0:
        shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
        values = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        return values.flatten(-2).movedim(-1, dim)
    stored = words.contiguous().view(torch.uint8)
    each = (stored.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    stream = each.flatten(-2)
    n_values = stream.shape[-1] // bits
    powers = 1 << torch.arange(bits, dtype=torch.int32)
    each = stream[..., : n_values * bits].reshape(*stream.shape[:-1], n_values, bits)
    return (each.int() * powers).sum(-1, dtype=torch.int32).movedim(-1, dim)


def _read_scale(scale: torch.Tensor) -> torch.Tensor:
    """A scale as float32: a byte is the exponent of a power of two."""
    if scale.dtype == torch.uint8:
        return torch.exp2(scale.float() - EXPONENT_BIAS)
    return scale.float()


def _read_small_floats(stored: torch.Tensor) -> torch.Tensor:
    """Two numbers of each byte [..., n] as [..., 2 n], the lower half of a byte first."""
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    halves = torch.stack([stored & 15, stored >> 4], -1).flatten(-2)
    return table[halves.int()]


def _spread(blocks: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """The value of its block for each element of [..., rows, columns]; the last blocks may be smaller."""
    rows, columns = block
    spread = blocks.repeat_interleave(rows, -2)[..., : shape[-2], :]
    return spread.repeat_interleave(columns, -1)[..., : shape[-1]]
