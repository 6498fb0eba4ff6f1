"""Rows of weights or keys, as they lie in memory, times the numbers of a few tokens: written in vectors.

A compiler would do as well for one format on one machine; where registers are few it keeps too much in them, or
widens into memory first.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from swarmd.compute.compiled.layout import BFLOAT16, FLOAT16, FLOAT32, GROUP, INT8, LEVEL_OF_ZERO, ROWS, WIDTH
from swarmd.compute.compiled.machine import Made, fast, instruction

tools: Any = cgutils  # untyped
SUMS = 8  # at the same time: an addition takes 4 cycles, and 2 begin in each
IN_MEMORY = {FLOAT32: ir.FloatType(), FLOAT16: ir.HalfType(), BFLOAT16: ir.IntType(16), INT8: ir.IntType(8)}


def _widened(builder: Any, stored: int, address: Any, n: int) -> Any:
    """Read n numbers as float32."""
    word, numbers = ir.VectorType(ir.IntType(32), n), ir.VectorType(ir.FloatType(), n)
    kept = builder.load(builder.bitcast(address, ir.VectorType(IN_MEMORY[stored], n).as_pointer()), align=1)
    if stored == FLOAT16:
        return builder.fpext(kept, numbers)
    if stored == BFLOAT16:
        return builder.bitcast(builder.shl(builder.zext(kept, word), ir.Constant(word, [16] * n)), numbers)
    if stored == INT8:
        return builder.sitofp(builder.sext(kept, word), numbers)
    return kept


def _sum(builder: Any, first: Any, numbers: Any) -> Any:
    """A number and all of a vector, in any order."""
    number = ir.FloatType()
    kind = ir.FunctionType(number, [number, numbers.type])
    add = tools.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.fadd.v{numbers.type.count}f32")
    return builder.call(add, [first, numbers], fastmath=("reassoc",))


def _plus(builder: Any, total: Any, one: Any, other: Any) -> Any:
    """Vectors: a total, and one times the other."""
    return builder.fadd(builder.fmul(one, other, flags=["contract"]), total, flags=["contract"])


def _everywhere(builder: Any, address: Any, n: int) -> Any:
    """A number that is read, n times."""
    word, nothing = ir.IntType(32), ir.Constant(ir.VectorType(ir.FloatType(), n), ir.Undefined)
    one = builder.insert_element(nothing, builder.load(address, align=4), word(0))
    return builder.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(word, n), [0] * n))


def _times_pair(n: int) -> Made:
    """Two rows of k numbers times those of n tokens.

    Told is how they are stored; by addresses both rows, the first token's numbers, and two sums for each token; where
    the next token's numbers are, and how many.
    """
    number, word, n_parts = ir.FloatType(), ir.IntType(32), SUMS // (2 * n)

    def multiply(builder: Any, stored: int, rows: Any, tokens: Any, at: Any, width: int, sums: Any) -> None:
        """Add products of ``width`` numbers to n times 2 sums."""
        weights = [_widened(builder, stored, builder.gep(row, [at]), width) for row in rows]
        for t, token in enumerate(tokens):
            x = _widened(builder, FLOAT32, builder.gep(token, [at]), width)
            for side, weight in enumerate(weights):
                total = sums[2 * t + side]
                builder.store(_plus(builder, builder.load(total), weight, x), total)

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
            builder.store(_sum(builder, last, total), builder.gep(out, [word(which)]))

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for stored in IN_MEMORY:
            with builder.if_then(builder.icmp_signed("==", args[0], args[0].type(stored))):
                of_format(builder, stored, args[1:])
        return context.get_dummy_value()

    def times(typingctx: Any, stored: Any, first: Any, second: Any, x: Any, step: Any, k: Any, sums: Any) -> Any:
        return types.void(*[types.int64] * 7), generate

    return instruction(times)


def _times_group(n: int) -> Made:
    """Add one group of ROWS rows of 4 bits, times GROUP numbers of each of n tokens, to ROWS totals of each.

    By addresses: of the levels, of the scales of ROWS rows and their zeros; of the first token's numbers, where the
    next one's are, of what a token's numbers add up to, and of the totals. LEVEL_OF_ZERO is nothing but its zero.
    """
    number, word, byte, half = ir.FloatType(), ir.IntType(32), ir.IntType(8), ROWS // 2
    some_bytes, some_numbers = ir.VectorType(byte, half), ir.VectorType(number, half)
    some_words = ir.VectorType(word, half)
    four = ir.Constant(some_words, [4] * half)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        levels = builder.inttoptr(args[0], some_bytes.as_pointer())
        scales, step = builder.inttoptr(args[1], IN_MEMORY[BFLOAT16].as_pointer()), args[3]
        tokens = [builder.add(args[2], builder.mul(step, step.type(t))) for t in range(n)]
        numbers = [builder.inttoptr(token, number.as_pointer()) for token in tokens]
        products = [[ir.Constant(some_numbers, [0.0] * half)] * 2 for _ in range(n)]
        for k in range(GROUP):
            pairs = builder.zext(builder.load(builder.gep(levels, [word(k)]), align=1), some_words)
            sides = [builder.sitofp(part, some_numbers) for part in (pairs, builder.lshr(pairs, four))]
            for t in range(n):
                factor = _everywhere(builder, builder.gep(numbers[t], [word(k)]), half)
                products[t] = [_plus(builder, *both, factor) for both in zip(products[t], sides, strict=True)]
        for both in products:  # the lower half of a byte is what the upper half leaves of it
            both[0] = _plus(builder, both[0], both[1], ir.Constant(some_numbers, [-16.0] * half))
        sums = builder.inttoptr(args[4], number.as_pointer())
        totals = builder.inttoptr(args[5], some_numbers.as_pointer())
        for side in range(2):
            scale = _widened(builder, BFLOAT16, builder.gep(scales, [word(side * half)]), half)
            zero = _widened(builder, BFLOAT16, builder.gep(scales, [word(ROWS + side * half)]), half)
            shifted = _plus(builder, zero, scale, ir.Constant(some_numbers, [-float(LEVEL_OF_ZERO)] * half))
            for t in range(n):
                total = builder.gep(totals, [word(2 * t + side)])
                of_token = _everywhere(builder, builder.gep(sums, [word(t)]), half)
                so_far = _plus(builder, builder.load(total, align=4), shifted, of_token)
                builder.store(_plus(builder, so_far, scale, products[t][side]), total, align=4)
        return context.get_dummy_value()

    def times(typingctx: Any, levels: Any, scales: Any, x: Any, step: Any, sums: Any, totals: Any) -> Any:
        return types.void(*[types.int64] * 6), generate

    return instruction(times)


times_group, times_group_of_two = _times_group(1), _times_group(2)
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
