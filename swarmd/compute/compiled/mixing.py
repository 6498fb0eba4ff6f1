"""What attention does with rows of keys and values, as they lie in memory: written in vectors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from swarmd.compute.compiled.layout import FLOAT32
from swarmd.compute.compiled.machine import AHEAD_BYTES, CACHE_LINE, Made, ask_for, fast, instruction
from swarmd.compute.compiled.products import (
    BYTES,
    IN_MEMORY,
    TOGETHER,
    everywhere,
    in_each_way,
    in_steps,
    number,
    plus,
    products_of,
    row_of,
    tools,
    widened,
    word,
)
from swarmd.compute.compiled.registers import WIDTH

VECTORS = {n: 4 if WIDTH == 16 else {1: 8, 2: 4, 3: 4, 4: 2}[n] for n in range(1, TOGETHER + 1)}  # of sums: registers
ROWS_AT_ONCE = 128  # that stay in near caches, for more than TOGETHER queries
LEAST = float(np.finfo(np.float32).min)


def _look_ahead(builder: Any, place: Any) -> None:
    """Ask for what comes a page after an address: what the machine guesses by itself ends with the page."""
    ask_for(builder, builder.inttoptr(builder.add(place, place.type(AHEAD_BYTES)), ir.IntType(8).as_pointer()))


def _over_rows(write: Callable[..., None]) -> Made:
    """An instruction about rows ``below`` bytes apart, n rows of numbers ``step`` bytes and of sums ``apart``."""

    def typed(
        typingctx: Any,
        stored: Any,
        n: Any,
        rows: Any,
        below: Any,
        n_rows: Any,
        numbers: Any,
        step: Any,
        k: Any,
        sums: Any,
        apart: Any,
    ) -> Any:
        return types.void(*[types.int64] * 10), in_each_way(write)

    return instruction(typed)


def _write_products(builder: Any, stored: int, n: int, *about: Any) -> None:
    """See ``look_at``."""
    rows, below, n_rows, x, step, k, sums, apart = about
    queries, outs = ([row_of(builder, at, by, t) for t in range(n)] for at, by in ((x, step), (sums, apart)))
    one = n_rows.type(1)
    half, last = builder.ashr(builder.add(n_rows, one), one), builder.sub(n_rows, one)
    with tools.for_range(builder, half) as loop:  # two streams from memory are faster than one
        other = builder.add(loop.index, half)
        other = builder.select(builder.icmp_signed("<", other, n_rows), other, last)
        places = [builder.add(rows, builder.mul(below, row)) for row in (loop.index, other)]
        with tools.for_range_slice(builder, one.type(0), below, one.type(CACHE_LINE), inc=True) as (line, _):
            for place in places:
                _look_ahead(builder, builder.add(place, line))
        pair = [builder.inttoptr(place, IN_MEMORY[stored].as_pointer()) for place in places]
        for which, total in enumerate(products_of(builder, stored, pair, queries, k)):
            builder.store(total, builder.gep(outs[which // 2], [(loop.index, other)[which % 2]]))


_look_at = _over_rows(_write_products)


@fast
def look_at(stored: Any, rows: Any, below: Any, n_rows: Any, x: Any, sums: Any) -> Any:
    """Products of each row of k numbers, from an address on, with each query of x [n, k]: sums [n, at least n_rows]."""
    n, k = x.shape
    step, apart, at_once = 4 * k, 4 * sums.shape[1], n_rows if n <= TOGETHER else ROWS_AT_ONCE
    for row in range(0, n_rows, at_once):
        some, first = min(at_once, n_rows - row), rows + row * below
        for t in range(0, n, TOGETHER):
            query, to = x.ctypes.data + t * step, sums.ctypes.data + t * apart + 4 * row
            _look_at(stored, min(TOGETHER, n - t), first, below, some, query, step, k, to, apart)


def _mix_some(builder: Any, stored: int, at: Any, widths: list[int], rows: Any, shares: Any, sums: Any) -> None:
    """Add up all rows from number ``at`` on, in registers of these widths."""
    first, below, n_rows = rows
    offsets = [builder.add(at, at.type(sum_of)) for sum_of in itertools.accumulate(widths[:-1], initial=0)]

    def parts(row: Any) -> list[tuple[Any, int]]:
        """What these registers hold of a row: a pointer, and how many numbers."""
        return [(builder.gep(row, [offset]), width) for offset, width in zip(offsets, widths, strict=True)]

    totals = [
        [tools.alloca_once_value(builder, widened(builder, FLOAT32, *part)) for part in parts(row)] for row in sums
    ]
    with tools.for_range(builder, n_rows) as loop:
        row = row_of(builder, first, below, loop.index, IN_MEMORY[stored])
        begin = builder.ptrtoint(builder.gep(row, [at]), at.type)
        for line in range(0, sum(widths) * BYTES[stored], CACHE_LINE):
            _look_ahead(builder, builder.add(begin, begin.type(line)))
        numbers = [widened(builder, stored, *part) for part in parts(row)]
        for share, of_token in zip(shares, totals, strict=True):
            one = builder.load(builder.gep(share, [loop.index]))
            for wide, total in zip(numbers, of_token, strict=True):
                every = everywhere(builder, one, wide.type.count)
                builder.store(plus(builder, builder.load(total), wide, every), total)
    for row, of_token in zip(sums, totals, strict=True):
        for (place, width), total in zip(parts(row), of_token, strict=True):
            to = builder.bitcast(place, ir.VectorType(number, width).as_pointer())
            builder.store(builder.load(total), to, align=4)


def _write_sums(builder: Any, stored: int, n: int, *about: Any) -> None:
    """See ``mix``."""
    rows, below, n_rows, shares, step, k, sums, apart = about
    places = [[row_of(builder, at, by, t) for t in range(n)] for at, by in ((shares, step), (sums, apart))]
    for width, at in in_steps(builder, k, (VECTORS[n] * WIDTH, WIDTH, 1)):
        widths = [1] if width == 1 else [WIDTH] * (width // WIDTH)
        _mix_some(builder, stored, at, widths, (rows, below, n_rows), *places)


_mix = _over_rows(_write_sums)


@fast
def mix(stored: Any, rows: Any, below: Any, n_rows: Any, shares: Any, sums: Any) -> Any:
    """Rows of k numbers, from an address on, by shares [n, at least n_rows], onto sums [n, k]."""
    n, k = sums.shape
    step, apart, at_once = 4 * shares.shape[1], 4 * k, n_rows if n <= TOGETHER else ROWS_AT_ONCE
    for row in range(0, n_rows, at_once):
        some, first = min(at_once, n_rows - row), rows + row * below
        for t in range(0, n, TOGETHER):
            share, to = shares.ctypes.data + t * step + 4 * row, sums.ctypes.data + t * apart
            _mix(stored, min(TOGETHER, n - t), first, below, some, share, step, k, to, apart)


@instruction
def _largest(typingctx: Any, numbers: Any, n: Any) -> Any:
    """See ``largest``: of n float32 at an address."""

    def larger(builder: Any, one: Any, other: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", one, other), one, other)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        numbers, n = builder.inttoptr(args[0], number.as_pointer()), args[1]
        least = {width: ir.Constant(ir.VectorType(number, width), [LEAST] * width) for width in (WIDTH, 1)}
        known = {width: tools.alloca_once_value(builder, constant) for width, constant in least.items()}
        for width, at in in_steps(builder, n, known):
            some = widened(builder, FLOAT32, builder.gep(numbers, [at]), width)
            builder.store(larger(builder, some, builder.load(known[width])), known[width])
        most = [builder.load(place) for place in known.values()]
        kind = ir.FunctionType(number, [most[0].type])
        choose = tools.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fmax.v{WIDTH}f32")
        return larger(builder, builder.call(choose, most[:1]), builder.extract_element(most[1], word(0)))

    return types.float32(types.int64, types.int64), generate


@fast
def largest(row: Any) -> Any:
    """The largest of float32 in a row, of those that are numbers; the least that there is, if none is."""
    return _largest(row.ctypes.data, len(row))
