"""What a draft learns from where nobody gives it text: conversations in which the model writes both sides.

A model made for conversations, asked to go on after the beginning of a user's turn, writes what users ask (Xu et al.
2024, "Magpie"). So each row is one long conversation: once a turn has ended, the next one is begun as the chat template
begins it. Others write one text a row.
"""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swarmd.client.drafting.examples import Examples, choose_top
from swarmd.errors import ConfigError

ROW_TOKENS = 512  # two turns or three: what a draft reaches back, and as much again
MOST_ASKED = 64  # tokens of a question that does not end by itself
MOST_ANSWERED = 256  # of an answer: both turns end some time
HEAT_OF_ANSWERS = 0.8  # of half of the rows; the others take the likeliest tokens, as what is drafted for
WORDS = ("apple", "zebra")


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """``begin``: the tokens before the first question; ``answer``: between it and the answer; ``ask``: behind that.

    Without turns, of a model that has no chat template, the last two are empty.
    """

    begin: tuple[int, ...]
    answer: tuple[int, ...] = ()
    ask: tuple[int, ...] = ()


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TURN_EXAMPLES = (
    *([_turn("user", word)] for word in WORDS),
    *([_turn("user", WORDS[0]), _turn("assistant", word), _turn("user", WORDS[0])] for word in WORDS),
)
"""Conversations that a chat template writes, for ``read_turns``."""


def read_turns(rendered: Sequence[Sequence[int]]) -> TurnTokens:
    """What a chat template puts around turns, by the ids of TURN_EXAMPLES. Raises ConfigError if that is unclear."""
    one, other, long, other_long = map(list, rendered)
    begin, answer = _common_start(one, other), _common_end(one, other)
    question = one[len(begin) : len(one) - len(answer)]
    rest = _common_end(long, other_long)
    ask = rest[: len(rest) - len(answer) - len(question)]
    if not answer or not ask or rest[len(ask) :] != [*question, *answer]:
        raise ConfigError("the chat template puts other tokens around each turn: give texts to learn from (--data)")
    return TurnTokens(tuple(begin), tuple(answer), tuple(ask))


def _common_start(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [x for x, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))]


def _common_end(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return _common_start(a[::-1], b[::-1])[::-1]


class ConversationWriter:
    """Which tokens come next in ``n_rows`` conversations that grow side by side."""

    def __init__(self, n_rows: int, turns: TurnTokens, generator: torch.Generator) -> None:
        self._turns = turns
        self._generator = generator
        self._is_asking = [bool(turns.answer)] * n_rows
        self._n_written = [0] * n_rows
        self._forced: list[deque[int]] = [deque() for _ in range(n_rows)]

    def choose(self, logits: torch.Tensor) -> list[int]:
        """The next token of each row, by logits [n_rows, vocabulary]."""
        n = len(self._forced)
        is_asking = torch.tensor(self._is_asking)
        heat = torch.where(is_asking, 1.0, HEAT_OF_ANSWERS)[:, None]
        drawn = torch.multinomial((logits.float() / heat).softmax(-1), 1, generator=self._generator)[:, 0]
        is_greedy = (torch.arange(n) < n // 2) & ~is_asking
        chosen: list[int] = torch.where(is_greedy, logits.argmax(-1), drawn).tolist()
        return [self._advance(row, token) for row, token in enumerate(chosen)]

    def _advance(self, row: int, token: int) -> int:
        forced = self._forced[row]
        if forced:
            return forced.popleft()
        self._n_written[row] += 1
        behind = self._turns.answer if self._is_asking[row] else self._turns.ask
        most = MOST_ASKED if self._is_asking[row] else MOST_ANSWERED
        if not behind or (token != behind[0] and self._n_written[row] < most):
            return token
        forced.extend(behind[1:])
        self._is_asking[row] = not self._is_asking[row]
        self._n_written[row] = 0
        return behind[0]


@torch.no_grad()
def write_rows(model: Any, turns: TurnTokens, n_rows: int, generator: torch.Generator) -> Iterator[int | Examples]:
    """Have a remote model write rows of ROW_TOKENS; yields how many tokens there are by now, at last the examples."""
    writer = ConversationWriter(n_rows, turns, generator)
    cache = model.new_cache(len(turns.begin) + ROW_TOKENS)
    ids = torch.tensor([turns.begin] * n_rows)
    can_keep = "logits_to_keep" in inspect.signature(type(model).forward).parameters
    options = {"logits_to_keep": 1} if can_keep else {}
    tokens, hidden, tops, chances = [], [], [], []
    try:
        for number in range(ROW_TOKENS):
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True, **options).logits[:, -1]
            tokens.append(ids[:, -1:])
            hidden.append(cache.returned[:, -1:].to(torch.bfloat16))
            top, chance = choose_top(logits)
            tops.append(top[:, None])
            chances.append(chance[:, None])
            ids = torch.tensor(writer.choose(logits))[:, None]
            yield (number + 1) * n_rows
    finally:
        cache.close()
    yield Examples(*(torch.cat(parts, 1) for parts in (tokens, hidden, tops, chances)))


@torch.no_grad()
def read_rows(model: Any, rows: Sequence[Sequence[int]]) -> Examples:
    """Have a remote model read rows of ROW_TOKENS."""
    found = []
    for row in rows:
        cache = model.new_cache(ROW_TOKENS)
        ids = torch.tensor([row])
        try:
            logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
            found.append((ids, cache.returned.to(torch.bfloat16), *choose_top(logits)))
        finally:
            cache.close()
    return Examples(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def cut_rows(texts: Sequence[Sequence[int]]) -> list[list[int]]:
    """All texts, one behind the other, in rows of ROW_TOKENS; what is left at the end is left out."""
    stream = list(itertools.chain.from_iterable(texts))
    return [stream[i : i + ROW_TOKENS] for i in range(0, len(stream) - ROW_TOKENS + 1, ROW_TOKENS)]
