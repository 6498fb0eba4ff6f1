"""What the formats' own tools write, served by two real servers: are the tokens those of the tools' own numbers?

    python -m tools.prove.written_by_tools [--only FORM]

Each tool is installed into a virtual environment of its own in a temporary folder (2 GB and some minutes each), where
tools/prove/quantise_with.py quantises a tiny model of a family on the CPU and says what the tool makes of its numbers.
A row: the form, the family, how many matrices, and the largest difference of our numbers from the tool's.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from swarmd.compute.model.checkpoint_tensors import CheckpointTensors
from swarmd.compute.model.unpacking import unpack
from swarmd.home.models import bundled_folder
from tests import families
from tests.real.test_quantised import assert_tokens_are_those_of

PINNED = {
    "bitsandbytes": ("bitsandbytes==0.50.2", "transformers==5.23.0", "accelerate==1.15.0", "torch==2.13.0"),
    "torchao": ("torchao==0.18.0", "transformers==5.23.0", "accelerate==1.15.0", "torch==2.13.0"),
    "compressed-tensors": ("compressed-tensors==0.20.0", "transformers==5.23.0", "accelerate==1.15.0", "torch==2.13.0"),
    "gptqmodel": ("gptqmodel==7.7.0", "torch==2.14.1"),
}
CASES = {
    "bitsandbytes": {
        "nf4": ("llama", "gpt_oss"),
        "nf4-nested": ("qwen3_moe",),
        "fp4": ("minimax_m2",),
        "llm-int8": ("deepseek_v3",),
    },
    "torchao": {"torchao-int8": ("llama", "qwen3_moe", "gpt_oss"), "torchao-fp8": ("deepseek_v3", "minimax_m2")},
    "compressed-tensors": {
        "packed": ("minimax_m2", "deepseek_v3"),
        "packed-zeros": ("qwen3_moe", "gpt_oss"),
        "float": ("llama",),
    },
    "gptqmodel": {
        "gptq": ("qwen3_moe", "deepseek_v3"),
        "gptq-by-activation": ("llama",),
        "gptq-8-bits": ("llama",),
        "awq": ("llama",),
    },
}
MOST_APART = 1e-6  # of the largest number
NARROWEST = 128  # of a Llama that gptqmodel's AWQ takes: it goes by 64 rows


def make_plain(family: str, folder: Path) -> Path:
    """Write a tiny model with a tokenizer, which gptqmodel asks for."""
    if family == "llama":
        config = LlamaConfig(
            hidden_size=NARROWEST,
            intermediate_size=2 * NARROWEST,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=NARROWEST // 4,
            vocab_size=families.VOCABULARY,
        )
        LlamaForCausalLM(config).save_pretrained(folder)
    else:
        families.make_named(family, folder)
    for path in bundled_folder().glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def farthest(folder: Path, meant: Path) -> tuple[int, float]:
    """How many matrices are quantised, and how far our numbers are from the tool's, of the largest."""
    tensors, theirs = CheckpointTensors(folder), load_file(meant / "model.safetensors")
    apart = []
    for name, tensor in tensors.plain.items():
        if tensor.rule:
            ours = unpack(tensor, tensors.read)
            apart.append(float((ours - theirs[name]).abs().max() / theirs[name].abs().max()))
    return len(apart), max(apart)


def prove(python: Path, form: str, family: str, root: Path) -> None:
    plain, folder, meant = make_plain(family, root / "plain"), root / "quantised", root / "meant"
    script = Path(__file__).with_name("quantise_with.py")
    command = [str(python), str(script), form, str(plain), str(folder), str(meant)]
    settings = {**os.environ, "GPTQMODEL_CPU_WORKERS": "4"}  # by itself it takes one of two cores, and asks for two
    done = subprocess.run(
        command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert not done.returncode, done.stdout[-2_000:]
    n, apart = farthest(folder, meant)
    assert apart <= MOST_APART, f"{form} of {family}: numbers are {apart:.1e} from the tool's"
    assert_tokens_are_those_of(meant, folder, root / "swarm")
    print(f"{form:<20} {family:<12} {n:>4} matrices  {apart:.0e}  tokens equal", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one form")
    only = parser.parse_args().only
    for tool, forms in CASES.items():
        wanted = [(form, family) for form, named in forms.items() for family in named if only in (None, form)]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as home:
            subprocess.run([sys.executable, "-m", "venv", home], check=True)
            python = Path(home) / "bin" / "python"
            subprocess.run([python, "-m", "pip", "install", "-q", *PINNED[tool]], check=True)
            for form, family in wanted:
                with tempfile.TemporaryDirectory() as root:
                    prove(python, form, family, Path(root))


if __name__ == "__main__":
    main()
