"""Weights in 4 bits: 16 levels for each 32 of a row, between its smallest and its largest.

Weights that came from such levels (GGUF's Q4_0, Q4_1 and Q4_K) are found to lie on them, and get them again: only what
a level is worth is rounded, to bfloat16, as torch's kernel takes it. A group need not have used all 16 levels.
"""

from __future__ import annotations

import torch

from swarmd.compute.compiled.layout import GROUP, LEVEL_OF_ZERO

MOST_STEPS = 15  # between the smallest and the largest
NEAR = 0.06  # of a step: what float16 and bfloat16 lose of a weight
SAMPLED_ROWS = 16  # of a matrix: do its groups lie on levels?
SHARE = 0.5  # of their groups that do, for all to be looked at


def in_4_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """weight [out, in] as levels of 0 to 15, scales and zeros [out, in / 32]: (level - 8) * scale + zero."""
    groups = weight.float().view(len(weight), -1, GROUP)
    low, high = groups.amin(-1), groups.amax(-1)
    steps = ((high - low) / _n_steps(groups)).clamp(min=torch.finfo(torch.float32).tiny)
    scales, zeros = steps.bfloat16(), (low + LEVEL_OF_ZERO * steps).bfloat16()
    levels = (groups - zeros.float()[..., None]) / scales.float()[..., None] + LEVEL_OF_ZERO
    return levels.round().clamp(0, MOST_STEPS).flatten(1), scales, zeros


def _n_steps(groups: torch.Tensor) -> torch.Tensor:
    """How many steps lie between the ends of each group [out, n, 32]: 15, but where they lie on levels of fewer."""
    found = _steps_between(groups[:: max(1, len(groups) // SAMPLED_ROWS)].flatten(0, 1))
    if (found > 0).float().mean() < SHARE:
        return torch.full(groups.shape[:2], MOST_STEPS, device=groups.device)
    found = _steps_between(groups.flatten(0, 1))
    finer = found * (MOST_STEPS // found.clamp(min=1))  # the same levels and some between: a scale's error counts less
    return torch.where(found > 0, finer, MOST_STEPS).view(groups.shape[:2])


def _steps_between(groups: torch.Tensor) -> torch.Tensor:
    """How many steps lie between the ends of groups [n, 32] of which all lies on levels; 0 for other groups.

    A step is the least by which two weights of a group differ: two that use one level are the same to the bit.
    """
    ordered = groups.sort(-1)[0]
    between = ordered.diff(dim=-1)
    step = between.masked_fill_(between == 0, torch.inf).amin(-1)
    reach = ordered[:, -1] - ordered[:, 0]
    n = (reach / step).round()
    levels = (ordered - ordered[:, :1]) * (n / reach)[:, None]
    is_on = (levels - levels.round()).abs().amax(-1) < NEAR
    return torch.where(is_on & (n <= MOST_STEPS), n, 0.0)
