"""What blocks of a model take in memory, before anything is loaded. Pure arithmetic over shapes."""

from __future__ import annotations

import json
import math
import re
from collections import Counter

from swarmd.protocol.models.configuration import PACKED
from swarmd.protocol.models.manifest import Manifest, entry_groups, plain_tensors
from swarmd.protocol.wire.tensors import ITEM_BYTES

WORKSPACE_BYTES = 256 * 2**20  # what torch takes for a pass beside weights and caches
SHARE_OF_FREE = 0.5  # for weights, where a server chooses by itself: the rest is for caches, history and others
SHARE_OF_CARD = 0.8  # for weights, of a card's own memory: history is not there, nor are others
CARD_BYTES = 2**30  # of a card, that its driver, libraries, graphs and the largest pass take beside weights and caches
QUANTIZED_BITS = {"int8": 8.25, "int4": 5.0, "nf4": 4.5}  # a weight with its share of the scales


INT4_GROUP = 32  # weights of a row; a matrix whose width is no multiple of it gets 8 bits (compute/linear/formats.py)
INT8_GROUP = 16  # numbers of a row that torch's kernel of 8 bits reads together: others are not for it
INT4_ROWS = 16  # that torch's kernel takes together; the same of a matrix's height
EXPERT = re.compile(r"\.experts\.\d+\.")
"""In the name of a single expert's weight: transformers makes one tensor of all of a block."""
EXPERTS_OF_THEIR_OWN = ("jetmoe", "llama4", "llama4_text", "longcat_flash", "step3p7", "step3p7_text")
"""Families whose experts transformers computes in no common way: they stay as they are."""
OF_EXPERTS = ("int8", "int4")  # which shrink them: on a CPU only, bitsandbytes' nf4 passes them over
LAYERS_OF_THEIR_OWN = {"falcon": ("int8", "int4", "nf4"), "gpt2": ("int8", "int4")}
"""Families whose matrices lie in other layers than torch's linear ones, and what does not shrink these."""


def tensor_bytes(shape: tuple[int, ...], dtype: str, quantize: str = "none") -> int:
    """Bytes of one tensor once loaded, rounded to so many bits."""
    n_items = math.prod(shape)
    if quantize != "none":
        return int(n_items * QUANTIZED_BITS[quantize] / 8)
    return n_items * ITEM_BYTES[dtype]


def loaded_bits(name: str, shape: tuple[int, ...], quantize: str, family: str, shrinks_experts: bool = True) -> str:
    """Say in which bits a tensor of a block is kept, if the block is quantised: its matrices shrink, nothing else."""
    is_set = len(shape) == 3  # of experts
    is_matrix = is_set or (len(shape) == 2 and name.endswith(".weight"))
    can_shrink = shrinks_experts and quantize in OF_EXPERTS and family not in EXPERTS_OF_THEIR_OWN
    stays = (is_set or EXPERT.search(name)) and not can_shrink
    if not is_matrix or stays or quantize in LAYERS_OF_THEIR_OWN.get(family, ()):
        return "none"
    n_out, n_in = shape[-2:]
    if n_in % INT8_GROUP:
        return "none"
    return "int8" if quantize == "int4" and (n_in % INT4_GROUP or n_out % INT4_ROWS) else quantize


def group_bytes(
    manifest: Manifest,
    dtype: str,
    quantize: str = "none",
    shrinks_experts: bool = True,
) -> tuple[list[int], int]:
    """Bytes of each block once loaded, and of what is around them, which is never quantised. GGUF keeps its bits.

    What is quantised in its files is counted as it is loaded: plain, or in the bits asked for; experts in few bits are
    for CPUs (``shrinks_experts``).
    """
    family = family_of(manifest)
    n_bytes: Counter[int | None] = Counter()
    groups = dict(zip((entry.name for entry in manifest.entries), entry_groups(manifest), strict=True))
    if family == PACKED:
        for entry in manifest.entries:
            n_bytes[groups[entry.name]] += entry.n_bytes
    else:
        for file in manifest.files:
            n_bytes[groups[file.name]] += file.n_bytes
        for tensor in plain_tensors(manifest):
            group = groups[tensor.parts.get("weight", tensor.name)]
            is_block = group != manifest.n_blocks
            shape = tensor.shape
            if "state" in tensor.parts:  # only that says its shape: as wide as models are, by multiples of 32
                shape = (INT4_ROWS, shape[0] // INT4_ROWS)
            bits = "none"
            if is_block:
                bits = loaded_bits(tensor.name, shape, quantize, family, shrinks_experts)
            n_bytes[group] += tensor_bytes(tensor.shape, dtype, bits)
    return [n_bytes[block] for block in range(manifest.n_blocks)], n_bytes[manifest.n_blocks]


def family_of(manifest: Manifest) -> str:
    """The ``model_type`` of a model's configuration."""
    return str(json.loads(manifest.config).get("model_type"))


def blocks_that_fit(free_bytes: int, blocks: list[int]) -> int:
    """How many blocks a server takes that may choose: as many as fit beside a pass, and one at least."""
    return _n_blocks(min(int(free_bytes * SHARE_OF_FREE), free_bytes - WORKSPACE_BYTES), blocks)


def blocks_that_fit_card(free_bytes: int, blocks: list[int], plain_block_bytes: int = 0) -> int:
    """How many blocks a server takes on a card with so much free memory of its own, one at least.

    ``plain_block_bytes``: what one takes as it comes, before it is rounded to its few bits there.
    """
    return _n_blocks(min(int(free_bytes * SHARE_OF_CARD), free_bytes - CARD_BYTES - plain_block_bytes), blocks)


def tokens_that_fit(free_bytes: int, token_bytes: int) -> int:
    """How many tokens half of a memory holds, once the blocks are in it."""
    return free_bytes // 2 // max(1, token_bytes)


def _n_blocks(room_bytes: int, blocks: list[int]) -> int:
    return max(1, min(len(blocks), room_bytes // max(1, *blocks)))
