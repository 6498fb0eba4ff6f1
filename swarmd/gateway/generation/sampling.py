"""One token out of logits, as a request wants it: penalties, bias, a grammar's mask, then temperature and cuts.

The order is that of transformers' ``generate``, whose processors do what they can do; presence and frequency
penalties are OpenAI's (API reference, "Create chat completion"). What is told of probabilities is the model's own,
before any of it. Every request draws from a generator of its own: its seed and its logits decide, nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

LEAST_TEMPERATURE = 1e-30  # in float32 less is 0, by which nothing can be divided; either takes the best


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen. ``temperature`` 0 takes the best; ``n_top`` is how many alternatives are told of."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    wants_logprobs: bool = False
    n_top: int = 0

    @property
    def n_needed(self) -> int | None:
        """How many of the largest logits decide a token; None where any can."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        if any(penalties) or self.bias:
            return None
        return 1 if self.temperature <= 0 else self.top_k or None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token, its log-probability (0 where nobody asked), and the most likely ones with theirs."""

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """Chooses one request's tokens, one after the other."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int]) -> None:
        self._sampling = sampling
        self._counts: Counter[int] = Counter()
        self._ids = list(prompt) if sampling.repetition_penalty != 1 else []
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)
        self._warpers = _make_warpers(sampling) if sampling.temperature > 0 else []

    def choose(self, logits: torch.Tensor, allowed: torch.Tensor | None = None) -> SampledToken:
        """Choose a token from logits [vocabulary], of the ``allowed`` ones (a mask) where a grammar says so.

        A chosen token counts for penalties only once ``count_token`` has it.
        """
        # The grammar's mask comes before temperature and cuts: those keep the likeliest tokens, and would otherwise
        # keep ones that the grammar forbids.
        scores = self._penalised(logits)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        if self._sampling.temperature <= 0:
            token = int(scores.argmax())
        else:
            row = (scores - scores.max()).unsqueeze(0)  # the best is 0 at any temperature: none becomes infinite
            for warper in self._warpers:
                row = warper(None, row)
            chances = row[0].softmax(-1)
            token = int(torch.multinomial(chances, 1, generator=self._generator))
        return self._report(token, logits)

    def count_token(self, token: int) -> None:
        """Count a token that is part of the answer."""
        self._counts[token] += 1
        if self._ids:
            self._ids.append(token)

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        sampling = self._sampling
        scores = logits
        if sampling.repetition_penalty != 1 and self._ids:
            processor = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)
            ids = torch.tensor([self._ids])
            scores = processor(ids, scores.unsqueeze(0).clone())[0]
        if (sampling.presence_penalty or sampling.frequency_penalty) and self._counts:
            ids = torch.tensor(list(self._counts))
            counts = torch.tensor(list(self._counts.values()), dtype=scores.dtype)
            penalties = -sampling.presence_penalty - sampling.frequency_penalty * counts
            scores = scores.index_add(0, ids, penalties)
        if sampling.bias:
            ids = torch.tensor(list(sampling.bias))
            biases = torch.tensor(list(sampling.bias.values()), dtype=scores.dtype)
            scores = scores.index_add(0, ids, biases)
        return scores

    def _report(self, token: int, logits: torch.Tensor) -> SampledToken:
        """Add the model's own probabilities to a token, where the request wants them."""
        return (
            report_token(token, logits, self._sampling.n_top) if self._sampling.wants_logprobs else SampledToken(token)
        )


def report_token(token: int, logits: torch.Tensor, n_top: int) -> SampledToken:
    """Say how likely a token is by logits [vocabulary], and which ones are most likely."""
    logprobs = logits.log_softmax(-1)
    values, ids = logprobs.topk(min(n_top, logits.shape[0]))
    top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token, float(logprobs[token]), top)


def _make_warpers(sampling: Sampling) -> list[TemperatureLogitsWarper]:
    temperature = max(float(sampling.temperature), LEAST_TEMPERATURE)
    warpers = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(float(sampling.top_p)))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers
