"""Numbers as split parts that a matrix unit multiplies: pairs of bfloat16, or bytes, in rows of tiles.

A float32 is the sum of three bfloat16, each with 8 bits of its fraction. The parts of a row lie in tiles one after the
other, and a row of a tile has SIDE pairs:

    x = part 0 + part 1 + part 2                  tile of part 0 | tile of part 1 | tile of part 2
        (8 bits) (8 bits) (8 bits)                one row of a tile: | lower 0, upper 0 | lower 1, upper 1 | ...

Which two numbers make a pair does not matter, as long as tokens and weights are paired alike. A weight in bfloat16 is
read as it lies, so neighbours are a pair; others are split from two vectors, so i and i + STEP / 2 are.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from swarmd.compute.compiled.amx import ROW, TILE, float32_row, int8, int16, int32_row, pointer_to
from swarmd.compute.compiled.layout import BFLOAT16, FLOAT16, FLOAT32, LEVEL_STEP, N_SPLIT_PARTS, SIDE, STEP
from swarmd.compute.compiled.machine import CompiledFunction, instruction
from swarmd.compute.compiled.products import BYTES, load_widened


def _row_of(bits: int) -> Any:
    """Make a constant row of SIDE times these bits."""
    return ir.Constant(int32_row, [bits] * SIDE)


def _round_bits(builder: Any, numbers: Any) -> Any:
    """Round float32 numbers to 16 bits, in the upper half: to the nearest, ties to even; NaN stays NaN."""
    bits = builder.bitcast(numbers, int32_row)
    odd = builder.and_(builder.lshr(bits, _row_of(16)), _row_of(1))
    rounded = builder.add(builder.add(bits, _row_of(0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", numbers, numbers)  # rounding might make a number of its bits
    return builder.select(is_nan, _row_of(0x7FC0_0000), rounded)


# A weight's parts are cut and not rounded: what remains then has the sign of the number, and three parts hold all of a
# float32 (two of a float16) either way. Tokens are rounded: their first part alone is the nearest bfloat16.
def _split_pairs(
    builder: Any,
    lower: Any,
    upper: Any,
    n_parts: int,
    is_cut: bool,
    place: Any,
) -> None:
    """Write two vectors of SIDE numbers as ``n_parts`` rows of as many pairs, TILE bytes apart.

    Each part is what remains of a number, cut or rounded to bfloat16; the next part is of the rest.
    """
    for part in range(n_parts):
        pair = []
        for numbers in (lower, upper):
            bits = builder.bitcast(numbers, int32_row) if is_cut else _round_bits(builder, numbers)
            pair.append(builder.and_(bits, _row_of(0xFFFF_0000)))
        lower_half = builder.lshr(pair[0], _row_of(16))
        row = builder.or_(lower_half, pair[1])
        row_place = pointer_to(builder, place, part * TILE, int32_row)
        builder.store(row, row_place, align=4)
        lower = builder.fsub(lower, builder.bitcast(pair[0], float32_row))
        upper = builder.fsub(upper, builder.bitcast(pair[1], float32_row))


@instruction
def split_tokens(typingctx: Any, numbers: Any, is_in_order: Any, place: Any) -> Any:
    """Split STEP numbers of a token to a row of pairs in each of N_SPLIT_PARTS tiles.

    A pair is two neighbours where the weight is read in order, else numbers i and i + STEP / 2.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        first = load_widened(builder, FLOAT32, pointer_to(builder, args[0], 0), SIDE)
        second = load_widened(builder, FLOAT32, pointer_to(builder, args[0], ROW), SIDE)
        even_places = ir.Constant(int32_row, list(range(0, STEP, 2)))
        odd_places = ir.Constant(int32_row, list(range(1, STEP, 2)))
        even = builder.shuffle_vector(first, second, even_places)
        odd = builder.shuffle_vector(first, second, odd_places)
        lower = builder.select(args[1], even, first)
        upper = builder.select(args[1], odd, second)
        _split_pairs(builder, lower, upper, N_SPLIT_PARTS, False, args[2])
        return context.get_dummy_value()

    return types.void(types.int64, types.boolean, types.int64), generate


@instruction
def split_quantised(typingctx: Any, quantised: Any, place: Any) -> Any:
    """Split LEVEL_STEP quantised values of 16 bits to a row of upper bytes, and one of lower ones a tile further on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves = ir.VectorType(int16, LEVEL_STEP)
        row = ir.VectorType(int8, LEVEL_STEP)
        values = builder.load(pointer_to(builder, args[0], 0, halves), align=2)
        upper = builder.lshr(values, ir.Constant(halves, [8] * LEVEL_STEP))
        for part, bits in enumerate((upper, values)):
            out = pointer_to(builder, args[1], part * TILE, row)
            builder.store(builder.trunc(bits, row), out, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _split_row_of(stored: int) -> CompiledFunction:
    """Split STEP numbers of a weight's row to a row of as many tiles as it has parts: pairs of i and i + STEP / 2.

    What has one part, bfloat16 and quantised values of 8 bits, stays as it is, 64 bytes of it.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if stored == BFLOAT16:
            row = ir.VectorType(int16, STEP)
            numbers = builder.load(pointer_to(builder, args[0], 0, row), align=2)
            out = pointer_to(builder, args[1], 0, row)
            builder.store(numbers, out, align=2)
            return context.get_dummy_value()
        n_bytes = SIDE * BYTES[stored]
        lower = load_widened(builder, stored, pointer_to(builder, args[0], 0), SIDE)
        upper = load_widened(builder, stored, pointer_to(builder, args[0], n_bytes), SIDE)
        _split_pairs(builder, lower, upper, N_SPLIT_PARTS if stored == FLOAT32 else 2, True, args[1])
        return context.get_dummy_value()

    def typed(typingctx: Any, numbers: Any, place: Any) -> Any:
        return types.void(types.int64, types.int64), generate

    return instruction(typed)


split_row_of_32_bits = _split_row_of(FLOAT32)
split_row_of_16_bits = _split_row_of(FLOAT16)
copy_row = _split_row_of(BFLOAT16)
