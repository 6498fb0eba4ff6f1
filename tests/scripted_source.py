"""A source of draft tokens that knows the text: it says each token rightly with a fixed chance, and takes its time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

WRONG = 0  # what it says instead of the right token, which the texts of its users never are


class ScriptedSource:
    """Proposes ``text``; ``each_s`` is what a token costs, and ``sleep`` has that time pass, where it is real."""

    def __init__(
        self,
        text: Sequence[int],
        chance: float,
        each_s: float,
        rng: random.Random,
        sleep: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.each_s = each_s
        self._text = text
        self._chance = chance
        self._rng = rng
        self._sleep = sleep

    def begin(self, prompt: Sequence[int]) -> None: ...

    def end(self) -> None: ...

    def propose(self, text: Sequence[int], tried: Sequence[int], max_tokens: int, min_chance: float) -> list[int]:
        first = len(text) + len(tried)
        right = self._text[first : first + max_tokens]
        self._sleep(self.each_s * len(right))
        return [token if self._rng.random() < self._chance else WRONG for token in right]
