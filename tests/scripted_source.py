"""A source of draft tokens that knows the text: it is right with a fixed chance, and takes its time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

WRONG = 0  # what it says instead of the right token, which the texts of its users never are


class ScriptedSource:
    """Proposes ``text``, each token rightly with the chance ``chance``; where it is wrong, its second choice is right
    with the chance ``second_chance``. ``each_s`` is what a token costs; ``sleep`` has that time pass, where it is real.

    Where it is right depends on the place and the ``seed`` alone: however the text is generated, that is the same.
    """

    def __init__(
        self,
        text: Sequence[int],
        chance: float,
        each_s: float,
        seed: int,
        second_chance: float = 0.0,
        sleep: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.each_s = each_s
        self.takes_time = each_s > 0
        self._sleep = sleep
        self._has_seconds = second_chance > 0
        rng = random.Random(seed)
        self._firsts: list[int] = []
        self._seconds: list[int] = []
        for token in text:
            is_right, is_second_right = rng.random() < chance, rng.random() < second_chance
            self._firsts.append(token if is_right else WRONG)
            self._seconds.append(token if not is_right and is_second_right else WRONG)

    def count_right(self, first: int) -> int:
        """Count the places from ``first`` on where it is right."""
        return sum(token != WRONG for token in self._firsts[first:])

    def begin(self, prompt: Sequence[int]) -> None: ...

    def end(self) -> None: ...

    def hear(self, place: int, hidden: object) -> None: ...

    def propose(self, text: Sequence[int], tried: Sequence[int], max_tokens: int, min_chance: float) -> list[int]:
        first = len(text) + len(tried)
        proposed = self._firsts[first : first + max_tokens]
        self._sleep(self.each_s * len(proposed))
        return proposed

    def second_choice(self, place: int) -> int | None:
        return self._seconds[place] if self._has_seconds else None
