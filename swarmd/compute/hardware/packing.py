"""How torch packs weights of 4 bits on this CPU: it depends on how wide a register is."""

from __future__ import annotations

import functools

import torch

DEFAULT_ROWS = 32  # that compiled code reads together where torch packs in another way: it is not taken there


@functools.cache
def packed_rows() -> int:
    """How many rows of 4 bits torch packs beside each other, byte by byte row i and row i + half; 0: in another way."""
    rows = torch.randint(16, (64, 32), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    pairs = torch._convert_weight_to_int4pack_for_cpu(rows, 1)
    for n in (64, 32):  # where a register holds 16 numbers, or 8
        halves = pairs.view(-1, 32, n // 2)
        if torch.equal(torch.cat([halves & 15, halves >> 4], 2).transpose(1, 2).reshape(64, 32), rows.byte()):
            return n
    return 0


def rows_together() -> int:
    """How many rows of 4 bits compiled code reads at a time."""
    return packed_rows() or DEFAULT_ROWS
