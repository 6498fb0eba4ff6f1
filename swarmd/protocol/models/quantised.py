"""Safetensors whose weights are quantised as they are published: which tensors of the files make one of the model's.

Names, kinds and shapes only; ``compute.model.unpacking`` makes the numbers. The layouts are those that the formats' own
tools write: transformers' FP8 and MXFP4, compressed-tensors, GPTQ, AWQ, bitsandbytes, torchao. A weight counts as
quantised by the tensors that lie beside it, so that modules which were left out need not be named.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from swarmd.errors import IntegrityError
from swarmd.protocol.models.scheme import (
    AWQ,
    BITSANDBYTES,
    FP8,
    GPTQ,
    GPTQ_BITS,
    MXFP4,
    TORCHAO,
    Scheme,
)

WORD_BITS = 32  # of the whole numbers that small ones are packed into
MX_GROUP = 32  # values that share an exponent
NV_GROUP = 16  # values that share a scale of 8 bits
FLOATS: tuple[str, ...] = ("F8_E4M3", "F8_E5M2")
SCALES = ("F32", "F16", "BF16")
EXPONENTS: tuple[str, ...] = ("F8_E8M0", "U8")  # scales that are powers of two
SMALL_PARTS = ("state", "shape", "format")
"""Roles of what a matrix has beside numbers: a few bytes, or kilobytes."""
TABLE_SIZE, OUTER_TABLE_SIZE = 16, 256  # numbers that 4 and 8 bits of bitsandbytes look up
MAX_STATE_BYTES = 4_096  # of JSON beside such a weight, which has less than 200
UNUSED = re.compile(
    r"(\.(input_scale|input_zero_point|input_global_scale|output_scale|qscale_act|[qkv]_scale|weight_shape)|"
    r"[._]activation_scale(_inv)?)$"
)
"""Beside weights: scales of activations and caches, which stay in 16 or 32 bits here, and shapes that are known."""


class Stored(NamedTuple):
    """A tensor of a file: its name, safetensors' kind of its numbers, and its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlainTensor:
    """A tensor as the model takes it, and what it is made of: ``parts`` are names of stored tensors by their role.

    ``rule`` says how ("": it is stored as it is), with ``bits`` of a packed value; blocks of ``block`` [rows, columns]
    share a scale. ``zeros_lag``: zero points are stored one too small. A weight whose shape is told by what it is made
    of (``state``) has the shape [numbers] here.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rule: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    bits: int = 0
    block: tuple[int, int] = (0, 0)
    zeros_lag: bool = False


def plain_tensors(scheme: Scheme | None, stored: Iterable[Stored]) -> list[PlainTensor]:
    """The tensors of the model, in the order of the files. Raises IntegrityError for parts that do not fit."""
    tensors = list(stored)
    if scheme is None:
        return [PlainTensor(*tensor) for tensor in tensors]
    by_name = {tensor.name: tensor for tensor in tensors}
    made = [made for tensor in tensors if (made := _make(scheme, tensor, by_name)) is not None]
    used = {part for tensor in made for part in tensor.parts.values()}
    rest = [PlainTensor(*t) for t in tensors if t.name not in used and not UNUSED.search(t.name)]
    plain = [*made, *rest]
    if len({tensor.name for tensor in plain}) < len(plain):
        twice = [name for name, n in Counter(tensor.name for tensor in plain).items() if n > 1]
        raise IntegrityError(f"{min(twice)} is stored twice, in two forms")
    return plain


def _group_size(main: Stored, group: int, n_groups: int, n_in: int) -> int:
    """How many inputs share a scale. Raises IntegrityError where that does not come out."""
    size = group or (n_in // n_groups if n_groups else 0)
    if not size or -(-n_in // size) != n_groups:
        raise IntegrityError(f"{main.name} has {n_groups} groups for {n_in} inputs, group_size {group or None}")
    return size


def _make(scheme: Scheme, tensor: Stored, by_name: Mapping[str, Stored]) -> PlainTensor | None:
    """What a stored tensor is the main part of, if it is one."""
    parts = _Parts(tensor, by_name)
    if scheme.method == FP8:
        stem = tensor.name.removesuffix("weight")
        names = (f"{tensor.name}_scale_inv", f"{tensor.name}_scale", f"{stem}scale", f"{stem}qscale_weight")
        found = next((name for name in names if parts.find(name) is not None), None)
        return _scaled(scheme, parts, tensor.name, found) if found is not None and tensor.dtype in FLOATS else None
    if scheme.method == MXFP4:
        return _experts(parts) if tensor.name.endswith("_blocks") else None
    if scheme.method in (GPTQ, AWQ):
        return _columns(scheme, parts) if tensor.name.endswith(".qweight") else None
    if scheme.method == BITSANDBYTES:
        return _looked_up(parts) or _in_parts_of_127(parts)
    if scheme.method == TORCHAO:
        return _of_torchao(scheme, parts) if tensor.name.endswith("._weight_qdata") else None
    if tensor.name.endswith(".weight_packed"):
        return _packed(scheme, parts) if tensor.dtype == "I32" else _small_floats(parts)
    return _scaled(scheme, parts, tensor.name, f"{tensor.name}_scale") if tensor.name.endswith(".weight") else None


class _Parts:
    """The stored tensors that lie beside one, by their names."""

    def __init__(self, main: Stored, by_name: Mapping[str, Stored]) -> None:
        self.main = main
        self._by_name = by_name

    def find(self, name: str) -> Stored | None:
        return self._by_name.get(name)

    def need(self, name: str, kinds: Sequence[str], *shapes: tuple[int, ...]) -> Stored:
        """The tensor of a name, of one of these kinds and shapes. Raises IntegrityError."""
        found = self._by_name.get(name)
        if found is None:
            raise IntegrityError(f"{self.main.name} lacks {name}, without which it means nothing")
        if found.dtype not in kinds or found.shape not in shapes:
            expected = " or ".join(map(str, map(list, dict.fromkeys(shapes))))
            raise IntegrityError(
                f"{name} is {found.dtype} {list(found.shape)}, and beside {self.main.name} "
                f"{list(self.main.shape)} it is {expected} of {', '.join(kinds)}"
            )
        return found

    def require(self, kind: str, n_dims: int) -> None:
        if self.main.dtype != kind or len(self.main.shape) != n_dims or 0 in self.main.shape:
            raise IntegrityError(
                f"{self.main.name} is {self.main.dtype} {list(self.main.shape)}, expected {kind} of {n_dims} dimensions"
            )


def _scaled(scheme: Scheme, parts: _Parts, name: str, scale_name: str) -> PlainTensor | None:
    """8 bits a number, with a scale for the tensor, a row, a group of a row, or a block."""
    main, scale = parts.main, parts.find(scale_name)
    if scale is None or main.dtype not in (*FLOATS, "I8") or len(main.shape) not in (2, 3) or 0 in main.shape:
        return None
    *leading, rows, columns = main.shape
    of_sets = [tuple(leading), (*leading, 1, 1)] if leading else []
    shapes = [(), (1,), (1, 1), (*leading, rows, 1), *of_sets]
    block_rows, block_columns = scheme.block
    blocks = (*leading, -(-rows // block_rows), -(-columns // block_columns)) if block_rows else ()
    groups = scale.shape[-1] if scale.shape[:-1] == main.shape[:-1] else 0
    block = (0, 0)
    if blocks and scale.shape == blocks:
        block = scheme.block
    elif groups > 1 and columns % groups == 0 and (not scheme.groups or columns // groups in scheme.groups):
        block = (1, columns // groups)
    if block[0]:
        shapes.append(scale.shape)
    parts.need(scale_name, (*SCALES, *EXPONENTS), *shapes)
    roles = {"weight": main.name, "scale": scale_name}
    zero_name = f"{scale_name.removesuffix('_scale')}_zero_point"
    if parts.find(zero_name) is not None:
        parts.need(zero_name, ("I8",), scale.shape)
        roles["zero"] = zero_name
    return PlainTensor(name, "F32", main.shape, "scaled", roles, 8, block)


def _of_torchao(scheme: Scheme, parts: _Parts) -> PlainTensor:
    """torchao's matrices of 8 bits, and of fewer that lie in 8: as others', under names of their own."""
    stem = parts.main.name.removesuffix("_weight_qdata")
    made = _scaled(scheme, parts, f"{stem}weight", f"{stem}_weight_scale")
    if made is None:
        raise IntegrityError(
            f"{parts.main.name} is {parts.main.dtype} {list(parts.main.shape)}: of torchao's matrices swarmd reads "
            f"those of 8 bits (I8, {', '.join(FLOATS)}) with scales beside them (_weight_scale)"
        )
    return made


def _looked_up(parts: _Parts) -> PlainTensor | None:
    """bitsandbytes' 4 bits: two numbers of a table a byte, times the largest of their block, which may be 8 bits."""
    main = parts.main
    largest = parts.find(f"{main.name}.absmax")
    if largest is None:
        return None
    parts.require("U8", 2)
    n = main.shape[0] * main.shape[1] * 2
    roles = {"weight": main.name, "largest": largest.name, "table": f"{main.name}.quant_map"}
    parts.need(roles["table"], ("F32",), (TABLE_SIZE,))
    states = [f"{main.name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")]
    state = next((found for name in states if (found := parts.find(name)) is not None), None)
    if state is None or state.dtype != "U8" or len(state.shape) != 1 or state.shape[0] > MAX_STATE_BYTES:
        raise IntegrityError(f"{main.name} lacks {states[0]}, which says its shape")
    roles["state"] = state.name
    parts.need(largest.name, ("F32", "U8"), (math.prod(largest.shape),))
    if largest.dtype == "U8":
        outer = parts.find(f"{main.name}.nested_absmax")
        n_outer = math.prod(outer.shape) if outer is not None else 1
        roles["outer largest"] = parts.need(f"{main.name}.nested_absmax", ("F32",), (n_outer,)).name
        roles["outer table"] = parts.need(f"{main.name}.nested_quant_map", ("F32",), (OUTER_TABLE_SIZE,)).name
    return PlainTensor(main.name, "F32", (n,), "looked up", roles, 4)


