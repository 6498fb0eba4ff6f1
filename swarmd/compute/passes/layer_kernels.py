"""Choose what computes the layers of a span on this CPU, and find out whether a fused kernel may compute its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from swarmd.compute.compiled.build import NotFused, compiled_folder
from swarmd.compute.hardware.measurements import Measurements
from swarmd.compute.linear.kernels import PROMPT_ROWS, ROWS, choose_kernel
from swarmd.compute.passes import precompile
from swarmd.compute.passes.fused import FusedShape, describe
from swarmd.values import Decision


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """What computes layers, and why; and what the blocks have in common, if a fused kernel may compute them."""

    kernels: Decision[str]
    shape: FusedShape | None = None


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """What the choice depends on. Its result is remembered by ``timing_key``."""

    dtype: torch.dtype
    keeps_8_bits: bool
    may_compile: bool
    cache_folder: Path
    timing_key: tuple[object, ...]
    remembered: Measurements

    def run(
        self, model: PreTrainedModel, blocks: Sequence[nn.Module], on_layer: Callable[[int, int], None]
    ) -> LayerKernels:
        """Lay weights out as the fastest kernels read them."""
        shape, why = self._describe(model, blocks)
        folder = self.cache_folder
        is_compiled = self.may_compile and precompile.is_compiled(folder)
        if not self.may_compile:
            why = "; compiled code is off"
        elif not is_compiled:
            why += "; what is compiled was not there yet when it was loaded"
        key = ("kernels", *self.timing_key, shape is None, is_compiled, compiled_folder(folder).name)
        known = self.remembered.find(*key)
        fastest = str(known.get("action")) if known is not None else None
        rows = PROMPT_ROWS if shape else ROWS  # where blocks are fused, layers compute prompts only
        compile_folder = folder if is_compiled else None  # else a worker would wait 20 s for it
        kernels = choose_kernel(model, rows, compile_folder, fastest, on_layer)
        if known is None:
            self.remembered.keep({"action": kernels.action}, *key)
        return LayerKernels(Decision(kernels.action, kernels.reason + why), shape)

    def _describe(
        self,
        model: PreTrainedModel,
        blocks: Sequence[nn.Module],
    ) -> tuple[FusedShape | None, str]:
        """Find out whether a fused kernel may compute these blocks; where it may not, say why."""
        if not self.may_compile:
            return None, ""
        try:
            return describe(model.get_decoder(), blocks, self.dtype, self.keeps_8_bits), ""
        except NotFused as error:
            return None, f"; not one call: {error}"
