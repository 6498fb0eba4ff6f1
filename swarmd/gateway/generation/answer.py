"""One answer as it grows: which tokens, which text, what is tried ahead, when it ends. Knows no network.

Each pass gives logits for one or more tokens that were sent. The first token chosen counts; where tokens were sent
ahead (client.model.speculation), a further one counts as long as it is what was sent. So what is chosen never depends
on what was tried: the distribution is that of one token at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from swarmd.client.model.speculation import Costs, Lookup, Speculation
from swarmd.gateway.generation.grammar import Grammar
from swarmd.gateway.generation.sampling import SampledToken, Sampler, Sampling
from swarmd.gateway.generation.token_bytes import TokenBytes
from swarmd.gateway.generation.writing import Writer

N_BEFORE = 64  # of a prompt's last tokens: a character that begins there has four bytes, in a run of some more


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """What is asked for: a prompt, and how to go on from there. ``eos`` ends it; ``key`` is who asks."""

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stops: tuple[str, ...] = ()
    eos: frozenset[int] = frozenset()
    grammar: Grammar | None = None
    keeps_special: bool = False
    looks_up: bool = True
    key: str = ""

    @property
    def n_needed(self) -> int | None:
        """How many of the largest logits decide a token, or are told of; None where any can."""
        needed = self.sampling.n_needed
        return None if needed is None or self.grammar is not None else max(needed, self.sampling.n_top)


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What came of one pass; of the last one, ``finish`` is "stop" or "length", ``stopped`` the stop string, if any."""

    text: str
    choices: tuple[SampledToken, ...]
    finish: str | None = None
    stopped: str | None = None


class Answer:
    """The growing answer to one request. ``rejected`` of the tokens sent last are no part of it."""

    def __init__(self, wanted: AnswerOptions, tokens: TokenBytes, costs: Costs) -> None:
        self._wanted = wanted
        self.speculation = Speculation(costs, [Lookup()] if wanted.looks_up and not wanted.grammar else [])
        self._sampler = Sampler(wanted.sampling, wanted.prompt)
        self._writer = Writer(tokens, wanted.stops, wanted.prompt[-N_BEFORE:], wanted.keeps_special)
        self._tokens: list[int] = list(wanted.prompt)
        self._ahead: list[int] = []
        self._new: list[SampledToken] = []
        self._text = ""
        self.rejected = 0
        self.finish: str | None = None

    @property
    def n_tokens(self) -> int:
        return len(self._tokens) - len(self._wanted.prompt)

    @property
    def want(self) -> int:
        """For how many of the tokens sent last logits are needed."""
        return 1 + len(self._ahead)

    def decide(self, logits: torch.Tensor) -> list[int]:
        """Take what [want, vocabulary] logits say; returns the tokens to send next, none when it is finished."""
        ahead, self._ahead, self.rejected = self._ahead, [], 0
        for index in range(len(logits)):
            self._take(self._choose(logits[index]))
            is_last = index == len(logits) - 1
            if self.finish or is_last or ahead[index] != self._tokens[-1]:
                self.rejected = len(logits) - 1 - index
                break
        self.speculation.learn(len(ahead) - self.rejected)
        if self.finish:
            return []
        sent = [self._tokens[-1], *self._forced()]
        if self.finish:
            return []
        self._ahead = self.speculation.ahead(self._tokens, self._wanted.max_tokens - self.n_tokens - 1)
        return [*sent, *self._ahead]

    def piece(self) -> AnswerDelta:
        """What is new since the last one."""
        text = self._text + (self._writer.finish() if self.finish else "")
        piece = AnswerDelta(text, tuple(self._new), self.finish, self._writer.stopped)
        self._new, self._text = [], ""
        return piece

    def _choose(self, logits: torch.Tensor) -> SampledToken:
        grammar = self._wanted.grammar
        return self._sampler.choose(logits, grammar.allowed() if grammar else None)

    def _take(self, choice: SampledToken) -> None:
        if choice.token in self._wanted.eos:
            self._tokens.append(choice.token)
            self.finish = "stop"
            return
        self._tokens.append(choice.token)
        self._new.append(choice)
        self._sampler.took(choice.token)
        self._text += self._writer.add(choice.token)
        if self._wanted.grammar is not None:
            self._wanted.grammar.took(choice.token)
        is_whole = self._wanted.grammar is not None and self._wanted.grammar.is_done
        if self._writer.stopped is not None or is_whole:
            self.finish = "stop"
        elif self.n_tokens >= self._wanted.max_tokens:
            self.finish = "length"

    def _forced(self) -> list[int]:
        """Tokens that the grammar leaves no choice for: they travel with the last one, as one op."""
        if self._wanted.grammar is None or self._wanted.sampling.tells:
            return []
        taken = []
        for token in self._wanted.grammar.forced():
            self._take(SampledToken(token))
            taken.append(token)
            if self.finish:
                break
        return taken
