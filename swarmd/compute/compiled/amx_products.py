"""Several tokens times a weight by a CPU's matrix unit (Intel AMX), which multiplies in bfloat16.

A float32 has three times bfloat16's bits, and is the sum of three such numbers, its split parts; what was written in
float16 is one of two. Of a product of two numbers six parts are computed and added up in float32, firsts with firsts to
thirds: the others are less than what float32 rounds. What comes is as exact as by AVX-512 for numbers of usual sizes
(to this unit what is below 1e-38 is nothing, parts too), and sooner: 512 products a cycle for 32. Weights are read
where they lie, row by row, and split on the way, so one session's steps read them as they are.

                     token part 0   token part 1   token part 2
    weight part 0         x              x              x
    weight part 1         x              x              .
    weight part 2         x              .              .          x: computed

Quantised values of 8 bits are multiplied in whole numbers, 1,024 products a cycle: a token's values, of 16 bits, have
two parts then, their upper byte and their lower one, with sums of their own (``quantised``).

The unit's registers (``amx``), of which one step of a weight uses all:

    0 1 2 3        4 5 6               7
    sums           parts of tokens     one tile of the weight
    SIDE rows of the weight by SIDE tokens, transposed when they are written to ``out``
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
    int32_row,
    int64,
    load_rows,
    new_shapes,
    pointer_to,
    set_register_shape,
    store_transposed,
    transpose,
)
from swarmd.compute.compiled.layout import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    INT8,
    LEVEL_STEP,
    N_BYTE_PARTS,
    N_SPLIT_PARTS,
    SIDE,
    STEP,
)
from swarmd.compute.compiled.machine import (
    CompiledFunction,
    emit_prefetch,
    fast,
    fast_without_lock,
    instruction,
    jitable,
    number_bytes,
    wait_at_barrier,
)
from swarmd.compute.compiled.products import BYTES, broadcast, is_equal, multiply_add
from swarmd.compute.compiled.split_parts import (
    copy_row,
    split_quantised,
    split_row_of_16_bits,
    split_row_of_32_bits,
    split_tokens,
)

SUMS = 4  # registers that are added up at the same time: a product takes 52 cycles, one begins in 16
INPUTS = SUMS  # the first of three registers with a token's parts, behind those of sums
WEIGHT = SUMS + N_SPLIT_PARTS  # the register of the weight
FORMATS = (FLOAT32, FLOAT16, BFLOAT16, INT8)
SPLIT_TILES = 24  # of a weight's parts, which many tokens read from the first cache


@jitable
def _n_weight_parts(stored: Any) -> Any:
    """Return how many split parts a number of a weight has."""
    if stored == FLOAT32:
        return N_SPLIT_PARTS
    return 2 if stored == FLOAT16 else 1


@jitable
def _n_token_parts(stored: Any) -> Any:
    """Return how many split parts a number of a token has."""
    return N_BYTE_PARTS if stored == INT8 else N_SPLIT_PARTS


@jitable
def _step_columns(stored: Any) -> Any:
    """Return how many columns of each row one step multiplies."""
    return LEVEL_STEP if stored == INT8 else STEP


@jitable
def _tiles_at_once(stored: Any) -> Any:
    """Return how many tiles of a weight are multiplied at the same time."""
    return SUMS // N_BYTE_PARTS if stored == INT8 else SUMS


@instruction
def _clear_sums(typingctx: Any) -> Any:
    """Set all sums to 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i in range(SUMS):
            call_unit(builder, "tilezero", int8(i))
        return context.get_dummy_value()

    return types.void(), generate


def _with_sums(name: str) -> CompiledFunction:
    """Make an instruction between all sums and an address, [SUMS, SIDE, SIDE] of 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for i in range(SUMS):
            place = pointer_to(builder, args[0], i * TILE)
            call_unit(builder, name, int8(i), place, int64(ROW))
        return context.get_dummy_value()

    def typed(typingctx: Any, sums: Any) -> Any:
        return types.void(types.int64), generate

    return instruction(typed)


_load_sums = _with_sums("tileloadd64")
_store_sums = _with_sums("tilestored64")


def _products(stored: int, part: int) -> list[tuple[str, int]]:
    """Tell which instructions multiply a weight's part with a token's parts, and to which of a tile's sums they add."""
    if stored == INT8:
        return [("tdpbssd", 0), ("tdpbsud", 1)]  # signed bytes times signed ones, and times unsigned ones
    return [("tdpbf16ps", 0)] * (N_SPLIT_PARTS - part)


