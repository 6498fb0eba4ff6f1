"""SmolLM2-135M-Instruct quantised as models are published, in each form that is read: perplexity, bytes on the disk.

    python -m benchmarks.published [--windows 4] [FOLDER ...]

Each form is written by tests/quantised_files.py: weights to the nearest value, groups of 64, without any calibration,
so that figures are those of reading and of bits, and not of GPTQ's or AWQ's choice of values. Then its blocks are
loaded as a server loads them, in float32 and in the bits that are nearest to the form's own (``quantize``). The text is
that of benchmarks/perplexity.py. Folders are of this model too, as a format's own tool has written it (tools/prove/
quantise_with.py); then these are measured, and no others.
"""

from __future__ import annotations

import argparse
import tempfile
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics

import torch
from transformers import AutoTokenizer

from benchmarks.perplexity import WINDOW, perplexity
from swarmd.compute.model.ends import Ends
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.values import Span
from tests import quantised_files
from tests.quantised_files import FORMATS, write_quantised
from tests.real.smollm2 import smollm2

OWN_BITS = {
    "gptq": "int4",
    "awq": "int4",
    "packed": "int4",
    "packed with zero points": "int4",
    "int8": "int8",
    "nf4": "nf4",
}
LEFT_OUT = ("gptq of 2 bits, by activation", "nf4", "nf4, nested")
"""To the nearest of four values nothing is left of a model; the writers' table of numbers is not NF4's."""


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("folders", nargs="*", type=Path)
    asked = parser.parse_args()
    n_windows = asked.windows
    quantised_files.GROUP = 64
    plain = smollm2()
    tokenizer = AutoTokenizer.from_pretrained(plain)
    ids = torch.tensor(tokenizer("\n".join(topics.values()))["input_ids"][: n_windows * WINDOW]).view(-1, WINDOW)
    ends = Ends(plain, torch.float32)

    def measure(folder: Path, quantize: str = "none") -> float:
        span = LoadedSpan(folder, Span(0, 30), torch.float32, LoadOptions(quantize=quantize))
        return perplexity(span, ends, ids, partial(ends.logits, arity=span.layer_arity))

    first = measure(plain)
    print(f"plain: {first:.3f}\n\n| form | MB | in float32 | of plain | in bits of its own |\n|---|---|---|---|---|")

    def show(form: str, folder: Path) -> None:
        n_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        found = measure(folder)
        own = OWN_BITS.get(form)
        again = f"{own} {measure(folder, own):.3f}" if own else ""
        print(f"| {form} | {n_bytes / 1e6:.0f} | {found:.3f} | {found / first:.4f} | {again} |", flush=True)

    for folder in asked.folders:
        show(folder.name, folder)
    for form in [] if asked.folders else [form for form in FORMATS if form not in LEFT_OUT]:
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root) / "model"
            write_quantised(plain, folder, form)
            show(form, folder)


if __name__ == "__main__":
    main()