def _in_parts_of_127(parts: _Parts) -> PlainTensor | None:
    """bitsandbytes' 8 bits: parts of 127 of the largest of a row."""
    main = parts.main
    stem = main.name.removesuffix("weight")
    if parts.find(f"{stem}SCB") is None or stem == main.name:
        return None
    parts.require("I8", 2)
    roles = {"weight": main.name, "largest": parts.need(f"{stem}SCB", ("F32",), main.shape[:1]).name}
    if parts.find(f"{stem}weight_format") is not None:
        roles["format"] = parts.need(f"{stem}weight_format", ("U8", "I64", "I32"), (), (1,)).name
    return PlainTensor(main.name, "F32", main.shape, "in parts of 127", roles, 8)


def _experts(parts: _Parts) -> PlainTensor:
    """gpt-oss's sets of experts [E, out, groups, 16], which the model takes as [E, in, out]."""
    parts.require("U8", 4)
    n, n_out, n_groups, n_bytes = parts.main.shape
    if n_bytes * 2 != MX_GROUP:
        raise IntegrityError(f"{parts.main.name} has groups of {n_bytes} bytes, expected {MX_GROUP // 2}")
    name = parts.main.name.removesuffix("_blocks")
    scale = parts.need(f"{name}_scales", EXPONENTS, (n, n_out, n_groups))
    roles = {"weight": parts.main.name, "scale": scale.name}
    return PlainTensor(name, "F32", (n, n_groups * MX_GROUP, n_out), "experts", roles, 4)


