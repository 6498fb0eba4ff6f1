"""Does another way through some blocks give what the family's own forward gives, and in how much time?

All is tried on a part of a span: errors show in one block of each kind, and speed in as many blocks as no cache holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.hardware.device import finish
from swarmd.compute.linear.quantize import relative_error
from swarmd.compute.passes.backend import MAX_CAPTURED
from swarmd.compute.passes.ragged import RaggedAttention
from swarmd.values import Span

CHECKED = (1, 4, MAX_CAPTURED)  # tokens of passes that have to give the same
TIMED_PASSES = 3  # of which the fastest counts: other programs run here too
FAR = 4_096  # a position, where a model does not say how far it goes
FROM_THE_END = 32  # positions that examples take
Way = Callable[[list[SessionTokens]], list[torch.Tensor]]
Examples = Callable[[int, int, Span], list[SessionTokens]]
"""Of n, position and hop: n sessions with some past and a new token each, the same ones each time."""
Forward = Callable[[torch.Tensor, torch.Tensor, Span], torch.Tensor]
"""The family's own pass: hidden [1, n, d], positions [1, n], hop to [1, n, d]."""


class Trial:
    """Compares ways through hops of one span with the family's own pass, which it times once for each size."""

    def __init__(self, ragged: RaggedAttention, forward: Forward, examples: Examples, n_positions: int | None) -> None:
        self._ragged = ragged
        self.forward = forward
        self.examples = examples
        self.far = max(0, (n_positions or FAR) - FROM_THE_END)
        self._pass_s: dict[tuple[int, Span], float] = {}

    @torch.inference_mode()
    def error(self, way: Way, hop: Span, at: int = 0, checked: Sequence[int] = CHECKED) -> float:
        """The largest error of the outputs of some passes, and of those after them, which see what was kept."""
        errors = []
        for n_tokens in checked:
            ours, theirs = self.examples(n_tokens, at, hop), self.examples(n_tokens, at, hop)
            for _ in range(2):
                errors += self._errors(way, ours, theirs, hop)
                ours, theirs = _next(ours), _next(theirs)
        return _worst(errors)

    @torch.inference_mode()
    def error_of_several(self, way: Way, hop: Span, n_tokens: int) -> float:
        """The error of a pass over two sessions with half of so many new tokens each."""
        ours, theirs = (_longer(self.examples(2, 0, hop), n_tokens // 2) for _ in range(2))
        return _worst(self._errors(way, ours, theirs, hop))

    def _errors(self, way: Way, ours: list[SessionTokens], theirs: list[SessionTokens], hop: Span) -> list[float]:
        pairs = zip(way(ours), self.run_pass(theirs, hop), strict=True)
        return [relative_error(got, expected) for got, expected in pairs]

    @torch.inference_mode()
    def seconds(self, way: Way, hop: Span, n_tokens: int) -> float:
        """The time of a pass by this way: the fastest of some."""
        pieces, taken = self.examples(n_tokens, 0, hop), []
        for _ in range(TIMED_PASSES):
            begun = time.perf_counter()
            finish(way(pieces)[0].device)
            taken.append(time.perf_counter() - begun)
            pieces = _next(pieces)
        return min(taken)

    def pass_seconds(self, hop: Span, n_tokens: int) -> float:
        """The time of the family's own pass."""
        if (n_tokens, hop) not in self._pass_s:
            self._pass_s[n_tokens, hop] = self.seconds(lambda pieces: self.run_pass(pieces, hop), hop, n_tokens)
        return self._pass_s[n_tokens, hop]

    def run_pass(self, pieces: list[SessionTokens], hop: Span) -> list[torch.Tensor]:
        """The family's own pass."""
        return self._ragged.run(pieces, lambda hidden, positions: self.forward(hidden, positions, hop))


def _next(pieces: Sequence[SessionTokens]) -> list[SessionTokens]:
    """The same sessions with a token more in their caches, and the same token again."""
    return [SessionTokens(p.hidden, p.positions + 1, p.cache, p.n_past + p.hidden.shape[1]) for p in pieces]


def _longer(pieces: Sequence[SessionTokens], n_tokens: int) -> list[SessionTokens]:
    """The same sessions with so many new tokens, each another."""
    steps = torch.arange(n_tokens, device=pieces[0].hidden.device)
    hidden = [torch.stack([p.hidden[:, 0].roll(i, -1) for i in range(n_tokens)], 1) for p in pieces]
    return [SessionTokens(h, p.positions + steps, p.cache, p.n_past) for h, p in zip(hidden, pieces, strict=True)]


def _worst(errors: Sequence[float]) -> float:
    """The largest; what is no number is worse than any."""
    return max(error if error == error else math.inf for error in errors)
