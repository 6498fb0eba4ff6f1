"""Do hidden states in fewer bits between servers change the next token? For each family, with codes of three kinds.

python -m benchmarks.wire_codes [--families qwen3 gemma3_text]

Random models of eight blocks, cut in four, weights in bfloat16, computed in float32; 64 texts of 32 random tokens, so
2,048 next tokens. Random weights make logits nearly alike, so these are more easily changed than those of a trained
model: SmolLM2-135M-Instruct (30 blocks cut in four) on texts stands in the last row. *One scale a token* is int8 as it
is often done; swarmd's int8 has a scale for each 64 values of a token.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoTokenizer

from swarmd.compute.model import skeleton
from swarmd.compute.model.ends import Ends
from swarmd.compute.model.plain_config import read_config
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.values import Span
from swarmd.wire.tensors import pack, unpack_untrusted
from tests import families
from tests.real.smollm2 import smollm2

N_TEXTS = 64
N_TOKENS = 32
N_LAYERS = 8
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
CHANGED: dict[str, dict[str, Any]] = {
    **{key: {} for key in ("qwen2", "qwen3", "gemma3_text", "phi3", "glm4", "olmo", "stablelm", "smollm3")},
    "granite": {"attention_multiplier": 1 / 64},  # its default is no scale at all
    "gemma": {},  # passed there with float32 on the wire only
    "gemma4_text": {"vocab_size_per_layer_input": 4096, "hidden_size_per_layer_input": 64},
    "gpt2": {"n_embd": 512, "n_layer": N_LAYERS, "n_head": 8},
    "falcon_mamba": {},
    "mpt": {"d_model": 512, "n_layers": N_LAYERS, "n_heads": 8},
    "qwen3_next": {**families.EXPERTS, "linear_num_value_heads": 8, "linear_num_key_heads": 4},
    "minimax_m2": families.EXPERTS,
}
"""Families of which the certification of mesh-llm (2026-07-28) says that 8 bits changed the next token."""
Code = Callable[[torch.Tensor], torch.Tensor]


def travel(name: str) -> Code:
    """What arrives of rows [b, t, d] that are sent by one of swarmd's codes."""

    def code(rows: torch.Tensor) -> torch.Tensor:
        places = torch.zeros(rows.shape[:2], dtype=torch.int32)
        return unpack_untrusted(*_sent(rows, places, name))[0]

    return code


def _sent(rows: torch.Tensor, places: torch.Tensor, name: str) -> tuple[Any, memoryview]:
    meta, payload = pack(rows, places, None, name)
    return meta, memoryview(payload)


def one_scale_a_token(rows: torch.Tensor) -> torch.Tensor:
    """What arrives in int8 with one scale for all numbers of a token."""
    scale = rows.abs().amax(-1, keepdim=True) / 127
    return (rows / scale).round() * scale


CODES: dict[str, Code] = {
    "float16": travel("float16"),
    "int8": travel("int8"),
    "one scale a token": one_scale_a_token,
}


def logits_of(spans: Sequence[LoadedSpan], ends: Ends, texts: Sequence[Sequence[int]], code: Code) -> torch.Tensor:
    """Logits behind each token of each text: [texts, tokens, vocabulary]."""
    found = []
    for ids in texts:
        rows = ends.embed([ids], [0])[0]
        positions = torch.arange(len(ids)).unsqueeze(0)
        for span in spans:
            rows = span.forward(code(rows), positions)
        found.append(ends.logits(code(rows)[0], spans[0].layer_arity))
    return torch.stack(found)


def perplexity(logits: torch.Tensor, texts: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log-likelihood of each token but the first."""
    return float(functional.cross_entropy(logits[:, :-1].flatten(0, 1), torch.tensor(texts)[:, 1:].flatten()).exp())


def measure(folder: Path, texts: Sequence[Sequence[int]], is_trained: bool) -> list[str]:
    """How many next tokens each code changes, and for a trained model what becomes of its perplexity."""
    layout = families.lay_out(folder)
    n = layout.n_blocks(skeleton.count_layers(read_config(folder)))
    bounds = [n * part // 4 for part in range(5)]
    options = LoadOptions(has_plain_layers=True)
    spans = [LoadedSpan(folder, Span(start, end), torch.float32, options) for start, end in itertools.pairwise(bounds)]
    ends = Ends(folder, torch.float32)
    whole = logits_of(spans, ends, texts, lambda rows: rows)
    cells = []
    for code in CODES.values():
        logits = logits_of(spans, ends, texts, code)
        n_changed = int((logits.argmax(-1) != whole.argmax(-1)).sum())
        change = 100 * (perplexity(logits, texts) / perplexity(whole, texts) - 1)
        cells.append(f"{n_changed}, perplexity {change:+.1f} %" if is_trained else str(n_changed))
    return cells


def make_wide(family: str, folder: Path) -> Path:
    """Write a random model whose hidden states neither grow nor fade."""
    changes = {**families.TINY, **families.FAMILIES.get(family, {}), **WIDE, **CHANGED[family]}
    config = AutoConfig.for_model(family, **changes)
    rng = torch.Generator().manual_seed(0)
    model: Any = skeleton.family_class(config)(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=rng)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=1.0, generator=rng)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def random_texts() -> list[list[int]]:
    """Texts of random tokens."""
    ids = torch.randint(3, WIDE["vocab_size"], (N_TEXTS, N_TOKENS), generator=torch.Generator().manual_seed(0))
    return [list(row) for row in ids.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=[*CHANGED, "SmolLM2-135M-Instruct"])
    torch.set_num_threads(1)
    print(f"| next tokens of {N_TEXTS * N_TOKENS:,} that change | {' | '.join(CODES)} |\n|---|{'---|' * len(CODES)}")
    for family in parser.parse_args().families:
        with tempfile.TemporaryDirectory() as path:
            if family in CHANGED:
                folder = make_wide(family, Path(path))
                texts = random_texts()
            else:
                folder = smollm2()
                ids = AutoTokenizer.from_pretrained(folder)("\n".join(topics.values()))["input_ids"]
                texts = [ids[start : start + N_TOKENS] for start in range(0, N_TEXTS * 500, 500)]
            print(f"| {family} | {' | '.join(measure(folder, texts, family not in CHANGED))} |", flush=True)


if __name__ == "__main__":
    main()
