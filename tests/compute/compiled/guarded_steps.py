"""Whole steps of blocks, with attention, on memory between pages that nobody may touch.

    python -m tests.compute.compiled.guarded_steps

Every buffer of the fused kernel lies in such memory: weights, scales, biases, norms, the table of addresses, keys and
values with room for just the new tokens, hidden states, and what threads share. Shapes fill no vector where the format
allows it. Each step gives what it gives in other memory, to the bit.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swarmd.compute.compiled import layout
from swarmd.compute.compiled.build import compiling
from swarmd.compute.compiled.registers import ROWS
from tests.compute.compiled.guarded import GuardedMemory, weight_of

Array = np.ndarray[Any, Any]
Place = Callable[[Array], Array]
"""Copy an array to the memory of a run."""


@dataclass(frozen=True)
class Shape:
    """What blocks look like: widths of the model and of its MLP, heads, kept heads and the width of one."""

    width: int
    inner: int
    heads: int
    kept_heads: int
    head: int


@dataclass(frozen=True)
class Session:
    """Tokens of one session: shared ones, its own past ones, and the new ones of this step."""

    shared: int
    past: int
    new: int


SHAPES = (
    Shape(width=32, inner=64, heads=4, kept_heads=4, head=8),
    Shape(width=70, inner=54, heads=6, kept_heads=2, head=7),
    Shape(width=66, inner=130, heads=3, kept_heads=1, head=34),
    Shape(width=2, inner=2, heads=2, kept_heads=2, head=1),
)
SHAPES_OF_4_BITS = (
    Shape(width=ROWS, inner=2 * ROWS, heads=2, kept_heads=1, head=ROWS),
    Shape(width=2 * ROWS, inner=ROWS, heads=6, kept_heads=2, head=ROWS // 2),
)
STEPS = (
    (Session(0, 0, 1),),
    (Session(0, 5, 3), Session(9, 0, 1)),
    (Session(17, 3, 2), Session(0, 130, 1), Session(0, 1, 1)),
    (Session(0, 131, 8),),
)
FORMATS = (layout.FLOAT32, layout.BFLOAT16, layout.FLOAT16, layout.INT8, layout.INT4)
CACHE_FORMATS = {
    layout.FLOAT32: np.float32,
    layout.BFLOAT16: np.uint16,
    layout.FLOAT16: np.uint16,
    layout.INT8: np.int8,
}
N_BLOCKS = 2
N_THREADS = 2  # of steps of several sessions


def matrix_sizes(shape: Shape) -> dict[int, tuple[int, int]]:
    """Rows and columns of each matrix of a block."""
    queries = shape.heads * shape.head
    kept = shape.kept_heads * shape.head
    return {
        layout.QUERY: (queries, shape.width),
        layout.KEY: (kept, shape.width),
        layout.VALUE: (kept, shape.width),
        layout.OUT: (shape.width, queries),
        layout.GATE: (shape.inner, shape.width),
        layout.UP: (shape.inner, shape.width),
        layout.DOWN: (shape.width, shape.inner),
    }


def table_of(shape: Shape, stored: int, place: Place) -> Array:
    """Addresses of the weights of all blocks, with biases and norms of heads."""
    rng = np.random.default_rng(0)
    norms = {
        layout.NORM: shape.width,
        layout.MLP_NORM: shape.width,
        layout.QUERY_NORM: shape.head,
        layout.KEY_NORM: shape.head,
    }
    table = np.zeros((N_BLOCKS, layout.N_ADDRESSES), np.int64)
    for block in range(N_BLOCKS):
        for column, (n_out, n_in) in matrix_sizes(shape).items():
            weight, scales = weight_of(stored, n_in, n_out)
            bias = rng.standard_normal(n_out, np.float32)
            table[block, column] = place(weight).ctypes.data
            table[block, layout.SCALES + column] = place(scales).ctypes.data
            table[block, layout.BIAS + column] = place(bias).ctypes.data
        for column, n in norms.items():
            table[block, column] = place(rng.random(n, np.float32)).ctypes.data
    return place(table)


def cache_of(shape: Shape, kept: int, n_tokens: int) -> Array:
    """Keys or values [kept heads, tokens, bytes] of so many tokens, and no more."""
    rng = np.random.default_rng(n_tokens)
    numbers = rng.standard_normal((shape.kept_heads, n_tokens, shape.head), np.float32)
    if kept == layout.INT8:
        quantised = (40 * numbers).clip(-127, 127).astype(np.int8).view(np.uint8)
        scales = np.full((*numbers.shape[:2], 1), 0.02, np.float32).view(np.uint8)
        return np.concatenate([quantised, scales], 2)
    if kept == layout.BFLOAT16:
        return (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return numbers.astype(np.float16 if kept == layout.FLOAT16 else np.float32).view(np.uint8)


def kv_tables(shape: Shape, kept: int, sessions: tuple[Session, ...], place: Place) -> tuple[Array, Array, list[Array]]:
    """``kv_places`` and ``counts`` (see ``attention``), and all keys and values that they tell of."""
    size = np.dtype(CACHE_FORMATS[kept]).itemsize
    caches: list[Array] = []

    def new_place(n_tokens: int) -> list[int]:
        """Addresses of new keys and values, and the numbers from a head to the next one."""
        if not n_tokens:
            return [0, 0, 0]
        pair = [place(cache_of(shape, kept, n_tokens)) for _ in range(2)]
        caches.extend(pair)
        return [*(cache.ctypes.data for cache in pair), pair[0][0].nbytes // size]

    kv_places = []
    for _ in range(N_BLOCKS):
        rows = []
        for session in sessions:
            row = new_place(session.shared) + new_place(session.past + session.new)
            rows += [row] * session.new
        kv_places.append(rows)
    counts = [[session.shared, session.past + n] for session in sessions for n in range(session.new)]
    return place(np.array(kv_places, np.int64)), place(np.array(counts, np.int64)), caches


def run_step(
    run_blocks: Callable[..., None],
    shape: Shape,
    formats: tuple[int, int],
    sessions: tuple[Session, ...],
    place: Place,
    n_threads: int = 1,
) -> list[Array]:
    """Run a step in this memory; returns hidden states, and all keys and values afterwards."""
    stored, kept = formats
    n = sum(session.new for session in sessions)
    numbers = (shape.heads, shape.kept_heads, shape.head, shape.inner, stored, kept, layout.SILU)
    table = table_of(shape, stored, place)
    kv_places, counts, caches = kv_tables(shape, kept, sessions, place)
    hidden = place(np.random.default_rng(n).standard_normal((n, shape.width), np.float32))
    frequencies = place(np.linspace(1, 0.01, shape.head // 2, dtype=np.float32))
    floats = place(np.array([1e-5, shape.head**-0.5, 1], np.float32))
    of_pass = place(counts.sum(1)), kv_places, counts
    room = place(np.zeros(n * layout.n_shared(numbers), np.float32))
    barrier = place(np.zeros(1, np.int64))
    shape_numbers = place(np.array(numbers, np.int64))

    def run_share(thread: int) -> None:
        share = room, barrier, thread, n_threads
        run_blocks(shape_numbers, floats, table, frequencies, hidden, of_pass, share)

    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(run_share, range(n_threads)))  # raises what a thread raised
    return [hidden, *caches]


def run_all(run_blocks: Callable[..., None], at_the_end: bool) -> int:
    """Run steps of all formats, shapes and sessions in guarded memory; returns how many were tried."""
    n = 0
    for stored, kept in itertools.product(FORMATS, CACHE_FORMATS):
        shapes = SHAPES_OF_4_BITS if stored == layout.INT4 else SHAPES
        for shape, sessions in itertools.product(shapes, STEPS):
            memory = GuardedMemory(at_the_end)
            free_arrays: list[Array] = []  # kept alive, as guarded ones are

            def copy_free(array: Array, arrays: list[Array] = free_arrays) -> Array:
                arrays.append(array.copy())
                return arrays[-1]

            n_threads = N_THREADS if len(sessions) > 1 else 1
            expected = run_step(run_blocks, shape, (stored, kept), sessions, copy_free)
            found = run_step(run_blocks, shape, (stored, kept), sessions, memory.array, n_threads)
            assert np.isfinite(found[0]).all()
            for one, other in zip(found, expected, strict=True):
                assert np.array_equal(one, other), (stored, kept, shape, sessions)
            n += 1
    return n


def main() -> None:
    """Run all steps at both sides of their memory."""
    with compiling(Path(tempfile.gettempdir())):
        from swarmd.compute.compiled.blocks import run_blocks

        print(run_all(run_blocks, at_the_end=True) + run_all(run_blocks, at_the_end=False))


if __name__ == "__main__":
    main()
