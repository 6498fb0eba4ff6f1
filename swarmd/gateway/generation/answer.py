"""One answer as it grows: which tokens, which text, what is tried ahead, when it ends. Knows no network.

Each pass gives logits for one or more tokens that were sent. The first token chosen counts; where tokens were tried
(client.drafting.speculation), a further one counts as long as it is what was sent. So what is chosen never depends on
what was tried: the distribution is that of one token at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarmd.client.drafting.source import DraftSource
from swarmd.client.drafting.speculation import Costs, Speculation
from swarmd.gateway.generation.grammar import Grammar
from swarmd.gateway.generation.sampling import SampledToken, Sampler, Sampling
from swarmd.gateway.generation.token_bytes import TokenBytes
from swarmd.gateway.generation.writing import Writer
from swarmd.plan.chains.flight import Flight, TokenWindow

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
    shown: frozenset[int] = frozenset()  # special tokens that are part of the text
    may_try: bool = True  # tokens ahead
    key: str = ""
    keeps: bool = True  # its session, for a next turn, and may have a kept one, or the room of some

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
    """The growing answer to one request, and what is tried ahead for it by ``sources``, where that may be."""

    def __init__(
        self, options: AnswerOptions, tokens: TokenBytes, costs: Costs, sources: Sequence[DraftSource] = ()
    ) -> None:
        self.options = options
        self.speculation = Speculation(costs, sources if options.may_try and not options.grammar else ())
        self._sampler = Sampler(options.sampling, options.prompt)
        self._bytes = tokens
        self._writer = Writer(tokens, options.stops, options.prompt[-N_BEFORE:], options.shown)
        self._tokens: list[int] = list(options.prompt)
        self._unsent: list[SampledToken] = []
        self._text = ""
        self.finish: str | None = None

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer so far, its end included."""
        return len(self._tokens) - len(self.options.prompt)

    @property
    def tokens(self) -> list[int]:
        """The prompt and the answer so far."""
        return self._tokens

    def begin(self, logits: torch.Tensor, hidden: torch.Tensor) -> None:
        """Take the logits [1, vocabulary] after the prompt or all of the text so far, and what they are of, [1, d]."""
        self.speculation.hear(len(self._tokens) - 1, hidden[0])
        self._take(self._choose(logits[0]))
        self._take_forced()

    def fly(self, cached: list[int], next_number: int, max_tokens: int, can_fly: bool, now: float) -> Flight:
        """Go on from ``cached``, what the caches hold: all but the last tokens, in a session of ``max_tokens``."""
        flight = Flight(self._tokens, cached, next_number)
        most_tokens = min(len(self.options.prompt) + self.options.max_tokens, max_tokens + 1)
        self.speculation.start(flight, most_tokens, can_fly, now)
        return flight

    def read(self, window: TokenWindow, logits: torch.Tensor, hidden: torch.Tensor, now: float) -> int | None:
        """Take a window's logits [n_wanted, vocabulary], and what they are of, [n_wanted, d].

        Returns from which number on windows are void, where some have become so.
        """
        # Row i holds what the model says after the token sent at place i. A token that was tried counts as long as
        # each choice before it was the token sent:
        #
        #     sent    last  d0  d1  d2        (d: tried tokens)
        #     rows     r0   r1  r2  r3
        #     choice   d0   d1   x            x != d2: x counts, d2 and r3 do not
        n_before = self.n_tokens
        for row in self.speculation.rows_to_decide(window):
            self.speculation.hear(len(self._tokens) - 1, hidden[row])
            choice = self._choose(logits[row])
            self.speculation.take(choice.token)
            self._count(choice)
            if self.finish:
                break
        self._take_forced()
        if self.finish:
            return self.speculation.stop()
        return self.speculation.end_answer(self.n_tokens - n_before, now)

    def piece(self) -> AnswerDelta:
        """Return what is new since the last call, and forget it."""
        text = self._text + (self._writer.finish() if self.finish else "")
        delta = AnswerDelta(text, tuple(self._unsent), self.finish, self._writer.stopped)
        self._unsent = []
        self._text = ""
        return delta

    def _choose(self, logits: torch.Tensor) -> SampledToken:
        grammar = self.options.grammar
        return self._sampler.choose(logits, grammar.allowed_tokens() if grammar else None)

    def _take(self, choice: SampledToken) -> None:
        self._tokens.append(choice.token)
        self._count(choice)

    def _count(self, choice: SampledToken) -> None:
        """A token was added to the text: that may be its end."""
        if choice.token in self.options.eos:
            self.finish = "stop"
            return
        self._unsent.append(choice)
        self._sampler.count_token(choice.token)
        self._text += self._writer.add(choice.token)
        grammar = self.options.grammar
        if grammar is not None:
            grammar.accept_token(choice.token, self._bytes[choice.token].decode(errors="replace"))
        is_complete = grammar is not None and grammar.is_done
        if self._writer.stopped is not None or is_complete:
            self.finish = "stop"
        elif self.n_tokens >= self.options.max_tokens:
            self.finish = "length"

    def _take_forced(self) -> None:
        """Take the tokens that the grammar leaves no choice for: they travel with the last one, as one op."""
        grammar = self.options.grammar
        if self.finish or grammar is None or self.options.sampling.wants_logprobs:
            return
        for token in grammar.forced_tokens():
            self._take(SampledToken(token))
            if self.finish:
                return
