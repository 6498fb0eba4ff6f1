"""Weights that are quantised as they are published, made plain: the numbers behind ``protocol.models.quantised``.

Each rule is that of the format's own tool, which is named beside it; numbers are float32 until a model is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import isfinite, prod
from typing import Annotated, Any

import msgspec
import torch

from swarmd.errors import ConfigError
from swarmd.protocol.models.quantised import WORD_BITS, PlainTensor
from swarmd.protocol.models.scheme import AWQ, GPTQ

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""Of what weights are made of, by safetensors' name."""
Read = Callable[[str], torch.Tensor]
Parts = dict[str, torch.Tensor]
Pieces = Iterator[tuple[Any, torch.Tensor]]
"""Where in the plain tensor numbers belong, and these, float32: a piece after the other, so that one takes little."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the eight magnitudes of 4 bits (OCP Microscaling 1.0)
EXPONENT_BIAS = 127  # of a scale that is a byte: the power of two of float32
NO_NUMBER = 255  # of such a scale
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each value of a word, the lowest bits first
PIECE = 1 << 22  # numbers that are made at a time: 16 MB in float32, and some of these


Extent = Annotated[int, msgspec.Meta(ge=1, le=2**31)]


class LookUp(msgspec.Struct):
    """What bitsandbytes writes beside a weight of 4 bits: its shape, and how many numbers share their largest."""

    shape: tuple[Extent, Extent]
    blocksize: Extent
    nested_blocksize: Extent = 1
    nested_offset: float = 0.0


class UnpackedTensor:
    """A tensor that is made plain once it is read; transformers reads it as it reads a slice of safetensors."""

    def __init__(self, plain: PlainTensor, read: Read, dtype: torch.dtype) -> None:
        self._plain = plain
        self._read = read
        self._dtype = dtype

    def get_shape(self) -> list[int]:
        """The shape that it will have."""
        return list(self._plain.shape)

    def get_dtype(self) -> str:
        """What kind of numbers it stands for, by safetensors' name."""
        return self._plain.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return unpack(self._plain, self._read, self._dtype)[index]


