"""A few tokens times a weight: read once, widened on the way."""

from __future__ import annotations

from typing import Any

import numpy as np

from swarmd.compute.compiled.layout import BFLOAT16, BIAS, FLOAT16, FLOAT32, GROUP, INT4, INT8, ROWS, SCALES, ZEROS
from swarmd.compute.compiled.machine import (
    carray,
    fast,
    of_bfloat16,
    of_float16,
    pointer,
    prefetch,
    times_group,
    times_group_of_two,
    widen,
)

CACHE_LINE = 64  # bytes
AHEAD_BYTES = 4096  # 1,024 to 16,384 are alike within a tenth


@fast
def _read(stored: Any, table: Any, which: Any, r: Any, row: Any) -> Any:
    """Read row r of a weight in 16 or 8 bits, without the scale that int8 has for all of it."""
    k = len(row)
    if stored == INT8:
        levels = carray(pointer(table[which] + r * k), (k,), np.int8)
        for i in range(k):
            row[i] = np.float32(levels[i])
    else:
        widen(stored, table[which] + 2 * r * k, k, row)


@fast
def _look_ahead(address: Any, n_bytes: Any) -> Any:
    """Ask for what will be read in a moment: what the machine guesses by itself comes late at page ends."""
    for line in range(0, n_bytes, CACHE_LINE):
        prefetch(address + AHEAD_BYTES + line)


@fast
def _pair(first: Any, second: Any, x: Any, products: Any) -> Any:
    """Two rows of a weight times each of x [n, in]: products [n, 2]."""
    n, k = x.shape
    t = 0
    while t + 4 <= n:
        a, b, c, d = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        e, f, g, h = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(k):
            v, w = first[i], second[i]
            a += v * x[t, i]
            b += v * x[t + 1, i]
            c += v * x[t + 2, i]
            d += v * x[t + 3, i]
            e += w * x[t, i]
            f += w * x[t + 1, i]
            g += w * x[t + 2, i]
            h += w * x[t + 3, i]
        products[t, 0], products[t + 1, 0], products[t + 2, 0], products[t + 3, 0] = a, b, c, d
        products[t, 1], products[t + 1, 1], products[t + 2, 1], products[t + 3, 1] = e, f, g, h
        t += 4
    while t + 2 <= n:
        a, b, e, f = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        for i in range(k):
            a += first[i] * x[t, i]
            b += first[i] * x[t + 1, i]
            e += second[i] * x[t, i]
            f += second[i] * x[t + 1, i]
        products[t, 0], products[t + 1, 0], products[t, 1], products[t + 1, 1] = a, b, e, f
        t += 2
    if t < n:
        a, e = np.float32(0), np.float32(0)
        for i in range(k):
            a += first[i] * x[t, i]
            e += second[i] * x[t, i]
        products[t, 0], products[t, 1] = a, e


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
def _alone(stored: Any, table: Any, which: Any, x: Any, out: Any, adds: Any) -> Any:
    """``multiply`` for one x [in], whose weights are read where they lie."""
    m, k = out.shape[1], len(x)
    half = m // 2
    zero = np.float32(0)
    biases = _biases(table, which, m)
    if stored == INT8:
        levels = carray(pointer(table[which]), (m, k), np.int8)
        scales = carray(pointer(table[SCALES + which]), (m,), np.float32)
        for r in range(half):
            _look_ahead(table[which] + r * k, k)
            _look_ahead(table[which] + (r + half) * k, k)
            a, b = zero, zero
            for i in range(k):
                a += np.float32(levels[r, i]) * x[i]
                b += np.float32(levels[r + half, i]) * x[i]
            _put(biases, scales[r] * a, out, 0, r, adds)
            _put(biases, scales[r + half] * b, out, 0, r + half, adds)
    elif stored == BFLOAT16:
        halves = carray(pointer(table[which]), (m, k), np.uint16)
        for r in range(half):
            a, b = zero, zero
            for i in range(k):
                a += of_bfloat16(halves[r, i]) * x[i]
                b += of_bfloat16(halves[r + half, i]) * x[i]
            _put(biases, a, out, 0, r, adds)
            _put(biases, b, out, 0, r + half, adds)
    elif stored == FLOAT16:
        halves = carray(pointer(table[which]), (m, k), np.uint16)
        for r in range(half):
            a, b = zero, zero
            for i in range(k):
                a += of_float16(halves[r, i]) * x[i]
                b += of_float16(halves[r + half, i]) * x[i]
            _put(biases, a, out, 0, r, adds)
            _put(biases, b, out, 0, r + half, adds)
    else:
        numbers = carray(pointer(table[which]), (m, k), np.float32)
        for r in range(half):
            a, b = zero, zero
            for i in range(k):
                a += numbers[r, i] * x[i]
                b += numbers[r + half, i] * x[i]
            _put(biases, a, out, 0, r, adds)
            _put(biases, b, out, 0, r + half, adds)


