"""Rows of weights, as they lie in memory, times the numbers of a few tokens: written in vectors.

A compiler would do as well for one format on one machine; where registers are few it keeps too much in them, or
widens into memory first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from swarmd.compute.compiled.layout import BFLOAT16, FLOAT16, FLOAT32, INT8
from swarmd.compute.compiled.machine import Made, fast, instruction
from swarmd.compute.compiled.registers import WIDTH

tools: Any = cgutils  # untyped
SUMS = 8  # at the same time: an addition takes 4 cycles, and 2 begin in each
TOGETHER = 4  # tokens at the same time, at most
IN_MEMORY = {FLOAT32: ir.FloatType(), FLOAT16: ir.HalfType(), BFLOAT16: ir.IntType(16), INT8: ir.IntType(8)}
BYTES = {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2, INT8: 1}
number, word = ir.FloatType(), ir.IntType(32)


def widened(builder: Any, stored: int, address: Any, n: int) -> Any:
    """Read n numbers as float32; of 8 bits without their scale."""
    words, numbers = ir.VectorType(word, n), ir.VectorType(number, n)
    kept = builder.load(builder.bitcast(address, ir.VectorType(IN_MEMORY[stored], n).as_pointer()), align=1)
    if stored == FLOAT16:
        return builder.fpext(kept, numbers)
    if stored == BFLOAT16:
        return builder.bitcast(builder.shl(builder.zext(kept, words), ir.Constant(words, [16] * n)), numbers)
    if stored == INT8:
        return builder.sitofp(kept, numbers)
    return kept


def total_of(builder: Any, first: Any, numbers: Any) -> Any:
    """A number and all of a vector, in any order."""
    kind = ir.FunctionType(number, [number, numbers.type])
    add = tools.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{numbers.type.count}f32")
    return builder.call(add, [first, numbers], fastmath=("reassoc",))


def plus(builder: Any, total: Any, one: Any, other: Any) -> Any:
    """Vectors: a total, and one times the other."""
    return builder.fadd(builder.fmul(one, other, flags=["contract"]), total, flags=["contract"])


def everywhere(builder: Any, one: Any, n: int) -> Any:
    """A number, n times."""
    wide = builder.insert_element(ir.Constant(ir.VectorType(one.type, n), ir.Undefined), one, word(0))
    return builder.shuffle_vector(wide, wide, ir.Constant(ir.VectorType(word, n), [0] * n))


def in_steps(builder: Any, k: Any, steps: Iterable[int]) -> Iterator[tuple[int, Any]]:
    """Write loops from 0 to k, each with the next of these steps over what is left: yields the step, and where it is.

    Steps become smaller, and the last is 1.
    """
    done = k.type(0)
    for step in dict.fromkeys(steps):
        end = builder.sub(k, builder.srem(k, k.type(step)))
        with tools.for_range_slice(builder, done, end, k.type(step), inc=True) as (at, _):
            yield step, at
        done = end


def row_of(builder: Any, rows: Any, below: Any, which: Any, kind: Any = number) -> Any:
    """A pointer to one of the rows that begin at an address, so many bytes apart; ``which`` may be a plain number."""
    which = below.type(which) if isinstance(which, int) else which
    return builder.inttoptr(builder.add(rows, builder.mul(below, which)), kind.as_pointer())


def in_each_way(write: Callable[..., None], formats: Iterable[int] = tuple(IN_MEMORY)) -> Made:
    """What an instruction stands for that is told how rows are stored and for how many tokens it is, up to TOGETHER."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for stored in formats:
            with builder.if_then(builder.icmp_signed("==", args[0], args[0].type(stored))):
                for n in range(1, TOGETHER + 1):
                    with builder.if_then(builder.icmp_signed("==", args[1], args[1].type(n))):
                        write(builder, stored, n, *args[2:])
        return context.get_dummy_value()

    return generate


def products_of(builder: Any, stored: int, rows: Any, tokens: Any, k: Any) -> list[Any]:
    """Two rows of k numbers times those of a few tokens, by pointers: two sums for each token."""
    n_sums = 2 * len(tokens)
    n_parts = SUMS // n_sums

    def multiply(at: Any, width: int, sums: Any) -> None:
        """Add products of ``width`` numbers to the sums of all."""
        weights = [widened(builder, stored, builder.gep(row, [at]), width) for row in rows]
        for t, token in enumerate(tokens):
            x = widened(builder, FLOAT32, builder.gep(token, [at]), width)
            for side, weight in enumerate(weights):
                total = sums[2 * t + side]
                builder.store(plus(builder, builder.load(total), weight, x), total)

    nothing, none = (ir.Constant(ir.VectorType(number, n), [0.0] * n) for n in (WIDTH, 1))
    wide = [[tools.alloca_once_value(builder, nothing) for _ in range(n_sums)] for _ in range(n_parts)]
    left = [tools.alloca_once_value(builder, none) for _ in range(n_sums)]
    for step, at in in_steps(builder, k, (n_parts * WIDTH, WIDTH, 1)):
        if step == 1:
            multiply(at, 1, left)
        for part, sums in enumerate(wide[: step // WIDTH]):
            multiply(builder.add(at, k.type(part * WIDTH)), WIDTH, sums)
    totals = [reduce(builder.fadd, map(builder.load, parts)) for parts in zip(*wide, strict=True)]
    rest = [builder.extract_element(builder.load(one), word(0)) for one in left]
    return [total_of(builder, first, total) for first, total in zip(rest, totals, strict=True)]


@instruction
def _times_pair(
    typingctx: Any, stored: Any, n: Any, first: Any, second: Any, x: Any, step: Any, k: Any, sums: Any
) -> Any:
    """Two rows of k numbers times those of n tokens, ``step`` bytes apart, to sums [n, 2]."""

    def write(builder: Any, stored: int, n: int, first: Any, second: Any, x: Any, step: Any, k: Any, sums: Any) -> None:
        rows = [builder.inttoptr(row, IN_MEMORY[stored].as_pointer()) for row in (first, second)]
        tokens = [row_of(builder, x, step, t) for t in range(n)]
        out = builder.inttoptr(sums, number.as_pointer())
        for which, total in enumerate(products_of(builder, stored, rows, tokens, k)):
            builder.store(total, builder.gep(out, [word(which)]))

    return types.void(*[types.int64] * 8), in_each_way(write, (FLOAT32, FLOAT16, BFLOAT16))


@fast
def times_pair(stored: Any, first: Any, second: Any, x: Any, n: Any, k: Any, products: Any) -> Any:
    """Two rows at these addresses times each of x [n, k] float32 to products [n, 2], all by their addresses."""
    for t in range(0, n, TOGETHER):
        _times_pair(stored, min(TOGETHER, n - t), first, second, x + 4 * t * k, 4 * k, k, products + 8 * t)
