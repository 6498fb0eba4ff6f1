"""Safetensors whose weights are quantised as they are published: which tensors of the files make one of the model's.

Names, kinds and shapes only; ``compute.model.unpacking`` makes the numbers. The layouts are those that the formats' own
tools write: transformers' FP8 and MXFP4, compressed-tensors, GPTQ, AWQ. A weight counts as quantised by the tensors
that lie beside it, so that modules which were left out need not be named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from swarmd.errors import IntegrityError

FIELDS = ("quantization_config", "compression_config")
"""Under which a configuration says so; the second is an older name of compressed-tensors' own."""
FP8, MXFP4, GPTQ, AWQ, COMPRESSED = "fp8", "mxfp4", "gptq", "awq", "compressed-tensors"
METHODS = (FP8, MXFP4, GPTQ, AWQ, COMPRESSED)
WORD_BITS = 32  # of the whole numbers that small ones are packed into
GPTQ_BITS = (2, 3, 4, 8)
PACKED_BITS = (2, 4, 8)  # of compressed-tensors; versions pack 3, 5, 6 and 7 bits differently, under the same name
MX_GROUP = 32  # values that share an exponent
NV_GROUP = 16  # values that share a scale of 8 bits
FLOATS: tuple[str, ...] = ("F8_E4M3", "F8_E5M2")
SCALES = ("F32", "F16", "BF16")
EXPONENTS: tuple[str, ...] = ("F8_E8M0", "U8")  # scales that are powers of two
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
    share a scale. ``zeros_lag``: zero points are stored one too small.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rule: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    bits: int = 0
    block: tuple[int, int] = (0, 0)
    zeros_lag: bool = False


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's weights are quantised."""

    method: str
    bits: int = 0
    block: tuple[int, int] = (0, 0)
    zeros_lag: bool = False
    group: int = 0  # inputs of a row that share a scale, where one number says it


# --- what the configuration says ---------------------------------------------------------------------------------


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """How a configuration says that the weights are quantised; None for plain ones. Raises IntegrityError."""
    key = next((key for key in FIELDS if config.get(key)), None)
    settings = config[key] if key is not None else {}
    if not isinstance(settings, dict):
        raise IntegrityError(f"{key} is no JSON object")
    for sparsity in (config.get("sparsity_config"), settings.get("sparsity_config")):
        if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
            raise IntegrityError(
                "the weights are stored without their zeros (sparsity_config): swarmd takes dense ones"
            )
    if settings.get("transform_config"):
        raise IntegrityError("the weights are for inputs that are rotated (transform_config), which nothing here does")
    if key is None:
        return None
    method = settings.get("quant_method", COMPRESSED if key == FIELDS[1] else None)
    if method == FP8:
        return Scheme(FP8, 8, _read_block(settings.get("weight_block_size")))
    if method == MXFP4:
        return Scheme(MXFP4, 4)
    if method == GPTQ:
        return _read_gptq(settings)
    if method == AWQ:
        version = settings.get("version", settings.get("format", "gemm"))
        _require("AWQ", "version", str(version).lower(), ("gemm",))
        _require("AWQ", "bits", settings.get("bits", settings.get("w_bit")), (4,))
        return Scheme(AWQ, 4, group=_read_group(settings.get("group_size", settings.get("q_group_size"))))
    if method == COMPRESSED:
        return _read_compressed(settings)
    raise IntegrityError(
        f"the weights are quantised already ({key}: {str(method)[:32]}): swarmd reads plain ones and "
        f"{', '.join(METHODS)}"
    )


def _read_block(size: Any) -> tuple[int, int]:
    if size is None:
        return (0, 0)
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and 0 < n <= 2**16 for n in size):
        return (size[0], size[1])
    raise IntegrityError(f"weight_block_size is {str(size)[:40]}, expected two whole numbers")


def _read_gptq(settings: Mapping[str, Any]) -> Scheme:
    form = settings.get("checkpoint_format", settings.get("format", "gptq"))
    _require("GPTQ", "checkpoint_format", form, ("gptq", "gptq_v2"))
    _require("GPTQ", "pack_dtype", settings.get("pack_dtype", "int32"), ("int32",))
    _require("GPTQ", "bits", settings.get("bits"), GPTQ_BITS)
    group = _read_group(settings.get("group_size"))
    return Scheme(GPTQ, settings["bits"], zeros_lag=form == "gptq", group=group)


