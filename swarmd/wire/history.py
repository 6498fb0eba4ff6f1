"""What a sender sent, kept so that its successor can be rebuilt after a death.

In the *replayed* grade settled ops are merged: one growing slab of hidden states with crops and beam reorders
applied, as the successor's cache has them. In the *exact* grade every op is kept as it was. Slabs live in memory up
to a budget shared by all sessions of the process, then in unlinked files that the kernel pages out.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from swarmd.protocol.wire.alternatives import Alternative, count_alternative_tokens
from swarmd.protocol.wire.messages import Edit, count_changes, count_cropped
from swarmd.wire.tensors import Inputs, first_tokens

_FIRST_TOKENS = 64  # room at first; doubled when it is full
_MERGED_STEPS = 16  # of one token each, at once


@dataclass(slots=True)
class Budget:
    """Bytes of history that may stay in memory; what is beyond goes to ``spill_folder``."""

    memory_bytes: int = 1 << 30
    spill_folder: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    used_bytes: int = 0

    def allocate(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Make a tensor: in memory while there is room, else in a file that nobody else can open."""
        n_bytes = torch.Size(shape).numel() * dtype.itemsize
        if self.used_bytes + n_bytes <= self.memory_bytes:
            self.used_bytes += n_bytes
            return torch.empty(shape, dtype=dtype)
        with tempfile.NamedTemporaryFile(dir=self.spill_folder, prefix="swarmd-history-") as file:
            file.truncate(n_bytes)
            raw = torch.from_file(
                file.name,
                shared=True,
                size=n_bytes,
                dtype=torch.uint8,
            )
            return raw.view(dtype).view(shape)

    def release(self, n_bytes: int) -> None:
        """Give back bytes that were in memory."""
        self.used_bytes = max(0, self.used_bytes - n_bytes)


@dataclass(frozen=True, slots=True)
class SentOp:
    """One op as it was sent: edits first, then hidden [b, t, d], positions [b, t], mask [b, t] or None.

    ``n_absent`` tokens follow that nobody computes (``protocol.wire.messages.Void``). The last tokens of ``hidden`` are
    those of ``alternatives``, which nobody keeps.
    """

    seq: int
    edits: tuple[Edit, ...]
    hidden: torch.Tensor | None
    positions: torch.Tensor | None
    mask: torch.Tensor | None
    record_past: bool = False
    n_absent: int = 0
    alternatives: tuple[Alternative, ...] = ()

    @property
    def n_kept(self) -> int:
        """Tokens of each row that caches keep."""
        return 0 if self.hidden is None else self.hidden.shape[1] - count_alternative_tokens(self.alternatives)

    @property
    def n_tokens(self) -> int:
        """Tokens of each row that count as the session's, the absent ones included."""
        return self.n_kept + self.n_absent

    def kept(self) -> Inputs | None:
        """Return hidden states, positions and mask of the tokens that caches keep."""
        if self.hidden is None or self.positions is None:
            return None
        return first_tokens((self.hidden, self.positions, self.mask), self.n_kept)

    @property
    def is_plain(self) -> bool:
        """Does it bring tokens, and nothing else?"""
        has_tokens = self.hidden is not None and self.positions is not None
        return has_tokens and self.mask is None and not self.edits and not self.n_absent

    def alone(self) -> SentOp:
        """Return the same op in memory of its own: what a pass gave to many lies in one piece."""
        hidden = self.hidden
        if hidden is None or hidden.untyped_storage().nbytes() <= 2 * hidden.nbytes:
            return self
        return replace(self, hidden=hidden.clone())

    def without_tokens(self) -> SentOp:
        """Return the same op with all of its tokens absent."""
        return replace(self, hidden=None, positions=None, mask=None, n_absent=self.n_tokens, alternatives=())

    def last(self, n_tokens: int) -> SentOp:
        """Return the same op with the last ``n_tokens`` of each row only, and its alternatives."""
        n_tokens += count_alternative_tokens(self.alternatives)
        if self.hidden is None or self.positions is None or n_tokens >= self.hidden.shape[1]:
            return self
        if not n_tokens:
            return replace(self, hidden=None, positions=None, mask=None)
        mask = None if self.mask is None else self.mask[:, -n_tokens:]
        hidden = self.hidden[:, -n_tokens:]
        positions = self.positions[:, -n_tokens:]
        return replace(self, hidden=hidden, positions=positions, mask=mask)


