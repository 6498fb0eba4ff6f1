"""The quick ways to compute a few new tokens of several sessions, and when a pass goes by one of them.

A pass can be written down as a straight line of tensor calls (``capture``), and blocks of the usual kind can be
computed by one call (``fused``; on a card, ``passes.graphs``). Which of them are right here, and for how many tokens
they are faster than the pass itself, is found out by ``quickening``, while sessions are computed by the pass itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from swarmd.compute.cache.kvcache import SpanCache
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.passes.ragged import RaggedAttention
from swarmd.compute.passes.traced import Pass
from swarmd.values import Decision

MAX_CAPTURED = 8  # tokens of a pass by a straight line: longer ones are bound by arithmetic


class FusedBackend(Protocol):
    """Computes a few new tokens of several sessions at once."""

    @property
    def timed(self) -> Sequence[int]:
        """Tokens of passes that are worth timing, as many as it may be taken for."""

    @property
    def longest(self) -> int:
        """New tokens of one session that it is worth taking for."""

    def takes(self, caches: Sequence[SpanCache]) -> bool:
        """Can it read how all of these are kept?"""

    def run(self, pieces: Sequence[SessionTokens]) -> list[torch.Tensor]:
        """Compute the new tokens of all pieces, each [b, t, d], and keep their keys and values."""


class Backends:
    """The quick ways of one span, as far as they are known to be right and fast."""

    def __init__(self, ragged: RaggedAttention) -> None:
        self._ragged = ragged
        self.captured: Pass | None = None
        self.fused: FusedBackend | None = None
        self.n_fused = 0  # tokens of a pass up to which one call is the fastest
        self.why = ""

    def knows(self, n_tokens: int, longest: int) -> bool:
        """Is there a quick way for so many new tokens, so many of one session?"""
        return self._may_call(n_tokens, longest) is not None or (self.captured is not None and n_tokens <= MAX_CAPTURED)

    def calls(self, n_tokens: int, caches: Sequence[SpanCache], longest: int = 1) -> bool:
        """Is one call the quickest way for so many new tokens of sessions with these caches, so many of one?"""
        fused = self._may_call(n_tokens, longest)
        return fused is not None and fused.takes(caches)

    def _may_call(self, n_tokens: int, longest: int) -> FusedBackend | None:
        """The one call, if it is the quickest way for so many tokens."""
        fused = self.fused
        return fused if fused is not None and n_tokens <= self.n_fused and longest <= fused.longest else None

    def run(self, pieces: list[SessionTokens], n_tokens: int) -> list[torch.Tensor] | None:
        """Compute ``n_tokens`` in all, by the quickest way that takes them; None where there is none."""
        longest = max(piece.hidden.shape[1] for piece in pieces)
        if self.fused is not None and self.calls(n_tokens, [piece.cache for piece in pieces], longest):
            return self.fused.run(pieces)
        if self.captured is not None and n_tokens <= MAX_CAPTURED:
            return self._ragged.run_captured(pieces, self.captured)
        return None

    def explain(self, kernels: Decision[str]) -> Decision[str]:
        """What computes a few tokens, added to what computes layers."""
        action = f"{kernels.action}, up to {self.n_fused} tokens by one call" if self.n_fused else kernels.action
        return Decision(action, "; ".join(filter(None, (kernels.reason, self.why))))
