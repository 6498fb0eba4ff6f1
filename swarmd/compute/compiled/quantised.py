"""Weights in 8 or 4 bits times the numbers of a few tokens: quantised values are whole numbers, and so are products.

What enters is quantised to 16 bits, with a scale for each token: 15 bits of its largest number are more than bfloat16
has of any. Two products and their sum are one instruction then. What a token gives does not depend on the tokens beside
it, but for the last bit of 8 bits where a matrix unit computes several (``amx_products``).
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from swarmd.compute.compiled.layout import BFLOAT16, GROUP, LEVEL_OF_ZERO
from swarmd.compute.compiled.machine import (
    AHEAD_BYTES,
    CompiledFunction,
    emit_prefetch,
    fast,
    instruction,
    quantisation_scale,
)
from swarmd.compute.compiled.products import (
    add_up,
    broadcast,
    constant_vector,
    float32,
    int32,
    load_widened,
    loop_in_steps,
    multiply_add,
    row_pointer,
    tools,
)
from swarmd.compute.compiled.registers import ROWS, WIDTH

MOST = 32_767  # of 16 bits
CHUNK = 4_096  # of a row's values of 8 bits: so many products with 16 bits fit in 32 bits, added up in 8 places
LANE = 8  # numbers of 16 bits: within so many a CPU of wider registers puts two beside each other
PARTS = 4  # of a row, added up beside each other: by so many are products of one token, fewer of several
int8 = ir.IntType(8)
int16 = ir.IntType(16)


@fast
def quantise_tokens(x: Any, quantised: Any, scales: Any) -> Any:
    """Quantise x [n, k] float32 to [n, k] int16, with a scale [n] for each token."""
    n, k = x.shape
    for t in range(n):
        scale, scales[t] = quantisation_scale(x[t], MOST)
        per_scale = np.float32(1) / scale
        for i in range(k):
            rounded = np.rint(x[t, i] * per_scale)
            quantised[t, i] = np.int16(np.int32(rounded))


def _load(builder: Any, element: Any, address: Any, n: int) -> Any:
    """Read n numbers as they lie in memory."""
    place = builder.bitcast(address, ir.VectorType(element, n).as_pointer())
    return builder.load(place, align=1)


# One instruction of the CPU (pmaddwd, or vpdpwssd with the addition): 16 bits times 16 bits, neighbours added.
#
#     left      a0  a1 | a2  a3 | ...      2 n numbers of 16 bits
#     right     b0  b1 | b2  b3 | ...
#     sums    a0b0+a1b1 | a2b2+a3b3 ...    n numbers of 32 bits
#
# LLVM recognises the instruction in what is written here: widen, multiply, add even places to odd ones.
def _multiply_pairs(builder: Any, left: Any, right: Any) -> Any:
    """Multiply 2 n numbers of 16 bits and add each product to its neighbour's: n of 32 bits."""
    n = left.type.count // 2
    wide = ir.VectorType(int32, 2 * n)
    places = ir.VectorType(int32, n)
    left = builder.sext(left, wide)
    right = builder.sext(right, wide)
    products = builder.mul(left, right, flags=["nsw"])
    nothing = ir.Constant(wide, ir.Undefined)
    even_places = ir.Constant(places, list(range(0, 2 * n, 2)))
    odd_places = ir.Constant(places, list(range(1, 2 * n, 2)))
    even = builder.shuffle_vector(products, nothing, even_places)
    odd = builder.shuffle_vector(products, nothing, odd_places)
    return builder.add(even, odd)


def _token_pointers(builder: Any, first: Any, stride: Any, n: int) -> list[Any]:
    """Make pointers to the quantised values of n tokens."""
    return [row_pointer(builder, first, stride, t, int16) for t in range(n)]


def _add_products(
    builder: Any,
    rows: Any,
    tokens: Any,
    index: Any,
    width: int,
    sums: Any,
) -> None:
    """Add products of ``width`` values of both rows with each token's to 2 sums a token: in pairs, or of one alone."""
    element = int32 if width == 1 else int16
    weight_vector = ir.VectorType(element, width)
    weights = []
    for row in rows:
        values = _load(builder, int8, builder.gep(row, [index]), width)
        weights.append(builder.sext(values, weight_vector))
    for t, token in enumerate(tokens):
        x = _load(builder, int16, builder.gep(token, [index]), width)
        for side, weight in enumerate(weights):
            if width == 1:
                product = builder.mul(weight, builder.sext(x, weight.type))
            else:
                product = _multiply_pairs(builder, weight, x)
            total = sums[2 * t + side]
            builder.store(builder.add(builder.load(total), product), total)