# What one sender keeps, in the order in which it was sent:
#
#     merged: one slab [b, n_tokens, d]             settled, and separate ops
#     +---------------------------------------+     +----+ +----+ | +----+ +----+
#     | all up to ``base_seq``, edits applied | <-- | op | | op | | | op | | op | <-- add
#     +---------------------------------------+     +----+ +----+ | +----+ +----+
#                                                            settle(seq)
#
# An op is merged once it is settled: its answer has reached the client, so no repair will undo it. A successor that
# knows nothing gets the slab and then the ops; one that is up to op ``seq`` gets only the ops after it. In the exact
# grade nothing is merged: a successor must compute in the same portions, since sums in another order round otherwise.
# Absent tokens are at the end, if there are any: they are cropped before tokens are put behind them.
#
# To copy one token into the slab takes as long as to copy sixteen. So settled steps wait, until there are enough or
# somebody looks. Longer ops are merged at once: only the slab is in the budget.
class History:
    """The ops that one sender sent in one session."""

    def __init__(self, is_exact: bool, budget: Budget) -> None:
        self.is_exact = is_exact
        self.recent_tokens = 0  # of separate ops
        self.recent_edits = 0
        self._slab = _Slab(budget)
        self._settled: list[SentOp] = []
        self._recent: list[SentOp] = []

    def merge(self) -> _Slab:
        """Merge all that is settled; returns it, as the successor's caches have it."""
        settled = self._settled
        self._settled = []
        self._slab.apply(settled)
        return self._slab

    @property
    def base_seq(self) -> int:
        """The last op that is merged."""
        return self.merge().base_seq

    @property
    def n_tokens(self) -> int:
        """Tokens of each row that are merged."""
        return self.merge().n_tokens

    def add(self, sent: SentOp) -> None:
        """Add the newest op."""
        self._recent.append(sent)
        self.recent_tokens += sent.n_tokens
        self.recent_edits += count_changes(sent.edits, sent.hidden is not None)

    def settle(self, seq: int) -> None:
        """Merge what is settled up to ``seq``; the exact grade keeps everything apart."""
        while not self.is_exact and self._recent and self._recent[0].seq <= seq:
            settled = self._recent.pop(0)
            self.recent_tokens -= settled.n_tokens
            self.recent_edits -= count_changes(settled.edits, settled.hidden is not None)
            is_step = settled.n_kept <= 1
            self._settled.append(settled.alone() if is_step else settled)
            if not is_step or len(self._settled) >= _MERGED_STEPS:
                self.merge()

    def forget_void(self, first: int, last: int) -> None:
        """Keep no tokens of ops ``first`` to ``last``: they are absent for whoever is sent them from now on."""
        self._recent = [sent.without_tokens() if first <= sent.seq <= last else sent for sent in self._recent]

    def after(self, seq: int) -> Iterator[SentOp]:
        """Return the separate ops after ``seq``, in order."""
        return (sent for sent in self._recent if sent.seq > seq)

    def base(self, max_tokens: int) -> Iterator[tuple[int, int, SentOp]]:
        """Yield the merged history in parts of at most ``max_tokens``: (part, parts, op)."""
        return self.merge().parts(max_tokens)

    def tokens(self, start: int, end: int) -> torch.Tensor:
        """Return hidden states [b, end - start, d] of tokens that no later edit has touched, as a copy."""
        return torch.cat([hidden for hidden, _ in self._parts(start, end)], 1)

    def placed(
        self,
        start: int,
        end: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the same with their positions [b, end - start]; fewer where there are fewer. Raises LookupError.

        Crops that are not merged yet count; after a reorder of rows that is not, nobody knows.
        """
        if any(edit.rows is not None for sent in self._recent for edit in sent.edits):
            raise LookupError("rows were reordered")
        parts = self._parts(start, min(end, self.n_kept))
        if not parts:
            raise LookupError(f"{self.n_kept} tokens are here")
        hidden = torch.cat([part_hidden for part_hidden, _ in parts], 1)
        positions = torch.cat([part_positions for _, part_positions in parts], 1)
        return hidden, positions

    @property
    def n_kept(self) -> int:
        """Tokens that no op has cropped, merged or not."""
        n_cropped = sum(count_cropped(sent.edits) for sent in self._recent)
        slab = self.merge()
        return slab.n_tokens + slab.n_absent + self.recent_tokens - n_cropped

    def _parts(
        self,
        start: int,
        end: int,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return hidden states and positions of live tokens ``start`` to ``end``, piece by piece."""
        slab = self.merge()
        parts = slab.kept()
        n_absent = slab.n_absent
        for sent in self._recent:
            n_cropped = count_cropped(sent.edits)
            _crop_parts(parts, max(0, n_cropped - n_absent))
            n_absent = max(0, n_absent - n_cropped) + sent.n_absent
            if (kept := sent.kept()) is not None:
                parts.append(kept[:2])
        windows = []
        offset = 0
        for hidden, positions in parts:
            window = slice(max(0, start - offset), max(0, end - offset))
            windows.append((hidden[:, window], positions[:, window]))
            offset += hidden.shape[1]
        return [part for part in windows if part[0].shape[1]] or windows[:1]

    def close(self) -> None:
        """Forget everything, and give back its memory."""
        self._slab.close()
        self._settled = []
        self._recent = []


class _Slab:
    """Ops that were merged: one growing tensor of each kind, with crops and reorders applied."""

    def __init__(self, budget: Budget) -> None:
        self.base_seq = 0
        self.n_tokens = 0
        self.n_absent = 0  # behind them
        self.record_past = False
        self._budget = budget
        self._hidden: torch.Tensor | None = None
        self._positions: torch.Tensor | None = None
        self._mask: torch.Tensor | None = None
        self._charged = 0

    def apply(self, ops: Sequence[SentOp]) -> None:
        """Apply ops as their receiver applied them to its caches; tokens that come one after the other at once."""
        for is_plain, group in itertools.groupby(ops, key=lambda sent: sent.is_plain):
            run = list(group)
            if is_plain:
                kept = [part for sent in run if (part := sent.kept()) is not None]
                hidden = torch.cat([part[0] for part in kept], 1)
                positions = torch.cat([part[1] for part in kept], 1)
                self._append_tokens(hidden, positions, None)
            else:
                for sent in run:
                    self._apply_op(sent)
            self.base_seq = run[-1].seq
            self.record_past |= any(sent.record_past for sent in run)

    def kept(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return hidden states and positions, if there are any."""
        if self._hidden is None or self._positions is None:
            return []
        return [(self._hidden[:, : self.n_tokens], self._positions[:, : self.n_tokens])]

    def parts(self, max_tokens: int) -> Iterator[tuple[int, int, SentOp]]:
        """See ``History.base``."""
        if self._hidden is None or self._positions is None or not self.n_tokens:
            return
        n_parts = -(-self.n_tokens // max_tokens)
        for part in range(n_parts):
            window = slice(part * max_tokens, min(self.n_tokens, (part + 1) * max_tokens))
            mask = None if self._mask is None else self._mask[:, window]
            op = SentOp(
                self.base_seq,
                edits=(),
                hidden=self._hidden[:, window],
                positions=self._positions[:, window],
                mask=mask,
                record_past=self.record_past,
                n_absent=self.n_absent if part + 1 == n_parts else 0,
            )
            yield part, n_parts, op

    def close(self) -> None:
        """Give back its memory."""
        self._budget.release(self._charged)
        self._charged = 0
        self._hidden = None
        self._positions = None
        self._mask = None

    def _apply_op(self, sent: SentOp) -> None:
        for edit in sent.edits:
            if edit.crop is not None:
                self.n_tokens -= max(0, edit.crop - self.n_absent)
                self.n_absent = max(0, self.n_absent - edit.crop)
            if edit.rows is not None:
                self._reorder_rows(torch.tensor(edit.rows))
        if (kept := sent.kept()) is not None:
            self._append_tokens(*kept)
        self.n_absent += sent.n_absent

    def _reorder_rows(self, rows: torch.Tensor) -> None:
        """Reorder the slabs' rows."""
        if torch.equal(rows, torch.arange(len(rows))):
            return
        for slab in (self._hidden, self._positions, self._mask):
            if slab is not None:
                slab[:, : self.n_tokens] = slab[rows, : self.n_tokens]

    def _append_tokens(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> None:
        b, t, d = hidden.shape
        self._reserve_room(b, self.n_tokens + t, d, hidden.dtype)
        assert self._hidden is not None
        assert self._positions is not None
        window = slice(self.n_tokens, self.n_tokens + t)
        self._hidden[:, window] = hidden
        self._positions[:, window] = positions
        if mask is not None and self._mask is None:
            self._mask = torch.ones(self._positions.shape, dtype=torch.uint8)
        if self._mask is not None:
            self._mask[:, window] = 1 if mask is None else mask
        self.n_tokens += t

    def _reserve_room(
        self,
        b: int,
        n_tokens: int,
        d: int,
        dtype: torch.dtype,
    ) -> None:
        """Have room for so many tokens in all; grown slabs are charged before the old ones are given back."""
        capacity = 0 if self._hidden is None else self._hidden.shape[1]
        if n_tokens <= capacity:
            return
        capacity = max(_FIRST_TOKENS, 2 * capacity, n_tokens)
        used_before = self._budget.used_bytes
        hidden = self._budget.allocate((b, capacity, d), dtype)
        positions = torch.empty((b, capacity), dtype=torch.int32)
        mask = None if self._mask is None else torch.ones((b, capacity), dtype=torch.uint8)
        if self._hidden is not None and self._positions is not None:
            hidden[:, : self.n_tokens] = self._hidden[:, : self.n_tokens]
            positions[:, : self.n_tokens] = self._positions[:, : self.n_tokens]
        if mask is not None and self._mask is not None:
            mask[:, : self.n_tokens] = self._mask[:, : self.n_tokens]
        charged = self._budget.used_bytes - used_before
        self._budget.release(self._charged)
        self._charged = charged
        self._hidden = hidden
        self._positions = positions
        self._mask = mask


def _crop_parts(
    parts: list[tuple[torch.Tensor, torch.Tensor]],
    n_tokens: int,
) -> None:
    """Drop the last ``n_tokens`` of each row."""
    while n_tokens and parts:
        hidden, positions = parts.pop()
        n_remaining = max(0, hidden.shape[1] - n_tokens)
        n_tokens -= hidden.shape[1] - n_remaining
        if n_remaining:
            parts.append((hidden[:, :n_remaining], positions[:, :n_remaining]))
