"""Does a backend give what the family's own forward gives for some blocks, and in how much time?

All is tried on a part of a span: errors show in one block of each kind, and speed in as many blocks as no cache holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.hardware.device import finish
from swarmd.compute.linear.kernels import TIMED_BYTES
from swarmd.compute.linear.quantize import relative_error
from swarmd.compute.passes.backend import MAX_TRACED_TOKENS, RaggedBackend
from swarmd.values import Span

CHECKED = (1, 4, MAX_TRACED_TOKENS)  # tokens of passes that have to give the same
TIMED_PASSES = 3  # of which the fastest counts: other programs run here too
FAR = 4_096  # a position, where a model does not say how far it goes
FROM_THE_END = 32  # positions that examples take
Run = Callable[[Sequence[SessionTokens]], list[torch.Tensor]]
"""Compute new tokens by some backend, and keep their keys and values."""
Examples = Callable[[int, int, Span], list[SessionTokens]]
"""From n, position and hop: n sessions with some past and a new token each, the same ones each time."""
Reference = Callable[[Span], RaggedBackend]
"""From a hop: the family's own forward over several sessions in one row."""


class Trial:
    """Compares backends on hops of one span with the family's own pass, which it times once for each size."""

    def __init__(self, reference: Reference, examples: Examples, n_positions: int | None) -> None:
        self.reference = reference
        self.examples = examples
        self.far = max(0, (n_positions or FAR) - FROM_THE_END)
        self._pass_s: dict[tuple[int, Span], float] = {}

    @torch.inference_mode()
    def error(
        self,
        run: Run,
        hop: Span,
        position: int = 0,
        checked: Sequence[int] = CHECKED,
    ) -> float:
        """Return the largest error of some passes' outputs, and of the passes after them, which see what was kept."""
        errors = []
        for n_tokens in checked:
            pieces = self.examples(n_tokens, position, hop)
            reference = self.examples(n_tokens, position, hop)
            for _ in range(2):
                errors += self._errors(run, pieces, reference, hop)
                pieces = _continue(pieces)
                reference = _continue(reference)
        return _worst(errors)

    @torch.inference_mode()
    def error_of_several(self, run: Run, hop: Span, n_tokens: int) -> float:
        """Return the error of a pass over two sessions with half of so many new tokens each."""
        pieces, reference = (_lengthen(self.examples(2, 0, hop), n_tokens // 2) for _ in range(2))
        return _worst(self._errors(run, pieces, reference, hop))

    def _errors(
        self,
        run: Run,
        pieces: list[SessionTokens],
        reference: list[SessionTokens],
        hop: Span,
    ) -> list[float]:
        pairs = zip(run(pieces), self.reference(hop).run(reference), strict=True)
        return [relative_error(out, expected) for out, expected in pairs]

    @torch.inference_mode()
    def seconds(self, run: Run, hop: Span, n_tokens: int) -> float:
        """Measure the time of a pass by this backend: the fastest of some."""
        pieces = self.examples(n_tokens, 0, hop)
        seconds = []
        for _ in range(TIMED_PASSES):
            begin = time.perf_counter()
            finish(run(pieces)[0].device)
            seconds.append(time.perf_counter() - begin)
            pieces = _continue(pieces)
        return min(seconds)

    def pass_seconds(self, hop: Span, n_tokens: int) -> float:
        """Return the time of the family's own pass, measured once."""
        key = n_tokens, hop
        if key not in self._pass_s:
            self._pass_s[key] = self.seconds(self.reference(hop).run, hop, n_tokens)
        return self._pass_s[key]


def _continue(pieces: Sequence[SessionTokens]) -> list[SessionTokens]:
    """Take the same sessions with their new tokens in their caches, and the same tokens again."""
    continued = []
    for piece in pieces:
        n_past = piece.n_past + piece.hidden.shape[1]
        continued.append(SessionTokens(piece.hidden, piece.positions + 1, piece.cache, n_past))
    return continued


def _lengthen(pieces: Sequence[SessionTokens], n_tokens: int) -> list[SessionTokens]:
    """Take the same sessions with so many new tokens, all different."""
    steps = torch.arange(n_tokens, device=pieces[0].hidden.device)
    lengthened = []
    for piece in pieces:
        token = piece.hidden[:, 0]
        hidden = torch.stack([token.roll(i, -1) for i in range(n_tokens)], 1)
        lengthened.append(SessionTokens(hidden, piece.positions + steps, piece.cache, piece.n_past))
    return lengthened


def _worst(errors: Sequence[float]) -> float:
    """Return the largest error; NaN is worse than any."""
    return max(error if error == error else math.inf for error in errors)


def first_blocks(span: Span, block_bytes: Sequence[int]) -> Span:
    """Return so many first blocks that no cache holds them."""
    total = 0
    for n, n_bytes in enumerate(block_bytes, 1):
        total += n_bytes
        if total >= TIMED_BYTES:
            return Span(span.start, span.start + n)
    return span
