"""SmolLM2 in each of llama.cpp's quantisations, over two real servers; prints the table of docs/models.md.

    python -m tools.gguf_kinds [KIND ...]

The shipped file is quantised anew by the library, added, and served. 64 greedy tokens of three prompts are compared
with those of the library on the whole file, and perplexity is measured over the swarm. Fails where a token differs.
"""

from __future__ import annotations

import ctypes as c
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import torch

import swarmd
from swarmd.compute.checkpoints import packing
from swarmd.compute.llama_cpp.gguf_header import read_all_parts
from swarmd.compute.llama_cpp.library import _find_folder, _path_of, load_library
from tests.real.harness import local_swarm
from tests.real.smollm2 import gguf_file
from tests.real.test_packed import N_TOKENS, PROMPTS

KINDS = {
    "Q2_K": 10,
    "Q3_K_M": 12,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q4_K_M": 15,
    "IQ4_NL": 25,
    "Q5_K_M": 17,
    "Q6_K": 18,
    "Q8_0": 7,
    "BF16": 32,
}
"""The library's numbers for them."""
N_TEXT = 512  # tokens of documentation, for perplexity


class _QuantizeParams(c.Structure):
    """The first fields of the library's ``llama_model_quantize_params``; the others stay as it fills them."""

    _fields_ = (
        ("n_threads", c.c_int32),
        ("kind", c.c_int32),
        ("output_kind", c.c_int32),
        ("embedding_kind", c.c_int32),
        ("allows_requantising", c.c_bool),
        ("quantises_output", c.c_bool),
        ("rest", c.c_char * 240),
    )


def quantise(source: Path, target: Path, kind: str) -> None:
    """Write a file's weights in other bits, by the library itself."""
    load_library()
    llama = c.CDLL(str(_path_of(_find_folder(), "llama")))
    llama.llama_model_quantize_default_params.restype = _QuantizeParams
    llama.llama_model_quantize.argtypes = [c.c_char_p, c.c_char_p, c.POINTER(_QuantizeParams)]
    params = llama.llama_model_quantize_default_params()
    assert (params.n_threads, params.allows_requantising, params.quantises_output) == (0, False, True)
    params.kind = KINDS[kind]
    params.allows_requantising = True
    failed = llama.llama_model_quantize(str(source).encode(), str(target).encode(), c.byref(params))
    assert not failed, f"{kind} cannot be made: {load_library().explain()}"


def measure_kind(kind: str, folder: Path) -> tuple[str, bool]:
    """Serve one kind; returns its row, and whether all tokens are the library's."""
    file = folder / f"{kind}.gguf"
    subprocess.run([sys.executable, "-m", "tools.gguf_kinds", "--make", kind, str(file)], check=True)
    packed = folder / kind
    packed.mkdir()
    n_blocks = packing.pack(read_all_parts(file), packed, lambda line: None).n_blocks
    n_bytes = sum(path.stat().st_size for path in packed.iterdir())
    n_equal = []
    with local_swarm(folder / "homes" / kind) as swarm:
        swarm.serving((0, 2), (2, n_blocks), model="smol", models={"smol": packed})
        with swarmd.connect(swarm.invite()) as client:
            model = client.model("smol")
            tokenizer = client.tokenizer("smol")
            for prompt in PROMPTS:
                ids = tokenizer(prompt, return_tensors="pt").input_ids
                out = model.generate(ids, max_new_tokens=N_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=2)
                command = [sys.executable, "-m", "tests.real.whole_file", str(file), str(N_TOKENS)]
                said = subprocess.run(
                    command, input=json.dumps(ids[0].tolist()), capture_output=True, text=True, check=True
                )
                n_equal.append(sum(map(int.__eq__, out[0, ids.shape[1] :].tolist(), json.loads(said.stdout))))
            text = tokenizer(topics["specialnames"], return_tensors="pt").input_ids[:, :N_TEXT]
            with torch.no_grad():
                perplexity = math.exp(float(model(text, labels=text, use_cache=False).loss))
    size = f"{file.stat().st_size / 2**20:.0f}"
    more = 100 * (n_bytes / file.stat().st_size - 1)
    tokens = ", ".join(map(str, n_equal))
    return f"| {kind} | {size} | +{more:.1f} % | {tokens} | {perplexity:.2f} |", min(n_equal) == N_TOKENS


def main(arguments: list[str]) -> None:
    """Measure the kinds that are named, or all."""
    if arguments[:1] == ["--make"]:
        quantise(gguf_file(), Path(arguments[2]), arguments[1])
        return
    torch.set_num_threads(1)
    are_equal = []
    print(
        "| kind | file, MiB | packed folder | equal tokens of 64, three prompts | perplexity |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for kind in arguments or KINDS:
            row, is_equal = measure_kind(kind, Path(folder))
            are_equal.append(is_equal)
            print(row, flush=True)
    sys.exit(not all(are_equal))


if __name__ == "__main__":
    main(sys.argv[1:])
