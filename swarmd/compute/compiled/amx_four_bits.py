"""Several tokens times a weight in 4 bits by a CPU's matrix unit: whole numbers, as in ``quantised``, to the bit.

Each GROUP of a row's values has a scale and a zero of its own, so sums leave the unit after each, where they are made
numbers and added up. Tokens are the rows of a tile here, and a weight lies as fours of values of SIDE rows beside each
other, which is near to how it lies in memory:

    in memory (``layout``)           unpacked, for a part of SIDE rows
    column 0: rows 0..ROWS-1         | row 0: columns 0 1 2 3 | row 1: columns 0 1 2 3 | ...      64 bytes
    column 1: rows 0..ROWS-1         | row 0: columns 4 5 6 7 | ...
    ...                              ...                                                          GROUP / 4 rows
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
    apply_shapes,
    call_unit,
    exchange_shapes,
    float32_row,
    int8,
    int32,
    int32_row,
    int64,
    new_shapes,
    pointer_to,
    set_register_shape,
)
from swarmd.compute.compiled.amx_products import put_scaled
from swarmd.compute.compiled.layout import BFLOAT16, GROUP, LEVEL_OF_ZERO, N_BYTE_PARTS, SIDE
from swarmd.compute.compiled.machine import AHEAD_BYTES, CACHE_LINE, emit_prefetch, fast, instruction
from swarmd.compute.compiled.products import broadcast, load_widened, multiply_add, tools
from swarmd.compute.compiled.registers import ROWS

FOUR = 4  # values of a row that one instruction multiplies in each place
PART = GROUP // FOUR * ROW  # bytes of a group's values of SIDE rows
PARTS = ROWS // SIDE
ALL = PARTS * TILE  # bytes of totals of SIDE tokens and ROWS rows
SIDES = 4  # of SIDE tokens at a time: their totals stay in the first cache
UPPER, LOWER = range(N_BYTE_PARTS)  # bytes of a token's value, and registers with the sums of either
INPUTS = N_BYTE_PARTS  # the first register of a token's bytes
WEIGHT = 2 * N_BYTE_PARTS  # the register of a weight


@instruction
def _unpack(typingctx: Any, packed: Any, place: Any) -> Any:
    """Unpack a group of ROWS rows, as they lie in memory, to PARTS parts for the unit: by addresses."""
    n_bytes = FOUR // 2 * ROWS // 2  # of two columns, half of each four
    half_vector = ir.VectorType(int8, n_bytes)
    row_vector = ir.VectorType(int8, ROW)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low_bits = ir.Constant(row_vector, [15] * ROW)
        four = ir.Constant(row_vector, [4] * ROW)
        for row in range(GROUP // FOUR):
            begin = row * 2 * n_bytes
            half_begins = (begin, begin + n_bytes)
            half_places = [pointer_to(builder, args[0], offset, half_vector) for offset in half_begins]
            halves = [builder.load(place, align=1) for place in half_places]
            for offset in range(0, 2 * n_bytes, CACHE_LINE):
                emit_prefetch(builder, pointer_to(builder, args[0], begin + offset + AHEAD_BYTES))
            for part in range(PARTS // 2):
                first_row = part * SIDE
                rows = range(first_row, first_row + SIDE)
                places = [row + i * ROWS // 2 for row in rows for i in range(FOUR)]
                mask = ir.Constant(ir.VectorType(int32, ROW), places)
                values = builder.shuffle_vector(*halves, mask)
                lower = builder.and_(values, low_bits)
                upper = builder.lshr(values, four)
                for i_part, unpacked in ((part, lower), (part + PARTS // 2, upper)):
                    out = pointer_to(builder, args[1], i_part * PART + row * ROW, row_vector)
                    builder.store(unpacked, out, align=ROW)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@instruction
def _multiply_part(
    typingctx: Any,
    tokens: Any,
    token_stride: Any,
    lower: Any,
    weight: Any,
    sums: Any,
) -> Any:
    """Multiply a group's values of SIDE tokens with one part of it, to sums of upper bytes and of lower ones.

    By addresses; with the bytes from token to token, and from the upper bytes to the lower ones.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        tokens, token_stride, lower, weight, sums = args
        weight_place = pointer_to(builder, weight, 0)
        call_unit(builder, "tileloadd64", int8(WEIGHT), weight_place, int64(ROW))
        signed = (UPPER, 0, "tdpbssd")
        unsigned = (LOWER, lower, "tdpbusd")
        for part, offset, name in (signed, unsigned):
            inputs = int8(INPUTS + part)
            call_unit(builder, "tilezero", int8(part))
            call_unit(builder, "tileloadd64", inputs, pointer_to(builder, tokens, offset), token_stride)
            call_unit(builder, name, int8(part), inputs, int8(WEIGHT))
            out = pointer_to(builder, sums, part * TILE)
            call_unit(builder, "tilestored64", int8(part), out, int64(ROW))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


