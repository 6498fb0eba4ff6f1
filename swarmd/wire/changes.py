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

MOST_BYTES = 64 * 2**20  # of rows that are remembered at each end, in each direction: the first that come
ID_BYTES = 8  # of a row's name


class Changes:
    """See the module. Values are [t, d] for each row, on the CPU; whoever adds them up does it alike at both ends."""

    def __init__(self) -> None:
        self.n_bytes = 0
        self._kept: dict[bytes, tuple[int, torch.Tensor]] = {}

    def before(
        self, rows: tuple[MicroBatchRow, ...], hidden: torch.Tensor
    ) -> tuple[tuple[MicroBatchRow, ...], torch.Tensor]:
        """The rows of hidden [b, t, d] with how often each was sent before, and what the receiver then came to."""
        found = tuple(MicroBatchRow(row.id, self._times(row.id, hidden)) for row in rows)
        return found, self._base(found, hidden)

    def take(self, rows: tuple[MicroBatchRow, ...], change: torch.Tensor) -> torch.Tensor:
        """What a change [b, t, d] that was received comes to. Raises Refused when those rows are not known so."""
        if len(rows) != len(change) or any(row.times != self._times(row.id, change) for row in rows if row.times):
            raise Refused(Code.NOT_HELD, "a change of rows that are not remembered here: send them whole")
        values = self._base(rows, change) + change
        self.note(rows, values)
        return values

    def note(self, rows: tuple[MicroBatchRow, ...], values: torch.Tensor) -> None:
        """The receiver has come to these values [b, t, d]; what is not finite is nothing to go on from."""
        if not torch.isfinite(values).all():
            return
        for row, value in zip(rows, values, strict=True):
            previous = self._kept.get(row.id)
            growth = value.numel() * value.element_size() - (_bytes(previous[1]) if previous is not None else 0)
            if self.n_bytes + growth <= MOST_BYTES:
                self._kept[row.id] = row.times + 1, value.clone()
                self.n_bytes += growth
            elif previous is not None:
                del self._kept[row.id]
                self.n_bytes -= _bytes(previous[1])

    def _times(self, row: bytes, hidden: torch.Tensor) -> int:
        times, value = self._kept.get(row, (0, None))
        return times if value is not None and value.shape == hidden.shape[1:] and value.dtype == hidden.dtype else 0

    def _base(self, rows: tuple[MicroBatchRow, ...], hidden: torch.Tensor) -> torch.Tensor:
        nothing = torch.zeros(hidden.shape[1:], dtype=hidden.dtype)
        return torch.stack([self._kept[row.id][1] if row.times else nothing for row in rows])


def rows_of(hidden: torch.Tensor, mask: torch.Tensor | None) -> tuple[MicroBatchRow, ...]:
    """A name for each row of what enters the first block: by its second half, which no soft prompt changes.

    ``mask`` [b, t] says where there is something, if rows are padded.
    """
    rows = []
    for i, row in enumerate(hidden.detach().cpu()):
        tokens = row if mask is None else row[mask[i].bool().cpu()]
        half = tokens[len(tokens) // 2 :].contiguous().view(torch.uint8)
        rows.append(MicroBatchRow(hashlib.blake2b(half.numpy().tobytes(), digest_size=ID_BYTES).digest()))
    return tuple(rows)


def _bytes(values: torch.Tensor) -> int:
    return values.numel() * values.element_size()
