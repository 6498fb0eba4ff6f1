"""How likely a prompt's own tokens are, each after those before it: what programs that measure models ask for."""

from __future__ import annotations

import torch

from swarmd.gateway.generation.sampling import SampledToken, report_token


class PromptScores:
    """Reads the logits of a prompt's tokens as they come (a ``HeadClient``, which sends the prompt and nothing more).

    ``tokens``: the prompt's but for its first one, of which nothing is known; each with ``n_top`` alternatives.
    """

    start = 0

    def __init__(self, prompt: tuple[int, ...], n_top: int) -> None:
        self._prompt = prompt
        self._n_top = n_top
        self.tokens: list[SampledToken] = []

    def decide(self, logits: torch.Tensor | None) -> list[int]:
        """Take the logits of the next tokens [n, vocabulary]; at first none, for which the prompt is sent."""
        if logits is None:
            return list(self._prompt)
        following = self._prompt[len(self.tokens) + 1 :]
        self.tokens += [report_token(token, row, self._n_top) for token, row in zip(following, logits, strict=False)]
        return []