def _columns(scheme: Scheme, parts: _Parts) -> PlainTensor:
    """GPTQ's and AWQ's matrices, which are stored as [in, out]: GPTQ packs along the first, AWQ along the second."""
    parts.require("I32", 2)
    stem = parts.main.name.removesuffix("qweight")
    rows, columns = parts.main.shape
    bits = scheme.bits
    listed = parts.find(f"{stem}g_idx")
    if listed is not None and scheme.method == GPTQ:  # a number for each input: matrices may differ in their bits
        bits = next((n for n in GPTQ_BITS if listed.shape == (rows * WORD_BITS // n,)), bits)
    is_gptq = scheme.method == GPTQ
    n_in, n_out = (rows * WORD_BITS // bits, columns) if is_gptq else (rows, columns * WORD_BITS // bits)
    scale = parts.find(f"{stem}scales")
    n_groups = scale.shape[0] if scale is not None and len(scale.shape) == 2 else 1
    parts.need(f"{stem}scales", SCALES, (n_groups, n_out))
    parts.need(f"{stem}qzeros", ("I32",), (n_groups, -(-n_out * bits // WORD_BITS)))
    roles = {"weight": parts.main.name, "scale": f"{stem}scales", "zero": f"{stem}qzeros"}
    group = scheme.group
    if listed is not None and group and -(-n_in // group) != n_groups:  # groups of this matrix are of another size
        group = 0
    block = (1, _group_size(parts.main, group, n_groups, n_in))
    if listed is not None:
        roles["group"] = parts.need(f"{stem}g_idx", ("I32", "I64"), (n_in,)).name
    shape = (n_out, n_in)
    return PlainTensor(f"{stem}weight", "F32", shape, scheme.method, roles, bits, block, scheme.zeros_lag)


def _packed(scheme: Scheme, parts: _Parts) -> PlainTensor:
    """Whole numbers of few bits [out, in], packed along the second."""
    parts.require("I32", 2)
    name = parts.main.name.removesuffix("_packed")
    rows, words = parts.main.shape
    scale = parts.find(f"{name}_scale")
    n_groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1
    parts.need(f"{name}_scale", SCALES, (rows, n_groups))
    bits, group = _packing(scheme, parts.main, n_groups)
    columns = words * WORD_BITS // bits
    block = (1, _group_size(parts.main, group, n_groups, columns))
    roles = {"weight": parts.main.name, "scale": f"{name}_scale"}
    if parts.find(f"{name}_g_idx") is not None:
        raise IntegrityError(f"{name}_g_idx: groups in another order than the inputs are not read")
    if parts.find(f"{name}_zero_point") is not None:
        n_words = -(-rows * bits // WORD_BITS)
        roles["zero"] = parts.need(f"{name}_zero_point", ("I32",), (n_words, n_groups)).name
    if parts.find(f"{name}_shape") is not None:
        roles["shape"] = parts.need(f"{name}_shape", ("I64", "I32"), (2,)).name
    return PlainTensor(name, "F32", (rows, columns), "packed", roles, bits, block)


def _packing(scheme: Scheme, main: Stored, n_groups: int) -> tuple[int, int]:
    """The bits of a packed matrix, and its inputs that share a scale: which of its kinds has so many groups.

    Configurations say it by patterns of names, which are not looked at. Raises IntegrityError where it may be several.
    """
    if len(scheme.packings) == 1:
        return scheme.packings[0]
    n_bits = main.shape[1] * WORD_BITS
    fitting = [(b, g) for b, g in scheme.packings if n_groups == (-(-n_bits // b // g) if g else 1)]
    if len(fitting) != 1:
        raise IntegrityError(
            f"{main.name} has {n_groups} groups in rows of {n_bits} bits, which fits {len(fitting)} of the kinds that "
            "config_groups name"
        )
    return fitting[0]


def _small_floats(parts: _Parts) -> PlainTensor:
    """Floating-point numbers of 4 bits [out, in / 2]: NVFP4, with a scale of the tensor beside, or MXFP4."""
    parts.require("U8", 2)
    name = parts.main.name.removesuffix("_packed")
    rows, columns = parts.main.shape[0], parts.main.shape[1] * 2
    roles = {"weight": parts.main.name, "scale": f"{name}_scale"}
    if parts.find(f"{name}_global_scale") is not None:
        group, kinds = NV_GROUP, FLOATS[:1]
        roles["global"] = parts.need(f"{name}_global_scale", ("F32",), (1,), ()).name
    else:
        group, kinds = MX_GROUP, EXPONENTS
    if columns % group:
        raise IntegrityError(f"{parts.main.name} has {columns} inputs, expected a multiple of {group}")
    parts.need(f"{name}_scale", kinds, (rows, columns // group))
    return PlainTensor(name, "F32", (rows, columns), "small floats", roles, 4, (1, group))
