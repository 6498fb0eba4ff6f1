"""The engine that every worker has: a family's own code in torch, with the backends of ``passes``.

It loads what the daemon asks for, finds out how fast that is, and begins the search for faster backends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from swarmd.compute.hardware.device import device_description, free_memory_bytes, pick_device
from swarmd.compute.model.head import LogitsHead
from swarmd.compute.passes import precompile
from swarmd.compute.passes.improvements import MOST_TEXT, Improvements
from swarmd.compute.passes.load_request import load_blocks, spill_folder
from swarmd.compute.passes.span import LoadedSpan, cache_bytes_per_token, numerics
from swarmd.compute.serving.engine import LoadedEngine, LoadSignals
from swarmd.compute.serving.fine_tuning import Training
from swarmd.compute.serving.rates import first_rates
from swarmd.errors import ConfigError
from swarmd.protocol.models.configuration import layout_of
from swarmd.protocol.models.manifest import read_config
from swarmd.protocol.wire.worker import Loaded, LoadSpan, Measured

QUICK_S = 0.05  # for a first speed to announce: the worker is online so much sooner
BLOCK_S = 1.0  # what a forward of one block may take: decoding waits for it, and the daemon for a sign of life
MIN_MICRO_BATCH_TOKENS = 64  # fewer waste the matrix units of any CPU


def load_span(request: LoadSpan, signals: LoadSignals, kind: Callable[..., LoadedSpan] = LoadedSpan) -> LoadedSpan:
    """Load blocks, and find out what they can do. Raises ConfigError."""
    try:
        return load_blocks(request, kind, signals.on_block, signals.on_part)
    except ConfigError as error:
        said = layout_of(read_config(Path(request.path))).describe()
        raise ConfigError(f"{error}; of its blocks config.json says: {said}" if said else str(error)) from None


def load_torch_engine(
    request: LoadSpan,
    signals: LoadSignals,
    load: Callable[[LoadSpan, LoadSignals], LoadedSpan] = load_span,
) -> LoadedEngine:
    """Load a span with all that torch can. Raises ConfigError, or torch.OutOfMemoryError."""
    folder = spill_folder(request)
    compiles = request.compiled and pick_device(request.device) == "cpu"
    compiler = precompile.start(folder) if compiles and not precompile.is_compiled(folder) else None
    span = load(request, signals)
    head, description = introduce(request, span)
    improvements = Improvements(span, Path(request.path), compiler)
    return LoadedEngine(
        engine=span,
        description=msgspec.structs.replace(description, kernels=improvements.kernels),
        fine_tuning=fine_tuning_of(request, span, description),
        head=head,
        background=improvements,
    )


def introduce(request: LoadSpan, span: LoadedSpan) -> tuple[LogitsHead | None, Loaded]:
    """Load the head of a span, where one is asked for, and find out what is told of both. Raises ConfigError."""
    head = _load_head(request, span) if request.head else None
    decode, prefill = first_rates(span, span.sample, QUICK_S)
    speed = Measured(decode_tokens_per_s=decode, prefill_tokens_per_s=prefill)
    return head, msgspec.structs.replace(describe(span, request.model, speed), has_head=head is not None)


def fine_tuning_of(request: LoadSpan, span: LoadedSpan, description: Loaded) -> Training:
    """Fine-tuning of a span, in micro-batches of which a block takes a second at most."""
    block_tokens_per_s = len(span.span) * description.speed.prefill_tokens_per_s
    max_tokens = max(MIN_MICRO_BATCH_TOKENS, int(BLOCK_S * block_tokens_per_s))
    return Training(span, request.tuning_bytes, max_tokens)


def _load_head(request: LoadSpan, span: LoadedSpan) -> LogitsHead | None:
    """Load norm and head, where the span ends the model. Raises ConfigError."""
    if span.span.end < span.n_blocks:
        return None
    return LogitsHead(
        Path(request.path),
        span.dtype,
        span.device,
        span.layer_arity,
    )


def describe(span: LoadedSpan, model: str, speed: Measured) -> Loaded:
    """Return what is told of a span that is loaded."""
    name, memory_bytes = device_description(str(span.device))
    return Loaded(
        device=name,
        device_memory_bytes=memory_bytes,
        device_free_bytes=None if memory_bytes is None else free_memory_bytes(str(span.device)),
        numerics=numerics(span, model),
        hidden=span.hidden_size,
        digits=span.family.format.n_digits,
        layer_arity=span.layer_arity,
        cache_bytes_per_token=cache_bytes_per_token(span),
        batching=span.batching[:MOST_TEXT],
        speed=speed,
    )
