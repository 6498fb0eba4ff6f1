"""Do the formats' own tools read what tests/quantised_files.py writes, and as the numbers that it says?

    python -m tools.prove.quantised

compressed-tensors 0.20.0 is installed into a temporary folder; transformers reads MXFP4 and FP8. Each row is a form,
and the largest difference between the tool's numbers and ours, of the largest of them. NVFP4 is told in bfloat16.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib import import_module
from typing import Any

import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.quantised_files import FORMATS, fp8_blocks, mxfp4

BFLOAT16 = 2**-8  # half of its last bit
PINNED = ("compressed-tensors==0.20.0", "loguru==0.7.3")
OF_COMPRESSED: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("pack-quantized", {"group_size": 16, "strategy": "group"}),
    "packed with zero points": ("pack-quantized", {"group_size": 16, "strategy": "group"}),
    "packed 8 bits": ("pack-quantized", {"group_size": 16, "strategy": "group"}),
    "int8": ("int-quantized", {}),
    "fp8 of rows": ("float-quantized", {}),
    "fp8 of blocks": ("float-quantized", {}),
    "mxfp4": ("mxfp4-pack-quantized", {"strategy": "group", "scale_dtype": "torch.uint8"}),
    "nvfp4": ("nvfp4-pack-quantized", {"strategy": "tensor_group"}),
}


def of_compressed_tensors(form: str, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tool's numbers of what we wrote, and ours."""
    compressors, quantization = (import_module(f"compressed_tensors.{n}") for n in ("compressors", "quantization"))
    settings, write = FORMATS[form]
    name, more = OF_COMPRESSED[form]
    weights: dict[str, Any] = {**settings["config_groups"]["group_0"]["weights"], **more}
    args = quantization.QuantizationArgs(**weights)
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=args)
    stored, meant = write(weight)
    stored.pop("input_scale", None)
    if "weight_scale" in stored and stored["weight_scale"].dtype in (torch.float16, torch.bfloat16):
        stored["weight_scale"] = stored["weight_scale"].float()  # else it rounds what it gives to these 16 bits
    tool = compressors.BaseCompressor.get_value_from_registry(name)
    told: torch.Tensor = tool.decompress(stored, scheme)["weight"]
    return told, meant


def main() -> None:
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(7))
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, *PINNED]
        subprocess.run(command, check=True)
        sys.path.insert(0, folder)
        for form in OF_COMPRESSED:
            found[f"compressed-tensors, {form}"] = of_compressed_tensors(form, weight)
    stored, meant = mxfp4(weight[None])
    blocks = stored["weight_packed"].view(1, 64, -1, 16)
    told = convert_moe_packed_tensors(blocks, stored["weight_scale"], dtype=torch.float32)
    found["transformers, MXFP4"] = told.transpose(1, 2), meant
    stored, meant = fp8_blocks(16, 32)(weight)
    tool = Fp8Dequantize(None)
    found["transformers, FP8"] = (
        tool._dequantize_one(stored["weight"], stored["weight_scale_inv"], torch.float32),
        meant,
    )
    for name, (told, ours) in found.items():
        difference = float((told.float() - ours).abs().max() / ours.abs().max())
        print(f"{name:<48} {difference:.1e}")
        most = BFLOAT16 if told.dtype == torch.bfloat16 else 1e-6
        assert difference <= most, "the tool reads other numbers"


if __name__ == "__main__":
    main()
