"""Checkpoints whose weights are quantised as they are published, written by hand, and what they mean as plain ones.

The writers go the other way than swarmd.compute.model.unpacking, one value at a time where that is short: they share no
line with it. tools/prove/quantised.py compares both with the formats' own tools.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Written = tuple[
    dict[str, torch.Tensor], torch.Tensor
]  # stored tensors by what follows the module's name; their meaning
GROUP = 16  # that some change
OWN_GROUP = 0  # stands for it in settings
LEFT_PLAIN = ("embed", "lm_head", "gate.weight", "router", "norm")
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word each of eight columns lies


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack rows of whole numbers [n, t] into words, the first value in the lowest bits."""
    n, t = values.shape
    if 32 % bits == 0 and t * bits % 32 == 0:
        each = values.long().view(n, -1, 32 // bits) << torch.arange(0, 32, bits)
        whole = each.sum(2)
        return torch.where(whole >= 2**31, whole - 2**32, whole).int()
    packed = torch.zeros(n, -(-t * bits // 32), dtype=torch.int64)
    for row in range(n):
        stream = 0
        for place, value in enumerate(values[row].tolist()):
            stream |= int(value) << (place * bits)
        for word in range(packed.shape[1]):
            packed[row, word] = (stream >> (32 * word)) & 0xFFFFFFFF
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def _levels(weight: torch.Tensor, bits: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whole numbers [out, in] from 0 on, with zero points and scales [out, in / group]; never a zero point of 0."""
    top = 2**bits - 1
    parts = weight.unflatten(1, (-1, group))
    low, high = parts.amin(2), parts.amax(2)
    scale = ((high - low) / top).clamp(min=1e-4).half().float()
    zero = (-low / scale).round().clamp(1, top)
    values = (parts / scale[..., None] + zero[..., None]).round().clamp(0, top).flatten(1)
    return values.int(), zero.int(), scale


def _plain(values: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    return (values - zero.repeat_interleave(group, 1)).float() * scale.repeat_interleave(group, 1)


def gptq(bits: int, is_first: bool, shuffles: bool = False) -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        n_in = weight.shape[1]
        order = torch.randperm(n_in, generator=torch.Generator().manual_seed(1)) if shuffles else torch.arange(n_in)
        values, zero, scale = _levels(weight[:, order], bits, GROUP)
        plain = torch.empty_like(weight)
        plain[:, order] = _plain(values, zero, scale, GROUP)
        stored, group = torch.empty_like(values), torch.empty(n_in, dtype=torch.int32)
        stored[:, order], group[order] = values, torch.arange(n_in, dtype=torch.int32) // GROUP
        tensors = {
            "qweight": words(stored, bits).T.contiguous(),
            "qzeros": words(zero.T - int(is_first), bits),
            "scales": scale.T.half().contiguous(),
            "g_idx": group,
        }
        return tensors, plain

    return write


def awq(weight: torch.Tensor) -> Written:
    values, zero, scale = _levels(weight, 4, GROUP)

    def pack(rows: torch.Tensor) -> torch.Tensor:
        places = torch.tensor(AWQ_PLACES)
        moved = torch.empty_like(rows)
        for start in range(0, rows.shape[1], 8):
            moved[:, start + places] = rows[:, start : start + 8]
        return words(moved, 4)

    tensors = {"qweight": pack(values.T), "qzeros": pack(zero.T), "scales": scale.T.half().contiguous()}
    return tensors, _plain(values, zero, scale, GROUP)


def packed(bits: int, has_zeros: bool) -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        half = 2 ** (bits - 1)
        if has_zeros:
            values, zero, scale = _levels(weight, bits, GROUP)
        else:
            scale = (weight.unflatten(1, (-1, GROUP)).abs().amax(2) / (half - 1)).half().float()
            values = (weight / scale.repeat_interleave(GROUP, 1)).round().int() + half
            zero = torch.full_like(scale, half).int()
        tensors = {
            "weight_packed": words(values, bits),
            "weight_scale": scale.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if has_zeros:
            tensors["weight_zero_point"] = words(zero.T.contiguous(), bits).T.contiguous()
        return tensors, _plain(values, zero, scale, GROUP)

    return write


def int8(weight: torch.Tensor) -> Written:
    scale = (weight.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    values = (weight / scale).round().clamp(-128, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scale.bfloat16()}, values * scale


def fp8_rows(weight: torch.Tensor) -> Written:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16().float()
    values = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale": scale.bfloat16(), "input_scale": torch.ones(1)}
    return tensors, values.float() * scale


def fp8_tensor(weight: torch.Tensor) -> Written:
    """One scale, under the name that AutoFP8 gave it; transformers reads others only."""
    scale = weight.abs().max() / 448
    values = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": values, "weight_scale": scale.reshape(()), "input_scale": torch.ones(())}
    return tensors, values.float() * scale


def fp8_blocks(rows: int, columns: int, name: str = "weight_scale_inv") -> Callable[[torch.Tensor], Written]:
    def write(weight: torch.Tensor) -> Written:
        plain, values = torch.empty_like(weight), torch.empty_like(weight).to(torch.float8_e4m3fn)
        n_rows, n_columns = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        scales = torch.empty(n_rows, n_columns)
        for i in range(n_rows):
            for j in range(n_columns):
                place = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = weight[place].abs().max() / 448
                values[place] = (weight[place] / scales[i, j]).to(torch.float8_e4m3fn)
                plain[place] = values[place].float() * scales[i, j]
        return {"weight": values, name: scales}, plain

    return write


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """The 4 bits whose number is nearest."""
    return (values[..., None] - E2M1).abs().argmin(-1)


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, the first in the lower half."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def mxfp4(weight: torch.Tensor) -> Written:
    groups = weight.unflatten(-1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = _nearest(groups / exponent.exp2()[..., None])
    plain = (E2M1[codes] * exponent.exp2()[..., None]).flatten(-2)
    return {"weight_packed": _bytes(codes).flatten(-2), "weight_scale": (exponent + 127).to(torch.uint8)}, plain


def nvfp4(weight: torch.Tensor) -> Written:
    groups = weight.unflatten(-1, (-1, 16))
    of_all = torch.tensor([448 * 6 / float(weight.abs().max())])
    scale = (groups.abs().amax(-1) / 6 * of_all).to(torch.float8_e4m3fn)
    codes = _nearest(groups / (scale.float() / of_all)[..., None])
    plain = (E2M1[codes] * (scale.float() / of_all)[..., None]).flatten(-2)
    return {
        "weight_packed": _bytes(codes).flatten(-2),
        "weight_scale": scale,
        "weight_global_scale": of_all,
    }, plain


def _table(n: int) -> torch.Tensor:
    """Numbers from -1 to 1, denser around zero, which is one of them; in no even steps, as bitsandbytes' own."""
    steps = torch.linspace(-1, 1, n + 1)[1:]
    return steps.abs().pow(1.5) * steps.sign()


def _nearest_of(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return (values[..., None] - table).abs().argmin(-1)


def looked_up(is_nested: bool, size: int = 64) -> Callable[[torch.Tensor], Written]:
    """bitsandbytes' 4 bits, in blocks of the flattened matrix; the largest of each may be of 8 bits themselves."""

    def write(weight: torch.Tensor) -> Written:
        table, blocks = _table(16), weight.reshape(-1, size)
        largest = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": [*weight.shape]}
        tensors = {"weight.quant_map": table, "weight.absmax": largest}
        if is_nested:
            outer_table, offset, outer_size = _table(256), float(largest.mean()), 24
            rest = largest - offset
            parts = list(rest.split(outer_size))
            outer = torch.stack([part.abs().max() for part in parts])
            codes = torch.cat([_nearest_of(part / top, outer_table) for part, top in zip(parts, outer, strict=True)])
            largest = outer_table[codes] * outer[torch.arange(len(codes)) // outer_size] + offset
            tensors |= {"weight.absmax": codes.to(torch.uint8)}
            tensors |= {"weight.nested_absmax": outer, "weight.nested_quant_map": outer_table}
            state |= {"nested_blocksize": outer_size, "nested_offset": offset, "nested_dtype": "float32"}
        codes = _nearest_of(blocks / largest[:, None], table)
        tensors["weight"] = ((codes[:, 0::2] << 4) | codes[:, 1::2]).to(torch.uint8).reshape(-1, 1)
        tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        return tensors, (table[codes] * largest[:, None]).view(weight.shape)

    return write


def in_parts_of_127(weight: torch.Tensor) -> Written:
    largest = weight.abs().amax(1)
    values = (weight / largest[:, None] * 127).round()
    tensors = {"weight": values.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values * largest[:, None] / 127


def torchao(group: int, kind: torch.dtype) -> Callable[[torch.Tensor], Written]:
    """torchao's int8 and FP8, with a scale for each group of a row."""

    def write(weight: torch.Tensor) -> Written:
        groups = weight.unflatten(1, (-1, group))
        top = 448 if kind.is_floating_point else 127
        scale = groups.abs().amax(2) / top
        values = groups / scale[..., None]
        values = values.to(kind) if kind.is_floating_point else values.round().to(kind)
        tensors = {"_weight_qdata": values.flatten(1), "_weight_scale": scale}
        if not kind.is_floating_point:
            tensors["_weight_zero_point"] = torch.zeros(scale.shape, dtype=torch.int8)
        return tensors, (values.float() * scale[..., None]).flatten(1)

    return write


def _group(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
        "sparsity_config": {"format": "dense", "ignore": [], "targets": []},
        "kv_cache_scheme": None,
        "transform_config": {},
    }


FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Written]]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [24, 40]}, fp8_blocks(24, 40)),
    "fp8 with other names": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": OWN_GROUP, "checkpoint_format": "gptq"}, gptq(4, True)),
    "gptq of 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": OWN_GROUP}, gptq(8, True)),
    "gptq of 3 bits": ({"quant_method": "gptq", "bits": 3, "group_size": OWN_GROUP}, gptq(3, True)),
    "gptq of 2 bits, by activation": (
        {"quant_method": "gptq", "bits": 2, "checkpoint_format": "gptq_v2", "desc_act": True},
        gptq(2, False, shuffles=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": OWN_GROUP, "version": "gemm", "zero_point": True}, awq),
    "packed": (_group(num_bits=4, type="int", symmetric=True, group_size=OWN_GROUP), packed(4, has_zeros=False)),
    "packed with zero points": (
        _group(num_bits=4, type="int", symmetric=False, group_size=OWN_GROUP),
        packed(4, has_zeros=True),
    ),
    "packed 8 bits": (_group(num_bits=8, type="int", symmetric=True, group_size=OWN_GROUP), packed(8, has_zeros=False)),
    "int8": (_group(num_bits=8, type="int", strategy="channel"), int8),
    "fp8 of rows": (_group(num_bits=8, type="float", strategy="channel"), fp8_rows),
    "fp8 of blocks": (
        _group(num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
        fp8_blocks(16, 32, "weight_scale"),
    ),
    "mxfp4": (_group(num_bits=4, type="float", group_size=32), mxfp4),
    "nvfp4": (_group(num_bits=4, type="float", group_size=16), nvfp4),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, looked_up(is_nested=False)),
    "nf4, nested": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, looked_up(is_nested=True)),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, in_parts_of_127),
    "torchao int8": ({"quant_method": "torchao"}, torchao(16, torch.int8)),
    "torchao fp8": ({"quant_method": "torchao"}, torchao(64, torch.float8_e4m3fn)),
}


