"""Rows of weights, as they lie in memory, times the numbers of a few tokens: written in vectors.

A compiler would do as well for one format on one machine; where registers are few it keeps too much in them, or
widens into memory first.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from swarmd.compute.compiled.layout import BFLOAT16, FLOAT16, FLOAT32, WIDTH
from swarmd.compute.compiled.machine import Made, fast, instruction

tools: Any = cgutils  # untyped
SUMS = 8  # at the same time: an addition takes 4 cycles, and 2 begin in each
IN_MEMORY = {FLOAT32: ir.FloatType(), FLOAT16: ir.HalfType(), BFLOAT16: ir.IntType(16)}


def widened(builder: Any, stored: int, address: Any, n: int) -> Any:
    """Read n numbers as float32."""
    word, numbers = ir.VectorType(ir.IntType(32), n), ir.VectorType(ir.FloatType(), n)
    kept = builder.load(builder.bitcast(address, ir.VectorType(IN_MEMORY[stored], n).as_pointer()), align=1)
    if stored == FLOAT16:
        return builder.fpext(kept, numbers)
    if stored == BFLOAT16:
        return builder.bitcast(builder.shl(builder.zext(kept, word), ir.Constant(word, [16] * n)), numbers)
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


def _times_pair(n: int) -> Made:
    """Two rows of k numbers times those of n tokens.

    Told is how they are stored; by addresses both rows, the first token's numbers, and two sums for each token; where
    the next token's numbers are, and how many.
    """
    number, word, n_parts = ir.FloatType(), ir.IntType(32), SUMS // (2 * n)

    def multiply(builder: Any, stored: int, rows: Any, tokens: Any, at: Any, width: int, sums: Any) -> None:
        """Add products of ``width`` numbers to n times 2 sums."""
        weights = [widened(builder, stored, builder.gep(row, [at]), width) for row in rows]
        for t, token in enumerate(tokens):
            x = widened(builder, FLOAT32, builder.gep(token, [at]), width)
            for side, weight in enumerate(weights):
                total = sums[2 * t + side]
                builder.store(plus(builder, builder.load(total), weight, x), total)

    def of_format(builder: Any, stored: int, args: Any) -> None:
        rows = [builder.inttoptr(address, IN_MEMORY[stored].as_pointer()) for address in args[:2]]
        step, k = args[3], args[4]
        tokens = [builder.add(args[2], builder.mul(step, step.type(t))) for t in range(n)]
        tokens = [builder.inttoptr(token, number.as_pointer()) for token in tokens]
        nothing = ir.Constant(ir.VectorType(number, WIDTH), [0.0] * WIDTH)
        wide = [[tools.alloca_once_value(builder, nothing) for _ in range(2 * n)] for _ in range(n_parts)]
        whole = builder.sub(k, builder.srem(k, k.type(n_parts * WIDTH)))
        with tools.for_range_slice(builder, k.type(0), whole, k.type(n_parts * WIDTH), inc=True) as (at, _):
            for part, sums in enumerate(wide):
                multiply(builder, stored, rows, tokens, builder.add(at, k.type(part * WIDTH)), WIDTH, sums)
        left = [tools.alloca_once_value(builder, ir.Constant(ir.VectorType(number, 1), [0.0])) for _ in wide[0]]
        with tools.for_range_slice(builder, whole, k, k.type(1), inc=True) as (at, _):
            multiply(builder, stored, rows, tokens, at, 1, left)
        out = builder.inttoptr(args[5], number.as_pointer())
        for which, parts in enumerate(zip(*wide, strict=True)):
            total = reduce(builder.fadd, map(builder.load, parts))
            last = builder.extract_element(builder.load(left[which]), word(0))
            builder.store(total_of(builder, last, total), builder.gep(out, [word(which)]))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for stored in IN_MEMORY:
            with builder.if_then(builder.icmp_signed("==", args[0], args[0].type(stored))):
                of_format(builder, stored, args[1:])
        return context.get_dummy_value()

    def times(typingctx: Any, stored: Any, first: Any, second: Any, x: Any, step: Any, k: Any, sums: Any) -> Any:
        return types.void(*[types.int64] * 7), generate

    return instruction(times)


_times_pair_1, _times_pair_2, _times_pair_4 = (_times_pair(n) for n in (1, 2, 4))


@fast
def times_pair(stored: Any, first: Any, second: Any, x: Any, n: Any, k: Any, products: Any) -> Any:
    """Two rows at these addresses times each of x [n, k] float32 to products [n, 2], all by their addresses."""
    step = 4 * k
    t = 0
    while t < n:
        left, token, sums = n - t, x + t * step, products + 8 * t
        if left >= 4:
            _times_pair_4(stored, first, second, token, step, k, sums)
        elif left >= 2:
            _times_pair_2(stored, first, second, token, step, k, sums)
        else:
            _times_pair_1(stored, first, second, token, step, k, sums)
        t += 4 if left >= 4 else 2 if left >= 2 else 1
