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
from swarmd.compute.compiled.machine import fast, instruction
from swarmd.compute.compiled.registers import WIDTH

tools: Any = cgutils  # untyped
SUMS = 8  # at the same time: an addition takes 4 cycles, and 2 begin in each
TOGETHER = 4  # tokens at the same time, at most
IN_MEMORY = {
    FLOAT32: ir.FloatType(),
    FLOAT16: ir.HalfType(),
    BFLOAT16: ir.IntType(16),
    INT8: ir.IntType(8),
}
BYTES = {FLOAT32: 4, FLOAT16: 2, BFLOAT16: 2, INT8: 1}
float32 = ir.FloatType()
int32 = ir.IntType(32)


def constant_vector(element: Any, value: float, n: int) -> Any:
    """Make a constant vector of a value, n times."""
    return ir.Constant(ir.VectorType(element, n), [value] * n)


def load_widened(builder: Any, stored: int, address: Any, n: int) -> Any:
    """Read n numbers as float32; int8 without its scale."""
    int32_vector = ir.VectorType(int32, n)
    float32_vector = ir.VectorType(float32, n)
    stored_vector = ir.VectorType(IN_MEMORY[stored], n)
    numbers = builder.load(builder.bitcast(address, stored_vector.as_pointer()), align=1)
    if stored == FLOAT16:
        return builder.fpext(numbers, float32_vector)
    if stored == BFLOAT16:  # the upper half of a float32's bits
        bits = builder.zext(numbers, int32_vector)
        return builder.bitcast(builder.shl(bits, constant_vector(int32, 16, n)), float32_vector)
    if stored == INT8:
        return builder.sitofp(numbers, float32_vector)
    return numbers


def add_up(builder: Any, first: Any, numbers: Any) -> Any:
    """Add a number and all of a vector, in any order."""
    function_type = ir.FunctionType(float32, [float32, numbers.type])
    name = f"llvm.vector.reduce.fadd.v{numbers.type.count}f32"
    add = tools.get_or_insert_function(builder.module, function_type, name)
    return builder.call(add, [first, numbers], fastmath=("reassoc",))


