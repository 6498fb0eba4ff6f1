"""Weights in 8 or 4 bits times the numbers of a few tokens: both are whole numbers, and so are their products.

What enters is rounded to 16 bits, a unit for each token: 15 bits of its largest number are more than bfloat16 has of
any. Two products and their sum are one instruction then. What a token gives does not depend on who is beside it, but
for the last bit of 8 bits where a unit for matrices computes several (``tiles``).
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from swarmd.compute.compiled.layout import BFLOAT16, GROUP, LEVEL_OF_ZERO
from swarmd.compute.compiled.machine import AHEAD_BYTES, Made, ask_for, fast, instruction, unit_of
from swarmd.compute.compiled.products import everywhere, in_steps, plus, row_of, tools, total_of, widened
from swarmd.compute.compiled.registers import ROWS, WIDTH

MOST = 32_767  # of 16 bits
CHUNK = 4_096  # of a row's levels of 8 bits: so many products with such levels fit in 32 bits, added up in 8 places
LANE = 8  # numbers of 16 bits: within so many a CPU of wider registers puts two beside each other
PARTS = 4  # of a row, added up beside each other: by so many are products of one token, fewer of several
byte, half, word, number = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


@fast
def round_to_levels(x: Any, levels: Any, units: Any) -> Any:
    """x [n, k] float32 to levels [n, k] int16, and a unit [n] for each token's."""
    n, k = x.shape
    for t in range(n):
        unit, units[t] = unit_of(x[t], MOST)
        per_unit = np.float32(1) / unit
        for i in range(k):
            levels[t, i] = np.int16(np.int32(np.rint(x[t, i] * per_unit)))


def _read(builder: Any, kind: Any, address: Any, n: int) -> Any:
    """n numbers as they lie in memory."""
    return builder.load(builder.bitcast(address, ir.VectorType(kind, n).as_pointer()), align=1)


def _pairs(builder: Any, some: Any, others: Any) -> Any:
    """Products of 2 n numbers of 16 bits, each added to its neighbour's: n of 32 bits."""
    n = some.type.count // 2
    wide, places = ir.VectorType(word, 2 * n), ir.VectorType(word, n)
    products = builder.mul(builder.sext(some, wide), builder.sext(others, wide), flags=["nsw"])
    first, second = (
        builder.shuffle_vector(
            products, ir.Constant(wide, ir.Undefined), ir.Constant(places, list(range(side, 2 * n, 2)))
        )
        for side in range(2)
    )
    return builder.add(first, second)


def _tokens(builder: Any, first: Any, step: Any, n: int) -> list[Any]:
    """Where the levels of n tokens are."""
    return [row_of(builder, first, step, t, half) for t in range(n)]


def _add_products(builder: Any, rows: Any, tokens: Any, at: Any, width: int, sums: Any) -> None:
    """Add products of ``width`` levels of both rows with each token's to 2 sums a token: in pairs, or of one alone."""
    kind = word if width == 1 else half
    weights = [
        builder.sext(_read(builder, byte, builder.gep(row, [at]), width), ir.VectorType(kind, width)) for row in rows
    ]
    for t, token in enumerate(tokens):
        x = _read(builder, half, builder.gep(token, [at]), width)
        for side, weight in enumerate(weights):
            product = builder.mul(weight, builder.sext(x, weight.type)) if width == 1 else _pairs(builder, weight, x)
            total = sums[2 * t + side]
            builder.store(builder.add(builder.load(total), product), total)


