"""Prompt lookup: what followed the same tokens before is proposed again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

LOOK_BACK = 4_096  # tokens of a prompt that are looked through
GRAMS = (4, 2)  # so many last tokens have to occur before, for what followed them to be tried; the longest first


class Lookup:
    """Proposes what followed the last tokens where they occurred before in the same text (prompt lookup)."""

    each_s = 0.0
    takes_time = False

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # some tokens that follow each other, and where they last ended
        self._n_known = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Do nothing: the text is read as it grows."""

    def end(self) -> None:
        """Do nothing."""

    def hear(self, place: int, hidden: torch.Tensor) -> None:
        """Do nothing: tokens are all it reads."""

    def propose(self, text: Sequence[int], tried: Sequence[int], max_tokens: int, min_chance: float) -> list[int]:
        """The text begins as it did the last time."""
        self._learn_grams(text)
        n_tried = len(tried)
        n_last = max(GRAMS)
        last = (*text[-n_last:], *tried)[-n_last:]
        for n in GRAMS:
            end = self._after.get(tuple(last[-n:]))
            if end is not None and len(text) + n_tried > n:
                return list(text[end : end + max_tokens])
        return []

    def second_choice(self, place: int) -> int | None:
        """Know none."""
        return None

    def _learn_grams(self, tokens: Sequence[int]) -> None:
        first = max(self._n_known, len(tokens) - LOOK_BACK)
        for end in range(first, len(tokens)):  # what ends here is found from the next token on
            for n in GRAMS:
                if end >= n:
                    self._after[tuple(tokens[end - n : end])] = end
        self._n_known = len(tokens)
