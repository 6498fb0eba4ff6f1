"""Execution backends: the ways to compute the new tokens of a pass, and which of them computes which pass.

All have one face. Two are always there: the family's own forward for one session after the other, and the same forward
over several sessions in one row. Faster ones are found while a span serves (``backend_selection``), and are rows of its
table from then on:

    new tokens of some sessions --> the first row of the table for so many tokens and these caches
                                --> ragged, for several sessions, for long ones, and for few tokens
                                --> family
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swarmd.compute.cache.adapters import SpanAdapters
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.passes.family import FamilyForward, PassInputs
from swarmd.compute.passes.ragged import LONG_PAST, RaggedAttention
from swarmd.compute.passes.traced import Pass
from swarmd.values import Decision, Span

MAX_TRACED_TOKENS = 8  # of a traced pass: longer ones are bound by arithmetic
UNLIMITED = 1 << 62  # tokens: more than any pass has


class Backend(Protocol):
    """One way to compute the new tokens of some sessions at one hop."""

    @property
    def longest(self) -> int:
        """New tokens of one session that it is worth taking for."""

    @property
    def is_reentrant(self) -> bool:
        """May it run in the midst of another pass?"""

    def supports(self, caches: Sequence[SpanCache]) -> bool:
        """Can it read all of these caches?"""

    def run(self, pieces: Sequence[SessionTokens]) -> list[torch.Tensor]:
        """Compute the new tokens of all pieces, each [b, t, d], and keep their keys and values."""


@dataclass(frozen=True, slots=True)
class FamilyBackend:
    """The family's own forward, one session after the other: it takes all, and gives what others have to give."""

    family: FamilyForward
    adapters: SpanAdapters
    hop: Span
    longest: int = UNLIMITED
    is_reentrant: bool = False

    def supports(self, caches: Sequence[SpanCache]) -> bool:
        """Return that it does."""
        return True

    def run(self, pieces: Sequence[SessionTokens]) -> list[torch.Tensor]:
        """Compute each piece alone."""
        return [self._run_alone(piece) for piece in pieces]

    def _run_alone(self, piece: SessionTokens) -> torch.Tensor:
        with self.adapters.using([(piece.n_tokens, piece.lora)]):
            return self.family.compute(
                piece.hidden,
                piece.positions,
                piece.mask,
                piece.cache,
                piece.n_past,
                self.hop,
            )


@dataclass(frozen=True, slots=True)
class RaggedBackend:
    """The family's own forward over the tokens of several sessions in one row (``ragged``)."""

    family: FamilyForward
    ragged: RaggedAttention
    hop: Span
    adapters: SpanAdapters | None = None
    longest: int = UNLIMITED
    is_reentrant: bool = False

    def supports(self, caches: Sequence[SpanCache]) -> bool:
        """Return that it does: families whose caches it cannot take have no such backend."""
        return True

    def run(self, pieces: Sequence[SessionTokens]) -> list[torch.Tensor]:
        """Compute all pieces in one row."""
        if self.adapters is None:
            return self.ragged.run(pieces, self.forward)
        with self.adapters.using([(piece.n_tokens, piece.lora) for piece in pieces]):
            return self.ragged.run(pieces, self.forward)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run the family's forward over one row, [1, n, d]; attention is ``ragged``'s."""
        return self.family.run(PassInputs(hidden, positions, None, self.ragged.cache), self.hop)


@dataclass(frozen=True, slots=True)
class TracedBackend:
    """A row of several sessions through a traced pass (``traced``), without the modules around its operators."""

    ragged: RaggedAttention
    traced: Pass
    longest: int = UNLIMITED
    is_reentrant: bool = False

    def supports(self, caches: Sequence[SpanCache]) -> bool:
        """Return that it does: attention is not part of what is traced."""
        return True

    def run(self, pieces: Sequence[SessionTokens]) -> list[torch.Tensor]:
        """Compute all pieces in one row."""
        return self.ragged.run_traced(pieces, self.traced)


@dataclass(frozen=True, slots=True)
class TableRow:
    """A backend that is the fastest one for passes of up to ``most_tokens``, where no row before it is.

    ``name`` is what operators read of it; empty where they are told nothing.
    """

    most_tokens: int
    backend: Backend
    name: str = ""


class BackendTable:
    """Which backend computes a pass at one hop, by its size: new tokens in all, and the most of one session.

    ``rows`` are the backends that were found to be right and fast, in the order of ``candidates.all_candidates``, but
    for one that was timed on the whole span: that comes first. ``reason`` says how.
    """

    def __init__(self, family: FamilyBackend, ragged: RaggedBackend | None) -> None:
        self.hop = family.hop
        self._family = family
        self._ragged = ragged
        self.rows: list[TableRow] = []
        self.reason = ""

    def choose(self, pieces: Sequence[SessionTokens]) -> Backend:
        """Return the backend for these pieces."""
        if self._ragged is None or any(piece.is_alone for piece in pieces):
            return self._family
        fast = self._rows_for(sum(piece.n_tokens for piece in pieces), max(piece.hidden.shape[1] for piece in pieces))
        if fast and all(piece.lora is None for piece in pieces):
            caches = [piece.cache for piece in pieces]
            for row in fast:
                if row.backend.supports(caches):
                    return row.backend
        if fast or len(pieces) > 1 or _has_long_past(pieces[0]):
            return self._ragged
        return self._family

    def _rows_for(self, n_tokens: int, longest: int) -> list[TableRow]:
        return [row for row in self.rows if n_tokens <= row.most_tokens and longest <= row.backend.longest]

    @property
    def interleaved_tokens(self) -> int:
        """New tokens of a pass that can be computed in the midst of another one; 0 where none can."""
        return max((row.most_tokens for row in self.rows if row.backend.is_reentrant), default=0)

    def can_interleave(self, n_tokens: int, cache: SpanCache) -> bool:
        """Can so many new tokens with this cache be computed in the midst of another pass?"""
        rows = self._rows_for(n_tokens, 1)
        return any(row.backend.is_reentrant and row.backend.supports([cache]) for row in rows)

    def explain(self, kernels: Decision[str]) -> Decision[str]:
        """Say what computes a few tokens, beside what computes layers."""
        named = [f"up to {row.most_tokens} tokens by {row.name}" for row in self.rows if row.name]
        action = ", ".join([kernels.action, *named])
        return Decision(action, "; ".join(filter(None, (kernels.reason, self.reason))))


def _has_long_past(piece: SessionTokens) -> bool:
    """Does attention in two parts pay? The family's forward knows none, and would copy what is shared."""
    return piece.n_past >= LONG_PAST or piece.cache.is_shared