# A group's product of a token and a row, from whole numbers (see ``quantised._multiply_group_by``):
#
#     scale * (256 * upper + lower) + (zero - LEVEL_OF_ZERO * scale) * sum of the token's values
@instruction
def _add_group(
    typingctx: Any,
    sums: Any,
    scales: Any,
    token_sums: Any,
    n: Any,
    totals: Any,
) -> Any:
    """Add a group's scaled sums of n tokens to totals [SIDE tokens, SIDE] float32.

    By addresses of the sums; of the scales of SIDE rows, with their zeros ROWS further on; and of the sum of each
    token's values of the group.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, scales, token_sums, n, totals = args
        scale = load_widened(builder, BFLOAT16, pointer_to(builder, scales, 0), SIDE)
        zero = load_widened(builder, BFLOAT16, pointer_to(builder, scales, 2 * ROWS), SIDE)
        minus_eight = ir.Constant(float32_row, [-float(LEVEL_OF_ZERO)] * SIDE)
        eight = ir.Constant(int32_row, [8] * SIDE)
        offset = multiply_add(builder, zero, scale, minus_eight)
        with tools.for_range(builder, n) as loop:
            row = builder.mul(loop.index, int64(ROW))
            places = [
                pointer_to(builder, sums, builder.add(row, int64(part * TILE)), int32_row)
                for part in range(N_BYTE_PARTS)
            ]
            upper, lower = (builder.load(place, align=ROW) for place in places)
            whole = builder.add(builder.shl(upper, eight), lower)
            product = builder.sitofp(whole, float32_row)
            sum_offset = builder.mul(loop.index, int64(4))
            sum_place = pointer_to(builder, token_sums, sum_offset, ir.FloatType())
            token_sum = broadcast(builder, builder.load(sum_place, align=4), SIDE)
            total = pointer_to(builder, totals, row, float32_row)
            with_offset = multiply_add(builder, builder.load(total, align=ROW), offset, token_sum)
            builder.store(multiply_add(builder, with_offset, scale, product), total, align=ROW)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@fast
def _split_bytes(quantised: Any, tokens: Any, token_sums: Any) -> Any:
    """Split quantised values [n, k] of 16 bits to upper and lower bytes, [2, tokens, stride], and add up each group."""
    n, k = quantised.shape
    for t in range(n):
        row = quantised[t]
        upper = tokens[0, t]
        lower = tokens[1, t]
        for i in range(k):
            upper[i] = np.uint8((row[i] >> 8) & 255)
            lower[i] = np.uint8(row[i] & 255)
        for group in range(k // GROUP):
            total = np.int32(0)
            group_values = row[group * GROUP : (group + 1) * GROUP]
            for i in range(GROUP):
                total += np.int32(group_values[i])
            token_sums[t // SIDE, group, t % SIDE] = np.float32(total)


@fast
def _multiply_side(
    tokens: Any,
    stride: Any,
    lower: Any,
    n: Any,
    tiles: Any,
    scales: Any,
    token_sums: Any,
    sums: Any,
    totals: Any,
) -> Any:
    """Multiply a group's values of n tokens with those of ROWS rows: by addresses, as the instructions take them.

    All products come first, then all additions: the unit writes sums to memory, and vector registers read them there.
    """
    for part in range(PARTS):
        _multiply_part(tokens, stride, lower, tiles + part * PART, sums + part * N_BYTE_PARTS * TILE)
    for part in range(PARTS):
        part_sums = sums + part * N_BYTE_PARTS * TILE
        _add_group(part_sums, scales + 2 * part * SIDE, token_sums, n, totals + part * TILE)


@fast
def _put_totals(
    totals: Any,
    token_scales: Any,
    ones: Any,
    out: Any,
    first: Any,
    row: Any,
    adds: Any,
) -> Any:
    """Write totals of SIDE tokens from the first on and ROWS rows of the weight to out [n, m], or add them to it."""
    n, m = out.shape
    for t in range(first, min(first + SIDE, n)):
        for part in range(PARTS):
            numbers = totals + part * TILE + (t - first) * ROW
            place = out.ctypes.data + 4 * (t * m + row + part * SIDE)
            put_scaled(numbers, place, adds, ones.ctypes.data, token_scales[t])


@fast
def _shapes(n: Any) -> Any:
    """Describe the registers that are used here, for n tokens at a time."""
    shapes = new_shapes()
    for register in range(WEIGHT):
        set_register_shape(shapes, register, n, ROW if register < INPUTS else GROUP)
    set_register_shape(shapes, WEIGHT, GROUP // FOUR, ROW)
    return shapes


# Each group of ROWS rows is unpacked once, and meets all sides (of SIDE tokens) whose totals the first cache holds:
#
#     for ROWS rows
#         for SIDES sides of tokens                 totals [SIDES, PARTS, SIDE tokens, SIDE rows] = 0
#             for each group of columns             unpack -> tiles [PARTS]
#                 for each side                     tokens * tiles -> sums -> totals
#             write totals
#
# Rows of tokens are ROW bytes longer than k: at a power of two all of them would fall into one place of the cache.
# Addresses are taken in the loops: Numba frees an array after its last use by name.
@fast
def multiply_int4_tiles(
    weight: Any,
    scales: Any,
    quantised: Any,
    token_scales: Any,
    out: Any,
    adds: Any,
    first: Any,
    last: Any,
) -> Any:
    """Multiply quantised values [n, k] of 16 bits with rows ``first`` to ``last`` of a weight, to out, or add to it.

    ``token_scales`` [n]. The weight [m, k] and its scales by their addresses (``layout``); ROWS rows at a time.
    """
    n, k = quantised.shape
    groups = k // GROUP
    stride = k + ROW
    n_sides = -(-n // SIDE)
    tokens = np.empty((2, n_sides * SIDE, stride), np.uint8)
    token_sums = np.zeros((n_sides, groups, SIDE), np.float32)
    _split_bytes(quantised, tokens, token_sums)
    unpacked = np.empty(ROW + PARTS * PART, np.uint8)
    sums = np.empty(ROW + N_BYTE_PARTS * ALL, np.uint8)
    totals = np.empty(ROW + SIDES * ALL, np.uint8)
    ones = np.ones(SIDE, np.float32)
    lower = n_sides * SIDE * stride
    previous = exchange_shapes(_shapes(min(n, SIDE)))
    for row in range(first, last, ROWS):
        for side in range(0, n_sides, SIDES):
            totals[:] = 0
            tiles = aligned(unpacked)
            sides_now = min(SIDES, n_sides - side)
            for group in range(groups):
                _unpack(weight + (row * k + group * GROUP * ROWS) // 2, tiles)
                row_scales = scales + 4 * (row * groups + group * ROWS)
                for i in range(sides_now):
                    x = tokens.ctypes.data + (side + i) * SIDE * stride + group * GROUP
                    x_sums = token_sums.ctypes.data + ((side + i) * groups + group) * ROW
                    place = aligned(totals) + i * ALL
                    n_tokens = min(n, SIDE)
                    _multiply_side(x, stride, lower, n_tokens, tiles, row_scales, x_sums, aligned(sums), place)
            for i in range(sides_now):
                side_totals = aligned(totals) + i * ALL
                first_token = (side + i) * SIDE
                _put_totals(side_totals, token_scales, ones, out, first_token, row, adds)
    apply_shapes(previous)
