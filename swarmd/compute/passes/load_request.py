"""What a daemon asks of a load, as a span takes it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from swarmd.compute.hardware.device import pick_device
from swarmd.compute.hardware.measurements import Measurements
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.values import Span
from swarmd.wire.tensors import DTYPES

SpanT = TypeVar("SpanT", bound=LoadedSpan)


def spill_folder(request: LoadSpan) -> Path:
    """Where a worker keeps what does not fit its memory."""
    return Path(request.spill_folder or tempfile.gettempdir())


def options_of(request: LoadSpan) -> LoadOptions:
    """How the blocks of a request are loaded. Raises ConfigError for a device that is not here."""
    return LoadOptions(
        device=pick_device(request.device),
        quantize=request.quantize,
        kv_cache=request.kv_cache,
        is_compiled=request.compiled,
        cache_folder=spill_folder(request),
        remembered=Measurements(Path(request.spill_folder) if request.spill_folder else None),
    )


def span_of(request: LoadSpan) -> Span:
    """The blocks of a request."""
    return Span(request.start, request.end)


def load_blocks(request: LoadSpan, kind: Callable[..., SpanT], *signals: Callable[..., None]) -> SpanT:
    """Load the blocks of a request as some kind of span, and test them. Raises ConfigError."""
    span = kind(Path(request.path), span_of(request), DTYPES[request.dtype], options_of(request), *signals)
    span.self_test()
    return span
