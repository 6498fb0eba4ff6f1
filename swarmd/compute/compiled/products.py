"""Rows of numbers, as they lie in memory, times those of a few tokens, or added up by shares: written in vectors.

A compiler would do as well for one format on one machine; where registers are few it keeps too much in them, or
widens into memory first.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from swarmd.compute.compiled.layout import BFLOAT16, FLOAT16, FLOAT32, INT8, WIDTH
from swarmd.compute.compiled.machine import AHEAD_BYTES, CACHE_LINE, Made, ask_for, fast, instruction

tools: Any = cgutils  # untyped
SUMS = 8  # at the same time: an addition takes 4 cycles, and 2 begin in each
HINTS = 4
LEAST = float(np.finfo(np.float32).min)
IN_MEMORY = {FLOAT32: ir.FloatType(), FLOAT16: ir.HalfType(), BFLOAT16: ir.IntType(16), INT8: ir.IntType(8)}


def widened(builder: Any, stored: int, address: Any, n: int) -> Any:
    """Read n numbers as float32; of 8 bits without their scale."""
    word, numbers = ir.VectorType(ir.IntType(32), n), ir.VectorType(ir.FloatType(), n)
    kept = builder.load(builder.bitcast(address, ir.VectorType(IN_MEMORY[stored], n).as_pointer()), align=1)
    if stored == FLOAT16:
        return builder.fpext(kept, numbers)
    if stored == BFLOAT16:
        return builder.bitcast(builder.shl(builder.zext(kept, word), ir.Constant(word, [16] * n)), numbers)
    if stored == INT8:
        return builder.sitofp(kept, numbers)
    return kept


def total_of(builder: Any, first: Any, numbers: Any) -> Any:
    """A number and all of a vector, in any order."""
    number = ir.FloatType()
    kind = ir.FunctionType(number, [number, numbers.type])
    add = tools.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{numbers.type.count}f32")
    return builder.call(add, [first, numbers], fastmath=("reassoc",))


def plus(builder: Any, total: Any, one: Any, other: Any) -> Any:
    """Vectors: a total, and one times the other."""
    return builder.fadd(builder.fmul(one, other, flags=["contract"]), total, flags=["contract"])


def _products(builder: Any, stored: int, rows: Any, x: Any, step: Any, n: int, k: Any) -> list[Any]:
    """Two rows of k numbers, at these addresses, times those of n tokens, ``step`` bytes apart: [n, 2]."""
    number, word, n_parts = ir.FloatType(), ir.IntType(32), SUMS // (2 * n)
    rows = [builder.inttoptr(address, IN_MEMORY[stored].as_pointer()) for address in rows]
    tokens = [builder.add(x, builder.mul(step, step.type(t))) for t in range(n)]
    tokens = [builder.inttoptr(token, number.as_pointer()) for token in tokens]

    def multiply(at: Any, width: int, sums: Any) -> None:
        """Add products of ``width`` numbers to n times 2 sums."""
        weights = [widened(builder, stored, builder.gep(row, [at]), width) for row in rows]
        for t, token in enumerate(tokens):
            entering = widened(builder, FLOAT32, builder.gep(token, [at]), width)
            for side, weight in enumerate(weights):
                total = sums[2 * t + side]
                builder.store(plus(builder, builder.load(total), weight, entering), total)

    nothing = ir.Constant(ir.VectorType(number, WIDTH), [0.0] * WIDTH)
    wide = [[tools.alloca_once_value(builder, nothing) for _ in range(2 * n)] for _ in range(n_parts)]
    whole = builder.sub(k, builder.srem(k, k.type(n_parts * WIDTH)))
    with tools.for_range_slice(builder, k.type(0), whole, k.type(n_parts * WIDTH), inc=True) as (at, _):
        for part, sums in enumerate(wide):
            multiply(builder.add(at, k.type(part * WIDTH)), WIDTH, sums)
    left = [tools.alloca_once_value(builder, ir.Constant(ir.VectorType(number, 1), [0.0])) for _ in wide[0]]
    with tools.for_range_slice(builder, whole, k, k.type(1), inc=True) as (at, _):
        multiply(at, 1, left)
    totals = [reduce(builder.fadd, map(builder.load, parts)) for parts in zip(*wide, strict=True)]
    last = [builder.extract_element(builder.load(one), word(0)) for one in left]
    return [total_of(builder, first, total) for first, total in zip(last, totals, strict=True)]


def _in_each_format(write: Callable[..., None]) -> tuple[Any, Made]:
    """What a typed instruction gives that is told how rows are stored, then numbers and addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for stored in IN_MEMORY:
            with builder.if_then(builder.icmp_signed("==", args[0], args[0].type(stored))):
                write(builder, stored, *args[1:])
        return context.get_dummy_value()

    n_args = len(inspect.signature(write).parameters) - 1
    return types.void(*[types.int64] * n_args), generate


