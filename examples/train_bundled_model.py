"""Train the small language model that ships with swarmd, from text that Python itself carries.

The corpus is prose found in the standard library of the Python that runs this script: the language
reference in ``pydoc_data`` and the docstrings of every module. Nothing is downloaded. The result is a
Qwen3 decoder of 1.3 M parameters, stored in bfloat16 (it computes in float32), with a byte-level BPE
tokenizer, a generation config and ``training.json``, which records seed, corpus digest and loss.

    python examples/train_bundled_model.py --out swarmd/bundled --minutes 12
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import re
import sysconfig
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SEED = 20261120
VOCABULARY = 1024
CONTEXT_TOKENS = 256
END = "<|end|>"


def paragraphs(text: str) -> list[str]:
    """Split text into paragraphs of running prose: mostly letters, no doctests, no tables."""
    kept = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.strip().splitlines()]
        if not lines or any(line.startswith((">>>", "...", "$", "|", "+-", "==", "--")) for line in lines):
            continue
        joined = " ".join(lines)
        letters = sum(c.isalpha() or c == " " for c in joined)
        if len(joined) > 60 and letters > 0.86 * len(joined) and joined.isascii():
            kept.append(joined)
    return kept


def docstrings(path: Path) -> list[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [d for node in ast.walk(tree) if isinstance(node, documented) and (d := ast.get_docstring(node))]


def corpus() -> str:
    """Collect the prose of the standard library, each paragraph once, in a stable order."""
    from pydoc_data.topics import topics

    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [topics[name] for name in sorted(topics)]
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if "site-packages" not in parts and "test" not in parts and "tests" not in parts:
            texts.extend(docstrings(path))
    texts.extend(p.read_text(errors="ignore") for p in sorted(library.glob("LICENSE*")))
    seen = dict.fromkeys(p for text in texts for p in paragraphs(text))
    return END.join(seen)


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.split(END), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def build_model(eos: int) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=eos,
        eos_token_id=eos,
        pad_token_id=None,  # the end between two texts is no padding: its vector learns, too
    )
    return Qwen3ForCausalLM(config)


def optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks (Jordan et al. 2024), AdamW for everything else."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def schedule(fraction: float) -> float:
    """Warm up over the first 2 %, hold, then decay linearly over the last 60 %."""
    return min(1.0, fraction / 0.02, max(0.0, (1 - fraction) / 0.6))


def batch(data: torch.Tensor, rows: int, rng: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(data) - CONTEXT_TOKENS - 1, (rows,), generator=rng)
    return torch.stack([data[s : s + CONTEXT_TOKENS + 1] for s in starts.tolist()])


def train(model: Qwen3ForCausalLM, data: torch.Tensor, minutes: float, rows: int = 16) -> tuple[int, float]:
    """Train for a fixed wall time; returns (steps, mean loss of the last hundred steps, nats a token)."""
    rng = torch.Generator().manual_seed(SEED)
    steppers, recent, step, begun = optimizers(model), [], 0, time.monotonic()
    rates = [[group["lr"] for group in o.param_groups] for o in steppers]
    while (fraction := (time.monotonic() - begun) / (60 * minutes)) < 1:
        tokens = batch(data, rows, rng)
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        for optimizer, rate in zip(steppers, rates, strict=True):
            for group, lr in zip(optimizer.param_groups, rate, strict=True):
                group["lr"] = lr * schedule(fraction)
            optimizer.step()
            optimizer.zero_grad()
        recent = [*recent[-99:], loss.item()]
        step += 1
        if step % 100 == 0:
            print(f"step {step}  {fraction:4.0%}  loss {sum(recent) / len(recent):.3f}", flush=True)
    return step, sum(recent) / len(recent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("swarmd/bundled"))
    parser.add_argument("--minutes", type=float, default=12.0, help="wall time to train for")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.manual_seed(SEED)
    torch.set_num_threads(options.threads)
    text = corpus()
    tokenizer = train_tokenizer(text)
    data = torch.tensor(tokenizer(text)["input_ids"])
    model = build_model(tokenizer.eos_token_id)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(text) / 1e6:.1f} MB of prose, {len(data)} tokens, {n_parameters / 1e6:.2f} M parameters")
    steps, loss = train(model, data, options.minutes)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id)
    model.to(torch.bfloat16).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    record = {
        "seed": SEED,
        "corpus_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "corpus_bytes": len(text),
        "steps": steps,
        "minutes": options.minutes,
        "loss_nats_per_token": round(loss, 4),
        "bits_per_byte": round(loss / math.log(2) * len(data) / len(text), 3),
    }
    (options.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