@fast
def _times_4_bits(table: Any, which: Any, x: Any, out: Any, adds: Any) -> Any:
    """``multiply`` for weights of 4 bits, ROWS rows at a time: a level of 8 is nothing but its zero."""
    n, k = x.shape
    m, groups = out.shape[1], k // GROUP
    biases = _biases(table, which, m)
    scales = carray(pointer(table[SCALES + which]), (groups, m), np.uint16)
    zeros = carray(pointer(table[ZEROS + which]), (groups, m), np.uint16)
    sums = np.zeros((n, groups), np.float32)
    totals, parts = np.empty((n, ROWS), np.float32), np.empty((n, ROWS), np.float32)
    for t in range(n):
        for group in range(groups):
            for i in range(GROUP):
                sums[t, group] += x[t, group * GROUP + i]
    for r in range(0, m, ROWS):
        totals[:] = np.float32(0)
        for group in range(groups):
            address = table[which] + (r * k + group * GROUP * ROWS) // 2
            _look_ahead(address, GROUP * ROWS // 2)
            first, step = x.ctypes.data + 4 * group * GROUP, 4 * k
            for t in range(0, n - 1, 2):
                times_group_of_two(address, first + t * step, step, parts.ctypes.data + 4 * ROWS * t)
            if n % 2:
                times_group(address, first + (n - 1) * step, step, parts.ctypes.data + 4 * ROWS * (n - 1))
            for t in range(n):
                total = sums[t, group]
                for i in range(ROWS):
                    level = of_bfloat16(scales[group, r + i]) * (parts[t, i] - np.float32(8) * total)
                    totals[t, i] += level + of_bfloat16(zeros[group, r + i]) * total
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
    if n == 1:
        _alone(stored, table, which, x[0], out, adds)
        return
    m = out.shape[1]
    half = m // 2
    scales = carray(pointer(table[SCALES + which]), (m,), np.float32)
    biases = _biases(table, which, m)
    n_bytes = k if stored == INT8 else 4 * k if stored == FLOAT32 else 2 * k
    products = np.empty((n, 2), np.float32)
    first, second = np.empty(k, np.float32), np.empty(k, np.float32)
    for r in range(half):
        _look_ahead(table[which] + r * n_bytes, n_bytes)
        _look_ahead(table[which] + (r + half) * n_bytes, n_bytes)
        if stored == FLOAT32:  # which need not be read before
            first = carray(pointer(table[which] + r * n_bytes), (k,), np.float32)
            second = carray(pointer(table[which] + (r + half) * n_bytes), (k,), np.float32)
        else:
            _read(stored, table, which, r, first)
            _read(stored, table, which, r + half, second)
        _pair(first, second, x, products)
        for side in range(2):
            at = r + side * half
            scale = scales[at] if stored == INT8 else np.float32(1)
            for t in range(n):
                _put(biases, scale * products[t, side], out, t, at, adds)
