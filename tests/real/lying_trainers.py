"""Training workers that give other gradients than those of their draws: ``SWARMD_TEST_LIE`` says which.

They compute rightly what others gave: who lies about all is found by its false accusations.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from swarmd.compute.runs import gradients
from tests.real.liars import VARIABLE

LIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gradients: sign flipped": lambda g: -g,
    "gradients: scaled": lambda g: 3 * g,
    "gradients: constant": lambda g: torch.full_like(g, float(g.abs().mean())),
    "gradients: half of them not computed": lambda g: g * (torch.arange(g.numel()) % 2).view_as(g),
}


class LyingTrained(gradients.TrainedModel):
    """Honest about everything but its own draws."""

    def compute(self, rows: torch.Tensor, seed: int, into: int, is_fresh: bool) -> float:
        lie = LIES.get(os.environ.get(VARIABLE, ""), lambda g: g)
        hooks = [p.register_hook(lie) for _, p in self._vectors.parameters]
        try:
            return super().compute(rows, seed, into, is_fresh)
        finally:
            for hook in hooks:
                hook.remove()


def main() -> None:
    """A worker's entry, as swarmd.compute.runs.gradients'."""
    gradients.TrainedModel = LyingTrained  # type: ignore[misc]
    gradients.main()
