"""What a prompt itself gives: how likely its tokens are, each after those before it, and its last hidden states."""

from __future__ import annotations

import torch

from swarmd.gateway.generation.sampling import SampledToken, report_token


class PromptStates:
    """Collects the last hidden states of a prompt's tokens (a ``HeadClient``, which sends the prompt and no more)."""

    start = 0

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self._prompt = prompt
        self.parts: list[torch.Tensor] = []

    def decide(self, states: torch.Tensor | None) -> list[int]:
        """Take the states of the next tokens [n, d]; at first none, for which the prompt is sent."""
        if states is None:
            return list(self._prompt)
        self.parts.append(states)
        return []


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
