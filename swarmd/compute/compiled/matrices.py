"""Tokens times a weight: read once, widened on the way; of several by a matrix unit, where there is one."""

from __future__ import annotations

from typing import Any

import numpy as np

from swarmd.compute.compiled.layout import (
    BFLOAT16,
    BIAS,
    FLOAT16,
    GROUP,
    INT4,
    INT8,
    LEVEL_STEP,
    MOST_LEVELS,
    SCALES,
    SIDE,
    STEP,
)
from swarmd.compute.compiled.machine import (
    carray,
    fast,
    fast_without_lock,
    number_bytes,
    pointer,
    prefetch_ahead,
    wait_at_barrier,
)
from swarmd.compute.compiled.products import multiply_row_pair
from swarmd.compute.compiled.quantised import (
    CHUNK,
    multiply_group,
    multiply_group_by_two,
    multiply_quantised_pair,
    quantise_tokens,
)
from swarmd.compute.compiled.registers import ROWS
from swarmd.compute.hardware.matrix_unit import has_matrix_unit

FEWEST_TO_SPLIT, FEWEST, FEWEST_LEVELS = 8, 6, 4  # tokens for which a matrix unit takes less time

# A layer is three addresses: (weight, scales, bias). Threads share the rows of its weight, each a part of consecutive
# rows; each row becomes one column of ``out``. Without a matrix unit a thread reads two rows at a time, one of each
# half of the weight, since two streams from memory are faster than one:
#
#     weight [m, k]                     out [n, m]
#     +-----------+                     t0  | t0 ... |     | t1 ... |
#     | thread 0  |  \ row r            t1  |        |     |        |
#     | thread 1  |   |                 ...
#     +- m / 2 ---+   | two streams         column r     column r + m / 2
#     | thread 0  |  / row r + m / 2
#     | thread 1  |
#     +-----------+
#
# No two threads write the same column, so nothing is locked; the barrier afterwards is the caller's.


@fast
def layer_of(table: Any, i_layer: Any) -> Any:
    """Return the addresses of a layer's weight, its scales and its bias; 0 where there is none."""
    return table[i_layer], table[SCALES + i_layer], table[BIAS + i_layer]


@fast
def _biases(layer: Any, m: Any) -> Any:
    """Return the bias [m] of a layer; an empty one where it has none."""
    n = m if layer[2] != 0 else 0
    return carray(pointer(layer[2]), (n,), np.float32)


@fast
def _put(
    biases: Any,
    number: Any,
    out: Any,
    t: Any,
    column: Any,
    adds: Any,
) -> Any:
    """Write one number of a layer's output, with its bias if there is one, or add it to the number there."""
    if len(biases):
        number += biases[column]
    out[t, column] = number + out[t, column] if adds else number


