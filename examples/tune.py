"""Adapt a hosted model to your own text with the loop you know: ``loss.backward(); optimizer.step()``.

    swarmd up --serve demo &          # or join a swarm that serves it
    python examples/tune.py --model demo --data examples/caesar.jsonl --out latin

The model is an ordinary transformers model whose blocks are on servers, and PEFT is PEFT: the LoRA's parameters live
here, servers give back their gradients. ``swarmd tune`` does the same with checkpoints and resume.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model

import swarmd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, help="the daemon's home, if it is not the usual one")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--data", type=Path, default=Path(__file__).with_name("caesar.jsonl"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("tuned"))
    options = parser.parse_args()
    texts = [json.loads(line)["text"] for line in options.data.read_text().splitlines()]

    with swarmd.connect(home=options.home) as swarm:
        tokenizer, model = swarm.tokenizer(options.model), swarm.model(options.model)
        tuned = get_peft_model(model.requires_grad_(False), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
        optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
        for step in range(options.steps):
            rows = [torch.tensor(tokenizer(texts[(8 * step + i) % len(texts)]).input_ids) for i in range(8)]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
            loss = tuned(input_ids=ids.clamp(min=0), attention_mask=(ids >= 0).long(), labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step + 1}: loss {loss.item():.3f}")
        tuned.save_pretrained(options.out, save_embedding_layers=False)
        inputs = tokenizer("Gallia est", return_tensors="pt")
        text = tokenizer.decode(tuned.eval().generate(**inputs, max_new_tokens=30)[0], skip_special_tokens=True)
        print(text)


if __name__ == "__main__":
    main()
