"""The quick ways to compute a few new tokens of several sessions, and which of them this machine is to take.

A pass can be written down as a straight line of tensor calls (``capture``), and blocks of the usual kind can be
computed by one call (``fused``; on a card, ``cuda.graphs``). Each has to give what the pass itself gives, and the
second to be faster than the first: both are found out when a span is loaded.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from swarmd.compute.capture import Pass
from swarmd.compute.device import finish
from swarmd.compute.kvcache import SpanCache
from swarmd.compute.quantize import relative_error
from swarmd.compute.ragged import Piece, RaggedAttention
from swarmd.values import Decision

logger = logging.getLogger(__name__)

MAX_CAPTURED = 8  # tokens of a pass by a straight line: longer ones are bound by arithmetic
CHECKED = (1, 4, MAX_CAPTURED)  # tokens of passes that have to give the same
BETWEEN = 3  # tokens of a pass for which nothing was recorded: it takes what was for more
TIMED_PASSES = 3  # of which the fastest counts: other programs run here too
MUCH = 0.5  # of the time of the pass itself: a straight line takes two thirds of it or more
WORTH = 0.9  # of the time of other ways: servers on equal machines should choose alike
FAR = 4_096  # a position, where a model does not say how far it goes
FROM_THE_END = 32  # positions that examples take
FUSED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.01}  # with 30 blocks half of it is seen
Way = Callable[[list[Piece]], list[torch.Tensor]]


class OneCall(Protocol):
    """Computes a few new tokens of several sessions at once."""

    @property
    def timed(self) -> Sequence[int]:
        """Tokens of passes that are worth timing, as many as it may be taken for."""

    @property
    def longest(self) -> int:
        """New tokens of one session that it is worth taking for."""

    def takes(self, caches: Sequence[SpanCache]) -> bool:
        """Can it read how all of these are kept?"""

    def run(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """Compute the new tokens of all pieces, each [b, t, d], and keep their keys and values."""


class Quick:
    """See the module.

    ``examples(n, at)`` makes n sessions with some past from position ``at`` on and a new token each, the same ones each
    time. ``tolerance`` is relative, of a straight line; one call has another, by what the span ``computes_in``.
    """

    def __init__(
        self,
        ragged: RaggedAttention,
        plain: Pass,
        examples: Callable[[int, int], list[Piece]],
        n_positions: int | None,
        tolerance: float,
        computes_in: torch.dtype,
    ) -> None:
        self._ragged = ragged
        self._plain = plain
        self._far = max(0, (n_positions or FAR) - FROM_THE_END)
        self._tolerance, self._fused_tolerance = tolerance, FUSED_TOLERANCE[computes_in]
        self._examples = examples
        self._captured: Pass | None = None
        self._fused: OneCall | None = None
        self.n_fused = 0  # tokens of a pass up to which one call is the fastest
        self.why = ""

    def knows(self, n_tokens: int, longest: int) -> bool:
        """Is there a quick way for so many new tokens, so many of one session?"""
        return self._may_call(n_tokens, longest) is not None or (
            self._captured is not None and n_tokens <= MAX_CAPTURED
        )

    def calls(self, n_tokens: int, caches: Sequence[SpanCache], longest: int = 1) -> bool:
        """Is one call the quickest way for so many new tokens of sessions with these caches, so many of one?"""
        fused = self._may_call(n_tokens, longest)
        return fused is not None and fused.takes(caches)

    def _may_call(self, n_tokens: int, longest: int) -> OneCall | None:
        """The one call, if it is the quickest way for so many tokens."""
        fused = self._fused
        return fused if fused is not None and n_tokens <= self.n_fused and longest <= fused.longest else None

    def run(self, pieces: list[Piece], n_tokens: int) -> list[torch.Tensor] | None:
        """Compute ``n_tokens`` in all, by the quickest way that takes them; None where there is none."""
        longest = max(piece.hidden.shape[1] for piece in pieces)
        if self._fused is not None and self.calls(n_tokens, [piece.cache for piece in pieces], longest):
            return self._fused.run(pieces)
        if self._captured is not None and n_tokens <= MAX_CAPTURED:
            return self._ragged.run_captured(pieces, self._captured)
        return None

    def told(self, kernels: Decision[str]) -> Decision[str]:
        """What computes a few tokens, added to what computes layers."""
        action = f"{kernels.action}, up to {self.n_fused} tokens by one call" if self.n_fused else kernels.action
        return Decision(action, "; ".join(filter(None, (kernels.reason, self.why))))

    def find(self, fused: OneCall | None) -> None:
        """Try both ways; where one call is much faster than the pass itself, a straight line would not catch up."""
        right = fused if fused is not None and self._is_right(fused) else None
        if right is None or not self._take(right, MUCH):
            self._capture()
            if right is not None:
                self._take(right, WORTH)

    def record(self, make: Callable[[Pass], OneCall], trouble: str = "") -> None:
        """Have one call made of the straight line, where there is one and nothing is known that is in the way."""
        cache = self._examples(1, 0)[0].cache
        trouble = trouble or self._in_the_way(cache.is_plain and not cache.is_rounded)
        if trouble or self._captured is None:
            self.why = f"no one call: {trouble or 'passes are not captured'}"
            return
        try:
            made = make(self._captured)
            if self._is_right(made, (*made.timed, BETWEEN)):
                self._take(made, WORTH)
        except torch.AcceleratorError:
            raise  # nothing will be computed by this process any more
        except Exception as failure:  # noqa: BLE001 - what records and compiles fails in many ways, which mean the same
            logger.info("passes are not recorded: %s", failure)
            self.why = f"no one call: {str(failure)[:200]}"

    def _capture(self) -> None:
        """Write a pass down as a straight line, if that gives what the pass itself gives."""
        try:
            captured = self._ragged.capture(self._examples(2, 0), self._examples(3, 0), self._plain)
            error = self._error(lambda pieces: self._ragged.run_captured(pieces, captured))
        except Exception as failure:  # noqa: BLE001 - a tracer fails in many ways, and all of them mean the same
            logger.info("passes are not captured: %s", failure)
            return
        if error <= self._tolerance:
            self._captured = captured
        else:
            logger.info("passes are not captured: a captured pass differs by %.2g", error)

    def _in_the_way(self, is_kept_so: bool) -> str:
        """Why these layers are not for one call; empty where they can be."""
        if not is_kept_so:
            return "its layers keep more than plain keys and values"
        return "" if self._ragged.is_plain else "its layers attend in a way of their own"

    def _is_right(self, fused: OneCall, checked: Sequence[int] = ()) -> bool:
        """Does one call give what the pass gives, for these numbers of tokens at first, and for few far away?"""
        if trouble := self._in_the_way(fused.takes([piece.cache for piece in self._examples(1, 0)])):
            self.why = f"one call: {trouble}"
            return False
        error = max(self._error(fused.run, 0, checked), self._error(fused.run, self._far))
        self.why = f"one call: it differs by {error:.2g}"
        return error <= self._fused_tolerance

    def _take(self, fused: OneCall, at_most: float) -> bool:
        """Take one call for as many tokens as it takes ``at_most`` the time of other ways; is a line done without?"""
        told, self._fused, self.n_fused = list[str](), None, 0
        for n_tokens in fused.timed:
            is_captured = self._captured is not None and n_tokens <= MAX_CAPTURED
            ratio = self._ratio(fused.run, self._by_line if is_captured else self._by_pass, n_tokens)
            told.append(f"{ratio:.2f} for {n_tokens}")
            if ratio > (at_most if n_tokens <= MAX_CAPTURED else WORTH):
                break
            if n_tokens > MAX_CAPTURED and self._error_of_several(fused.run, n_tokens) > self._fused_tolerance:
                told.append(f"for {n_tokens} it gives something else")
                break
            self._fused, self.n_fused = fused, n_tokens
        self.why = f"time of one call against operators: {', '.join(told)}"
        return self.n_fused >= MAX_CAPTURED

    def _by_line(self, pieces: list[Piece]) -> list[torch.Tensor]:
        assert self._captured is not None
        return self._ragged.run_captured(pieces, self._captured)

    def _by_pass(self, pieces: list[Piece]) -> list[torch.Tensor]:
        return self._ragged.run(pieces, self._plain)

    @torch.inference_mode()
    def _error(self, way: Way, at: int = 0, checked: Sequence[int] = ()) -> float:
        """The largest error of the outputs of some passes, and of those after them, which see what was kept."""
        errors = []
        for n_tokens in checked or CHECKED:
            ours, theirs = self._examples(n_tokens, at), self._examples(n_tokens, at)
            for _ in range(2):
                got, expected = way(ours), self._by_pass(theirs)
                errors += [relative_error(p, q) for p, q in zip(got, expected, strict=True)]
                ours, theirs = _next(ours), _next(theirs)
        return _worst(errors)

    @torch.inference_mode()
    def _error_of_several(self, way: Way, n_tokens: int) -> float:
        """The error of a pass over two sessions with half of so many new tokens each."""
        ours, theirs = (_longer(self._examples(2, 0), n_tokens // 2) for _ in range(2))
        errors = [relative_error(p, q) for p, q in zip(way(ours), self._by_pass(theirs), strict=True)]
        return _worst(errors)

    @torch.inference_mode()
    def _ratio(self, way: Way, other: Way, n_tokens: int) -> float:
        """The time of one way over that of another, in turns."""
        pieces = self._examples(n_tokens, 0)
        taken: dict[Way, list[float]] = {way: [], other: []}
        for _ in range(TIMED_PASSES):
            for this in taken:
                begun = time.perf_counter()
                finish(this(pieces)[0].device)
                taken[this].append(time.perf_counter() - begun)
                pieces = _next(pieces)
        return min(taken[way]) / min(taken[other])


def _next(pieces: Sequence[Piece]) -> list[Piece]:
    """The same sessions with a token more in their caches, and the same token again."""
    return [Piece(p.hidden, p.positions + 1, p.cache, p.n_past + p.hidden.shape[1]) for p in pieces]


def _longer(pieces: Sequence[Piece], n_tokens: int) -> list[Piece]:
    """The same sessions with so many new tokens, each another."""
    steps = torch.arange(n_tokens, device=pieces[0].hidden.device)
    hidden = [torch.stack([p.hidden[:, 0].roll(i, -1) for i in range(n_tokens)], 1) for p in pieces]
    return [Piece(h, p.positions + steps, p.cache, p.n_past) for h, p in zip(hidden, pieces, strict=True)]


def _worst(errors: Sequence[float]) -> float:
    """The largest; what is no number is worse than any."""
    return max(error if error == error else math.inf for error in errors)
