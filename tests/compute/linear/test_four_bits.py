"""Weights that came from 4 bits get their levels again; others the 16 between their ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize

from swarmd.compute.compiled.layout import GROUP, LEVEL_OF_ZERO
from swarmd.compute.linear.four_bits import quantise_to_4_bits
from swarmd.compute.linear.quantize import relative_error

OUT, IN = 48, 512
BFLOAT16 = 2.0**-8  # what scales and zeros lose, at most


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((OUT, IN), np.float32) * np.float32(0.05)


def of_q4_k(seed: int = 0) -> np.ndarray:
    """Blocks of Q4_K as any encoder may write them: levels seldom reach both ends. (ggml-common.h, block_q4_K.)"""
    rng = np.random.default_rng(seed)
    blocks = np.zeros((OUT * IN // 256, 144), np.uint8)
    blocks[:, 0:4] = rng.uniform(0.001, 0.002, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    blocks[:, 4:16] = rng.integers(0, 256, (len(blocks), 12))
    blocks[:, 4:16] |= 8  # no scale of nothing
    levels = np.clip(rng.normal(7.5, 2.5, (len(blocks), 8, GROUP)).round(), 0, 15).astype(np.uint8)
    pairs = levels.reshape(-1, 4, 2, GROUP)
    blocks[:, 16:] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    found: np.ndarray = dequantize(blocks.reshape(OUT, -1), GGMLQuantizationType.Q4_K)
    return found


def numbers(levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    scales, zeros = (of.float().repeat_interleave(GROUP, 1) for of in (scales, zeros))
    return (levels.float() - LEVEL_OF_ZERO) * scales + zeros


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_blocks_of_gguf_keep_their_levels(kind: str, stored: torch.dtype) -> None:
    form = GGMLQuantizationType[kind]
    whole = of_q4_k() if kind == "Q4_K" else dequantize(quantize(weights(), form), form)
    weight = torch.from_numpy(np.ascontiguousarray(whole)).to(stored)
    levels, scales, zeros = quantise_to_4_bits(weight)
    assert relative_error(numbers(levels, scales, zeros), weight.float()) < BFLOAT16
    groups, steps = weight.float().view(OUT, -1, GROUP), levels.view(OUT, -1, GROUP)
    distinct = [[len(row.unique()) for row in of.flatten(0, 1)] for of in (groups, steps)]
    assert distinct[0] == distinct[1], "nothing that differed is the same now, nothing that was the same differs"


@pytest.mark.parametrize("n_levels", range(2, 17))
def test_however_few_levels_a_group_uses_it_keeps_them(n_levels: int) -> None:
    rng = torch.Generator().manual_seed(n_levels)
    used = torch.randint(n_levels, (OUT, IN // GROUP, GROUP), generator=rng)
    used[..., 0], used[..., 1] = 0, n_levels - 1
    used[..., 2] = min(1, n_levels - 1)  # two beside each other, else steps are others
    step, low = 0.01 + 0.02 * torch.rand(OUT, IN // GROUP, 1, generator=rng), -0.1
    weight = (low + used * step).flatten(1)
    assert relative_error(numbers(*quantise_to_4_bits(weight)), weight) < BFLOAT16


@pytest.mark.parametrize("seed", range(3))
def test_other_weights_take_all_levels(seed: int) -> None:
    weight = torch.from_numpy(weights(seed))
    levels, scales, zeros = quantise_to_4_bits(weight)
    groups = levels.view(OUT, -1, GROUP)
    assert (groups.amin(-1) == 0).all()
    assert (groups.amax(-1) == 15).all()
    assert relative_error(numbers(levels, scales, zeros), weight) < 0.1


def test_a_group_of_one_number_is_that_number() -> None:
    weight = torch.full((16, GROUP), 0.25)
    assert torch.equal(numbers(*quantise_to_4_bits(weight)), weight)
