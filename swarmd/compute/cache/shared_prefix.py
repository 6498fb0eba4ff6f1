"""Attention in two parts: over a prefix that all queries see whole, and over what is behind it.

Both are merged by their log-sums (Hydragen, Juravsky et al. 2024, section 3.2; the merge is that of FlashAttention). A
prefix that several sessions share is read once for all of them, and no mask is made for it: for long prompts, most
of whose keys every new token sees, that is half of the time.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Keys and values [b, heads, n, d]."""


# One query's attention over all keys is a mix of values, weighted by exp(score); it can be computed in two parts:
#
#     out  = (sum1 * out1 + sum2 * out2) / (sum1 + sum2)        sumN = the sum of exp(score) over part N's keys
#          = lerp(out2, out1, share)                            share = sum1 / (sum1 + sum2)
#                                                                     = sigmoid(log sum1 - log sum2)
#
# The kernel returns the logs, which do not overflow. Part 1, the shared prefix, needs no mask: every query sees all of
# it. So the queries of all sessions that begin alike are put together as if they were rows of one, and the prefix is
# read from memory once for all of them, which is what attention of single tokens takes its time for.
class AttentionRow(NamedTuple):
    """One session: queries [b, h, t, d], the prefix, what is behind it, and a mask [1, 1, t, n] for that or None."""

    query: torch.Tensor
    prefix: KeysAndValues
    suffix: KeysAndValues
    mask: torch.Tensor | None


def attend(rows: list[AttentionRow], scale: float | None) -> list[torch.Tensor]:
    """Compute attention of each session, [b, t, h, d]. Only on CPUs, whose kernel tells the log-sums at any batch."""
    by_prefix: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        keys = row.prefix[0]
        by_prefix[keys.data_ptr(), keys.shape[2]].append(index)
    packed = [_pack_heads(row) for row in rows]
    outs: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    for indices in by_prefix.values():
        queries = packed[indices[0]]
        if len(indices) > 1:
            queries = torch.cat([packed[i] for i in indices], 2)
        first, first_log = _attend(
            queries,
            rows[indices[0]].prefix,
            None,
            scale,
        )
        start = 0
        for i in indices:
            end = start + packed[i].shape[2]
            first_part = first[:, :, start:end]
            log_part = first_log[:, :, start:end]
            outs[i] = _merge(
                rows[i],
                packed[i],
                first_part,
                log_part,
                scale,
            )
            start = end
    return outs


def _pack_heads(row: AttentionRow) -> torch.Tensor:
    """Return heads that share keys as further queries: [b, kv heads, groups * t, d]."""
    b, h, t, d = row.query.shape
    heads = row.suffix[0].shape[1]
    return row.query.reshape(b, heads, h // heads * t, d)


def _merge(
    row: AttentionRow,
    packed: torch.Tensor,
    first: torch.Tensor,
    first_log: torch.Tensor,
    scale: float | None,
) -> torch.Tensor:
    """Compute attention over the suffix and merge it with ``first``, that over the prefix: [b, t, h, d]."""
    mask = None
    if row.mask is not None:
        groups = packed.shape[2] // row.query.shape[2]
        mask = torch.zeros_like(row.mask, dtype=packed.dtype)
        mask = mask.masked_fill_(~row.mask, -torch.inf).repeat(
            1,
            1,
            groups,
            1,
        )
    second, second_log = _attend(packed, row.suffix, mask, scale)
    share = torch.sigmoid(first_log - second_log).unsqueeze(-1).to(first.dtype)
    merged = torch.lerp(second, first, share)
    return merged.view(row.query.shape).transpose(1, 2).contiguous()


def _attend(
    query: torch.Tensor,
    keys_and_values: KeysAndValues,
    mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the mix of values [b, heads, n, d], and the log of the sum of its weights [b, heads, n]."""
    keys, values = keys_and_values
    out: tuple[torch.Tensor, torch.Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, keys, values, attn_mask=mask, scale=scale
    )
    return out
