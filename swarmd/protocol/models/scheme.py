"""How a configuration says that weights are quantised as they are published: the method, its bits, its groups.

Each of the formats' own tools writes it in its own words. What swarmd does not read is refused here by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarmd.errors import IntegrityError

FIELDS = ("quantization_config", "compression_config")
"""Under which a configuration says so; the second is an older name of compressed-tensors' own."""
SECTIONS = ("text_config",)
"""Of a composite, which may say so instead of the whole."""
FP8, MXFP4, GPTQ, AWQ, COMPRESSED = "fp8", "mxfp4", "gptq", "awq", "compressed-tensors"
BITSANDBYTES, TORCHAO = "bitsandbytes", "torchao"
METHODS = (FP8, MXFP4, GPTQ, AWQ, COMPRESSED, BITSANDBYTES, TORCHAO)
GPTQ_BITS = (2, 3, 4, 8)
MOST_KINDS = 8  # of weights in one model: each matrix is compared with all of them
PACKED_BITS = (2, 4, 8)  # of compressed-tensors; versions pack 3, 5, 6 and 7 bits differently, under the same name


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's weights are quantised: ``bits``, and inputs of a row that share a scale (``group``, 0: all).

    ``packings``: kinds of both, where weights may differ. ``groups``: sizes that any of these have. ``block``,
    ``zeros_lag``: see ``quantised.PlainTensor``.
    """

    method: str
    bits: int = 0
    block: tuple[int, int] = (0, 0)
    zeros_lag: bool = False
    group: int = 0
    packings: tuple[tuple[int, int], ...] = ()
    groups: tuple[int, ...] = ()


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """How a configuration says that the weights are quantised; None for plain ones. Raises IntegrityError."""
    sections = [config, *(config[name] for name in SECTIONS if isinstance(config.get(name), dict))]
    found = {_read_settings(key, section) for section in sections for key in FIELDS} - {None}
    if len(found) > 1:
        raise IntegrityError(f"{FIELDS[0]} stands there twice, and says two things")
    return found.pop() if found else None


def _read_settings(key: str, config: Mapping[str, Any]) -> Scheme | None:
    settings = config.get(key) or {}
    if not isinstance(settings, dict):
        raise IntegrityError(f"{key} is no JSON object")
    for sparsity in (config.get("sparsity_config"), settings.get("sparsity_config")):
        if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
            raise IntegrityError(
                "the weights are stored without their zeros (sparsity_config): swarmd takes dense ones"
            )
    if settings.get("transform_config"):
        raise IntegrityError("the weights are for inputs that are rotated (transform_config), which nothing here does")
    if not settings:
        return None
    method = settings.get("quant_method", COMPRESSED if key == FIELDS[1] else None)
    if method == FP8:
        return Scheme(FP8, block=_read_block(settings.get("weight_block_size")))
    if method == GPTQ:
        return _read_gptq(settings)
    if method == AWQ:
        version = settings.get("version", settings.get("format", "gemm"))
        _require("AWQ", "version", str(version).lower(), ("gemm",))
        _require("AWQ", "bits", settings.get("bits", settings.get("w_bit")), (4,))
        return Scheme(AWQ, 4, group=_read_group(settings.get("group_size", settings.get("q_group_size"))))
    if method == COMPRESSED:
        return _read_compressed(settings)
    if method in (MXFP4, BITSANDBYTES, TORCHAO):
        return Scheme(method)
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
    whole = [each for each in weights if each.get("type", "int") == "int"]
    for each in whole:
        _require("compressed-tensors", "num_bits", each.get("num_bits"), PACKED_BITS)
    packings = dict.fromkeys((int(each["num_bits"]), _read_group(each.get("group_size"))) for each in whole)
    sizes = dict.fromkeys(size for each in weights if (size := _read_group(each.get("group_size"))))
    blocks = {_read_block(each["block_structure"]) for each in weights if each.get("block_structure")}
    if len(packings) > MOST_KINDS or len(sizes) > MOST_KINDS or len(blocks) > 1:
        raise IntegrityError(
            f"compressed-tensors with {len(packings)} kinds of weights and blocks of {len(blocks)} sizes: up to "
            f"{MOST_KINDS} kinds are read, and blocks of one size"
        )
    return Scheme(COMPRESSED, block=next(iter(blocks), (0, 0)), packings=tuple(packings), groups=tuple(sizes))


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
