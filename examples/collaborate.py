"""Take part in a run of the swarm with a training loop of your own.

    swarmd train start recipe.toml            # somewhere in the swarm
    python examples/collaborate.py RUN FOLDER # the run's name or hash, and a folder with the model that it trains

The loop computes on whatever data it likes; the swarm decides when enough samples are there, averages the gradients
of all members, and takes the run's own optimizer step. Here every row is a random stretch of a text.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import swarmd
from swarmd.train import Collaboration


def main(run: str, folder: str, invite: str | None = None, n_updates: int = 20) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor(tokenizer(Path(__file__).with_name("caesar.jsonl").read_text())["input_ids"])
    with swarmd.connect(invite) as swarm, Collaboration(swarm, run, model) as collaboration:
        while True:
            starts = torch.randint(len(tokens) - 65, (4,))
            rows = torch.stack([tokens[s : s + 65] for s in starts])
            logits = model(rows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
            loss.backward()
            stepped = collaboration.step(len(rows), loss)
            if stepped.is_new:
                print(f"update {stepped.update}: loss {loss.item():.3f}", flush=True)
            if stepped.is_over or stepped.update >= n_updates:
                break


if __name__ == "__main__":
    main(*sys.argv[1:4])
