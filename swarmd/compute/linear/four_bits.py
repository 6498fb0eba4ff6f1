"""Weights in 4 bits: 16 quantised values for each 32 of a row, between its smallest and its largest.

Weights that were quantised so before (GGUF's Q4_0, Q4_1 and Q4_K) are recognised, and get the same values again: only
the scale is rounded, to bfloat16, as torch's kernel takes it. A group need not have used all 16 values.

    smallest                                    largest
       |---|---|---|---|---|---|---|---|---|---|---|         values 0..15, one step apart
                                       ^ zero: the number at value LEVEL_OF_ZERO
"""

from __future__ import annotations

import torch

from swarmd.compute.compiled.layout import GROUP, LEVEL_OF_ZERO

MOST_STEPS = 15  # between the smallest and the largest
TOGETHER = 64  # rows that torch's kernel packs beside each other, at most: parts of a weight are multiples of it
PART_BYTES = 2**20  # of a weight in float32 at a time: caches hold it
NEAR = 0.06  # of a step: what float16 and bfloat16 lose of a weight
SAMPLED_ROWS = 16  # of a matrix: were its groups quantised before?
SHARE = 0.5  # of their groups that do, for all to be looked at


def cut_rows(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut a weight [out, in] on a CPU into rows that caches hold while they are quantised, which takes a third then."""
    if weight.device.type != "cpu":
        return (weight,)
    n_rows = PART_BYTES // max(1, 4 * weight.shape[1]) // TOGETHER * TOGETHER
    return torch.split(weight, max(TOGETHER, n_rows))


def quantise_to_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise weight [out, in] to values of 0 to 15, scales and zeros [out, in / 32]: (value - 8) * scale + zero.

    The values are uint8, the others bfloat16.
    """
    sample = weight[:: max(1, len(weight) // SAMPLED_ROWS)].float().reshape(-1, GROUP)
    was_quantised = bool((_steps_between(sample) > 0).float().mean() >= SHARE)
    parts = [_quantise_rows(rows, was_quantised) for rows in cut_rows(weight)]
    values, scales, zeros = (torch.cat(column) for column in zip(*parts, strict=True))
    return values, scales, zeros


def _quantise_rows(rows: torch.Tensor, was_quantised: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    groups = rows.float().view(len(rows), -1, GROUP)
    low, high = groups.aminmax(dim=-1)
    tiniest = torch.finfo(torch.float32).tiny
    n_steps = _n_steps(groups) if was_quantised else MOST_STEPS
    steps = ((high - low) / n_steps).clamp(min=tiniest)
    scales = steps.bfloat16()
    zeros = (low + LEVEL_OF_ZERO * steps).bfloat16()
    # Values are those of the rounded scale and zero, so that their rounding is not added to that of the weights.
    values = (groups - zeros.float()[..., None]).div_(scales.float()[..., None]).add_(LEVEL_OF_ZERO)
    return values.round_().clamp_(0, MOST_STEPS).flatten(1).to(torch.uint8), scales, zeros


def _n_steps(groups: torch.Tensor) -> torch.Tensor:
    """Count the steps between the ends of each group [out, n, 32]: 15, or fewer where it was quantised to fewer."""
    n_steps = _steps_between(groups.flatten(0, 1))
    # As many steps between each two as there is room for: then a scale's rounding counts less.
    finer = n_steps * (MOST_STEPS // n_steps.clamp(min=1))
    return torch.where(n_steps > 0, finer, MOST_STEPS).view(groups.shape[:2])


def _steps_between(groups: torch.Tensor) -> torch.Tensor:
    """Count the steps between the ends of groups [n, 32] that were quantised before; 0 for other groups.

    A step is the least by which two weights of a group differ: two of one quantised value are the same to the bit.
    """
    ordered = groups.sort(-1)[0]
    differences = ordered.diff(dim=-1)
    step = differences.masked_fill_(differences == 0, torch.inf).amin(-1)
    extent = ordered[:, -1] - ordered[:, 0]
    n = (extent / step).round()
    values = (ordered - ordered[:, :1]) * (n / extent)[:, None]
    is_quantised = (values - values.round()).abs().amax(-1) < NEAR
    return torch.where(is_quantised & (n <= MOST_STEPS), n, 0.0)
