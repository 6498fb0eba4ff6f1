"""Tokens times a weight: read once, widened on the way; of several by a unit for matrices, where there is one."""

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
from swarmd.compute.compiled.machine import alone, carray, fast, look_ahead, meet, number_bytes, pointer
from swarmd.compute.compiled.products import times_pair
from swarmd.compute.compiled.quantised import (
    CHUNK,
    round_to_levels,
    times_group,
    times_group_of_two,
    times_pair_of_levels,
)
from swarmd.compute.compiled.registers import ROWS
from swarmd.compute.hardware.matrix_unit import has_tiles

FEWEST_TO_SPLIT, FEWEST, FEWEST_LEVELS = 8, 6, 4  # tokens for which a unit for matrices takes less time


@fast
def layer_of(table: Any, which: Any) -> Any:
    """Where a layer's weight lies, its scales and its bias; 0 is nothing."""
    return table[which], table[SCALES + which], table[BIAS + which]


@fast
def _biases(layer: Any, m: Any) -> Any:
    """The bias of a layer; none where it has none."""
    return carray(pointer(layer[2]), (m if layer[2] != 0 else 0,), np.float32)


@fast
def _put(biases: Any, number: Any, out: Any, t: Any, at: Any, adds: Any) -> Any:
    """One number of what a layer gives, with its bias if there are any, to or onto what is there."""
    if len(biases):
        number += biases[at]
    out[t, at] = number + out[t, at] if adds else number


