"""Several tokens times a weight in 4 bits by a CPU's unit for matrices: whole numbers, as in ``levels``, to the bit.

Each GROUP of a row's levels has a scale and a zero of its own, so sums leave the unit after each, where they are made
numbers and added up. Tokens come row by row here, and a weight as fours of levels of SIDE rows beside each other, which
is near to how it lies in memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from swarmd.compute.compiled.amx import (
    ROW,
    TILE,
    aligned,
    byte,
    call,
    exchange,
    floats,
    has_shape,
    new_shapes,
    pointer_to,
    reshape,
    wide,
    word,
    words,
)
from swarmd.compute.compiled.amx_products import put_levels
from swarmd.compute.compiled.layout import BFLOAT16, GROUP, LEVEL_OF_ZERO, LEVEL_TERMS, SIDE
from swarmd.compute.compiled.machine import AHEAD_BYTES, CACHE_LINE, ask_for, fast, instruction
from swarmd.compute.compiled.products import everywhere, plus, tools, widened
from swarmd.compute.compiled.registers import ROWS

FOUR = 4  # levels of a row that one instruction multiplies in each place
PART = GROUP // FOUR * ROW  # bytes of a group's levels of SIDE rows
PARTS = ROWS // SIDE
ALL = PARTS * TILE  # bytes of totals of SIDE tokens and ROWS rows
SIDES = 4  # of SIDE tokens at a time: their totals stay in the first cache
UPPER, LOWER = range(LEVEL_TERMS)  # bytes of a token's level, and registers with the sums of either
ENTERING, WEIGHT = LEVEL_TERMS, 2 * LEVEL_TERMS  # the first register of a token's bytes, and that of a weight


@instruction
def _unpack(typingctx: Any, packed: Any, place: Any) -> Any:
    """A group of ROWS rows, as they lie in memory, to PARTS parts for the unit: by addresses."""
    n_bytes = FOUR // 2 * ROWS // 2  # of levels that lie before the other two of each four
    two, four = ir.VectorType(byte, n_bytes), ir.VectorType(byte, ROW)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for row in range(GROUP // FOUR):
            at = row * 2 * n_bytes
            both = [builder.load(pointer_to(builder, args[0], at + i * n_bytes, two), align=1) for i in range(2)]
            for line in range(0, 2 * n_bytes, CACHE_LINE):
                ask_for(builder, pointer_to(builder, args[0], at + line + AHEAD_BYTES))
            for part in range(PARTS // 2):
                places = [part * SIDE + r + i * ROWS // 2 for r in range(SIDE) for i in range(FOUR)]
                levels = builder.shuffle_vector(*both, ir.Constant(ir.VectorType(word, ROW), places))
                lower = builder.and_(levels, ir.Constant(four, [15] * ROW))
                upper = builder.lshr(levels, ir.Constant(four, [4] * ROW))
                for which, some in ((part, lower), (part + PARTS // 2, upper)):
                    to = pointer_to(builder, args[1], which * PART + row * ROW, four)
                    builder.store(some, to, align=ROW)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@instruction
def _multiply(typingctx: Any, tokens: Any, below: Any, lower: Any, weight: Any, sums: Any) -> Any:
    """A group's levels of SIDE tokens times one part of it, to sums of upper bytes and of lower ones.

    By addresses; how far apart tokens are, and how far their lower bytes are from the upper ones.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tokens, below, lower, weight, sums = args
        call(builder, "tileloadd64", byte(WEIGHT), pointer_to(builder, weight, 0), wide(ROW))
        for term, offset, name in ((UPPER, 0, "tdpbssd"), (LOWER, lower, "tdpbusd")):  # signed bytes, unsigned ones
            call(builder, "tilezero", byte(term))
            call(builder, "tileloadd64", byte(ENTERING + term), pointer_to(builder, tokens, offset), below)
            call(builder, name, byte(term), byte(ENTERING + term), byte(WEIGHT))
            call(builder, "tilestored64", byte(term), pointer_to(builder, sums, term * TILE), wide(ROW))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@instruction
