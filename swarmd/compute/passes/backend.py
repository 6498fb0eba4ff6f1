"""The execution backends for a few new tokens of several sessions, and when a pass takes one of them.

A pass can be traced as a straight line of tensor calls (``traced``), and blocks of the usual kind can be computed by a
fused kernel (``fused``; on a card, ``graphs``). ``backend_selection`` finds out which of them are right here, and for
how many tokens they are faster than the pass itself. Sessions are computed by the pass itself meanwhile.

    new tokens, caches --> fused, if it is the fastest for so many and reads these caches
                       --> traced, if there is one and tokens are few
                       --> None: the caller runs the family's own pass
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

MAX_CAPTURED = 8  # tokens of a traced pass: longer ones are bound by arithmetic


class FusedBackend(Protocol):
    """Computes a few new tokens of several sessions at once."""

    @property
    def timed(self) -> Sequence[int]:
        """Tokens of passes that are worth timing, as many as it may be taken for."""

    @property
    def longest(self) -> int:
        """New tokens of one session that it is worth taking for."""

    def takes(self, caches: Sequence[SpanCache]) -> bool:
        """Can it read all of these caches?"""

    def run(self, pieces: Sequence[SessionTokens]) -> list[torch.Tensor]:
        """Compute the new tokens of all pieces, each [b, t, d], and keep their keys and values."""


class Backends:
    """The backends of one span, as far as they are known to be right and fast."""

    def __init__(self, ragged: RaggedAttention) -> None:
        self._ragged = ragged
        self.captured: Pass | None = None
        self.fused: FusedBackend | None = None
        self.n_fused = 0  # tokens of a pass up to which the fused kernel is the fastest
        self.why = ""

    def knows(self, n_tokens: int, longest: int) -> bool:
        """Is there a backend for so many new tokens, so many of one session?"""
        is_traced = self.captured is not None and n_tokens <= MAX_CAPTURED
        return is_traced or self._fused_for(n_tokens, longest) is not None

    def calls(self, n_tokens: int, caches: Sequence[SpanCache], longest: int = 1) -> bool:
        """Is the fused kernel the fastest for so many new tokens of sessions with these caches, so many of one?"""
        fused = self._fused_for(n_tokens, longest)
        return fused is not None and fused.takes(caches)

    def _fused_for(self, n_tokens: int, longest: int) -> FusedBackend | None:
        """Return the fused kernel, if it is the fastest for so many tokens."""
        fused = self.fused
        if fused is None or n_tokens > self.n_fused or longest > fused.longest:
            return None
        return fused

    def run(self, pieces: list[SessionTokens], n_tokens: int) -> list[torch.Tensor] | None:
        """Compute ``n_tokens`` in all, by the fastest backend that takes them; None where there is none."""
        longest = max(piece.hidden.shape[1] for piece in pieces)
        if self.fused is not None and self.calls(n_tokens, [piece.cache for piece in pieces], longest):
            return self.fused.run(pieces)
        if self.captured is not None and n_tokens <= MAX_CAPTURED:
            return self._ragged.run_captured(pieces, self.captured)
        return None

    def explain(self, kernels: Decision[str]) -> Decision[str]:
        """Say what computes a few tokens, beside what computes layers."""
        action = f"{kernels.action}, up to {self.n_fused} tokens by one call" if self.n_fused else kernels.action
        return Decision(action, "; ".join(filter(None, (kernels.reason, self.why))))