def _read_compressed(settings: Mapping[str, Any]) -> Scheme:
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise IntegrityError("compressed-tensors without config_groups: nothing says how weights are packed")
    found = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    weights: list[dict[str, Any]] = [each for each in found if isinstance(each, dict)]
    if len(weights) != len(groups):
        raise IntegrityError("a group of compressed-tensors says nothing of its weights")
    if any(each.get("actorder") not in (None, False, "static", "weight") for each in weights):
        raise IntegrityError("compressed-tensors with actorder by group: no version that is read today writes it")
    whole = [each.get("num_bits") for each in weights if each.get("type", "int") == "int"]
    for bits in whole:
        _require("compressed-tensors", "num_bits", bits, PACKED_BITS)
    if len(set(whole)) > 1:
        raise IntegrityError(f"compressed-tensors with weights of {', '.join(map(str, whole))} bits: one kind is read")
    block = next((each["block_structure"] for each in weights if each.get("block_structure")), None)
    sizes = {_read_group(each.get("group_size")) for each in weights if each.get("type", "int") == "int"}
    group = next(iter(sizes)) if len(sizes) == 1 else 0
    return Scheme(COMPRESSED, int(whole[0] or 0) if whole else 0, _read_block(block), group=group)


def _read_group(size: Any) -> int:
    """How many inputs share a scale; 0 where all of a row do, or nothing is said."""
    if size is None or size == -1:
        return 0
    if type(size) is int and 0 < size <= 2**20:
        return size
    raise IntegrityError(f"group_size is {str(size)[:40]}, expected a whole number, or -1")


def _require(tool: str, name: str, value: Any, allowed: Sequence[Any]) -> None:
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise IntegrityError(f"{tool} with {name} {str(value)[:32]!r}: swarmd reads {', '.join(map(str, allowed))}")


# --- which tensors belong together -------------------------------------------------------------------------------


def plain_tensors(scheme: Scheme | None, stored: Iterable[Stored]) -> list[PlainTensor]:
    """The tensors of the model, in the order of the files. Raises IntegrityError for parts that do not fit."""
    tensors = list(stored)
    if scheme is None:
        return [PlainTensor(*tensor) for tensor in tensors]
    by_name = {tensor.name: tensor for tensor in tensors}
    made = [made for tensor in tensors if (made := _make(scheme, tensor, by_name)) is not None]
    used = {part for tensor in made for part in tensor.parts.values()}
    rest = [PlainTensor(*t) for t in tensors if t.name not in used and not UNUSED.search(t.name)]
    twice = {tensor.name for tensor in made} & {tensor.name for tensor in rest}
    if twice:
        raise IntegrityError(f"{min(twice)} is stored twice: packed, and plain")
    return [*made, *rest]


