"""How torch packs weights of 4 bits on this CPU: it depends on how wide a register is."""

from __future__ import annotations

import functools

import torch

DEFAULT_ROWS = 32  # that compiled code reads together where torch packs in another way: it is not taken there


@functools.cache
def packed_rows() -> int:
    """Find out how many rows of 4 bits torch packs beside each other (``compiled.layout``); 0: it packs otherwise.

    torch does not say it, so that random rows are packed, unpacked for each layout, and compared.
    """
    rng = torch.Generator().manual_seed(0)
    rows = torch.randint(16, (64, 32), dtype=torch.int32, generator=rng)
    pairs = torch._convert_weight_to_int4pack_for_cpu(rows, 1)
    for n in (64, 32):  # where a register holds 16 numbers, or 8
        halves = pairs.view(-1, 32, n // 2)
        by_columns = torch.cat([halves & 15, halves >> 4], 2)
        unpacked = by_columns.transpose(1, 2).reshape(64, 32)
        if torch.equal(unpacked, rows.byte()):
            return n
    return 0


def rows_together() -> int:
    """Return how many rows of 4 bits compiled code reads at a time."""
    return packed_rows() or DEFAULT_ROWS
