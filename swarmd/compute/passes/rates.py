"""How fast a loaded span computes, measured pass by pass, so that whoever measures can stop."""

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
    hop, share = span.sample, len(span.sample) / len(span.span)
    return share * last(decode_rates(span, 1, budget_s, hop)), share * last(prefill_rates(span, budget_s, hop))


def decode_rates(span: LoadedSpan, n_streams: int, budget_s: float, hop: Span | None = None) -> Iterator[float]:
    """Measure tokens/s of so many decoding streams in one pass, in about ``budget_s``: after each pass the mean."""
    caches, n_past = [span.new_cache(hop) for _ in range(n_streams)], 16
    for cache in caches:
        span.forward(*span.example(n_past), None, cache, 0, hop)
        yield 0.0
    hidden, positions = span.example(1)

    def decode(step: int) -> int:
        at = n_past + step
        if span.can_batch:
            span.forward_ragged([SessionTokens(hidden, positions + at, cache, at) for cache in caches], hop)
        else:
            for cache in caches:
                span.forward(hidden, positions + at, None, cache, at, hop)
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
    done, n, spent_s = 0, 1, 0.0
    while spent_s < budget_s and n < 64:
        begun = time.perf_counter()
        done += step(n)
        spent_s += time.perf_counter() - begun
        n += 1
        yield done / max(spent_s, 1e-9)


def last(rates: Iterable[float]) -> float:
    """What was measured when the time was over."""
    return deque(rates, maxlen=1)[0]
