"""How fast a loaded span computes, measured pass by pass, so that the caller can stop in between."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.hardware.device import finish
from swarmd.compute.passes.span import LoadedSpan
from swarmd.values import Span


def first_rates(span: LoadedSpan, budget_s: float) -> tuple[float, float]:
    """Measure tokens/s of one stream and of prefill in a part of a span, in about ``budget_s`` each: a first guess."""
    share = len(span.sample) / len(span.span)
    decode_rate = last(decode_rates(span, 1, budget_s, span.sample))
    prefill_rate = last(prefill_rates(span, budget_s, span.sample))
    return share * decode_rate, share * prefill_rate


def decode_rates(span: LoadedSpan, n_streams: int, budget_s: float, hop: Span | None = None) -> Iterator[float]:
    """Measure tokens/s of so many decoding streams in one pass, in about ``budget_s``: after each pass the mean."""
    n_past = 16
    caches = [span.new_cache(hop) for _ in range(n_streams)]
    for cache in caches:
        span.forward(*span.example(n_past), None, cache, 0, hop)
        yield 0.0
    hidden, positions = span.example(1)

    def decode(step: int) -> int:
        position = n_past + step
        if span.can_batch:
            pieces = [SessionTokens(hidden, positions + position, cache, position) for cache in caches]
            span.forward_ragged(pieces, hop)
        else:
            for cache in caches:
                span.forward(hidden, positions + position, None, cache, position, hop)
        finish(span.device)
        return n_streams

    yield from _rates(decode, budget_s)


def prefill_rates(span: LoadedSpan, budget_s: float, hop: Span | None = None) -> Iterator[float]:
    """Measure tokens/s of prefill in chunks of 64, in about ``budget_s``: after each pass the mean."""

    def prefill(_: int) -> int:
        span.forward(*span.example(64), hop=hop)
        finish(span.device)
        return 64

    return _rates(prefill, budget_s)


def _rates(step: Callable[[int], int], budget_s: float) -> Iterator[float]:
    step(0)
    yield 0.0  # the first one is slow
    n_tokens = 0
    n_steps = 1
    spent_s = 0.0
    while spent_s < budget_s and n_steps < 64:
        begin = time.perf_counter()
        n_tokens += step(n_steps)
        spent_s += time.perf_counter() - begin
        n_steps += 1
        yield n_tokens / max(spent_s, 1e-9)


def last(rates: Iterable[float]) -> float:
    """Return the rate that was measured when the time was over."""
    return deque(rates, maxlen=1)[0]
