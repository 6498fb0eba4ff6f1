"""Rows of hidden states as changes against what was sent of the same row before: AQ-SGD (Wang et al. 2022, 2206.01299).

Where a data set is gone through more than once, a row's activations change little from one time to the next, and a
change that is small is rounded by little. Both ends of a link remember what the receiver has come to of each row; the
numbers of rows and times agree, or the receiver says so. One end, one direction; in memory, and bounded.
"""

from __future__ import annotations

import hashlib

import torch

from swarmd.errors import Code, Refused
from swarmd.protocol.wire.tuning import MicroBatchRow
from swarmd.wire.tensors import is_finite

MOST_BYTES = 64 * 2**20  # of rows that are remembered at each end, in each direction: the first that come
ID_BYTES = 8  # of a row's name


# Both ends of one direction of a link, for one row, at its n-th time:
#
#     sender                                       receiver
#     base = what the receiver came to, time n-1   base = the same
#     change = hidden - base, coded  ------------> values = base + change
#     notes base + the change as it was coded      notes values
#
# Invariant: both note the same bits. So the sender adds what the receiver decodes, not what it meant to send: errors of
# the coding do not add up. Whether both know the same of a row is seen by ``times``, which travels with the row; after
# a disagreement the receiver refuses, and the row is sent whole. Rows that find no room are not remembered, at either
# end: what fits is decided by sizes alone, which both see.
class Changes:
    """See the module. Values are [t, d] for each row, on the CPU, and are added up alike at both ends."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._known: dict[bytes, tuple[int, torch.Tensor]] = {}  # times that a row was sent, what it came to

    def before(
        self, rows: tuple[MicroBatchRow, ...], hidden: torch.Tensor
    ) -> tuple[tuple[MicroBatchRow, ...], torch.Tensor]:
        """Return the rows of hidden [b, t, d] with how often each was sent, and what the receiver then came to."""
        counted = tuple(MicroBatchRow(row.id, self._times(row.id, hidden)) for row in rows)
        return counted, self._base(counted, hidden)

    def take(
        self,
        rows: tuple[MicroBatchRow, ...],
        change: torch.Tensor,
    ) -> torch.Tensor:
        """Return what a received change [b, t, d] comes to. Raises Refused when those rows are not known so."""
        repeated = [row for row in rows if row.times]
        is_known = len(rows) == len(change)
        is_known = is_known and all(row.times == self._times(row.id, change) for row in repeated)
        if not is_known:
            raise Refused(Code.NOT_HELD, "a change of rows that are not remembered here: send them whole")
        values = self._base(rows, change) + change
        self.note(rows, values)
        return values

    def note(
        self,
        rows: tuple[MicroBatchRow, ...],
        values: torch.Tensor,
    ) -> None:
        """Remember that the receiver has come to these values [b, t, d]; what is not finite is not remembered."""
        if not is_finite(values):
            return
        for row, value in zip(rows, values, strict=True):
            previous = self._known.get(row.id)
            previous_bytes = _n_bytes(previous[1]) if previous is not None else 0
            growth = _n_bytes(value) - previous_bytes
            if self.n_bytes + growth <= MOST_BYTES:
                self._known[row.id] = (row.times + 1, value.clone())
                self.n_bytes += growth
            elif previous is not None:
                del self._known[row.id]
                self.n_bytes -= previous_bytes

    def _times(self, row: bytes, hidden: torch.Tensor) -> int:
        """Return how often a row of this shape and dtype was sent."""
        times, value = self._known.get(row, (0, None))
        if value is None or value.shape != hidden.shape[1:] or value.dtype != hidden.dtype:
            return 0
        return times

    def _base(
        self,
        rows: tuple[MicroBatchRow, ...],
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        """Return what changes are counted from, [b, t, d]: zeros for a row that is sent for the first time."""
        nothing = torch.zeros(hidden.shape[1:], dtype=hidden.dtype)
        return torch.stack([self._known[row.id][1] if row.times else nothing for row in rows])


def rows_of(hidden: torch.Tensor, mask: torch.Tensor | None) -> tuple[MicroBatchRow, ...]:
    """Name each row of what enters the first block: by its second half, which no soft prompt changes.

    ``mask`` [b, t] says where there is something, if rows are padded.
    """
    rows = []
    for i, row in enumerate(hidden.detach().cpu()):
        tokens = row if mask is None else row[mask[i].bool().cpu()]
        half = tokens[len(tokens) // 2 :].contiguous().view(torch.uint8)
        digest = hashlib.blake2b(half.numpy().tobytes(), digest_size=ID_BYTES).digest()
        rows.append(MicroBatchRow(digest))
    return tuple(rows)


def _n_bytes(values: torch.Tensor) -> int:
    return values.numel() * values.element_size()
