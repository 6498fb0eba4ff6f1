"""What attention does with rows of keys and values, as they lie in memory: written in vectors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from swarmd.compute.compiled.layout import FLOAT32
from swarmd.compute.compiled.machine import (
    AHEAD_BYTES,
    CACHE_LINE,
    CompiledFunction,
    emit_prefetch,
    fast,
    instruction,
)
from swarmd.compute.compiled.products import (
    BYTES,
    IN_MEMORY,
    TOGETHER,
    broadcast,
    constant_vector,
    dot_products,
    float32,
    for_each_variant,
    int32,
    load_widened,
    loop_in_steps,
    multiply_add,
    row_pointer,
    tools,
)
from swarmd.compute.compiled.registers import WIDTH

# Registers for sums, by tokens: AVX-512 has 32 registers of 16 numbers, AVX2 has 16 of 8.
_VECTORS_OF_8 = {1: 8, 2: 4, 3: 4, 4: 2}
_VECTORS_OF_16 = dict.fromkeys(range(1, TOGETHER + 1), 4)
VECTORS = _VECTORS_OF_16 if WIDTH == 16 else _VECTORS_OF_8
ROWS_AT_ONCE = 128  # that stay in near caches, for more than TOGETHER queries
LEAST = float(np.finfo(np.float32).min)


def _prefetch_ahead(builder: Any, address: Any) -> None:
    """Ask for what comes a page after an address: what the machine guesses by itself ends with the page."""
    soon_read = builder.add(address, address.type(AHEAD_BYTES))
    emit_prefetch(builder, builder.inttoptr(soon_read, ir.IntType(8).as_pointer()))


def _over_rows(write: Callable[..., None]) -> CompiledFunction:
    """Make an instruction over rows of a cache, for the numbers and the sums of n tokens.

    Its arguments are int64: format, n; address of the rows, bytes from row to row, number of rows; address of the
    tokens' numbers, bytes from token to token, numbers of a row; address of the sums, bytes from token to token.
    """

    def typed(
        typingctx: Any,
        stored: Any,
        n: Any,
        rows: Any,
        row_stride: Any,
        n_rows: Any,
        numbers: Any,
        number_stride: Any,
        k: Any,
        sums: Any,
        sum_stride: Any,
    ) -> Any:
        return types.void(*[types.int64] * 10), for_each_variant(write)

    return instruction(typed)


# Rows are read in pairs, one of the first half and one of the second: two streams from memory are faster than one. Of
# an odd number the last row is computed twice, which is cheaper than a second loop.
#
#     rows      0 | 1 | ... | half - 1 || half | half + 1 | ... | n_rows - 1
#     pairs     (0, half)   (1, half + 1)   ...
def _write_dot_products(builder: Any, stored: int, n: int, *addresses: Any) -> None:
    """See ``multiply_rows``."""
    rows, row_stride, n_rows, x, x_stride, k, sums, sum_stride = addresses
    queries = [row_pointer(builder, x, x_stride, t) for t in range(n)]
    outs = [row_pointer(builder, sums, sum_stride, t) for t in range(n)]
    one = n_rows.type(1)
    half = builder.ashr(builder.add(n_rows, one), one)
    last = builder.sub(n_rows, one)
    with tools.for_range(builder, half) as loop:
        second = builder.add(loop.index, half)
        second = builder.select(builder.icmp_signed("<", second, n_rows), second, last)
        pair = (loop.index, second)
        addresses_of_pair = [builder.add(rows, builder.mul(row_stride, row)) for row in pair]
        zero = one.type(0)
        line = one.type(CACHE_LINE)
        with tools.for_range_slice(builder, zero, row_stride, line, inc=True) as (offset, _):
            for address in addresses_of_pair:
                _prefetch_ahead(builder, builder.add(address, offset))
        pointers = [builder.inttoptr(address, IN_MEMORY[stored].as_pointer()) for address in addresses_of_pair]
        for i, total in enumerate(dot_products(builder, stored, pointers, queries, k)):
            token, side = divmod(i, 2)
            place = builder.gep(outs[token], [pair[side]])
            builder.store(total, place)


_multiply_rows = _over_rows(_write_dot_products)


# Many queries read the same rows, TOGETHER at a time. So that later queries find the rows in a near cache, rows are
# taken in blocks, and all queries are computed for one block before the next:
#
#                 rows 0..127      rows 128..255     ...
#     queries 0-3     1                 4
#     queries 4-7     2                 5
#     queries 8-11    3                 6
@fast
def multiply_rows(
    stored: Any,
    rows: Any,
    stride: Any,
    n_rows: Any,
    x: Any,
    sums: Any,
) -> Any:
    """Multiply each row of k numbers, from an address on, with each query of x [n, k]: sums [n, at least n_rows]."""
    n, k = x.shape
    x_stride = 4 * k
    sum_stride = 4 * sums.shape[1]
    at_once = n_rows if n <= TOGETHER else ROWS_AT_ONCE
    for row in range(0, n_rows, at_once):
        block_rows = min(at_once, n_rows - row)
        block = rows + row * stride
        for t in range(0, n, TOGETHER):
            n_tokens = min(TOGETHER, n - t)
            query = x.ctypes.data + t * x_stride
            out = sums.ctypes.data + t * sum_stride + 4 * row
            _multiply_rows(stored, n_tokens, block, stride, block_rows, query, x_stride, k, out, sum_stride)


# Sums of some columns stay in registers while all rows pass by; then come the next columns:
#
#                 columns from ``index`` on, sum(widths) of them
#                          |<----------->|
#     row 0       . . . . .|#############|. . .   * weight of row 0  \
#     row 1       . . . . .|#############|. . .   * weight of row 1   + -> registers -> sums
#     row 2       . . . . .|#############|. . .   * weight of row 2  /
def _write_column_sums(
    builder: Any,
    stored: int,
    index: Any,
    widths: list[int],
    rows: Any,
    weights: Any,
    sums: Any,
) -> None:
    """Add up some columns of all rows, from column ``index`` on, in registers of these widths."""
    first, row_stride, n_rows = rows
    begins = itertools.accumulate(widths[:-1], initial=0)
    offsets = [builder.add(index, index.type(begin)) for begin in begins]

    def pieces(row: Any) -> list[tuple[Any, int]]:
        """What these registers hold of a row: a pointer, and how many numbers."""
        places = [builder.gep(row, [offset]) for offset in offsets]
        return list(zip(places, widths, strict=True))

    totals = []
    for row in sums:
        loaded = [load_widened(builder, FLOAT32, place, width) for place, width in pieces(row)]
        totals.append([tools.alloca_once_value(builder, vector) for vector in loaded])
    with tools.for_range(builder, n_rows) as loop:
        row = row_pointer(builder, first, row_stride, loop.index, IN_MEMORY[stored])
        begin = builder.ptrtoint(builder.gep(row, [index]), index.type)
        for offset in range(0, sum(widths) * BYTES[stored], CACHE_LINE):
            _prefetch_ahead(builder, builder.add(begin, begin.type(offset)))
        vectors = [load_widened(builder, stored, place, width) for place, width in pieces(row)]
        for token_weights, token_totals in zip(weights, totals, strict=True):
            weight = builder.load(builder.gep(token_weights, [loop.index]))
            for vector, total in zip(vectors, token_totals, strict=True):
                factor = broadcast(builder, weight, vector.type.count)
                builder.store(multiply_add(builder, builder.load(total), vector, factor), total)
    for row, token_totals in zip(sums, totals, strict=True):
        for (place, width), total in zip(pieces(row), token_totals, strict=True):
            out = builder.bitcast(place, ir.VectorType(float32, width).as_pointer())
            builder.store(builder.load(total), out, align=4)


def _write_weighted_sums(builder: Any, stored: int, n: int, *addresses: Any) -> None:
    """See ``add_weighted_rows``."""
    rows, row_stride, n_rows, weights, weight_stride, k, sums, sum_stride = addresses
    token_weights = [row_pointer(builder, weights, weight_stride, t) for t in range(n)]
    token_sums = [row_pointer(builder, sums, sum_stride, t) for t in range(n)]
    steps = (VECTORS[n] * WIDTH, WIDTH, 1)
    for width, index in loop_in_steps(builder, k, steps):
        widths = [1] if width == 1 else [WIDTH] * (width // WIDTH)
        _write_column_sums(builder, stored, index, widths, (rows, row_stride, n_rows), token_weights, token_sums)


_add_weighted_rows = _over_rows(_write_weighted_sums)


@fast
def add_weighted_rows(
    stored: Any,
    rows: Any,
    stride: Any,
    n_rows: Any,
    weights: Any,
    sums: Any,
) -> Any:
    """Add rows of k numbers, from an address on, times weights [n, at least n_rows], to sums [n, k]."""
    n, k = sums.shape
    weight_stride = 4 * weights.shape[1]
    sum_stride = 4 * k
    at_once = n_rows if n <= TOGETHER else ROWS_AT_ONCE
    for row in range(0, n_rows, at_once):
        block_rows = min(at_once, n_rows - row)
        block = rows + row * stride
        for t in range(0, n, TOGETHER):
            n_tokens = min(TOGETHER, n - t)
            weight = weights.ctypes.data + t * weight_stride + 4 * row
            out = sums.ctypes.data + t * sum_stride
            _add_weighted_rows(stored, n_tokens, block, stride, block_rows, weight, weight_stride, k, out, sum_stride)


@instruction
def _largest(typingctx: Any, numbers: Any, n: Any) -> Any:
    """See ``largest``: of n float32 at an address."""

    def larger(builder: Any, candidate: Any, best: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", candidate, best), candidate, best)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers = builder.inttoptr(args[0], float32.as_pointer())
        n = args[1]
        best = {}
        for width in (WIDTH, 1):
            least = constant_vector(float32, LEAST, width)
            best[width] = tools.alloca_once_value(builder, least)
        for width, index in loop_in_steps(builder, n, best):
            vector = load_widened(builder, FLOAT32, builder.gep(numbers, [index]), width)
            place = best[width]
            largest_yet = larger(builder, vector, builder.load(place))
            builder.store(largest_yet, place)
        vector, single = (builder.load(place) for place in best.values())
        function_type = ir.FunctionType(float32, [vector.type])
        name = f"llvm.vector.reduce.fmax.v{WIDTH}f32"
        reduce_vector = tools.get_or_insert_function(builder.module, function_type, name)
        largest_of_vector = builder.call(reduce_vector, [vector])
        return larger(builder, largest_of_vector, builder.extract_element(single, int32(0)))

    return types.float32(types.int64, types.int64), generate


@fast
def largest(row: Any) -> Any:
    """Return the largest float32 in a row that is not NaN; the least that there is, if all are NaN."""
    return _largest(row.ctypes.data, len(row))