def write_quantised(
    plain: Path,
    folder: Path,
    form: str,
    others: Mapping[str, str] = MappingProxyType({}),
    leaves: Sequence[str] = LEFT_PLAIN,
) -> Path:
    """Write a checkpoint's matrices in a form; returns a folder with the plain ones that these mean.

    ``others``: parts of names, and the form that these matrices have. ``leaves``: parts of names that stay plain.
    """
    stored, meant = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.ndim != 2 or any(part in name for part in leaves) or not name.endswith(".weight"):
            stored[name] = meant[name] = tensor
            continue
        own = next((other for part, other in others.items() if part in name), form)
        parts, meant[name] = FORMATS[own][1](tensor.float())
        stored |= {name.removesuffix("weight") + part: each.contiguous() for part, each in parts.items()}
    settings = settings_of(form)
    for number, other in enumerate(others.values(), 1):
        if "config_groups" in settings:
            settings["config_groups"][f"group_{number}"] = settings_of(other)["config_groups"]["group_0"]
    return _write_both(plain, folder, settings, stored, meant)


def settings_of(form: str) -> dict[str, Any]:
    """What the configuration says of a form."""
    written = json.dumps(FORMATS[form][0])
    return dict(json.loads(written.replace(f'"group_size": {OWN_GROUP}', f'"group_size": {GROUP}')))


def write_experts(plain: Path, folder: Path) -> Path:
    """Write a gpt-oss checkpoint's experts as MXFP4, which hold [out, in]; the model has [in, out]."""
    stored, meant = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.ndim != 3:
            stored[name] = meant[name] = tensor
            continue
        parts, values = mxfp4(tensor.float().transpose(1, 2).contiguous())
        meant[name] = values.transpose(1, 2).contiguous()
        stored[f"{name}_blocks"] = parts["weight_packed"].unflatten(-1, (-1, 16)).contiguous()
        stored[f"{name}_scales"] = parts["weight_scale"]
    return _write_both(plain, folder, {"quant_method": "mxfp4"}, stored, meant)


def _write_both(
    plain: Path,
    folder: Path,
    settings: dict[str, Any],
    stored: dict[str, torch.Tensor],
    meant: dict[str, torch.Tensor],
) -> Path:
    expected = folder.with_name(f"{folder.name}-plain")
    for each in (folder, expected):
        shutil.copytree(plain, each, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    save_file(meant, expected / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return expected
