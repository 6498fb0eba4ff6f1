"""The error of few bits: how far the output of a span is from that of the same blocks unquantised, measured here."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch

from swarmd.compute.linear.quantize import relative_error
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.errors import ConfigError
from swarmd.values import Span

logger = logging.getLogger(__name__)


def quantization_error(span: LoadedSpan, folder: Path) -> float | None:
    """Return the relative error of a span's output on a probe, against unquantised blocks; None if not measurable.

    Only the last value that ``measure_quantization`` yields is the error.
    """
    return deque(measure_quantization(span, folder), maxlen=1)[0]


def measure_quantization(span: LoadedSpan, folder: Path) -> Iterator[float | None]:
    """Measure it block by block, each loaded unquantised and given back: yields None after each, and the error at last.

    Half of the probe's tokens are in the caches when the others come, so that caches in 8 bits have their part in it.
    Ends with None when not even one block fits into memory unquantised.
    """
    rng = torch.Generator().manual_seed(2)
    zeros, positions = span.family.example(16)
    hidden = torch.randn(zeros.shape, generator=rng).to(zeros)
    cache = span.new_cache()
    half = hidden.shape[1] // 2
    first = span.forward(hidden[:, :half], positions[:, :half], None, cache, 0)
    second = span.forward(hidden[:, half:], positions[:, half:], None, cache, half)
    out = torch.cat([first, second], 1)
    expected = hidden
    # The probe passes through one unquantised block after the other; each is freed before the next is loaded, since
    # the whole span unquantised may not fit into memory.
    options = LoadOptions(device=str(span.device), has_plain_layers=True)
    for block in span.span.blocks():
        yield None
        try:
            unquantised = LoadedSpan(folder, Span(block, block + 1), span.dtype, options)
        except ConfigError as error:
            logger.info("the loss of quantising is not measured: %s", error)
            yield None
            return
        expected = unquantised.forward(expected, positions)
    yield relative_error(out, expected)