def multiply_add(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """Add the product of two vectors to a total."""
    product = builder.fmul(left, right, flags=["contract"])
    return builder.fadd(product, total, flags=["contract"])


def broadcast(builder: Any, number: Any, n: int) -> Any:
    """Make a vector of a number, n times."""
    vector = ir.Constant(ir.VectorType(number.type, n), ir.Undefined)
    first = builder.insert_element(vector, number, int32(0))
    return builder.shuffle_vector(first, first, constant_vector(int32, 0, n))


# A row's length k is no multiple of a vector's. So there is a loop for each step size, and each begins where the one
# before it had too little left:
#
#     0                                             k
#     |-- 4 vectors --|-- 4 vectors --|-- 1 --|-- 1 --|.|.|
#      loop of the largest step        smaller          single numbers
def loop_in_steps(
    builder: Any,
    k: Any,
    steps: Iterable[int],
) -> Iterator[tuple[int, Any]]:
    """Write loops from 0 to k, each with the next of these steps over what remains: yields the step and the index.

    Steps become smaller, and the last is 1.
    """
    begin = k.type(0)
    for step in dict.fromkeys(steps):
        increment = k.type(step)
        end = builder.sub(k, builder.srem(k, increment))
        with tools.for_range_slice(builder, begin, end, increment, inc=True) as (index, _):
            yield step, index
        begin = end


def row_pointer(
    builder: Any,
    rows: Any,
    stride: Any,
    index: Any,
    element: Any = float32,
) -> Any:
    """Make a pointer to one of the rows that begin at an address, ``stride`` bytes apart; the index may be an int."""
    index = stride.type(index) if isinstance(index, int) else index
    address = builder.add(rows, builder.mul(stride, index))
    return builder.inttoptr(address, element.as_pointer())


def is_equal(builder: Any, number: Any, value: int) -> Any:
    """Compare a whole number with a constant."""
    return builder.icmp_signed("==", number, number.type(value))


def for_each_variant(
    write: Callable[..., None], formats: Iterable[int] = tuple(IN_MEMORY)
) -> Callable[[Any, Any, Any, Any], Any]:
    """Make the generator of an instruction whose first arguments are a format and a number of tokens, up to TOGETHER.

    Which variant runs is decided when it is called; each is written with both as constants.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for stored in formats:
            with builder.if_then(is_equal(builder, args[0], stored)):
                for n in range(1, TOGETHER + 1):
                    with builder.if_then(is_equal(builder, args[1], n)):
                        write(builder, stored, n, *args[2:])
        return context.get_dummy_value()

    return generate


# Memory is read once: a vector of each of two rows, and all products with it are added up while it is in a register.
#
#     row 0  |##|##|..|       n_sums = 2 rows * n tokens; each has SUMS / n_sums partial sums beside each other, since
#     row 1  |##|##|..|       an addition ends 4 cycles after it began and would wait for the one before it
#              x
#     token 0..n-1  |##|##|..|
#
# Two rows and not one: two streams from memory are faster. Not more: registers are needed for the sums.
def dot_products(
    builder: Any,
    stored: int,
    rows: Any,
    tokens: Any,
    k: Any,
) -> list[Any]:
    """Multiply two rows of k numbers with those of a few tokens, all by pointers: two sums for each token."""
    n_sums = 2 * len(tokens)
    n_partials = SUMS // n_sums

    def multiply(index: Any, width: int, sums: Any) -> None:
        """Add products of ``width`` numbers to the sums of all."""
        places = [builder.gep(row, [index]) for row in rows]
        weights = [load_widened(builder, stored, place, width) for place in places]
        for t, token in enumerate(tokens):
            x = load_widened(builder, FLOAT32, builder.gep(token, [index]), width)
            for side, weight in enumerate(weights):
                total = sums[2 * t + side]
                builder.store(multiply_add(builder, builder.load(total), weight, x), total)

    def new_sums(width: int) -> list[Any]:
        zeros = constant_vector(float32, 0.0, width)
        return [tools.alloca_once_value(builder, zeros) for _ in range(n_sums)]

    partials = [new_sums(WIDTH) for _ in range(n_partials)]
    single_sums = new_sums(1)
    for step, index in loop_in_steps(builder, k, (n_partials * WIDTH, WIDTH, 1)):
        if step == 1:
            multiply(index, 1, single_sums)
        for i, sums in enumerate(partials[: step // WIDTH]):
            multiply(builder.add(index, k.type(i * WIDTH)), WIDTH, sums)
    vectors = []
    for column in zip(*partials, strict=True):
        vectors.append(reduce(builder.fadd, map(builder.load, column)))
    totals = []
    for place, vector in zip(single_sums, vectors, strict=True):
        single = builder.extract_element(builder.load(place), int32(0))
        totals.append(add_up(builder, single, vector))
    return totals


@instruction
def _multiply_row_pair(
    typingctx: Any,
    stored: Any,
    n: Any,
    first: Any,
    second: Any,
    x: Any,
    stride: Any,
    k: Any,
    sums: Any,
) -> Any:
    """Multiply two rows of k numbers with those of n tokens, ``stride`` bytes apart, to sums [n, 2]."""

    def write(builder: Any, stored: int, n: int, *addresses: Any) -> None:
        first, second, x, stride, k, sums = addresses
        element = IN_MEMORY[stored].as_pointer()
        rows = [builder.inttoptr(row, element) for row in (first, second)]
        tokens = [row_pointer(builder, x, stride, t) for t in range(n)]
        out = builder.inttoptr(sums, float32.as_pointer())
        for i, total in enumerate(dot_products(builder, stored, rows, tokens, k)):
            builder.store(total, builder.gep(out, [int32(i)]))

    generate = for_each_variant(write, (FLOAT32, FLOAT16, BFLOAT16))
    return types.void(*[types.int64] * 8), generate


@fast
def multiply_row_pair(
    stored: Any,
    first: Any,
    second: Any,
    x: Any,
    n: Any,
    k: Any,
    products: Any,
) -> Any:
    """Multiply two rows with each of x [n, k] float32, to products [n, 2], all by their addresses."""
    stride = 4 * k
    for t in range(0, n, TOGETHER):
        n_tokens = min(TOGETHER, n - t)
        token = x + t * stride
        sums = products + 8 * t
        _multiply_row_pair(stored, n_tokens, first, second, token, stride, k, sums)