def _multiply_row_pair_by(n: int) -> CompiledFunction:
    """Two rows of k values of 8 bits times those of n tokens.

    By addresses both rows, the first token's values, and two sums for each token; also the stride from token to token,
    and k.
    """
    n_partials = PARTS // n
    width = 2 * WIDTH

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [builder.inttoptr(address, int8.as_pointer()) for address in args[:2]]
        k = args[4]
        tokens = _token_pointers(builder, args[2], args[3], n)

        def new_sums(width: int) -> list[Any]:
            zeros = constant_vector(int32, 0, width)
            return [tools.alloca_once_value(builder, zeros) for _ in range(2 * n)]

        partials = [new_sums(WIDTH) for _ in range(n_partials)]
        single_sums = new_sums(1)
        for step, index in loop_in_steps(builder, k, (n_partials * width, width, 1)):
            if step == 1:
                _add_products(builder, rows, tokens, index, 1, single_sums)
            for i, sums in enumerate(partials[: step // width]):
                begin = builder.add(index, k.type(i * width))
                _add_products(builder, rows, tokens, begin, width, sums)
        out = builder.inttoptr(args[5], float32.as_pointer())
        for i, column in enumerate(zip(*partials, strict=True)):
            total = reduce(builder.add, map(builder.load, column))
            single = builder.extract_element(builder.load(single_sums[i]), int32(0))
            numbers = builder.sitofp(total, ir.VectorType(float32, WIDTH))
            product = add_up(builder, builder.sitofp(single, float32), numbers)
            builder.store(product, builder.gep(out, [int32(i)]))
        return context.get_dummy_value()

    def multiply(
        typingctx: Any,
        first: Any,
        second: Any,
        x: Any,
        stride: Any,
        k: Any,
        sums: Any,
    ) -> Any:
        return types.void(*[types.int64] * 6), generate

    return instruction(multiply)


def _shuffle(builder: Any, left: Any, right: Any, places: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(int32, len(places)), places)
    return builder.shuffle_vector(left, right, mask)


# Values of 4 bits lie column by column, and products are added in pairs of columns: so two columns must come beside
# each other, row by row. CPUs do so within LANE numbers (punpcklwd, punpckhwd), which leaves an order of rows that is
# put right at the end, on sums, where it costs once a group instead of once a column:
#
#     column k        r0 r1 r2 r3 r4 r5 r6 r7
#     column k + 1    s0 s1 s2 s3 s4 s5 s6 s7
#     first halves    r0 s0 r1 s1 r2 s2 r3 s3      second halves    r4 s4 r5 s5 r6 s6 r7 s7
def _interleave(builder: Any, left: Any, right: Any) -> list[Any]:
    """Put numbers of 16 bits beside those of another vector: of each LANE the first halves, and the second ones."""
    n = left.type.count
    vectors = []
    for side in (0, LANE // 2):
        lanes = range(side, n, LANE)
        indices = [lane + i for lane in lanes for i in range(LANE // 2)]
        places = [index + i * n for index in indices for i in range(2)]
        vectors.append(_shuffle(builder, left, right, places))
    return vectors


def _restore_order(builder: Any, first: Any, second: Any) -> Any:
    """Put the sums of two interleaved vectors into the order of the rows."""
    n = first.type.count
    half_lane = LANE // 2
    places = []
    for lane in range(0, n, half_lane):
        for i in range(2):
            places += [i * n + lane + k for k in range(half_lane)]
    return _shuffle(builder, first, second, places)


# A byte holds a value of row i in its lower 4 bits and one of row i + ROWS / 2 in its upper 4. Widened to 16 bits, the
# byte b = 16 * upper + lower is multiplied as it is, and so is b >> 4 = upper. The lower row's sum is what remains:
#
#     sum(lower * x) = sum(b * x) - 16 * sum(upper * x)
#
# which saves a mask for each byte. Sums of a group of 32 columns fit: 32 * 255 * 32,767 < 2**31.
def _group_products(builder: Any, rows: Any, tokens: Any) -> list[list[Any]]:
    """Multiply ROWS rows of GROUP values of 4 bits with each token's: n times two vectors of whole numbers."""
    n_bytes = ROWS // 2
    wide = ir.VectorType(int16, n_bytes)
    four = constant_vector(int16, 4, n_bytes)
    sixteen = constant_vector(int32, 16, n_bytes)
    zeros = constant_vector(int32, 0, n_bytes // 2)
    sums = []
    for _ in tokens:  # both halves of each side
        sums.append([tools.alloca_once_value(builder, zeros) for _ in range(4)])
    begin = int32(0)
    end = int32(GROUP)
    two = int32(2)
    with tools.for_range_slice(builder, begin, end, two, inc=True) as (k, _):
        pair = [builder.add(k, int32(i)) for i in range(2)]
        offsets = [builder.mul(column, int32(n_bytes)) for column in pair]
        offset_ahead = builder.add(offsets[0], int32(AHEAD_BYTES))
        emit_prefetch(builder, builder.gep(rows, [offset_ahead]))  # all at once would have to queue
        places = [builder.gep(rows, [offset]) for offset in offsets]
        column_bytes = [_load(builder, int8, place, n_bytes) for place in places]
        columns = [builder.zext(column, wide) for column in column_bytes]
        whole_bytes = _interleave(builder, *columns)
        sides = [*whole_bytes, *(builder.lshr(pairs, four) for pairs in whole_bytes)]
        for token, totals in zip(tokens, sums, strict=True):
            pair_place = builder.bitcast(builder.gep(token, [k]), int32.as_pointer())
            pair_of_token = builder.load(pair_place, align=1)
            pair_vector = broadcast(builder, pair_of_token, n_bytes // 2)
            x = builder.bitcast(pair_vector, wide)
            for pairs, total in zip(sides, totals, strict=True):
                pair_sums = _multiply_pairs(builder, pairs, x)
                builder.store(builder.add(builder.load(total), pair_sums), total)
    products = []
    for totals in sums:
        a, b, c, d = map(builder.load, totals)
        upper = _restore_order(builder, c, d)
        whole = _restore_order(builder, a, b)
        lower = builder.sub(whole, builder.mul(upper, sixteen))
        products.append([lower, upper])
    return products


def _multiply_group_by(n: int) -> CompiledFunction:
    """Add one group of ROWS rows of 4 bits, times GROUP values of each of n tokens, to ROWS totals of each.

    By addresses: the quantised values of 4 bits; the scales of ROWS rows and their zeros; the first token's values,
    with the stride to the next token's; the sum of each token's values, and the totals. A weight is
    scale * (value - LEVEL_OF_ZERO) + zero, so a product is

        scale * sum(value * x) + (zero - LEVEL_OF_ZERO * scale) * sum(x)
    """
    n_bytes = ROWS // 2
    half_vector = ir.VectorType(float32, n_bytes)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = builder.inttoptr(args[0], int8.as_pointer())
        scales = builder.inttoptr(args[1], int16.as_pointer())
        tokens = _token_pointers(builder, args[2], args[3], n)
        products = _group_products(builder, rows, tokens)
        token_sums = builder.inttoptr(args[4], float32.as_pointer())
        totals = builder.inttoptr(args[5], half_vector.as_pointer())
        minus_eight = constant_vector(float32, -float(LEVEL_OF_ZERO), n_bytes)
        for side in range(2):
            scale_place = builder.gep(scales, [int32(side * n_bytes)])
            zero_place = builder.gep(scales, [int32(ROWS + side * n_bytes)])
            scale = load_widened(builder, BFLOAT16, scale_place, n_bytes)
            zero = load_widened(builder, BFLOAT16, zero_place, n_bytes)
            offset = multiply_add(builder, zero, scale, minus_eight)
            for t in range(n):
                total = builder.gep(totals, [int32(2 * t + side)])
                sum_place = builder.gep(token_sums, [int32(t)])
                token_sum = broadcast(builder, builder.load(sum_place, align=1), n_bytes)
                with_offset = multiply_add(builder, builder.load(total, align=4), offset, token_sum)
                product = builder.sitofp(products[t][side], half_vector)
                builder.store(multiply_add(builder, with_offset, scale, product), total, align=4)
        return context.get_dummy_value()

    def multiply(
        typingctx: Any,
        rows: Any,
        scales: Any,
        x: Any,
        stride: Any,
        sums: Any,
        totals: Any,
    ) -> Any:
        return types.void(*[types.int64] * 6), generate

    return instruction(multiply)


multiply_group = _multiply_group_by(1)
multiply_group_by_two = _multiply_group_by(2)
_multiply_row_pair_by_1 = _multiply_row_pair_by(1)
_multiply_row_pair_by_2 = _multiply_row_pair_by(2)
_multiply_row_pair_by_4 = _multiply_row_pair_by(4)


@fast
def multiply_quantised_pair(
    first: Any,
    second: Any,
    x: Any,
    stride: Any,
    n: Any,
    k: Any,
    products: Any,
) -> Any:
    """Multiply two rows with each of x [n, k] int16, to products [n, 2] float32, all by their addresses.

    k is at most CHUNK; ``stride``: bytes from a token's values to the next one's.
    """
    t = 0
    while t < n:
        remaining = n - t
        token = x + t * stride
        sums = products + 8 * t
        if remaining >= 4:
            _multiply_row_pair_by_4(first, second, token, stride, k, sums)
            t += 4
        elif remaining >= 2:
            _multiply_row_pair_by_2(first, second, token, stride, k, sums)
            t += 2
        else:
            _multiply_row_pair_by_1(first, second, token, stride, k, sums)
            t += 1