def _add(typingctx: Any, sums: Any, scales: Any, of_tokens: Any, n: Any, totals: Any) -> Any:
    """Add what a group's sums of n tokens are worth to totals [SIDE tokens, SIDE] float32.

    By addresses of the sums, of the scales of SIDE rows, ROWS further on their zeros, and of what the group's levels of
    each token add up to.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, scales, of_tokens, n, totals = args
        scale, zero = (widened(builder, BFLOAT16, pointer_to(builder, scales, 2 * ROWS * i), SIDE) for i in range(2))
        shifted = plus(builder, zero, scale, ir.Constant(floats, [-float(LEVEL_OF_ZERO)] * SIDE))
        with tools.for_range(builder, n) as loop:
            row = builder.mul(loop.index, wide(ROW))
            places = [
                pointer_to(builder, sums, builder.add(row, wide(term * TILE)), words) for term in range(LEVEL_TERMS)
            ]
            upper, lower = (builder.load(place, align=ROW) for place in places)
            product = builder.sitofp(builder.add(builder.shl(upper, ir.Constant(words, [8] * SIDE)), lower), floats)
            one = pointer_to(builder, of_tokens, builder.mul(loop.index, wide(4)), ir.FloatType())
            of_token = everywhere(builder, builder.load(one, align=4), SIDE)
            total = pointer_to(builder, totals, row, floats)
            so_far = plus(builder, builder.load(total, align=ROW), shifted, of_token)
            builder.store(plus(builder, so_far, scale, product), total, align=ROW)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@fast
def _enter(levels: Any, tokens: Any, of_tokens: Any) -> Any:
    """Levels [n, k] of 16 bits to their upper and lower bytes, [2, tokens, below], and sums of each group's."""
    n, k = levels.shape
    for t in range(n):
        row, upper, lower = levels[t], tokens[0, t], tokens[1, t]
        for i in range(k):
            upper[i], lower[i] = np.uint8((row[i] >> 8) & 255), np.uint8(row[i] & 255)
        for group in range(k // GROUP):
            total, some = np.int32(0), row[group * GROUP : (group + 1) * GROUP]
            for i in range(GROUP):
                total += np.int32(some[i])
            of_tokens[t // SIDE, group, t % SIDE] = np.float32(total)


@fast
def _multiply_side(
    tokens: Any, below: Any, lower: Any, n: Any, tiles: Any, scales: Any, of_tokens: Any, sums: Any, totals: Any
) -> Any:
    """A group's levels of n tokens times those of ROWS rows: by addresses, as ``_multiply`` and ``_add`` take them."""
    for part in range(PARTS):
        _multiply(tokens, below, lower, tiles + part * PART, sums + part * LEVEL_TERMS * TILE)
    for part in range(PARTS):
        _add(sums + part * LEVEL_TERMS * TILE, scales + 2 * part * SIDE, of_tokens, n, totals + part * TILE)


@fast
def _put(totals: Any, units: Any, ones: Any, out: Any, first: Any, row: Any, adds: Any) -> Any:
    """Totals of SIDE tokens from the first on and ROWS rows of the weight, by their address, to or onto out [n, m]."""
    n, m = out.shape
    for t in range(first, min(first + SIDE, n)):
        for part in range(PARTS):
            some, to = totals + part * TILE + (t - first) * ROW, out.ctypes.data + 4 * (t * m + row + part * SIDE)
            put_levels(some, to, adds, ones.ctypes.data, units[t])


@fast
def _shapes(n: Any) -> Any:
    """Of the registers that are used here, for n tokens at a time."""
    shapes = new_shapes()
    for register in range(WEIGHT):
        has_shape(shapes, register, n, ROW if register < ENTERING else GROUP)
    has_shape(shapes, WEIGHT, GROUP // FOUR, ROW)
    return shapes


@fast
def times_groups(weight: Any, scales: Any, levels: Any, units: Any, out: Any, adds: Any, first: Any, last: Any) -> Any:
    """Levels [n, k] of 16 bits, of these units [n], times rows ``first`` to ``last`` of a weight, to or onto out.

    The weight [m, k] and its scales by their addresses (``layout``); ROWS rows at a time.
    """
    n, k = levels.shape
    groups, below, n_sides = k // GROUP, k + ROW, -(-n // SIDE)  # tokens not where a cache has one place for all
    tokens, of_tokens = np.empty((2, n_sides * SIDE, below), np.uint8), np.zeros((n_sides, groups, SIDE), np.float32)
    _enter(levels, tokens, of_tokens)
    unpacked, sums = np.empty(ROW + PARTS * PART, np.uint8), np.empty(ROW + LEVEL_TERMS * ALL, np.uint8)
    totals, ones = np.empty(ROW + SIDES * ALL, np.uint8), np.ones(SIDE, np.float32)
    before = exchange(_shapes(min(n, SIDE)))
    for row in range(first, last, ROWS):
        for side in range(0, n_sides, SIDES):
            totals[:] = 0
            tiles, n_here = (
                aligned(unpacked),
                min(SIDES, n_sides - side),
            )  # now: an array is given back after its last use
            for group in range(groups):
                _unpack(weight + (row * k + group * GROUP * ROWS) // 2, tiles)
                of_rows = scales + 4 * (row * groups + group * ROWS)
                for i in range(n_here):
                    x = tokens.ctypes.data + (side + i) * SIDE * below + group * GROUP
                    of_x = of_tokens.ctypes.data + ((side + i) * groups + group) * ROW
                    to, lower = aligned(totals) + i * ALL, n_sides * SIDE * below
                    _multiply_side(x, below, lower, min(n, SIDE), tiles, of_rows, of_x, aligned(sums), to)
            for i in range(n_here):
                _put(aligned(totals) + i * ALL, units, ones, out, (side + i) * SIDE, row, adds)
    reshape(before)