def _times_pair(n: int) -> Made:
    """Two rows of k numbers times those of n tokens, to [n, 2]."""

    def times(builder: Any, stored: int, first: Any, second: Any, x: Any, step: Any, k: Any, sums: Any) -> None:
        out = builder.inttoptr(sums, ir.FloatType().as_pointer())
        for which, total in enumerate(_products(builder, stored, (first, second), x, step, n, k)):
            builder.store(total, builder.gep(out, [ir.IntType(32)(which)]))

    def typed(typingctx: Any, stored: Any, first: Any, second: Any, x: Any, step: Any, k: Any, sums: Any) -> Any:
        return _in_each_format(times)

    return instruction(typed)


def _times_rows(n: int) -> Made:
    """Rows of k numbers, ``below`` bytes apart, times those of n tokens, to n rows of sums; an even number of rows."""

    def times(
        builder: Any,
        stored: int,
        rows: Any,
        below: Any,
        n_rows: Any,
        x: Any,
        step: Any,
        k: Any,
        sums: Any,
        sums_step: Any,
    ) -> None:
        with tools.for_range_slice(builder, n_rows.type(0), n_rows, n_rows.type(2), inc=True) as (row, _):
            first = builder.add(rows, builder.mul(row, below))
            is_last = builder.icmp_signed("==", builder.add(row, row.type(1)), n_rows)
            second = builder.select(is_last, first, builder.add(first, below))
            for side in (first, second):
                for line in range(HINTS):
                    place = builder.add(side, side.type(AHEAD_BYTES + line * CACHE_LINE))
                    ask_for(builder, builder.inttoptr(place, ir.IntType(8).as_pointer()))
            for which, total in enumerate(_products(builder, stored, (first, second), x, step, n, k)):
                to = builder.add(sums, builder.mul(sums_step, step.type(which // 2)))
                to = builder.gep(
                    builder.inttoptr(to, ir.FloatType().as_pointer()), [builder.add(row, row.type(which % 2))]
                )
                builder.store(total, to)

    def typed(
        typingctx: Any,
        stored: Any,
        rows: Any,
        below: Any,
        n_rows: Any,
        x: Any,
        step: Any,
        k: Any,
        sums: Any,
        sums_step: Any,
    ) -> Any:
        return _in_each_format(times)

    return instruction(typed)


_times_pair_1, _times_pair_2, _times_pair_3, _times_pair_4 = (_times_pair(n) for n in range(1, 5))
_times_rows_1, _times_rows_2, _times_rows_3, _times_rows_4 = (_times_rows(n) for n in range(1, 5))


@fast
def times_rows(stored: Any, rows: Any, below: Any, n_rows: Any, x: Any, sums: Any) -> Any:
    """Rows of k numbers, ``below`` bytes apart, times those of tokens x [n, k] to sums [n, at least n_rows, or one more
    if that is odd]. Rows by their address."""
    (n, k), t = x.shape, 0
    step, to = 4 * k, 4 * sums.shape[1]
    while t < n:
        left, token, out = n - t, x.ctypes.data + t * step, sums.ctypes.data + t * to
        if left >= 4:
            _times_rows_4(stored, rows, below, n_rows, token, step, k, out, to)
        elif left == 3:
            _times_rows_3(stored, rows, below, n_rows, token, step, k, out, to)
        elif left == 2:
            _times_rows_2(stored, rows, below, n_rows, token, step, k, out, to)
        else:
            _times_rows_1(stored, rows, below, n_rows, token, step, k, out, to)
        t += min(4, left)


@fast
def times_pair(stored: Any, first: Any, second: Any, x: Any, n: Any, k: Any, products: Any) -> Any:
    """Two rows at these addresses times each of x [n, k] float32 to products [n, 2], all by their addresses."""
    step = 4 * k
    t = 0
    while t < n:
        left, token, sums = n - t, x + t * step, products + 8 * t
        if left >= 4:
            _times_pair_4(stored, first, second, token, step, k, sums)
        elif left == 3:
            _times_pair_3(stored, first, second, token, step, k, sums)
        elif left == 2:
            _times_pair_2(stored, first, second, token, step, k, sums)
        else:
            _times_pair_1(stored, first, second, token, step, k, sums)
        t += min(4, left)


def _mix(n: int) -> Made:
    """Rows of k numbers, ``below`` bytes apart, added to sums of n tokens by their shares of each row."""
    number, word, n_vectors = ir.FloatType(), ir.IntType(32), max(1, SUMS // (2 * n))

    def add_up(builder: Any, stored: int, at: Any, widths: list[int], about: Any) -> None:
        """All rows, from number ``at`` on, to sums that stay in registers of these widths."""
        rows, below, n_rows, shares, shares_step, sums, sums_step = about
        places, totals = [], []
        for t in range(n):
            to = builder.inttoptr(builder.add(sums, builder.mul(sums_step, at.type(t))), number.as_pointer())
            for v, width in enumerate(widths):
                place = builder.gep(to, [builder.add(at, at.type(v * width))])
                places.append(builder.bitcast(place, ir.VectorType(number, width).as_pointer()))
                totals.append(tools.alloca_once_value(builder, builder.load(places[-1], align=4)))
        with tools.for_range(builder, n_rows) as loop:
            row = builder.inttoptr(builder.add(rows, builder.mul(loop.index, below)), IN_MEMORY[stored].as_pointer())
            numbers = [
                widened(builder, stored, builder.gep(row, [builder.add(at, at.type(v * width))]), width)
                for v, width in enumerate(widths)
            ]
            for t in range(n):
                share = builder.add(shares, builder.mul(shares_step, at.type(t)))
                share = builder.load(builder.gep(builder.inttoptr(share, number.as_pointer()), [loop.index]))
                for v, width in enumerate(widths):
                    one = builder.insert_element(
                        ir.Constant(ir.VectorType(number, width), ir.Undefined), share, word(0)
                    )
                    every = builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(word, width), [0] * width))
                    total = totals[t * len(widths) + v]
                    builder.store(plus(builder, builder.load(total), numbers[v], every), total)
        for place, total in zip(places, totals, strict=True):
            builder.store(builder.load(total), place, align=4)

    def mix(
        builder: Any,
        stored: int,
        k: Any,
        rows: Any,
        below: Any,
        n_rows: Any,
        shares: Any,
        shares_step: Any,
        sums: Any,
        sums_step: Any,
    ) -> None:
        about = rows, below, n_rows, shares, shares_step, sums, sums_step
        at = k.type(0)
        for widths in ([WIDTH] * n_vectors, [WIDTH], [1]):
            end = builder.sub(k, builder.srem(k, k.type(sum(widths))))
            with tools.for_range_slice(builder, at, end, k.type(sum(widths)), inc=True) as (index, _):
                add_up(builder, stored, index, widths, about)
            at = end

    def typed(
        typingctx: Any,
        stored: Any,
        k: Any,
        rows: Any,
        below: Any,
        n_rows: Any,
        shares: Any,
        shares_step: Any,
        sums: Any,
        sums_step: Any,
    ) -> Any:
        return _in_each_format(mix)

    return instruction(typed)


_mix_1, _mix_2, _mix_3, _mix_4 = (_mix(n) for n in range(1, 5))


@fast
def mix(stored: Any, rows: Any, below: Any, n_rows: Any, shares: Any, sums: Any) -> Any:
    """Rows of k numbers, ``below`` bytes apart, added to sums [n, k] by shares [n, at least n_rows].

    Rows by their address.
    """
    (n, k), t = sums.shape, 0
    step, to = 4 * shares.shape[1], 4 * k
    while t < n:
        left, share, out = n - t, shares.ctypes.data + t * step, sums.ctypes.data + t * to
        if left >= 4:
            _mix_4(stored, k, rows, below, n_rows, share, step, out, to)
        elif left == 3:
            _mix_3(stored, k, rows, below, n_rows, share, step, out, to)
        elif left == 2:
            _mix_2(stored, k, rows, below, n_rows, share, step, out, to)
        else:
            _mix_1(stored, k, rows, below, n_rows, share, step, out, to)
        t += min(4, left)


@instruction
def largest(typingctx: Any, numbers: Any, n: Any) -> Any:
    """The largest of n float32 at an address, those that are numbers; the least that there is, if there are none."""
    number = ir.FloatType()

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, n = builder.inttoptr(args[0], number.as_pointer()), args[1]
        most = []
        at = n.type(0)
        for width in (WIDTH, 1):
            kind = ir.VectorType(number, width)
            most.append(tools.alloca_once_value(builder, ir.Constant(kind, [LEAST] * width)))
            end = builder.sub(n, builder.srem(n, n.type(width)))
            with tools.for_range_slice(builder, at, end, n.type(width), inc=True) as (index, _):
                some = widened(builder, FLOAT32, builder.gep(numbers, [index]), width)
                known = builder.load(most[-1])
                builder.store(builder.select(builder.fcmp_ordered(">", some, known), some, known), most[-1])
            at = end
        wide, last = builder.load(most[0]), builder.extract_element(builder.load(most[1]), ir.IntType(32)(0))
        kind = ir.FunctionType(number, [wide.type])
        choose = tools.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmax.v{WIDTH}f32")
        first = builder.call(choose, [wide])
        return builder.select(builder.fcmp_ordered(">", first, last), first, last)

    return types.float32(types.int64, types.int64), generate
