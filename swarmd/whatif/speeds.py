"""How fast a machine computes a model's blocks, and how many fit, from its data sheet or from what was measured.

A decode pass reads the weights once, whatever is in it, and computes each row: ``block_s + n * row_s``. What share of
the data sheet's figures is reached: measured on cards and processors of all kinds (docs/what-if.md, "Speeds").
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmd.plan.chains.memory import SHARE_OF_CARD, SHARE_OF_FREE, blocks_that_fit, blocks_that_fit_card
from swarmd.values import Span
from swarmd.whatif.scenario import MachineKind, ServedModel

READ_SHARE = 0.6  # of memory bandwidth that decoding reaches: 0.5 to 0.75 on cards and processors
DECODE_SHARE = 0.2  # of arithmetic that rows of a decode pass reach
PREFILL_SHARE_OF_PEAK = 0.4  # of arithmetic that prompts reach: 0.3 to 0.5
BATCHES = (4, 16, 64)  # sessions in one pass, of which a server announces its tokens/s
CACHE_BITS = 16  # of each number in a cache


@dataclass(frozen=True, slots=True)
class BlockSpeed:
    """Seconds of one block: of a decode pass, of each of its rows, of a prompt's token."""

    block_s: float
    row_s: float
    prefill_s: float

    def pass_s(self, n_blocks: float, n_rows: float) -> float:
        """Seconds of a pass of so many rows through so many blocks."""
        return n_blocks * (self.block_s + self.row_s * max(0.0, n_rows - 1))

    def tokens_per_s(self, span: Span, n_rows: int = 1) -> float:
        """What a server announces: all rows together, with as many in each pass."""
        return n_rows / self.pass_s(len(span), n_rows)


def block_speed(kind: MachineKind, model: ServedModel) -> BlockSpeed:
    """How fast machines of a kind compute one block of a model."""
    n_bytes = block_bytes(model)
    flops = 2 * model.block_parameters
    row_s = kind.row_ms / 1e3
    prefill_s = kind.prefill_ms / 1e3 or row_s
    if kind.tflops:
        row_s = row_s or flops / (DECODE_SHARE * kind.tflops * 1e12)
        prefill_s = kind.prefill_ms / 1e3 or flops / (PREFILL_SHARE_OF_PEAK * kind.tflops * 1e12)
    block_s = kind.block_ms / 1e3
    if not block_s:
        block_s = n_bytes / (READ_SHARE * kind.memory_gb_per_s * 1e9) + row_s
    return BlockSpeed(block_s, row_s, prefill_s or block_s)


def block_bytes(model: ServedModel) -> int:
    """Bytes of a block once loaded."""
    return int(model.block_parameters * model.bits / 8)


def count_fitting(kind: MachineKind, model: ServedModel) -> int:
    """How many blocks such a machine takes, as a server that chooses by itself; 0: not even one fits."""
    free_bytes = int(kind.memory_gb * 1e9)
    if block_bytes(model) > (SHARE_OF_CARD if kind.is_card else SHARE_OF_FREE) * free_bytes:
        return 0
    count = blocks_that_fit_card if kind.is_card else blocks_that_fit
    return count(free_bytes, [block_bytes(model)] * model.blocks)


def count_cache_tokens(kind: MachineKind, model: ServedModel, span: Span, most_tokens: int) -> int:
    """How many tokens of cache a server has for sessions beside its blocks."""
    free_bytes = kind.memory_gb * 1e9 - len(span) * block_bytes(model)
    token_bytes = len(span) * model.cache_numbers * CACHE_BITS / 8
    return max(0, min(most_tokens, int(free_bytes / 2 / token_bytes)))
