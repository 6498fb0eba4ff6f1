"""What it costs an optimizer that gradients are one update late (``synchronisation = "delayed"``), in one process.

python -m benchmarks.delay [--updates 400] [--seeds 0 1 2] [--layers 3] [--width 96] [--only adamw muon]

A Llama with the bundled tokenizer learns what Python's own help says, from nothing: 6 rows of 32 tokens an update,
clipped to 1, 20 updates of warm-up, then a cosine. Steps are the swarm's own (train.vectors.optimizers). At delay 1 an
update applies the gradient of the state before. The losses are of 200 rows that were held back.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from swarmd.home.models import bundled_folder
from swarmd.protocol.runs.recipe import Optimizer, Recipe, Schedule, Stop
from swarmd.train.vectors.optimizers import OuterOptimizer, matrix_ranges, outer_moments
from swarmd.train.vectors.state import VectorLayout

N_ROWS = 6
N_TOKENS = 32
N_HELD_BACK = 200
CLIP = 1.0
OPTIMIZERS = {
    "sgd": Optimizer(kind="sgd", learning_rate=0.1, momentum=0.9),
    "adamw": Optimizer(learning_rate=3e-3),
    "adamw, nesterov": Optimizer(learning_rate=3e-3, nesterov=True),
    "muon": Optimizer(kind="muon", learning_rate=3e-3, momentum=0.95),
    "muon, nesterov": Optimizer(kind="muon", learning_rate=3e-3, momentum=0.95, nesterov=True),
}


class Learner:
    """A model whose parameters lie in one vector, and what the swarm does with it."""

    def __init__(self, optimizer: Optimizer, updates: int, seed: int, size: dict[str, int]) -> None:
        torch.manual_seed(seed)
        config = AutoConfig.for_model("llama", num_attention_heads=4, num_key_value_heads=4, vocab_size=1024, **size)
        self.model: Any = AutoModelForCausalLM.from_config(config).float()
        named = list(self.model.named_parameters())
        self.vector = torch.cat([parameter.detach().flatten() for _, parameter in named])
        layout = VectorLayout(tuple((name, tuple(parameter.shape)) for name, parameter in named), "float32")
        for (_, parameter), (_, shape, start, end) in zip(named, layout.tensor_ranges(), strict=True):
            parameter.data = self.vector[start:end].view(shape)
        schedule = Schedule(decay="cosine", warmup=20)
        self.recipe = Recipe("r", "m", "d", optimizer=optimizer, schedule=schedule, stop=Stop(updates))
        moments = {name: np.zeros(len(self.vector), np.float32) for name in outer_moments(self.recipe)}
        self._optimizer = OuterOptimizer(
            self.recipe, self.vector.numpy(), moments, matrix_ranges(layout.tensor_ranges())
        )

    def gradient(self, rows: torch.Tensor) -> np.ndarray:
        """Return the clipped gradient of some rows [n, t + 1] at what the parameters are now."""
        self.loss(rows).backward()  # type: ignore[no-untyped-call]
        flat = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])
        self.model.zero_grad()
        return (flat * min(1.0, CLIP / float(flat.norm()))).numpy()

    def step(self, gradient: np.ndarray, number: int) -> None:
        """Change the parameters as update ``number``, counted from 1, does."""
        rate = self.recipe.learning_rate(number)
        self._optimizer.step(slice(0, len(gradient)), gradient.copy(), rate, number)
        self._optimizer.finish(lambda whole: gradient[whole], rate)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of rows [n, t + 1]."""
        logits = self.model(input_ids=rows[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def learn(
    optimizer: Optimizer,
    delay: int,
    options: argparse.Namespace,
    seed: int,
    rows: torch.Tensor,
    prepare: Callable[[Any], None] = lambda model: None,
) -> float:
    """Train from nothing, a model that was changed by ``prepare``; returns the loss of what was held back."""
    size = {
        "hidden_size": options.width,
        "intermediate_size": 8 * options.width // 3,
        "num_hidden_layers": options.layers,
    }
    learner = Learner(optimizer, options.updates, seed, size)
    prepare(learner.model)
    held_back, learned = rows[:N_HELD_BACK], rows[N_HELD_BACK:]
    rng = torch.Generator().manual_seed(100 + seed)
    late: list[np.ndarray] = []
    for number in range(1, options.updates + 1):
        chosen = torch.randint(len(learned), (N_ROWS,), generator=rng)
        late.append(learner.gradient(learned[chosen]))
        if len(late) > delay:
            learner.step(late.pop(0), number)
    with torch.no_grad():
        return float(torch.stack([learner.loss(part) for part in held_back.chunk(4)]).mean())


def read_rows() -> torch.Tensor:
    """Python's own help in rows of tokens, in a seeded order."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder())
    ids = torch.tensor(tokenizer("\n".join(topics.values()))["input_ids"])
    rows = ids[: len(ids) // (N_TOKENS + 1) * (N_TOKENS + 1)].view(-1, N_TOKENS + 1)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--only", nargs="*", default=[*OPTIMIZERS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_rows()
    print("| optimizer | loss at delay 0 | at delay 1 | more |\n|---|---|---|---|")
    for name in options.only:
        losses = [
            statistics.mean(learn(OPTIMIZERS[name], delay, options, seed, rows) for seed in options.seeds)
            for delay in (0, 1)
        ]
        print(
            f"| {name} | {losses[0]:.3f} | {losses[1]:.3f} | {100 * (losses[1] / losses[0] - 1):+.1f} % |", flush=True
        )


if __name__ == "__main__":
    main()