def _groups_of(main: Stored, scheme: Scheme, n_groups: int, n_in: int) -> int:
    """How many inputs share a scale. Raises IntegrityError where that does not come out."""
    size = scheme.group if n_groups > 1 and scheme.group else -(-n_in // n_groups) if n_groups else 0
    is_even = scheme.group > 0 or (n_groups > 0 and n_in % n_groups == 0)
    if not n_groups or not is_even or -(-n_in // size) != n_groups:
        raise IntegrityError(f"{main.name} has {n_groups} groups for {n_in} inputs, group_size {scheme.group or None}")
    return size


def _make(scheme: Scheme, tensor: Stored, by_name: Mapping[str, Stored]) -> PlainTensor | None:
    """What a stored tensor is the main part of, if it is one."""
    parts = _Parts(tensor, by_name)
    if scheme.method == FP8:
        stem = tensor.name.removesuffix("weight")
        names = (f"{tensor.name}_scale_inv", f"{tensor.name}_scale", f"{stem}scale", f"{stem}qscale_weight")
        found = next((name for name in names if parts.find(name) is not None), None)
        return _scaled(scheme, parts, found) if found is not None and tensor.dtype in FLOATS else None
    if scheme.method == MXFP4:
        return _experts(parts) if tensor.name.endswith("_blocks") else None
    if scheme.method in (GPTQ, AWQ):
        return _columns(scheme, parts) if tensor.name.endswith(".qweight") else None
    if tensor.name.endswith(".weight_packed"):
        return _packed(scheme, parts) if tensor.dtype == "I32" else _small_floats(parts)
    return _scaled(scheme, parts, f"{tensor.name}_scale") if tensor.name.endswith(".weight") else None


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


def _scaled(scheme: Scheme, parts: _Parts, scale_name: str) -> PlainTensor | None:
    """8 bits a number, with a scale for the tensor, a row, a group of a row, or a block."""
    main = parts.main
    if parts.find(scale_name) is None or main.dtype not in (*FLOATS, "I8") or len(main.shape) not in (2, 3):
        return None
    *outer, rows, columns = main.shape
    tail = tuple(outer)
    shapes = [(), (1,), (1, 1), (*tail, rows, 1)]
    if tail:
        shapes.append(tail)
        shapes.append((*tail, 1, 1))
    block_rows, block_columns = scheme.block
    blocks = (*tail, -(-rows // block_rows), -(-columns // block_columns)) if block_rows else ()
    found = parts.find(scale_name)
    assert found is not None
    groups = found.shape[-1] if len(found.shape) == len(main.shape) else 0
    block = (0, 0)
    if blocks and found.shape == blocks:
        block = scheme.block
        shapes.append(blocks)
    elif groups > 1 and columns % groups == 0 and found.shape[-2] == rows:
        block = (1, columns // groups)
        shapes.append(found.shape)
    parts.need(scale_name, (*SCALES, *EXPONENTS), *shapes)
    roles = {"weight": main.name, "scale": scale_name}
    zero_name = f"{main.name}_zero_point"
    if parts.find(zero_name) is not None:
        parts.need(zero_name, ("I8",), found.shape)
        roles["zero"] = zero_name
    return PlainTensor(main.name, "F32", main.shape, "scaled", roles, 8, block)


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
    per_word = WORD_BITS / scheme.bits
    n_in, n_out = (int(rows * per_word), columns) if scheme.method == GPTQ else (rows, int(columns * per_word))
    scale = parts.find(f"{stem}scales")
    n_groups = scale.shape[0] if scale is not None and len(scale.shape) == 2 else 1
    parts.need(f"{stem}scales", SCALES, (n_groups, n_out))
    parts.need(f"{stem}qzeros", ("I32",), (n_groups, -(-n_out * scheme.bits // WORD_BITS)))
    roles = {"weight": parts.main.name, "scale": f"{stem}scales", "zero": f"{stem}qzeros"}
    block = (1, _groups_of(parts.main, scheme, n_groups, n_in))
    if parts.find(f"{stem}g_idx") is not None:
        roles["group"] = parts.need(f"{stem}g_idx", ("I32", "I64"), (n_in,)).name
    shape = (n_out, n_in)
    return PlainTensor(f"{stem}weight", "F32", shape, scheme.method, roles, scheme.bits, block, scheme.zeros_lag)


def _packed(scheme: Scheme, parts: _Parts) -> PlainTensor:
    """Whole numbers of few bits [out, in], packed along the second."""
    parts.require("I32", 2)
    if not scheme.bits:
        raise IntegrityError(f"{parts.main.name} is packed, and config_groups name no bits of whole numbers")
    name = parts.main.name.removesuffix("_packed")
    rows, words = parts.main.shape
    columns = words * WORD_BITS // scheme.bits
    scale = parts.find(f"{name}_scale")
    n_groups = scale.shape[1] if scale is not None and len(scale.shape) == 2 else 1
    parts.need(f"{name}_scale", SCALES, (rows, n_groups))
    block = (1, _groups_of(parts.main, scheme, n_groups, columns))
    roles = {"weight": parts.main.name, "scale": f"{name}_scale"}
    if parts.find(f"{name}_g_idx") is not None:
        raise IntegrityError(f"{name}_g_idx: groups in another order than the inputs are not read")
    if parts.find(f"{name}_zero_point") is not None:
        n_words = -(-rows * scheme.bits // WORD_BITS)
        roles["zero"] = parts.need(f"{name}_zero_point", ("I32",), (n_words, n_groups)).name
    if parts.find(f"{name}_shape") is not None:
        roles["shape"] = parts.need(f"{name}_shape", ("I64", "I32"), (2,)).name
    return PlainTensor(name, "F32", (rows, columns), "packed", roles, scheme.bits, block)


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
