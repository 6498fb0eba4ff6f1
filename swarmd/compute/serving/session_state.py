"""What one session keeps at one hop between its ops: caches, padding, history, and how far they have come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from swarmd.compute.cache.adapters import LoraUpdates
from swarmd.compute.cache.session_cache import SessionCache
from swarmd.compute.serving.engine import Engine
from swarmd.plan.chains.void_ops import VoidOps
from swarmd.protocol.wire.alternatives import MOST_ALTERNATIVE_TOKENS
from swarmd.protocol.wire.messages import Edit, count_cropped
from swarmd.values import Span
from swarmd.wire.history import History


# ``n_tokens`` counts the tokens that the caches hold, those of an op in progress included as they are computed. The
# ``n_absent`` tokens behind them are in no cache: they were void before they were computed (``plan.chains.void_ops``).
#
# The history, from which a successor would be rebuilt, gets an op after its answer was sent (``HopSession.keep``), so
# that nobody waits for the copy. Whoever drives a session begins nothing before that: no replay and no hand-over sees
# caches that the history lacks.
@dataclass(slots=True)
class SessionState:
    """The caches of some rows of tokens, [n_rows, n_tokens]; ``mask`` is there once something is padded."""

    engine: Engine
    session: bytes
    hop: Span
    n_rows: int
    max_tokens: int
    codec: str
    history: History
    cache: SessionCache
    lora: LoraUpdates | None
    n_tokens: int = 0
    n_absent: int = 0
    void: VoidOps = field(default_factory=VoidOps)
    mask: torch.Tensor | None = None
    borrowed: list[SessionCache] = field(default_factory=list)  # for alternatives, which are not kept

    @property
    def can_try_alternatives(self) -> bool:
        """Can tokens be computed behind a part of its cache, and not be kept?"""
        engine = self.engine
        is_usual = self.n_rows == 1 and self.mask is None and not self.history.is_exact
        return is_usual and engine.can_batch and engine.shares_prefixes and self.cache.is_plain

    def borrowed_cache(self, number: int, n_tokens: int) -> SessionCache:
        """Return a cache that begins with the first ``n_tokens`` of this one; there is one for each ``number``."""
        while len(self.borrowed) <= number:
            self.borrowed.append(self.engine.new_cache(self.hop, self.max_tokens + MOST_ALTERNATIVE_TOKENS))
        self.borrowed[number].borrow(self.cache, n_tokens)
        return self.borrowed[number]

    @property
    def can_share(self) -> bool:
        """May other sessions be in the same pass? Not in the exact grade, and not with padding."""
        return not self.history.is_exact and self.mask is None

    @property
    def is_last_hop(self) -> bool:
        """Does it end the model?"""
        return self.hop.end == self.engine.n_blocks

    @property
    def n_entered(self) -> int:
        """Tokens that have entered and are not cropped, the absent ones included."""
        return self.n_tokens + self.n_absent

    def count_cached(self, n_cropped: int) -> int:
        """Count how many of the last ``n_cropped`` tokens the caches hold."""
        return max(0, n_cropped - self.n_absent)

    def apply_edits(self, edits: tuple[Edit, ...]) -> None:
        """Crop once and reorder once: which tokens stay and which rows have nothing to do with each other."""
        if not edits:
            return
        n_cropped = count_cropped(edits)
        if any(edit.crop is not None for edit in edits):
            n_cached = self.count_cached(n_cropped)
            self.cache.crop(n_cached)
            self.n_tokens -= n_cached
            self.n_absent -= n_cropped - n_cached
            if self.mask is not None:
                self.mask = self.mask[:, : self.n_tokens]
        order = order_after(edits, self.n_rows)
        if any(edit.rows is not None for edit in edits):
            rows = torch.tensor(order, device=self.engine.device)
            self.cache.reorder(rows)
            self.engine.on_block()  # of a large cache it takes a while, and is progress
            if self.mask is not None:
                self.mask = self.mask[rows]

    def extend_mask(self, n_new: int, mask: torch.Tensor | None) -> None:
        """Have the mask cover new tokens; there is none until something is padded."""
        if mask is None and self.mask is None:
            return
        device = self.engine.device
        past = self.mask
        if past is None:
            past = torch.ones(self.n_rows, self.n_tokens, device=device)
        new = torch.ones(self.n_rows, n_new) if mask is None else mask
        new = new.long().to(device)
        self.mask = torch.cat([past.long(), new], 1)


def order_after(edits: Sequence[Edit], n_rows: int) -> Sequence[int]:
    """Which row each row was before some edits."""
    order: Sequence[int] = range(n_rows)
    for edit in edits:
        order = [order[row] for row in edit.rows] if edit.rows is not None else order
    return order
