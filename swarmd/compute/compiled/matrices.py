"""A few tokens times a weight: read once, widened on the way."""

from __future__ import annotations

from typing import Any

import numpy as np

from swarmd.compute.compiled.layout import BIAS, FLOAT32, GROUP, INT4, INT8, ROWS, SCALES
from swarmd.compute.compiled.machine import carray, fast, pointer, prefetch
from swarmd.compute.compiled.products import times_group, times_group_of_two, times_pair

CACHE_LINE = 64  # bytes
AHEAD_BYTES = 4096  # 1,024 to 16,384 are alike within a tenth


@fast
def _look_ahead(address: Any, n_bytes: Any) -> Any:
    """Ask for what will be read in a moment: what the machine guesses by itself comes late at page ends."""
    for line in range(0, n_bytes, CACHE_LINE):
        prefetch(address + AHEAD_BYTES + line)


@fast
def _biases(table: Any, which: Any, m: Any) -> Any:
    """The bias of a layer; none where it has none."""
    return carray(pointer(table[BIAS + which]), (m if table[BIAS + which] != 0 else 0,), np.float32)


@fast
def _put(biases: Any, number: Any, out: Any, t: Any, at: Any, adds: Any) -> Any:
    """One number of what a layer gives, with its bias if there are any, to or onto what is there."""
    if len(biases):
        number += biases[at]
    out[t, at] = number + out[t, at] if adds else number


@fast
def _times_4_bits(table: Any, which: Any, x: Any, out: Any, adds: Any) -> Any:
    """``multiply`` for weights of 4 bits, ROWS rows at a time: a level of 8 is nothing but its zero."""
    n, k = x.shape
    m, groups = out.shape[1], k // GROUP
    biases = _biases(table, which, m)
    sums, totals = np.zeros((groups, n), np.float32), np.empty((n, ROWS), np.float32)
    for t in range(n):
        for group in range(groups):
            for i in range(GROUP):
                sums[group, t] += x[t, group * GROUP + i]
    step = 4 * k
    for r in range(0, m, ROWS):
        totals[:] = np.float32(0)
        # here, not before: an array that is not used any more is given back, whoever has its address
        at, sums_at, totals_at = x.ctypes.data, sums.ctypes.data, totals.ctypes.data
        for group in range(groups):
            levels = table[which] + (r * k + group * GROUP * ROWS) // 2
            _look_ahead(levels, GROUP * ROWS // 2)
            scales = table[SCALES + which] + 4 * (r * groups + group * ROWS)
            for t in range(0, n, 2):
                numbers = at + t * step + 4 * group * GROUP
                sum_at, total_at = sums_at + 4 * (group * n + t), totals_at + 4 * ROWS * t
                if t + 1 < n:
                    times_group_of_two(levels, scales, numbers, step, sum_at, total_at)
                else:
                    times_group(levels, scales, numbers, step, sum_at, total_at)
        for t in range(n):
            for i in range(ROWS):
                _put(biases, totals[t, i], out, t, r + i, adds)


@fast
def multiply(stored: Any, table: Any, which: Any, x: Any, out: Any, adds: Any) -> Any:
    """x [n, in] times a weight [m, in], with its bias, to or onto out [n, m]; m is even, of 4 bits a multiple of ROWS.

    Two rows at a time, from both halves: two streams from memory are faster than one.
    """
    n, k = x.shape
    if stored == INT4:
        _times_4_bits(table, which, x, out, adds)
        return
    m = out.shape[1]
    half = m // 2
    scales = carray(pointer(table[SCALES + which]), (m,), np.float32)
    biases = _biases(table, which, m)
    n_bytes = k if stored == INT8 else 4 * k if stored == FLOAT32 else 2 * k
    products = np.empty((n, 2), np.float32)
    numbers, sums = x.ctypes.data, products.ctypes.data
    for r in range(half):
        first = table[which] + r * n_bytes
        second = first + half * n_bytes
        if stored == INT8:  # with more bytes, hints cost on some machines what they bring on others
            _look_ahead(first, n_bytes)
            _look_ahead(second, n_bytes)
        times_pair(stored, first, second, numbers, n, k, sums)
        for side in range(2):
            at = r + side * half
            scale = scales[at] if stored == INT8 else np.float32(1)
            for t in range(n):
                _put(biases, scale * products[t, side], out, t, at, adds)
