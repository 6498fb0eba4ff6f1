"""Who proposes how a text goes on: what every source of draft tokens does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class DraftSource(Protocol):
    """Who proposes how a text goes on."""

    @property
    def each_s(self) -> float:
        """Seconds that proposing a token usually takes."""

    @property
    def takes_time(self) -> bool:
        """Is a token work? Else all that are wanted come at once."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start to prepare for a text that begins so, while the first pass is computed elsewhere."""

    def end(self) -> None:
        """There is no more to propose."""

    def hear(self, place: int, hidden: torch.Tensor) -> None:
        """What left the model's last block at a place of the text, [d]: the next token was chosen from it."""

    def propose(self, text: Sequence[int], tried: Sequence[int], max_tokens: int, min_chance: float) -> list[int]:
        """At most ``max_tokens`` tokens after the text and what was tried behind it.

        None that follow the text with less than the chance ``min_chance``, where it knows.
        """

    def second_choice(self, place: int) -> int | None:
        """The token that it would have proposed at a place of the text in the second place, where it knows."""