def _times_pair(n: int) -> Made:
    """Two rows of k levels of 8 bits times those of n tokens.

    By addresses both rows, the first token's levels, and two sums for each token; where the next token's levels are,
    and how many.
    """
    n_parts, width = PARTS // n, 2 * WIDTH

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [builder.inttoptr(address, byte.as_pointer()) for address in args[:2]]
        k, tokens = args[4], _tokens(builder, args[2], args[3], n)
        nothing = ir.Constant(ir.VectorType(word, WIDTH), [0] * WIDTH)
        parts = [[tools.alloca_once_value(builder, nothing) for _ in range(2 * n)] for _ in range(n_parts)]
        left = [tools.alloca_once_value(builder, ir.Constant(ir.VectorType(word, 1), [0])) for _ in range(2 * n)]
        for step, at in in_steps(builder, k, (n_parts * width, width, 1)):
            if step == 1:
                _add_products(builder, rows, tokens, at, 1, left)
            for part, sums in enumerate(parts[: step // width]):
                _add_products(builder, rows, tokens, builder.add(at, k.type(part * width)), width, sums)
        out = builder.inttoptr(args[5], number.as_pointer())
        for which, column in enumerate(zip(*parts, strict=True)):
            total = reduce(builder.add, map(builder.load, column))
            last = builder.extract_element(builder.load(left[which]), word(0))
            numbers = builder.sitofp(total, ir.VectorType(number, WIDTH))
            builder.store(total_of(builder, builder.sitofp(last, number), numbers), builder.gep(out, [word(which)]))
        return context.get_dummy_value()

    def times(typingctx: Any, first: Any, second: Any, x: Any, step: Any, k: Any, sums: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return instruction(times)


def _shuffled(builder: Any, one: Any, other: Any, places: list[int]) -> Any:
    return builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(word, len(places)), places))


def _beside(builder: Any, one: Any, other: Any) -> list[Any]:
    """Numbers of 16 bits beside those of another vector, in two: of each LANE, as CPUs do it, the first half and the
    second."""
    n = one.type.count
    starts = [[at + i for at in range(side, n, LANE) for i in range(LANE // 2)] for side in (0, LANE // 2)]
    return [_shuffled(builder, one, other, [at + i * n for at in some for i in range(2)]) for some in starts]


def _in_order(builder: Any, first: Any, second: Any) -> Any:
    """What came of two such vectors, as the numbers were."""
    n, some = first.type.count, LANE // 2
    places = [i * n + at + k for at in range(0, n, some) for i in range(2) for k in range(some)]
    return _shuffled(builder, first, second, places)


def _products_of_group(builder: Any, rows: Any, tokens: Any) -> list[list[Any]]:
    """ROWS rows of GROUP levels of 4 bits times those of each token: n times two vectors of whole numbers."""
    n_bytes = ROWS // 2
    wide = ir.VectorType(half, n_bytes)
    four, sixteen = ir.Constant(wide, [4] * n_bytes), ir.Constant(ir.VectorType(word, n_bytes), [16] * n_bytes)
    nothing = ir.Constant(ir.VectorType(word, n_bytes // 2), [0] * (n_bytes // 2))
    sums = [[tools.alloca_once_value(builder, nothing) for _ in range(4)] for _ in tokens]  # both halves of each side
    with tools.for_range_slice(builder, word(0), word(GROUP), word(2), inc=True) as (k, _):
        at = [builder.mul(builder.add(k, word(i)), word(n_bytes)) for i in range(2)]
        ask_for(builder, builder.gep(rows, [builder.add(at[0], word(AHEAD_BYTES))]))  # all at once would have to queue
        one, other = (builder.zext(_read(builder, byte, builder.gep(rows, [i]), n_bytes), wide) for i in at)
        both = _beside(builder, one, other)
        sides = [*both, *(builder.lshr(pairs, four) for pairs in both)]
        for token, totals in zip(tokens, sums, strict=True):
            two = builder.bitcast(builder.gep(token, [k]), word.as_pointer())
            x = builder.bitcast(everywhere(builder, builder.load(two, align=1), n_bytes // 2), wide)
            for pairs, total in zip(sides, totals, strict=True):
                builder.store(builder.add(builder.load(total), _pairs(builder, pairs, x)), total)
    products = []
    for totals in sums:
        a, b, c, d = map(builder.load, totals)
        upper = _in_order(builder, c, d)  # the lower half of a byte is what the upper half leaves of it
        lower = builder.sub(_in_order(builder, a, b), builder.mul(upper, sixteen))
        products.append([lower, upper])
    return products


def _times_group(n: int) -> Made:
    """Add one group of ROWS rows of 4 bits, times GROUP levels of each of n tokens, to ROWS totals of each.

    By addresses: of the levels of 4 bits, of the scales of ROWS rows and their zeros; of the first token's levels,
    where the next one's are, of what a token's levels add up to, and of the totals. LEVEL_OF_ZERO is nothing but its
    zero.
    """
    n_bytes = ROWS // 2
    some_numbers = ir.VectorType(number, n_bytes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = builder.inttoptr(args[0], byte.as_pointer())
        scales = builder.inttoptr(args[1], half.as_pointer())
        products = _products_of_group(builder, rows, _tokens(builder, args[2], args[3], n))
        sums = builder.inttoptr(args[4], number.as_pointer())
        totals = builder.inttoptr(args[5], some_numbers.as_pointer())
        for side in range(2):
            scale = widened(builder, BFLOAT16, builder.gep(scales, [word(side * n_bytes)]), n_bytes)
            zero = widened(builder, BFLOAT16, builder.gep(scales, [word(ROWS + side * n_bytes)]), n_bytes)
            shifted = plus(builder, zero, scale, ir.Constant(some_numbers, [-float(LEVEL_OF_ZERO)] * n_bytes))
            for t in range(n):
                total = builder.gep(totals, [word(2 * t + side)])
                of_token = everywhere(builder, builder.load(builder.gep(sums, [word(t)]), align=1), n_bytes)
                so_far = plus(builder, builder.load(total, align=4), shifted, of_token)
                product = builder.sitofp(products[t][side], some_numbers)
                builder.store(plus(builder, so_far, scale, product), total, align=4)
        return context.get_dummy_value()

    def times(typingctx: Any, levels: Any, scales: Any, x: Any, step: Any, sums: Any, totals: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return instruction(times)


times_group, times_group_of_two = _times_group(1), _times_group(2)
_times_pair_1, _times_pair_2, _times_pair_4 = (_times_pair(n) for n in (1, 2, 4))


@fast
def times_pair_of_levels(first: Any, second: Any, x: Any, step: Any, n: Any, k: Any, products: Any) -> Any:
    """Two rows at these addresses times each of x [n, k] int16 to products [n, 2] float32, all by their addresses.

    k is at most CHUNK; ``step``: bytes from a token's levels to the next one's.
    """
    t = 0
    while t < n:
        left, token, sums = n - t, x + t * step, products + 8 * t
        if left >= 4:
            _times_pair_4(first, second, token, step, k, sums)
        elif left >= 2:
            _times_pair_2(first, second, token, step, k, sums)
        else:
            _times_pair_1(first, second, token, step, k, sums)
        t += 4 if left >= 4 else 2 if left >= 2 else 1
