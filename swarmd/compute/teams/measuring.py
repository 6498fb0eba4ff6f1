"""How fast a member computes slices of a block, and how long sums take: measured before it is chosen for a team."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.hardware.device import use_threads
from swarmd.compute.model.slicing import Slicing
from swarmd.compute.passes.load_request import options_of
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.teams.orders import Measure
from swarmd.compute.teams.sums import Adding, TeamBroken
from swarmd.plan.chains.memory import WORKSPACE_BYTES
from swarmd.plan.teams.slices import slices
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.resources import measure_memory
from swarmd.values import Span
from swarmd.wire.tensors import DTYPES

N_WARM, N_TIMED = 5, 21  # passes of one token; the median counts
N_SUMS = 50  # of a token's hidden states
LEAST_S = 1e-7  # of what shrinks with a slice: less is noise


Seconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
BlockSeconds = Annotated[float, msgspec.Meta(ge=1e-9, le=3600)]
Number = Annotated[int, msgspec.Meta(ge=1)]


class SliceTimes(msgspec.Struct, frozen=True, array_like=True):
    """Of one token in a block: seconds that do not shrink with a slice, and those of the whole of what does.

    ``free_bytes`` of the memory that is the member's own, None where it is the leader's. ``sections`` are those of a
    block, each as (units, numbers); ``width`` is what a sum has of them, of one token.
    """

    fixed_s: Seconds
    block_s: BlockSeconds
    free_bytes: Annotated[int, msgspec.Meta(ge=0)] | None
    sections: tuple[tuple[Number, Number], ...]
    width: Number


def measure_slices(request: LoadSpan, n_members: int, has_own_memory: bool) -> SliceTimes:
    """Measure two slices of a block in the middle of what a request asks for, smaller than it is to be and larger.

    Raises ConfigError for a family that cannot be cut.
    """
    larger = measure_slice(request, n_members)
    smaller = measure_slice(request, 2 * n_members)
    free_bytes = memory_for_weights(request) if has_own_memory else None  # last: measuring leaves traces
    block_s = larger.token_s
    if larger.share > smaller.share:
        block_s = max(LEAST_S, (larger.token_s - smaller.token_s) / (larger.share - smaller.share))
    fixed_s = max(0.0, larger.token_s - block_s * larger.share)
    return SliceTimes(fixed_s, block_s, free_bytes, larger.sections, larger.width)


@dataclass(frozen=True, slots=True)
class MeasuredSlice:
    """What share of a block's sections it was, what a token took, and what a sum would have."""

    share: float
    token_s: float
    sections: tuple[tuple[int, int], ...]
    width: int


def measure_slice(request: LoadSpan, n_parts: int) -> MeasuredSlice:
    """Load one of so many parts of a block, compute some tokens, and give it up again. Raises ConfigError."""
    block = (request.start + request.end) // 2
    slicing = Slicing((1.0, n_parts - 1.0), 0)
    options = replace(options_of(request), slicing=slicing)
    span = LoadedSpan(Path(request.path), Span(block, block + 1), DTYPES[request.dtype], options)
    sections = tuple(slicing.sections.values())
    n_numbers = sum(numbers for _, numbers in sections)
    share = sum(len(slices(n, slicing.weights)[0]) / n * numbers for n, numbers in sections) / n_numbers
    measured = MeasuredSlice(share, time_token(span), sections, span.hidden_size)
    del span
    gc.collect()  # a model holds itself: what is loaded next needs its room
    return measured


def memory_for_weights(request: LoadSpan) -> int:
    """How many bytes of this machine's memory weights may take."""
    return max(0, measure_memory().free_bytes - request.leave_free_bytes - WORKSPACE_BYTES)


def time_token(span: LoadedSpan) -> float:
    """Seconds of a pass of one token through a span, the median of some."""
    hidden, positions = span.family.example(1)
    cache = span.new_cache(span.span, N_WARM + N_TIMED)
    times = []
    for n_past in range(N_WARM + N_TIMED):
        begun = time.perf_counter()
        span.run([SessionTokens(hidden, positions + n_past, cache, n_past)])
        times.append(time.perf_counter() - begun)
    return median(times[N_WARM:])


def time_sums(sums: Adding, width: int, dtype: torch.dtype) -> float:
    """Seconds of a sum of one token's hidden states. All who add up have to do so at the same time."""
    part = torch.zeros(1, 1, width, dtype=dtype)
    times = []
    for _ in range(N_SUMS):
        begun = time.perf_counter()
        sums.add(part)
        times.append(time.perf_counter() - begun)
    return median(times)


def answer_measure(order: Measure, sums: Adding, answer: Callable[[bytes], None], has_own_memory: bool) -> None:
    """Do a follower's part of being measured. Raises ConfigError or TeamBroken."""
    use_threads(order.load.threads)
    times = measure_slices(order.load, order.n_members, has_own_memory)
    answer(msgspec.msgpack.encode(times))
    time_sums(sums, times.width, DTYPES[order.load.dtype])


def read_times(data: bytes | bytearray) -> SliceTimes:
    """What a follower has measured. Raises TeamBroken for what is nothing of the kind."""
    try:
        return msgspec.msgpack.decode(data, type=SliceTimes)
    except msgspec.DecodeError as error:
        raise TeamBroken(f"a member of the team does not say how fast it is: {error}") from None
