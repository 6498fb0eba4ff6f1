"""Quantise a small checkpoint with a format's own tool; run by tools/prove/written_by_tools.py in the tool's venv.

    python quantise_with.py FORM PLAIN QUANTISED MEANT

PLAIN is a checkpoint; QUANTISED becomes what the tool saves of it, MEANT the same in plain numbers: those that the tool
itself makes of what it saved, and what it left plain (AWQ changes norms, too). Imports nothing of swarmd.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

N_SAMPLES, SAMPLE_TOKENS, VOCABULARY = 32, 64, 150
Numbers = dict[str, torch.Tensor]
"""Of each weight that was quantised, by its name: what the tool makes of it, float32."""


def _load(plain: Path, config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(plain, quantization_config=config, dtype=torch.float32)


def with_bitsandbytes(plain: Path, out: Path, **options: Any) -> Numbers:
    """NF4 or FP4, or LLM.int8, by transformers."""
    from bitsandbytes import functional, nn
    from transformers import BitsAndBytesConfig

    model = _load(plain, BitsAndBytesConfig(bnb_4bit_compute_dtype=torch.float32, **options))
    model.save_pretrained(out)
    numbers = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear4bit):
            numbers[f"{name}.weight"] = functional.dequantize_4bit(weight.data, weight.quant_state).float()
        elif isinstance(module, nn.Linear8bitLt):
            numbers[f"{name}.weight"] = functional.int8_vectorwise_dequant(weight.CB, weight.SCB)
    return numbers


def with_torchao(plain: Path, out: Path, kind: str) -> Numbers:
    """8 bits of a kind, by transformers."""
    from torchao import quantization
    from torchao.utils import TorchAOBaseTensor
    from transformers import TorchAoConfig

    model = _load(plain, TorchAoConfig(getattr(quantization, kind)()))
    model.save_pretrained(out)
    parameters = dict(model.named_parameters())
    return {name: p.dequantize().float() for name, p in parameters.items() if isinstance(p.data, TorchAOBaseTensor)}


def with_gptqmodel(plain: Path, out: Path, **options: Any) -> Numbers:
    """GPTQ or AWQ, calibrated with random tokens."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear

    model = GPTQModel.load(str(plain), QuantizeConfig(**options), device="cpu")
    torch.manual_seed(0)
    rows = torch.randint(3, VOCABULARY, (N_SAMPLES, SAMPLE_TOKENS)).tolist()
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=1)
    model.save(str(out))
    is_awq = "quant_method" in options
    backend, dtype = (BACKEND.TORCH_AWQ, torch.float32) if is_awq else (BACKEND.TORCH, torch.float16)
    again = GPTQModel.load(str(out), device="cpu", backend=backend, dtype=dtype)
    numbers = {}
    for name, module in again.model.named_modules():
        if isinstance(module, BaseQuantLinear):
            of_inputs = module(torch.eye(module.in_features)) if is_awq else module.float().dequantize_weight()
            numbers[f"{name}.weight"] = of_inputs.detach().float().T
    return numbers


def with_compressed_tensors(plain: Path, out: Path, **weights: Any) -> Numbers:
    """To the nearest values, without a calibration."""
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head", r"re:.*gate$"])
    apply_quantization_config(model, config)
    numbers = {}
    for name, module in model.named_modules():
        if getattr(module, "quantization_scheme", None) is None or not hasattr(module, "weight_scale"):
            continue
        groups = module.weight.unflatten(1, (-1, weights.get("group_size") or module.weight.shape[1]))
        scale, zero = calculate_qparams(groups.amin(2), groups.amax(2), args)
        module.weight_scale.data, module.weight_zero_point.data = scale, zero
        module.quantization_status = QuantizationStatus.FROZEN
        numbers[f"{name}.weight"] = fake_quantize(module.weight, scale, zero, args).detach().float()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(out)
    compressor.update_config(str(out))
    return numbers


def _awq() -> dict[str, Any]:
    from gptqmodel.quantization import FORMAT, METHOD

    return {"quant_method": METHOD.AWQ, "format": FORMAT.GEMM}


FORMS: dict[str, Callable[[Path, Path], Numbers]] = {
    "nf4": lambda p, o: with_bitsandbytes(p, o, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4": lambda p, o: with_bitsandbytes(p, o, load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "nf4-nested": lambda p, o: with_bitsandbytes(
        p, o, load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "llm-int8": lambda p, o: with_bitsandbytes(p, o, load_in_8bit=True),
    "torchao-int8": lambda p, o: with_torchao(p, o, "Int8WeightOnlyConfig"),
    "torchao-fp8": lambda p, o: with_torchao(p, o, "Float8WeightOnlyConfig"),
    "gptq": lambda p, o: with_gptqmodel(p, o, bits=4, group_size=32),
    "gptq-by-activation": lambda p, o: with_gptqmodel(p, o, bits=4, group_size=32, desc_act=True),
    "gptq-8-bits": lambda p, o: with_gptqmodel(p, o, bits=8, group_size=32),
    "awq": lambda p, o: with_gptqmodel(p, o, bits=4, group_size=32, **_awq()),
    "packed": lambda p, o: with_compressed_tensors(
        p, o, num_bits=4, type="int", symmetric=True, strategy="group", group_size=16
    ),
    "packed-zeros": lambda p, o: with_compressed_tensors(
        p, o, num_bits=4, type="int", symmetric=False, strategy="group", group_size=16
    ),
    "float": lambda p, o: with_compressed_tensors(p, o, num_bits=8, type="float", symmetric=True, strategy="channel"),
}


def main() -> None:
    form, *paths = sys.argv[1:]
    plain, out, meant = map(Path, paths)
    numbers = FORMS[form](plain, out)
    tensors = load_file(plain / "model.safetensors")
    unknown = numbers.keys() - tensors.keys()
    assert numbers, "the tool quantised nothing"
    assert not unknown, f"the tool has names of its own: {sorted(unknown)[:3]}"
    shutil.copytree(plain, meant, ignore=shutil.ignore_patterns("*.safetensors"))
    left_plain = {name: each for name, each in load_file(out / "model.safetensors").items() if name in tensors}
    tensors |= left_plain | {name: each.contiguous() for name, each in numbers.items()}
    save_file(tensors, meant / "model.safetensors", {"format": "pt"})
    print(f"{len(numbers)} matrices")


if __name__ == "__main__":
    main()