# All parts of the tokens are loaded once; then each tile of the weight, and each of its parts, passes through the one
# register that is left. While the unit multiplies, hints ask for the rows that the next block of tiles will read:
#
#     for each part of the weight
#         for each tile                   tile 0 | tile 1 | tile 2 | tile 3     SIDE rows each
#             load it                     -> register WEIGHT
#             times each token part       -> += sums of this tile
#             a few hints
def _write_step(builder: Any, stored: int, n_tiles: int, args: Any) -> None:
    """Write the products of a step of SIDE tokens and so many tiles of a weight: see ``_add_step``."""
    x, weight, row_stride, tile_stride, soon_read = args
    n_parts = _n_weight_parts(stored)
    n_sums = SUMS // _tiles_at_once(stored)
    n_lines = SIDE * _step_columns(stored) * BYTES[stored] // ROW
    hints = -(-n_lines // n_parts)  # after each tile, as many as are read of it
    for token_part in range(_n_token_parts(stored)):
        place = pointer_to(builder, x, token_part * TILE)
        call_unit(builder, "tileloadd64", int8(INPUTS + token_part), place, int64(ROW))
    for part in range(n_parts):
        for tile in range(n_tiles):
            tile_offset = builder.mul(tile_stride, int64(tile))
            offset = builder.add(tile_offset, int64(part * TILE))
            place = pointer_to(builder, weight, offset)
            call_unit(builder, "tileloadd64", int8(WEIGHT), place, row_stride)
            for token_part, (name, i_sum) in enumerate(_products(stored, part)):
                total = int8(n_sums * tile + i_sum)
                call_unit(builder, name, total, int8(WEIGHT), int8(INPUTS + token_part))
            with builder.if_then(builder.icmp_signed("!=", soon_read, int64(0))):
                first_hint = (part * n_tiles + tile) * hints
                for hint in range(first_hint, first_hint + hints):
                    emit_prefetch(builder, pointer_to(builder, soon_read, hint * ROW), cache=2)


@instruction
def _add_step(
    typingctx: Any,
    stored: Any,
    n_tiles: Any,
    x: Any,
    weight: Any,
    row_stride: Any,
    tile_stride: Any,
    soon_read: Any,
) -> Any:
    """Add products of a step's numbers to the sums of as many tiles of a weight as there are sums for.

    By addresses the tokens, [parts, SIDE, SIDE, 2 or 4]; the first tile of the weight, with the bytes to its next row
    and to the next tile; and what will be read soon, 0 where that is not to be asked for.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for variant in FORMATS:
            with builder.if_then(is_equal(builder, args[0], variant)):
                for n in range(1, _tiles_at_once(variant) + 1):
                    with builder.if_then(is_equal(builder, args[1], n)):
                        _write_step(builder, variant, n, args[2:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@instruction
def _join_and_transpose(typingctx: Any, rows: Any, columns: Any) -> Any:
    """Join two sums of whole numbers, of upper bytes and of lower ones, to float32, and write columns as rows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        upper_rows = load_rows(builder, args[0])
        lower_rows = load_rows(builder, builder.add(args[0], int64(TILE)))
        byte_worth = ir.Constant(float32_row, [256.0] * SIDE)
        totals = []
        for upper_row, lower_row in zip(upper_rows, lower_rows, strict=True):
            upper = builder.sitofp(upper_row, float32_row)
            lower = builder.sitofp(lower_row, float32_row)
            total = multiply_add(builder, lower, upper, byte_worth)
            totals.append(builder.bitcast(total, int32_row))
        store_transposed(builder, totals, args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _write_or_add(builder: Any, numbers: Any, out: Any, adds: Any) -> None:
    """Write SIDE numbers to an address, or add them to what is there."""
    place = pointer_to(builder, out, 0, float32_row)
    sums = builder.fadd(numbers, builder.load(place, align=4))
    builder.store(builder.select(adds, sums, numbers), place, align=4)


@instruction
def _put_numbers(typingctx: Any, numbers: Any, out: Any, adds: Any) -> Any:
    """Write SIDE numbers to an address, or add them to what is there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = pointer_to(builder, args[0], 0, float32_row)
        numbers = builder.load(place, align=4)
        _write_or_add(builder, numbers, args[1], args[2])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.boolean), generate


@instruction
def put_scaled(
    typingctx: Any,
    numbers: Any,
    out: Any,
    adds: Any,
    row_scales: Any,
    token_scale: Any,
) -> Any:
    """Write SIDE sums of quantised values, or add them, times the scale of each row, at an address, and a token's."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sum_place = pointer_to(builder, args[0], 0, float32_row)
        sums = builder.load(sum_place, align=4)
        scale_place = pointer_to(builder, args[3], 0, float32_row)
        row_scales = builder.load(scale_place, align=4)
        scales = builder.fmul(row_scales, broadcast(builder, args[4], SIDE))
        _write_or_add(builder, builder.fmul(sums, scales), args[1], args[2])
        return context.get_dummy_value()

    int64 = types.int64
    return types.void(int64, int64, types.boolean, int64, types.float32), generate


# Tokens are split once for a product, since each of their numbers meets all rows of the weight:
#
#     group 0: tokens 0..15                                           group 1: tokens 16..31
#     | step 0: tile of part 0, part 1, part 2 | step 1: ... | ... || step 0: ...
#
# In a tile, tokens are the columns: row i has pair i of each of SIDE tokens.
@fast
def room_for(stored: Any, n: Any, k: Any) -> Any:
    """Return how many bytes n tokens of k numbers take, split for a weight that is stored so."""
    n_groups = -(-n // SIDE)
    n_steps = k // _step_columns(stored)
    n_tiles = n_groups * n_steps * _n_token_parts(stored)
    return ROW + n_tiles * TILE


@fast
def split_tokens_to_tiles(
    stored: Any,
    x: Any,
    room: Any,
    first: Any,
    last: Any,
) -> Any:
    """Split groups ``first`` to ``last`` of SIDE tokens to tiles, for a weight that is stored so.

    x [n, k]: float32, or quantised values of 16 bits for a weight of int8. Rows of missing tokens are 0.
    """
    n, k = x.shape
    n_parts = _n_token_parts(stored)
    columns = _step_columns(stored)
    rows = np.zeros((n_parts, SIDE, SIDE), np.uint32)
    place = aligned(room) + first * (k // columns) * n_parts * TILE
    for group in range(first, last):
        for step in range(k // columns):
            for t in range(min(SIDE, n - group * SIDE)):
                offset = (group * SIDE + t) * k + step * columns
                numbers = x.ctypes.data + x.itemsize * offset
                row = rows.ctypes.data + t * ROW
                if stored == INT8:
                    split_quantised(numbers, row)
                else:
                    split_tokens(numbers, stored == BFLOAT16, row)
            for part in range(n_parts):
                transpose(rows.ctypes.data + part * TILE, place)
                place += TILE


@fast
def _split_rows(
    stored: Any,
    weight: Any,
    row_stride: Any,
    n_tiles: Any,
    place: Any,
) -> Any:
    """Split a step's numbers of each row of so many tiles of a weight, to tiles of its parts."""
    for tile in range(n_tiles):
        out = place + tile * TILE * _n_weight_parts(stored)
        rows = weight + tile * SIDE * row_stride
        if stored == FLOAT32:
            for row in range(SIDE):
                split_row_of_32_bits(rows + row * row_stride, out + row * ROW)
        elif stored == FLOAT16:
            for row in range(SIDE):
                split_row_of_16_bits(rows + row * row_stride, out + row * ROW)
        else:
            for row in range(SIDE):
                copy_row(rows + row * row_stride, out + row * ROW)


# A weight is read from memory once, however many groups of tokens there are. Its split tiles of a few steps stay in the
# first cache (SPLIT_TILES), and all groups are multiplied with them before the next steps; their sums wait in memory
# meanwhile:
#
#                 first steps      next steps       ...     (2 steps of float32, 12 of int8)
#     group 0     split, multiply  split, multiply          sums of group 0 are stored and loaded again
#     group 1     multiply         multiply                 sums of group 1
#     group 2     multiply         multiply
#
# A weight of one part and one group of tokens needs neither: the unit reads it where it lies.
@fast
def _multiply_block(
    stored: Any,
    tokens: Any,
    n_groups: Any,
    k: Any,
    weight: Any,
    n_tiles: Any,
    split_tiles: Any,
    sums: Any,
) -> Any:
    """Multiply groups of tokens with so many tiles of a weight, to sums [n_groups, SUMS, SIDE, SIDE]."""
    size = number_bytes(stored)
    n_parts = _n_weight_parts(stored)
    tiles_at_once = _tiles_at_once(stored)
    columns = _step_columns(stored)
    n_steps = k // columns
    row_stride = size * k
    is_in_place = n_parts == 1 and n_groups == 1
    at_once = n_steps if is_in_place else SPLIT_TILES // (tiles_at_once * n_parts)  # steps of one group after the other
    next_block = weight + SIDE * n_tiles * row_stride
    for first in range(0, n_steps, at_once):
        last = min(first + at_once, n_steps)
        for group in range(n_groups):
            if first == 0:
                _clear_sums()
            elif n_groups > 1:
                _load_sums(sums + group * SUMS * TILE)
            for step in range(first, last):
                x = tokens + (group * n_steps + step) * _n_token_parts(stored) * TILE
                rows = weight + step * columns * size
                place = split_tiles + (step - first) * tiles_at_once * n_parts * TILE
                soon_read = next_block + step * columns * size * SIDE * n_tiles if group == 0 else 0
                if is_in_place:
                    _add_step(stored, n_tiles, x, rows, row_stride, SIDE * row_stride, soon_read)
                    continue
                if group == 0:
                    _split_rows(stored, rows, row_stride, n_tiles, place)
                _add_step(stored, n_tiles, x, place, ROW, n_parts * TILE, soon_read)
            if n_groups > 1 or last == n_steps:
                _store_sums(sums + group * SUMS * TILE)


@fast
def _put_sums(
    stored: Any,
    sums: Any,
    transposed: Any,
    scales: Any,
    n_tiles: Any,
    out: Any,
    first: Any,
    row: Any,
    adds: Any,
) -> Any:
    """Write sums [SUMS, SIDE, SIDE], by their address, to ``out`` [n, m] from a token and a row of the weight on.

    ``scales``: those of rows and those of tokens; empty for floating-point numbers.
    """
    row_scales, token_scales = scales
    n, m = out.shape
    for tile in range(n_tiles):
        column = row + tile * SIDE
        if stored == INT8:
            _join_and_transpose(sums + tile * N_BYTE_PARTS * TILE, transposed)
        else:
            transpose(sums + tile * TILE, transposed)
        for t in range(min(SIDE, n - first)):
            place = out.ctypes.data + 4 * ((first + t) * m + column)
            if stored == INT8:
                tile_scales = row_scales.ctypes.data + 4 * column
                put_scaled(transposed + t * ROW, place, adds, tile_scales, token_scales[first + t])
            else:
                _put_numbers(transposed + t * ROW, place, adds)


@fast
def multiply_tiles(
    stored: Any,
    room: Any,
    k: Any,
    weight: Any,
    scales: Any,
    out: Any,
    adds: Any,
    first: Any,
    last: Any,
) -> Any:
    """Multiply split tokens with tiles ``first`` to ``last`` (of SIDE rows) of a weight, to out [n, m], or add to it.

    The weight [m, k] is stored as FLOAT32, FLOAT16, BFLOAT16 or INT8, by its address. ``scales``: of int8 those of
    rows [m] and of tokens [n], else empty.
    """
    n_groups = -(-len(out) // SIDE)
    tiles_at_once = _tiles_at_once(stored)
    split_tiles = np.empty(ROW + SPLIT_TILES * TILE, np.uint8)
    sums = np.empty((n_groups, SUMS * SIDE, SIDE), np.float32)
    transposed = np.empty((SIDE, SIDE), np.float32)
    shapes = new_shapes()
    for register in range(WEIGHT + 1):
        set_register_shape(shapes, register, SIDE, ROW)
    previous = exchange_shapes(shapes)
    for tile in range(first, last, tiles_at_once):
        n_tiles = min(tiles_at_once, last - tile)
        rows = weight + tile * SIDE * k * number_bytes(stored)
        tokens = aligned(room)
        split_place = aligned(split_tiles)
        _multiply_block(stored, tokens, n_groups, k, rows, n_tiles, split_place, sums.ctypes.data)
        for group in range(n_groups):
            place = sums.ctypes.data + group * SUMS * TILE
            row = tile * SIDE
            token = group * SIDE
            _put_sums(stored, place, transposed.ctypes.data, scales, n_tiles, out, token, row, adds)
    apply_shapes(previous)


@fast_without_lock
def multiply(
    stored: Any,
    x: Any,
    weight: Any,
    room: Any,
    out: Any,
    thread_share: Any,
) -> Any:
    """Multiply x [n, k] float32 with a weight [m, k] of numbers, to out [n, m]; k is a multiple of STEP, m of SIDE.

    ``room``: uint8 [room_for(stored, n, k)]. ``thread_share``: barrier, thread, n_threads, as of a step.
    """
    barrier, thread, n_threads = thread_share
    n, k = x.shape
    n_groups = -(-n // SIDE)
    n_tiles = out.shape[1] // SIDE
    counter = barrier.ctypes.data
    first_group = n_groups * thread // n_threads
    last_group = n_groups * (thread + 1) // n_threads
    split_tokens_to_tiles(stored, x, room, first_group, last_group)
    n_passed = wait_at_barrier(counter, 0, n_threads)
    no_scales = np.empty(0, np.float32), np.empty(0, np.float32)
    first = n_tiles * thread // n_threads
    last = n_tiles * (thread + 1) // n_threads
    multiply_tiles(stored, room, k, weight, no_scales, out, n < 0, first, last)
    wait_at_barrier(counter, n_passed, n_threads)
