"""Numbers as terms that a unit for matrices multiplies: pairs of bfloat16, or bytes of levels, in rows of tiles."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from swarmd.compute.compiled.amx import ROW, TILE, byte, floats, half, pointer_to, words
from swarmd.compute.compiled.layout import BFLOAT16, FLOAT16, FLOAT32, LEVEL_STEP, SIDE, STEP, TERMS
from swarmd.compute.compiled.machine import Made, instruction
from swarmd.compute.compiled.products import BYTES, widened


def _everywhere(bits: int) -> Any:
    return ir.Constant(words, [bits] * SIDE)


def _split(builder: Any, lower: Any, upper: Any, terms: int, is_cut: bool, place: Any) -> None:
    """Two vectors of SIDE numbers to ``terms`` rows of as many pairs, TILE bytes apart.

    A term is what is left, cut, or rounded to the nearest, ties to even.
    """
    for term in range(terms):
        pair = []
        for rest in (lower, upper):
            bits = builder.bitcast(rest, words)
            if not is_cut:
                odd = builder.and_(builder.lshr(bits, _everywhere(16)), _everywhere(1))
                rounded = builder.add(builder.add(bits, _everywhere(0x7FFF)), odd)
                is_none = builder.fcmp_unordered("uno", rest, rest)  # no number, which rounding might make one of
                bits = builder.select(is_none, _everywhere(0x7FC0_0000), rounded)
            pair.append(builder.and_(bits, _everywhere(0xFFFF_0000)))
        both = builder.or_(builder.lshr(pair[0], _everywhere(16)), pair[1])
        builder.store(both, pointer_to(builder, place, term * TILE, words), align=4)
        lower, upper = (
            builder.fsub(rest, builder.bitcast(bits, floats)) for rest, bits in zip((lower, upper), pair, strict=True)
        )


@instruction
def split_tokens(typingctx: Any, numbers: Any, is_in_order: Any, place: Any) -> Any:
    """STEP numbers that enter to a row of pairs in each of TERMS tiles: of neighbours, or of i and i + STEP / 2."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lower, upper = (widened(builder, FLOAT32, pointer_to(builder, args[0], ROW * i), SIDE) for i in range(2))
        even, odd = (
            builder.shuffle_vector(lower, upper, ir.Constant(words, list(range(first, STEP, 2)))) for first in range(2)
        )
        lower, upper = builder.select(args[1], even, lower), builder.select(args[1], odd, upper)
        _split(builder, lower, upper, TERMS, False, args[2])
        return context.get_dummy_value()

    return types.void(types.int64, types.boolean, types.int64), generate


@instruction
def split_levels(typingctx: Any, levels: Any, place: Any) -> Any:
    """LEVEL_STEP levels of 16 bits to a row of upper bytes, and one of lower ones a tile further on."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        halves, row = ir.VectorType(half, LEVEL_STEP), ir.VectorType(byte, LEVEL_STEP)
        levels = builder.load(pointer_to(builder, args[0], 0, halves), align=2)
        upper = builder.lshr(levels, ir.Constant(halves, [8] * LEVEL_STEP))
        for term, bits in enumerate((upper, levels)):
            builder.store(builder.trunc(bits, row), pointer_to(builder, args[1], term * TILE, row), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _split_row_of(stored: int) -> Made:
    """STEP numbers of a row of a weight to a row of as many tiles as it has terms: pairs of i and i + STEP / 2.

    What has one term, bfloat16 and levels of 8 bits, stays as it is, 64 bytes of it.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if stored == BFLOAT16:
            row = ir.VectorType(half, STEP)
            builder.store(
                builder.load(pointer_to(builder, args[0], 0, row), align=2),
                pointer_to(builder, args[1], 0, row),
                align=2,
            )
        else:
            n_bytes = SIDE * BYTES[stored]
            lower, upper = (widened(builder, stored, pointer_to(builder, args[0], n_bytes * i), SIDE) for i in range(2))
            _split(builder, lower, upper, TERMS if stored == FLOAT32 else 2, True, args[1])
        return context.get_dummy_value()

    def made(typingctx: Any, numbers: Any, place: Any) -> Any:
        return types.void(types.int64, types.int64), generate

    return instruction(made)


split_row_of_32_bits, split_row_of_16_bits = _split_row_of(FLOAT32), _split_row_of(FLOAT16)
copy_row = _split_row_of(BFLOAT16)