@torch.no_grad()
def unpack(plain: PlainTensor, read: Read, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make a tensor plain; ``read`` gives a stored one by its name. Raises ConfigError."""
    parts = check_parts(plain, read) | {"weight": read(plain.parts["weight"])}
    made = torch.empty(plain.shape, dtype=dtype)
    for place, numbers in RULES[plain.rule](plain, parts):
        made[place] = numbers
    return made


def shaped(plain: PlainTensor, read: Read) -> PlainTensor:
    """A tensor with its shape, where only what it is made of tells that. Raises ConfigError."""
    if "state" not in plain.parts:
        return plain
    return replace(plain, shape=_read_look_up(plain, read(plain.parts["state"])).shape)


def _read_look_up(plain: PlainTensor, state: torch.Tensor) -> LookUp:
    name, n = plain.parts["state"], prod(plain.shape)
    try:
        look_up = msgspec.json.decode(bytes(state.tolist()), type=LookUp)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{name}: {error}") from None
    n_said = prod(look_up.shape)
    if not isfinite(look_up.nested_offset) or n not in (n_said, n_said + n_said % 2):  # two are stored together
        raise ConfigError(f"{name} says {look_up}, and {plain.parts['weight']} holds {n} numbers")
    return look_up


# --- what is refused ---------------------------------------------------------------------------------------------


def check_parts(plain: PlainTensor, read: Read) -> Parts:
    """Read what lies beside a weight. Raises ConfigError for scales that lose what they scale, and contradictions."""
    parts = {role: read(name) for role, name in plain.parts.items() if role != "weight"}
    for role, numbers in parts.items():
        check_part(plain, role, numbers)
    if "state" in parts:
        _read_largest(plain, parts)
    scale = parts.get("scale")
    has_zeros = scale is not None and scale.dtype != torch.uint8 and not bool(scale.float().all())
    if has_zeros and not _loses_nothing(plain, parts | {"weight": read(plain.parts["weight"])}):
        raise ConfigError(f"{plain.parts['scale']} holds a scale that is zero: what it scales is lost")
    return parts


def check_part(plain: PlainTensor, role: str, numbers: torch.Tensor) -> None:
    """Refuse numbers that are none, groups that there are not, and shapes that are others. Raises ConfigError.

    ``numbers``: of what has this role, or, but for ``SMALL_PARTS``, some of it.
    """
    name = plain.parts[role]
    if role == "state":
        _read_look_up(plain, numbers)
    elif role == "shape" and tuple(numbers.tolist()) != plain.shape:
        raise ConfigError(
            f"{name} says {numbers.tolist()}, and {plain.parts['weight']} holds {list(plain.shape)} numbers"
        )
    elif role == "format" and bool(numbers.any()):
        raise ConfigError(f"{name} says that rows are not one after the other: not read")
    elif role == "group":
        n_groups = -(-plain.shape[1] // plain.block[1])
        if not bool(((numbers >= 0) & (numbers < n_groups)).all()):
            raise ConfigError(f"{name} names groups beyond the {n_groups} that there are")
    elif role == "scale" and numbers.dtype == torch.uint8:
        _require(name, not bool((numbers == NO_NUMBER).any()))
    elif role == "global":
        _require(name, bool(numbers.isfinite().all()) and bool(numbers.all()))
    elif numbers.is_floating_point():
        _require(name, bool(numbers.float().isfinite().all()))


def _require(name: str, is_good: bool) -> None:
    if not is_good:
        raise ConfigError(f"{name} holds what is no number, or zero: what it scales is lost")


def _loses_nothing(plain: PlainTensor, parts: Parts) -> bool:
    """Are weights zero wherever their scale is? So are blocks of zeros written."""
    of_zeros = parts | {"scale": (parts["scale"].float() == 0).to(parts["scale"].dtype)}
    return not any(bool(numbers.any()) for _, numbers in RULES[plain.rule](plain, of_zeros))


# --- how each form is read ---------------------------------------------------------------------------------------


def _scaled(plain: PlainTensor, parts: Parts) -> Pieces:
    """(w - zero) * scale, whatever the scale is of."""
    scale = _read_scale(parts["scale"])
    zero = parts["zero"].float() if "zero" in parts else None
    for expert in range(plain.shape[0]) if len(plain.shape) == 3 else (None,):
        weight, own_scale, own_zero = parts["weight"], scale, zero
        if expert is not None:
            weight = weight[expert]
            own_scale = scale[expert] if scale.numel() > 1 else scale
            own_zero = zero[expert] if zero is not None and zero.numel() > 1 else zero
        for rows in _row_pieces(weight.shape[0], weight.shape[1], max(1, plain.block[0])):
            values = weight[rows].float()
            if own_zero is not None:
                values = values - _part_of(own_zero, plain.block, rows, values.shape)
            numbers = values * _part_of(own_scale, plain.block, rows, values.shape)
            yield (rows if expert is None else (expert, rows)), numbers


def _experts(plain: PlainTensor, parts: Parts) -> Pieces:
    """gpt-oss (transformers' MXFP4): groups of 32 values in 16 bytes, each with an exponent."""
    for expert, (blocks, exponents) in enumerate(zip(parts["weight"], parts["scale"], strict=True)):
        n_out, n_groups, n_bytes = blocks.shape
        for rows in _row_pieces(n_out, n_groups * n_bytes * 2):
            values = _read_small_floats(blocks[rows]) * _read_scale(exponents[rows]).unsqueeze(-1)
            yield (expert, slice(None), rows), values.flatten(1).T


def _small_floats(plain: PlainTensor, parts: Parts) -> Pieces:
    """compressed-tensors' NVFP4 and MXFP4; NVFP4's scale of the tensor divides."""
    of_all = parts["global"].float() if "global" in parts else torch.ones(1)
    for rows in _row_pieces(*plain.shape):
        scale = _read_scale(parts["scale"][rows]) / of_all
        yield rows, _read_small_floats(parts["weight"][rows]) * _along(scale, plain)


def _packed(plain: PlainTensor, parts: Parts) -> Pieces:
    """compressed-tensors' pack-quantized: values along the inputs, zero points along the outputs, both offset."""
    zeros = torch.full((plain.shape[0], 1), 1 << (plain.bits - 1))
    if "zero" in parts:
        zeros = unpack_bits(parts["zero"], plain.bits, 0)[: plain.shape[0]]
    for rows in _row_pieces(*plain.shape):
        values = unpack_bits(parts["weight"][rows], plain.bits, 1)
        scale = _along(parts["scale"][rows].float(), plain)
        yield rows, (values - (_along(zeros[rows], plain) if "zero" in parts else zeros[rows])).float() * scale


def _gptq(plain: PlainTensor, parts: Parts) -> Pieces:
    """GPTQ: values along the inputs, zero points along the outputs; in the first format these are one too small."""
    n_out, n_in = plain.shape
    zeros = parts["zero"]
    if plain.zeros_lag and WORD_BITS % plain.bits == 0:  # taken off whole words, which borrow
        ones = sum(1 << at for at in range(0, WORD_BITS, plain.bits))
        zeros = ((zeros.long() + ones) & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)
    zero = unpack_bits(zeros, plain.bits, 1)[:, :n_out]
    if plain.zeros_lag and WORD_BITS % plain.bits:
        zero = (zero + 1) % (1 << plain.bits)
    group = torch.arange(n_in) // plain.block[1]
    if "group" in parts and bool(parts["group"].any()):  # of zeros alone: nobody filled it in, and it says nothing
        group = parts["group"].long()
    for rows in _row_pieces(n_out, n_in):
        values = unpack_bits(parts["weight"][:, rows], plain.bits, 0)  # [in, rows]
        yield rows, ((values - zero[:, rows][group]).float() * parts["scale"][:, rows].float()[group]).T


def _awq(plain: PlainTensor, parts: Parts) -> Pieces:
    """AWQ for GEMM: values and zero points along the outputs, the eight of a word in an order of their own."""
    order = torch.tensor(AWQ_ORDER).argsort()
    n_out, n_in = plain.shape
    group = torch.arange(n_in) // plain.block[1]

    def read_columns(packed: torch.Tensor) -> torch.Tensor:
        return unpack_bits(packed, plain.bits, 1).view(len(packed), -1, len(AWQ_ORDER))[..., order].flatten(1)

    zero = read_columns(parts["zero"])
    for inputs in _row_pieces(n_in, n_out):
        values = read_columns(parts["weight"][inputs])
        numbers = (values - zero[group[inputs]]).float() * parts["scale"].float()[group[inputs]]
        yield (slice(None), inputs), numbers.T


def _in_parts_of_127(plain: PlainTensor, parts: Parts) -> Pieces:
    """bitsandbytes' 8 bits (LLM.int8)."""
    for rows in _row_pieces(*plain.shape):
        yield rows, parts["weight"][rows].float() * (parts["largest"][rows, None] / 127)


def _looked_up(plain: PlainTensor, parts: Parts) -> Pieces:
    """bitsandbytes' NF4 and FP4: the upper half of a byte first, blocks of the matrix as one row."""
    n_out, n_in = plain.shape
    stored = parts["weight"].flatten()
    largest = _read_largest(plain, parts)
    size = _read_look_up(plain, parts["state"]).blocksize
    for rows in _row_pieces(n_out, n_in, 2):
        start, stop = rows.start * n_in, rows.stop * n_in
        codes = torch.stack([stored[start // 2 : -(-stop // 2)] >> 4, stored[start // 2 : -(-stop // 2)] & 15], -1)
        numbers = parts["table"][codes.flatten()[: stop - start].int()]
        yield rows, (numbers * largest[torch.arange(start, stop) // size]).view(-1, n_in)


def _read_largest(plain: PlainTensor, parts: Parts) -> torch.Tensor:
    """The largest number of each block: these may be of 8 bits, looked up and scaled alike. Raises ConfigError."""
    look_up = _read_look_up(plain, parts["state"])
    largest = parts["largest"]
    n_blocks, n_outer = -(-prod(plain.shape) // look_up.blocksize), -(-len(largest) // look_up.nested_blocksize)
    if len(largest) != n_blocks or ("outer largest" in parts and len(parts["outer largest"]) != n_outer):
        raise ConfigError(f"{plain.parts['largest']} has {len(largest)} blocks, and {plain.parts['state']} {n_blocks}")
    if "outer largest" not in parts:
        return largest
    outer = parts["outer largest"][torch.arange(len(largest)) // look_up.nested_blocksize]
    found = parts["outer table"][largest.int()] * outer + look_up.nested_offset
    if not bool(found.isfinite().all()):
        raise ConfigError(f"{plain.parts['largest']} holds what is no number: what it scales is lost")
    return found


RULES: dict[str, Callable[[PlainTensor, Parts], Pieces]] = {
    "scaled": _scaled,
    "experts": _experts,
    "small floats": _small_floats,
    "packed": _packed,
    GPTQ: _gptq,
    AWQ: _awq,
    "looked up": _looked_up,
    "in parts of 127": _in_parts_of_127,
}


def _row_pieces(n_rows: int, n_columns: int, step: int = 1) -> Iterator[slice]:
    """Rows of a matrix, some at a time; their number is a multiple of ``step``."""
    n_together = max(1, PIECE // max(1, n_columns * step)) * step
    return (slice(start, min(start + n_together, n_rows)) for start in range(0, n_rows, n_together))


def _along(values: torch.Tensor, plain: PlainTensor) -> torch.Tensor:
    """What is said for each group of a row [rows, groups], for each input."""
    return values.repeat_interleave(plain.block[1], 1)[:, : plain.shape[1]]


def _part_of(values: torch.Tensor, block: tuple[int, int], rows: slice, shape: torch.Size) -> torch.Tensor:
    """What is said for each block, row or all of a matrix, for some of its rows."""
    if block[0]:
        return _spread(values[rows.start // block[0] : -(-rows.stop // block[0])], block, shape)
    return values[rows] if values.ndim == 2 and len(values) > 1 else values


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
    if not block[0]:
        return blocks if blocks.ndim != 1 or len(shape) != 3 or len(blocks) == 1 else blocks[:, None, None]
    rows, columns = (torch.arange(n) // size for n, size in zip(shape[-2:], block, strict=True))
    return blocks[..., rows, :][..., columns]
