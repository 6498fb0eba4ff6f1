"""Attention in two parts: over a beginning that all queries see whole, and over what is behind it.

Both are merged by their log-sums (Hydragen, Juravsky et al. 2024, section 3.2; the merge is that of FlashAttention). A
beginning that several sessions share is read once for all of them, and no mask is made for it: for long prompts, most
of whose keys every new token sees, that is half of the time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

Kept = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [b, heads, n, d]."""


class AttentionRow(NamedTuple):
    """One session: queries [b, h, t, d], the beginning, what is behind it, and a mask [1, 1, t, n] for that or None."""

    query: torch.Tensor
    beginning: Kept
    own: Kept
    mask: torch.Tensor | None


def attend(rows: list[AttentionRow], scale: float | None) -> list[torch.Tensor]:
    """Attention of each session, [b, t, h, d]. Only on CPUs, whose kernel tells the log-sums at any batch."""
    by_prefix: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        keys = row.beginning[0]
        by_prefix[keys.data_ptr(), keys.shape[2]].append(index)
    packed = [_packed(row) for row in rows]
    outs: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    for indices in by_prefix.values():
        queries = torch.cat([packed[i] for i in indices], 2) if len(indices) > 1 else packed[indices[0]]
        first, first_log = _attend(queries, rows[indices[0]].beginning, None, scale)
        start = 0
        for i in indices:
            end = start + packed[i].shape[2]
            outs[i] = _merged(rows[i], packed[i], first[:, :, start:end], first_log[:, :, start:end], scale)
            start = end
    return outs


def _packed(row: AttentionRow) -> torch.Tensor:
    """Heads that share keys as further queries: [b, kv heads, groups * t, d]."""
    b, h, t, d = row.query.shape
    heads = row.own[0].shape[1]
    return row.query.reshape(b, heads, h // heads * t, d)


def _merged(
    row: AttentionRow, packed: torch.Tensor, first: torch.Tensor, first_log: torch.Tensor, scale: float | None
) -> torch.Tensor:
    mask = None
    if row.mask is not None:
        mask = torch.zeros_like(row.mask, dtype=packed.dtype).masked_fill_(~row.mask, -torch.inf)
        mask = mask.repeat(1, 1, packed.shape[2] // row.query.shape[2], 1)
    second, second_log = _attend(packed, row.own, mask, scale)
    share = torch.sigmoid(first_log - second_log).unsqueeze(-1).to(first.dtype)
    return torch.lerp(second, first, share).view(row.query.shape).transpose(1, 2).contiguous()


def _attend(
    query: torch.Tensor, keys_and_values: Kept, mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The mix of values [b, heads, n, d], and the log of the sum of its weights [b, heads, n]."""
    out: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, *keys_and_values, attn_mask=mask, scale=scale
    )
    return out