@fast
def _times_4_bits(layer: Any, x: Any, out: Any, adds: Any, part: Any, parts: Any) -> Any:
    """``multiply`` for weights of 4 bits, ROWS rows at a time: a level of 8 is nothing but its zero."""
    n, k = x.shape
    m, groups = out.shape[1], k // GROUP
    biases = _biases(layer, m)
    levels, units = np.empty((n, k), np.int16), np.empty(n, np.float32)
    round_to_levels(x, levels, units)
    sums, totals = np.zeros((groups, n), np.float32), np.empty((n, ROWS), np.float32)
    for t in range(n):
        for group in range(groups):
            for i in range(GROUP):
                sums[group, t] += levels[t, group * GROUP + i]
    step, weight, units_at = 2 * k, layer[0], layer[1]  # before what is written may be any of these
    for r in range(m // ROWS * part // parts * ROWS, m // ROWS * (part + 1) // parts * ROWS, ROWS):
        totals[:] = np.float32(0)
        # here, not before: an array that is not used any more is given back, whoever has its address
        at, sums_at, totals_at = levels.ctypes.data, sums.ctypes.data, totals.ctypes.data
        for group in range(groups):
            rows = weight + (r * k + group * GROUP * ROWS) // 2
            scales = units_at + 4 * (r * groups + group * ROWS)
            for t in range(0, n, 2):
                numbers = at + t * step + 2 * group * GROUP
                sum_at, total_at = sums_at + 4 * (group * n + t), totals_at + 4 * ROWS * t
                if t + 1 < n:
                    times_group_of_two(rows, scales, numbers, step, sum_at, total_at)
                else:
                    times_group(rows, scales, numbers, step, sum_at, total_at)
        for t in range(n):
            for i in range(ROWS):
                _put(biases, units[t] * totals[t, i], out, t, r + i, adds)


@fast
def _times_8_bits(layer: Any, x: Any, out: Any, adds: Any, part: Any, parts: Any) -> Any:
    """``multiply`` for weights of 8 bits, with a scale for each row."""
    n, k = x.shape
    m = out.shape[1]
    half = m // 2
    scales, biases = carray(pointer(layer[1]), (m,), np.float32), _biases(layer, m)
    levels, units = np.empty((n, k), np.int16), np.empty(n, np.float32)
    round_to_levels(x, levels, units)
    totals, more, weight = np.empty((n, 2), np.float32), np.empty((n, 2), np.float32), layer[0]
    for r in range(half * part // parts, half * (part + 1) // parts):
        first = weight + r * k
        second = first + half * k
        look_ahead(first, k)
        look_ahead(second, k)
        numbers = levels.ctypes.data
        times_pair_of_levels(first, second, numbers, 2 * k, n, min(CHUNK, k), totals.ctypes.data)
        for at in range(CHUNK, k, CHUNK):
            width = min(CHUNK, k - at)
            times_pair_of_levels(first + at, second + at, numbers + 2 * at, 2 * k, n, width, more.ctypes.data)
            totals += more
        for side in range(2):
            at = r + side * half
            for t in range(n):
                _put(biases, scales[at] * units[t] * totals[t, side], out, t, at, adds)


@fast
def _times_numbers(stored: Any, layer: Any, x: Any, out: Any, adds: Any, part: Any, parts: Any) -> Any:
    """``multiply`` for weights of 16 or 32 bits."""
    n, k = x.shape
    m = out.shape[1]
    half = m // 2
    biases = _biases(layer, m)
    n_bytes = number_bytes(stored) * k
    products, weight = np.empty((n, 2), np.float32), layer[0]
    for r in range(half * part // parts, half * (part + 1) // parts):
        first = weight + r * n_bytes  # no hints to read ahead: they cost on some machines what they bring on others
        times_pair(stored, first, first + half * n_bytes, x.ctypes.data, n, k, products.ctypes.data)
        for side in range(2):
            for t in range(n):
                _put(biases, products[t, side], out, t, r + side * half, adds)


if has_tiles():
    from swarmd.compute.compiled.amx_four_bits import times_groups
    from swarmd.compute.compiled.amx_products import enter, room_for, times_rows

    @fast
    def _times_tiles(stored: Any, layer: Any, x: Any, out: Any, adds: Any, part: Any, parts: Any) -> Any:
        """``multiply`` by a unit for matrices."""
        n, k = x.shape
        m, is_level = out.shape[1], stored in (INT4, INT8)
        biases, side = _biases(layer, m), ROWS if stored == INT4 else SIDE
        first, last = m // side * part // parts, m // side * (part + 1) // parts
        levels, units = np.empty((n, k if is_level else 0), np.int16), np.empty(n, np.float32)
        if is_level:
            round_to_levels(x, levels, units)
        if stored == INT4:
            times_groups(layer[0], layer[1], levels, units, out, adds, first * side, last * side)
        else:
            room = np.empty(room_for(stored, n, k), np.uint8)
            scales = carray(pointer(layer[1]), (m if is_level else 0,), np.float32)
            if is_level:
                enter(stored, levels, room, 0, -(-n // SIDE))
            else:
                enter(stored, x, room, 0, -(-n // SIDE))
            times_rows(stored, room, k, layer[0], (scales, units), out, adds, first, last)
        if len(biases):
            for t in range(n):
                for i in range(first * side, last * side):
                    out[t, i] += biases[i]

    @fast
    def by_tiles(stored: Any, n: Any, k: Any, m: Any) -> Any:
        """Does the unit take less time?"""
        if stored == INT4:
            return n >= FEWEST
        if stored == INT8:
            return n >= FEWEST_LEVELS and k % LEVEL_STEP == 0 and k <= MOST_LEVELS and m % SIDE == 0
        fewest = FEWEST if stored == BFLOAT16 else FEWEST_TO_SPLIT
        return stored <= FLOAT16 and n >= fewest and k % STEP == 0 and m % SIDE == 0
else:  # a compiler for another CPU knows no such instructions

    @fast
    def _times_tiles(stored: Any, layer: Any, x: Any, out: Any, adds: Any, part: Any, parts: Any) -> Any:
        """There are none."""
        raise NotImplementedError("tiles are for CPUs with AMX")

    @fast
    def by_tiles(stored: Any, n: Any, k: Any, m: Any) -> Any:
        return False


@fast
def multiply(stored: Any, layer: Any, x: Any, out: Any, adds: Any, part: Any, parts: Any) -> Any:
    """x [n, in] times a weight [m, in], with its bias, to or onto out [n, m].

    m is even, of 4 bits a multiple of ROWS. Two rows at a time, but by tiles, from both halves: two streams from memory
    are faster than one. Of the rows of the weight one ``part`` of so many is computed: threads share them.
    """
    if by_tiles(stored, len(x), x.shape[1], out.shape[1]):
        _times_tiles(stored, layer, x, out, adds, part, parts)
    elif stored == INT4:
        _times_4_bits(layer, x, out, adds, part, parts)
    elif stored == INT8:
        _times_8_bits(layer, x, out, adds, part, parts)
    else:
        _times_numbers(stored, layer, x, out, adds, part, parts)


@alone
def multiply_together(stored: Any, layer: Any, x: Any, out: Any, meeting: Any, part: Any, parts: Any) -> Any:
    """The same to ``out``, by as many threads, which wait for each other."""
    multiply(stored, layer, x, out, len(x) < 0, part, parts)  # False: see ``blocks``
    meet(meeting.ctypes.data, 0, parts)
