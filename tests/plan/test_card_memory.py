"""How many blocks a card takes: as many as fit beside a pass and caches, whatever their kind and bits."""

from __future__ import annotations

import pytest

from swarmd.plan.chains.memory import (
    CARD_BYTES,
    SHARE_OF_CARD,
    blocks_that_fit_card,
    loaded_bits,
    tensor_bytes,
    tokens_that_fit,
)

Shapes = dict[str, tuple[int, ...]]


def attention(width: int, of_keys: int) -> Shapes:
    wide, narrow = (width, width), (of_keys, width)
    return {"q_proj.weight": wide, "k_proj.weight": narrow, "v_proj.weight": narrow, "o_proj.weight": wide}


DENSE = attention(4_096, 1_024) | {
    **{"up_proj.weight": (14_336, 4_096), "gate_proj.weight": (14_336, 4_096), "down_proj.weight": (4_096, 14_336)},
    "input_layernorm.weight": (4_096,),
}
EXPERTS = attention(2_048, 512) | {
    **{"experts.gate_up_proj": (128, 1_536, 2_048), "experts.down_proj": (128, 2_048, 768)},
    "gate.weight": (128, 2_048),
}
KINDS = {"llama": (DENSE, 32), "qwen3_moe": (EXPERTS, 48)}


def block_bytes(family: str, quantize: str) -> int:
    shapes, _ = KINDS[family]
    bits = {name: loaded_bits(name, shape, quantize, family, shrinks_experts=False) for name, shape in shapes.items()}
    return sum(tensor_bytes(shape, "bfloat16", bits[name]) for name, shape in shapes.items())


@pytest.mark.parametrize("quantize", ["none", "int8", "int4", "nf4"])
@pytest.mark.parametrize("family", list(KINDS))
@pytest.mark.parametrize("card_gb", [8, 12, 16, 24])
def test_as_many_blocks_as_fit_and_no_more(card_gb: int, family: str, quantize: str) -> None:
    free = card_gb * 10**9 - 300 * 2**20  # a desktop is shown, too
    block, plain = block_bytes(family, quantize), block_bytes(family, "none") if quantize != "none" else 0
    n_blocks = KINDS[family][1]
    n = blocks_that_fit_card(free, [block] * n_blocks, plain)
    assert n * block + plain + CARD_BYTES <= free, "the last one is loaded, too, before it is rounded"
    assert n * block <= SHARE_OF_CARD * free, "caches have some room"
    is_full = (n + 1) * block + plain + CARD_BYTES > free or (n + 1) * block > SHARE_OF_CARD * free
    assert n == n_blocks or is_full
    assert n > (0.55 if card_gb > 8 else 0.4) * free / block or n == n_blocks


def test_an_8b_of_16_bits_takes_one_card_of_24_gb_or_two_of_12() -> None:
    block = block_bytes("llama", "none")
    assert blocks_that_fit_card(23 * 10**9, [block] * 32) == 32
    assert 2 * blocks_that_fit_card(11_700 * 10**6, [block] * 32) >= 32
    assert blocks_that_fit_card(7_700 * 10**6, [block_bytes("llama", "int4")] * 32, block) == 32


def test_one_block_at_least_is_tried() -> None:
    assert blocks_that_fit_card(0, [1 << 30] * 8, 1 << 30) == 1


def test_caches_have_half_of_what_is_left() -> None:
    assert tokens_that_fit(1 << 20, 64) == 8_192
    assert tokens_that_fit(1 << 20, 0) == 1 << 19, "a span without caches"
