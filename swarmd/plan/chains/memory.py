"""What blocks of a model take in memory, before anything is loaded. Pure arithmetic over shapes."""

from __future__ import annotations

import math
from collections import Counter

from swarmd.protocol.models.manifest import Manifest, entry_groups
from swarmd.protocol.wire.tensors import ITEM_BYTES

WORKSPACE_BYTES = 256 * 2**20  # what torch takes for a pass beside weights and caches
SHARE_OF_FREE = 0.5  # for weights, where a server chooses by itself: the rest is for caches, history and others
QUANTIZED_BITS = {"int8": 8.25, "int4": 5.0, "nf4": 4.5}  # a weight with its share of the scales


def tensor_bytes(shape: tuple[int, ...], dtype: str, quantize: str = "none") -> int:
    """Bytes of one tensor once loaded; of quantised blocks the matrices shrink, nothing else."""
    n_items = math.prod(shape)
    if quantize != "none" and len(shape) == 2:
        return int(n_items * QUANTIZED_BITS[quantize] / 8)
    return n_items * ITEM_BYTES[dtype]


def group_bytes(
    manifest: Manifest,
    dtype: str,
    quantize: str = "none",
) -> tuple[list[int], int]:
    """Bytes of each block once loaded, and of what is around them, which is never quantised."""
    n_bytes: Counter[int | None] = Counter()
    for entry, group in zip(manifest.entries, entry_groups(manifest), strict=True):
        is_block = group != manifest.n_blocks
        n_bytes[group] += tensor_bytes(entry.shape, dtype, quantize if is_block else "none")
    return [n_bytes[block] for block in range(manifest.n_blocks)], n_bytes[manifest.n_blocks]


def blocks_that_fit(free_bytes: int, blocks: list[int]) -> int:
    """How many blocks a server takes that may choose: as many as fit beside a pass, and one at least."""
    room_bytes = min(int(free_bytes * SHARE_OF_FREE), free_bytes - WORKSPACE_BYTES)
    n_fit = room_bytes // max(1, *blocks)
    return max(1, min(len(blocks), n_fit))
