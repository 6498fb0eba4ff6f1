"""Training workers that give other gradients than those of their draws: ``SWARMD_TEST_LIE`` says which.

They compute rightly what others gave: who lies about all is found by its false accusations.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from msgspec.structs import replace
from torch import nn

from swarmd.compute.runs import gradients, stages
from swarmd.protocol.wire.worker import ComputeStage, StageInputs
from swarmd.wire.activations import decode_untrusted, encode_activations, encode_gradient
from tests.real.liars import VARIABLE

LIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gradients: sign flipped": lambda g: -g,
    "gradients: scaled": lambda g: 3 * g,
    "gradients: constant": lambda g: torch.full_like(g, float(g.abs().mean())),
    "gradients: half of them not computed": lambda g: g * (torch.arange(g.numel()) % 2).view_as(g),
}


STAGE_LIES = ("stages: wrong activations", "stages: wrong gradients passed on", "stages: a wrong sum")
OTHER_ROWS = "stages: other rows"  # of who drives


class LyingStage(stages.TrainedStage):
    """Honest about what it computes again of others."""

    def compute(self, message: ComputeStage, inputs: StageInputs) -> tuple[float, bytes]:
        lie = os.environ.get(VARIABLE, "")
        self._factor = -1.0 if (lie, message.act) == ("stages: a wrong sum", "backward") else 1.0
        if (lie, message.act) == (OTHER_ROWS, "embed"):
            inputs = replace(inputs, ids=inputs.ids[4:] + inputs.ids[:4])
        loss, result = super().compute(message, inputs)
        shape = self._shape(inputs.n)
        if (lie, message.act) == ("stages: wrong activations", "forward"):
            result = encode_activations(1.1 * decode_untrusted(result, shape), self._recipe.activations)
        elif (lie, message.act) == ("stages: wrong gradients passed on", "backward"):
            result = encode_gradient(-decode_untrusted(result, shape), self._recipe.activations)
        return loss, result

    def _add(
        self, sums: list[torch.Tensor], parameters: list[nn.Parameter], gradients: list[torch.Tensor | None]
    ) -> None:
        super()._add(sums, parameters, [g if g is None else self._factor * g for g in gradients])


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
    gradients.TrainedStage = LyingStage  # type: ignore[misc]
    gradients.main()
