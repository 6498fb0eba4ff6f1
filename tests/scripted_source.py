"""A source of draft tokens that knows the text: it is right with a fixed chance, and takes its time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

WRONG = 0  # what it says instead of the right token, which the texts of its users never are


class ScriptedSource:
    """Proposes ``text``, each token rightly with the chance ``chance``; where it is wrong, its second choice is right
    with the chance ``second_chance``. ``each_s`` is what a token costs; ``sleep`` has that time pass, where it is real.
    """

    def __init__(
        self,
        text: Sequence[int],
        chance: float,
        each_s: float,
        rng: random.Random,
        second_chance: float = 0.0,
        sleep: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.each_s = each_s
        self._text = text
        self._chance = chance
        self._second_chance = second_chance
        self._rng = rng
        self._sleep = sleep
        self._seconds: dict[int, int] = {}

    def begin(self, prompt: Sequence[int]) -> None: ...

    def end(self) -> None: ...

    def propose(self, text: Sequence[int], tried: Sequence[int], max_tokens: int, min_chance: float) -> list[int]:
        first = len(text) + len(tried)
        proposed = []
        for place, right in enumerate(self._text[first : first + max_tokens], first):
            is_right = self._rng.random() < self._chance
            is_second_right = not is_right and self._rng.random() < self._second_chance
            proposed.append(right if is_right else WRONG)
            self._seconds[place] = right if is_second_right else WRONG
        self._sleep(self.each_s * len(proposed))
        return proposed

    def second_choice(self, place: int) -> int | None:
        return self._seconds.get(place) if self._second_chance else None
