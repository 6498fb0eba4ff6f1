"""Linear layers in float32 by a CPU's unit for matrices (Intel AMX), which knows bfloat16 only (``compiled.tiles``).

A weight is written as a sum of numbers in bfloat16. One is enough for checkpoints that were written in it, as most are;
three are any float32. The first two take part in products, and all of them are the weight again, to the bit.
"""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import torch
from torch import nn

from swarmd.compute.compiled.layout import SIDE, STEP
from swarmd.compute.fused import MOST_THREADS, compiling
from swarmd.compute.kernels import Kernel, Kernels
from swarmd.compute.linear import FrozenLinear
from swarmd.compute.team import Team

MOST_ROWS = 256  # at a time: what enters should stay in the second cache
MOST_TERMS = 3  # of 8 bits each: as many as float32 has
IN_PRODUCTS = 2  # of them: what the third adds is less than what is lost anyway
TOLERANCE = 1e-4  # as for other kernels in float32; 5e-6 is lost


@functools.cache
def has_tiles() -> bool:
    """Does this CPU have such a unit, may this process use it, and does the compiler know it?"""
    if not getattr(torch.cpu, "_is_amx_tile_supported", bool)() or not torch.cpu._init_amx():
        return False
    try:
        import llvmlite.binding as llvm  # late: not every worker needs it
    except ImportError:
        return False
    features = llvm.get_host_cpu_features()
    return bool(features.get("amx-tile") and features.get("amx-bf16"))


def fits(weight: torch.Tensor) -> bool:
    """Has a weight [m, k] a shape that tiles fill?"""
    m, k = weight.shape
    return m % (2 * SIDE) == 0 and k % STEP == 0


def terms_of(weight: torch.Tensor) -> list[torch.Tensor]:
    """Numbers in bfloat16 that add up to a weight, as few as do; one more than MOST_TERMS where none do."""
    terms, rest = list[torch.Tensor](), weight.detach().float()
    while (rest.any() or not terms) and len(terms) <= MOST_TERMS:
        terms.append(rest.bfloat16())
        rest = rest - terms[-1].float()
    return terms


def in_tiles(terms: list[torch.Tensor]) -> torch.Tensor:
    """Terms [m, k] as compiled code reads them: [m / SIDE, k / STEP, terms, STEP / 2, SIDE, 2]."""
    m, k = terms[0].shape
    parts = torch.stack(terms).view(len(terms), m // SIDE, SIDE, k // STEP, STEP // 2, 2)
    return parts.permute(1, 3, 0, 4, 2, 5).contiguous()


class TiledLinear(FrozenLinear):
    """float32 on a CPU with such a unit. Raises NotFused where nothing can be compiled."""

    def __init__(self, linear: nn.Linear, cache_folder: Path) -> None:
        super().__init__(linear)
        terms = terms_of(linear.weight)
        self._tiles = in_tiles(terms[:IN_PRODUCTS])
        self._rest = terms[IN_PRODUCTS] if len(terms) > IN_PRODUCTS else None
        with compiling(cache_folder):
            from swarmd.compute.compiled.tiles import multiply

            self._multiply = multiply
            self.compute(torch.zeros(1, self.in_features))

    @staticmethod
    def fits(linear: nn.Linear) -> bool:
        """Is there such a unit, does it take a weight of this shape, and is that the sum of its terms?"""
        return has_tiles() and fits(linear.weight) and len(terms_of(linear.weight)) <= MOST_TERMS

    @property
    def weight(self) -> torch.Tensor:
        """The weight as it was, to the bit, made anew."""
        terms = self._tiles.permute(2, 0, 4, 1, 3, 5).reshape(-1, self.out_features, self.in_features)
        whole = terms.float().sum(0)
        return whole if self._rest is None else whole + self._rest

    def compute(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.detach().reshape(-1, self.in_features).float().contiguous()
        out = torch.empty(len(rows), self.out_features)
        for at in range(0, len(rows), MOST_ROWS):
            some = slice(at, at + MOST_ROWS)
            self._compute_some(rows[some], out[some])
        if self.bias is not None:
            out += self.bias
        return out.view(*hidden.shape[:-1], self.out_features)

    def _compute_some(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        n = -(-len(rows) // SIDE) * SIDE
        room, meeting = np.empty(2 * n * self.in_features, np.uint16), np.zeros(1, np.int64)
        about = rows.numpy(), self._tiles.data_ptr(), self._tiles.shape[2], room, out.numpy()
        team = _team(min(torch.get_num_threads(), MOST_THREADS))
        team.run(out.numel(), lambda part, parts: self._multiply(*about, (meeting, part, parts)))


@functools.cache
def _team(n: int) -> Team:
    """Threads that all layers share."""
    return Team(n)


def kernels(cache_folder: Path) -> Kernels:
    """TiledLinear, among what may compute layers; what is compiled is kept there (``fused.compiling``)."""
    return {
        torch.float32: {"tiles": Kernel(lambda layer: TiledLinear(layer, cache_folder), TiledLinear.fits, TOLERANCE)}
    }