@fast
def _group_sums(quantised: Any) -> Any:
    """Add up each group of a token's quantised values [n, k]: [groups, n] float32, for the zeros of a weight."""
    n, k = quantised.shape
    sums = np.zeros((k // GROUP, n), np.float32)
    for t in range(n):
        for group in range(k // GROUP):
            for i in range(GROUP):
                sums[group, t] += quantised[t, group * GROUP + i]
    return sums


# ROWS rows lie beside each other, GROUP columns after the other, with ROWS scales and ROWS zeros of 16 bits each:
#
#     weight    | rows 0..ROWS-1: group 0 | group 1 | ... | rows ROWS..: group 0 | ...     GROUP * ROWS / 2 bytes each
#     scales    | ROWS scales, ROWS zeros | ...                                            4 * ROWS bytes each
@fast
def _multiply_int4(
    layer: Any,
    x: Any,
    out: Any,
    adds: Any,
    thread: Any,
    n_threads: Any,
) -> Any:
    """``multiply`` for weights of 4 bits, ROWS rows at a time."""
    n, k = x.shape
    m = out.shape[1]
    groups = k // GROUP
    biases = _biases(layer, m)
    quantised = np.empty((n, k), np.int16)
    token_scales = np.empty(n, np.float32)
    quantise_tokens(x, quantised, token_scales)
    sums = _group_sums(quantised)
    totals = np.empty((n, ROWS), np.float32)
    stride = 2 * k
    weight = layer[0]  # read before the loop: what is written in it may be any of these
    scales_address = layer[1]
    first = m // ROWS * thread // n_threads * ROWS
    last = m // ROWS * (thread + 1) // n_threads * ROWS
    for r in range(first, last, ROWS):
        totals[:] = np.float32(0)
        # Addresses are taken here, not before the loop: Numba frees an array after its last use by name, and does not
        # know that somebody has its address.
        x_address = quantised.ctypes.data
        sums_address = sums.ctypes.data
        totals_address = totals.ctypes.data
        for group in range(groups):
            rows = weight + (r * k + group * GROUP * ROWS) // 2
            scales = scales_address + 4 * (r * groups + group * ROWS)
            for t in range(0, n, 2):
                token = x_address + t * stride + 2 * group * GROUP
                token_sum = sums_address + 4 * (group * n + t)
                total = totals_address + 4 * ROWS * t
                if t + 1 < n:
                    multiply_group_by_two(rows, scales, token, stride, token_sum, total)
                else:
                    multiply_group(rows, scales, token, stride, token_sum, total)
        for t in range(n):
            for i in range(ROWS):
                number = token_scales[t] * totals[t, i]
                _put(biases, number, out, t, r + i, adds)


@fast
def _multiply_int8(
    layer: Any,
    x: Any,
    out: Any,
    adds: Any,
    thread: Any,
    n_threads: Any,
) -> Any:
    """``multiply`` for weights of 8 bits, with a scale for each row."""
    n, k = x.shape
    m = out.shape[1]
    half = m // 2
    scales = carray(pointer(layer[1]), (m,), np.float32)
    biases = _biases(layer, m)
    quantised = np.empty((n, k), np.int16)
    token_scales = np.empty(n, np.float32)
    quantise_tokens(x, quantised, token_scales)
    totals = np.empty((n, 2), np.float32)
    chunk_totals = np.empty((n, 2), np.float32)
    weight = layer[0]
    for r in range(half * thread // n_threads, half * (thread + 1) // n_threads):
        first = weight + r * k
        second = first + half * k
        prefetch_ahead(first, k)
        prefetch_ahead(second, k)
        token = quantised.ctypes.data
        stride = 2 * k
        # Sums of more than CHUNK products might not fit in 32 bits: they are added up as float32 from chunk to chunk.
        width = min(CHUNK, k)
        multiply_quantised_pair(first, second, token, stride, n, width, totals.ctypes.data)
        for begin in range(CHUNK, k, CHUNK):
            width = min(CHUNK, k - begin)
            chunk = token + 2 * begin
            sums = chunk_totals.ctypes.data
            multiply_quantised_pair(first + begin, second + begin, chunk, stride, n, width, sums)
            totals += chunk_totals
        for side in range(2):
            column = r + side * half
            for t in range(n):
                number = scales[column] * token_scales[t] * totals[t, side]
                _put(biases, number, out, t, column, adds)


@fast
def _multiply_floats(
    stored: Any,
    layer: Any,
    x: Any,
    out: Any,
    adds: Any,
    thread: Any,
    n_threads: Any,
) -> Any:
    """``multiply`` for weights of 16 or 32 bits."""
    n, k = x.shape
    m = out.shape[1]
    half = m // 2
    biases = _biases(layer, m)
    n_bytes = number_bytes(stored) * k
    products = np.empty((n, 2), np.float32)
    weight = layer[0]
    for r in range(half * thread // n_threads, half * (thread + 1) // n_threads):
        first = weight + r * n_bytes  # no hints to read ahead: they cost on some machines what they bring on others
        second = first + half * n_bytes
        multiply_row_pair(stored, first, second, x.ctypes.data, n, k, products.ctypes.data)
        for side in range(2):
            for t in range(n):
                _put(biases, products[t, side], out, t, r + side * half, adds)


if has_matrix_unit():
    from swarmd.compute.compiled.amx_four_bits import multiply_int4_tiles
    from swarmd.compute.compiled.amx_products import multiply_tiles, room_for, split_tokens_to_tiles

    # Threads share tiles here, of SIDE rows of the weight (of ROWS rows in 4 bits). Each thread splits all tokens for
    # itself: that is little work, and sharing it would cost one more barrier.
    @fast
    def _multiply_on_matrix_unit(
        stored: Any,
        layer: Any,
        x: Any,
        out: Any,
        adds: Any,
        thread: Any,
        n_threads: Any,
    ) -> Any:
        """``multiply`` by a matrix unit."""
        n, k = x.shape
        m = out.shape[1]
        is_quantised = stored in (INT4, INT8)
        weight, scales, _ = layer
        biases = _biases(layer, m)
        side = ROWS if stored == INT4 else SIDE
        first = m // side * thread // n_threads
        last = m // side * (thread + 1) // n_threads
        first_row = first * side
        last_row = last * side
        quantised = np.empty((n, k if is_quantised else 0), np.int16)
        token_scales = np.empty(n, np.float32)
        if is_quantised:
            quantise_tokens(x, quantised, token_scales)
        if stored == INT4:
            multiply_int4_tiles(weight, scales, quantised, token_scales, out, adds, first_row, last_row)
        else:
            room = np.empty(room_for(stored, n, k), np.uint8)
            n_scales = m if is_quantised else 0
            row_scales = carray(pointer(scales), (n_scales,), np.float32)
            if is_quantised:
                split_tokens_to_tiles(stored, quantised, room, 0, -(-n // SIDE))
            else:
                split_tokens_to_tiles(stored, x, room, 0, -(-n // SIDE))
            both_scales = row_scales, token_scales
            multiply_tiles(stored, room, k, weight, both_scales, out, adds, first, last)
        if len(biases):
            for t in range(n):
                for i in range(first_row, last_row):
                    out[t, i] += biases[i]

    @fast
    def is_for_matrix_unit(stored: Any, n: Any, k: Any, m: Any) -> Any:
        """Does the unit take a weight [m, k] of this format, and less time for n tokens?"""
        if stored == INT4:
            return n >= FEWEST
        if stored == INT8:
            return n >= FEWEST_LEVELS and k % LEVEL_STEP == 0 and k <= MOST_LEVELS and m % SIDE == 0
        fewest = FEWEST if stored == BFLOAT16 else FEWEST_TO_SPLIT
        return stored <= FLOAT16 and n >= fewest and k % STEP == 0 and m % SIDE == 0
else:  # a compiler for another CPU knows no such instructions

    @fast
    def _multiply_on_matrix_unit(
        stored: Any,
        layer: Any,
        x: Any,
        out: Any,
        adds: Any,
        thread: Any,
        n_threads: Any,
    ) -> Any:
        """There is none."""
        raise NotImplementedError("matrix units are for CPUs with AMX")

    @fast
    def is_for_matrix_unit(stored: Any, n: Any, k: Any, m: Any) -> Any:
        """There is none."""
        return False


@fast
def multiply(
    stored: Any,
    layer: Any,
    x: Any,
    out: Any,
    adds: Any,
    thread: Any,
    n_threads: Any,
) -> Any:
    """Multiply x [n, in] with a weight [m, in], with its bias, to out [n, m], or add it to what is there.

    m is even, of 4 bits a multiple of ROWS. This thread computes its part of the weight's rows.
    """
    n, k = x.shape
    if is_for_matrix_unit(stored, n, k, out.shape[1]):
        _multiply_on_matrix_unit(stored, layer, x, out, adds, thread, n_threads)
    elif stored == INT4:
        _multiply_int4(layer, x, out, adds, thread, n_threads)
    elif stored == INT8:
        _multiply_int8(layer, x, out, adds, thread, n_threads)
    else:
        _multiply_floats(stored, layer, x, out, adds, thread, n_threads)


@fast_without_lock
def multiply_together(
    stored: Any,
    layer: Any,
    x: Any,
    out: Any,
    barrier: Any,
    thread: Any,
    n_threads: Any,
) -> Any:
    """Multiply to ``out`` by as many threads, which wait for each other."""
    multiply(stored, layer, x, out, len(x) < 0, thread, n_threads)  # len(x) < 0 is False: see ``blocks``
    wait_at_barrier(barrier.ctypes.data, 0, n_threads)
