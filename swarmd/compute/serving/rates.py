"""How fast an engine computes, measured pass by pass, so that the caller can stop in between."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec
import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.hardware.device import finish
from swarmd.compute.serving.engine import Engine
from swarmd.protocol.wire.worker import Measured
from swarmd.values import Span

N_PAST = 16  # tokens that a stream has when it begins to decode
MOST_STEPS = 64  # of one measurement; no cache has to hold more
PREFILL_TOKENS = 64  # of a pass
BUDGET_S = 0.15  # for a steady speed, at each number of streams
STREAMS = (1, 4, 16)  # sessions decoding at once; between them speed is interpolated


def first_rates(engine: Engine, sample: Span, budget_s: float) -> tuple[float, float]:
    """Measure tokens/s of one stream and of prefill in a part of a span, in about ``budget_s`` each: a first guess."""
    share = len(sample) / len(engine.span)
    decode_rate = last(decode_rates(engine, 1, budget_s, sample))
    prefill_rate = last(prefill_rates(engine, budget_s, sample))
    return share * decode_rate, share * prefill_rate


def decode_rates(
    engine: Engine,
    n_streams: int,
    budget_s: float,
    hop: Span | None = None,
) -> Iterator[float]:
    """Measure tokens/s of so many decoding streams in one pass, in about ``budget_s``: after each pass the mean."""
    hop = hop or engine.span
    caches = [engine.new_cache(hop, N_PAST + MOST_STEPS) for _ in range(n_streams)]
    for cache in caches:
        engine.run([_zeros(engine, N_PAST, cache, 0)], hop)
        yield 0.0

    def decode(step: int) -> int:
        engine.run([_zeros(engine, 1, cache, N_PAST + step) for cache in caches], hop)
        finish(engine.device)
        return n_streams

    yield from _rates(decode, budget_s)


def prefill_rates(engine: Engine, budget_s: float, hop: Span | None = None) -> Iterator[float]:
    """Measure tokens/s of prefill in chunks of 64, in about ``budget_s``: after each pass the mean."""
    hop = hop or engine.span

    def prefill(_: int) -> int:
        engine.run([_zeros(engine, PREFILL_TOKENS, engine.new_cache(hop, PREFILL_TOKENS), 0)], hop)
        finish(engine.device)
        return PREFILL_TOKENS

    return _rates(prefill, budget_s)


def _zeros(engine: Engine, n_tokens: int, cache: object, n_past: int) -> SessionTokens:
    """Make new tokens of one session: hidden states of zeros."""
    hidden = torch.zeros(1, n_tokens, engine.hidden_size, dtype=engine.dtype, device=engine.device)
    positions = torch.arange(n_past, n_past + n_tokens, device=engine.device).unsqueeze(0)
    return SessionTokens(hidden, positions, cache, n_past)


def _rates(step: Callable[[int], int], budget_s: float) -> Iterator[float]:
    step(0)
    yield 0.0  # the first one is slow
    n_tokens = 0
    n_steps = 1
    spent_s = 0.0
    while spent_s < budget_s and n_steps < MOST_STEPS:
        begin = time.perf_counter()
        n_tokens += step(n_steps)
        spent_s += time.perf_counter() - begin
        n_steps += 1
        yield n_tokens / max(spent_s, 1e-9)


def last(rates: Iterable[float]) -> float:
    """Return the rate that was measured when the time was over."""
    return deque(rates, maxlen=1)[0]


class SpeedMeter:
    """Measures an engine at each number of streams, one after the other, and knows the ``speed`` found so far."""

    def __init__(
        self,
        engine: Engine,
        speed: Measured,
        is_disturbed: Callable[[], bool],
    ) -> None:
        self.speed = speed
        self._engine = engine
        self._is_disturbed = is_disturbed
        self._waiting: list[int] = []

    def measure(self) -> bool:
        """Measure at the next number of streams; False when somebody came meanwhile, and nothing is known."""
        if not self._waiting:
            self._waiting = [n for n in STREAMS if n == 1 or self._engine.can_batch]
        n_streams = self._waiting[0]
        rate = self._last_undisturbed(decode_rates(self._engine, n_streams, BUDGET_S))
        if not rate:
            return False
        if n_streams == 1:
            prefill = self._last_undisturbed(prefill_rates(self._engine, BUDGET_S))
            if not prefill:
                return False
            self.speed = msgspec.structs.replace(self.speed, decode_tokens_per_s=rate, prefill_tokens_per_s=prefill)
        else:
            batches = {**self.speed.batch_tokens_per_s, n_streams: rate}
            self.speed = msgspec.structs.replace(self.speed, batch_tokens_per_s=batches)
        self._waiting.pop(0)
        return True

    @property
    def is_complete(self) -> bool:
        """Is the speed known at all numbers of streams?"""
        return not self._waiting

    def _last_undisturbed(self, rates: Iterable[float]) -> float:
        """Return the last of some rates, each of which takes a pass to find; 0 when somebody came before."""
        newest = 0.0
        for rate in rates:
            if self._is_disturbed():
                return 0.0
            newest = rate
        return newest
