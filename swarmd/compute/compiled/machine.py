"""What compiled code needs beside loops: memory by its address, other formats of numbers, hints, a quick exp.

Numba compiles what ``exact`` and ``fast`` mark when it is first needed, for the machine it runs on, and keeps the
result on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from llvmlite import ir
from numba import carray as carray  # type: ignore[attr-defined]  # its list of exports lacks it
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from swarmd.compute.compiled.layout import BFLOAT16, FLOAT16, GROUP, ROWS

ANY_ORDER = {"reassoc", "contract", "nsz", "arcp"}  # of sums, which so become as wide as the machine
Made = Callable[..., Any]


def exact(function: Made) -> Made:
    """Compiled when it is first called, as it is written."""
    return cast(Made, njit(cache=True, error_model="numpy")(function))


def fast(function: Made) -> Made:
    """Compiled when it is first called; sums may be added up in any order."""
    return cast(Made, njit(cache=True, error_model="numpy", fastmath=ANY_ORDER)(function))


def instruction(function: Made) -> Made:
    """A function that says which instructions it stands for."""
    return cast(Made, intrinsic(function))


@instruction
def pointer(typingctx: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@instruction
def prefetch(typingctx: Any, address: Any) -> Any:
    """A hint to read what is there; any address will do."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        hint = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
        builder.call(hint, [builder.inttoptr(args[0], pointer), word(0), word(3), word(1)])  # read, keep, data
        return context.get_dummy_value()

    return types.void(types.int64), generate


@instruction
def of_bfloat16(typingctx: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        word = ir.IntType(32)
        return builder.bitcast(builder.shl(builder.zext(args[0], word), word(16)), ir.FloatType())

    return types.float32(types.uint16), generate


@instruction
def of_float16(typingctx: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@instruction
def to_float16(typingctx: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), generate


@instruction
def _bits(typingctx: Any, number: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


@instruction
def _of_bits(typingctx: Any, bits: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), generate


def _times_group(n: int) -> Made:
    """One group of ROWS rows of 4 bits times GROUP numbers of each of n tokens.

    By addresses: of the levels, of the first token's numbers, where the next one's are, and of ROWS sums for each.
    Written in vectors, since a compiler cannot know that sums in memory are not what it reads.
    """
    number, word, byte, half = ir.FloatType(), ir.IntType(32), ir.IntType(8), ROWS // 2
    some_bytes, some_numbers = ir.VectorType(byte, half), ir.VectorType(number, half)
    nothing, first = ir.Constant(some_numbers, ir.Undefined), ir.Constant(ir.VectorType(word, half), [0] * half)
    low, shift = ir.Constant(some_bytes, [15] * half), ir.Constant(some_bytes, [4] * half)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        levels, step = builder.inttoptr(args[0], some_bytes.as_pointer()), args[2]
        tokens = [builder.add(args[1], builder.mul(step, step.type(t))) for t in range(n)]
        numbers = [builder.inttoptr(token, number.as_pointer()) for token in tokens]
        totals = [[ir.Constant(some_numbers, [0.0] * half)] * 2 for _ in range(n)]
        for k in range(GROUP):
            pairs = builder.load(builder.gep(levels, [word(k)]), align=1)
            sides = [
                builder.uitofp(part, some_numbers) for part in (builder.and_(pairs, low), builder.lshr(pairs, shift))
            ]
            for t in range(n):
                one = builder.load(builder.gep(numbers[t], [word(k)]), align=4)
                factor = builder.shuffle_vector(builder.insert_element(nothing, one, word(0)), nothing, first)
                for side, part in enumerate(sides):
                    product = builder.fmul(part, factor, flags=["contract"])
                    totals[t][side] = builder.fadd(product, totals[t][side], flags=["contract"])
        out = builder.inttoptr(args[3], some_numbers.as_pointer())
        for at, total in enumerate(total for of_one in totals for total in of_one):
            builder.store(total, builder.gep(out, [word(at)]), align=4)
        return context.get_dummy_value()

    def times(typingctx: Any, levels: Any, x: Any, step: Any, sums: Any) -> Any:
        return types.void(*[types.int64] * 4), generate

    return instruction(times)


times_group, times_group_of_two = _times_group(1), _times_group(2)


@exact
def to_bfloat16(number: Any) -> Any:
    """Rounded to the nearest, ties to even."""
    bits = _bits(number)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@exact
def exp(x: Any) -> Any:
    """e to a float32, within two units in the last place: Cephes' expf. A plain function, so that loops vectorise."""
    x = min(max(x, np.float32(-87.0)), np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * _of_bits((np.int32(n) + np.int32(127)) << np.int32(23))


@fast
def widen(stored: Any, address: Any, n: Any, out: Any) -> Any:
    """Read n numbers of 16 or 32 bits."""
    if stored == BFLOAT16:
        halves = carray(pointer(address), (n,), np.uint16)
        for i in range(n):
            out[i] = of_bfloat16(halves[i])
    elif stored == FLOAT16:
        halves = carray(pointer(address), (n,), np.uint16)
        for i in range(n):
            out[i] = of_float16(halves[i])
    else:
        numbers = carray(pointer(address), (n,), np.float32)
        for i in range(n):
            out[i] = numbers[i]


@fast
def narrow(stored: Any, numbers: Any, address: Any) -> Any:
    """Write numbers in 16 or 32 bits."""
    n = len(numbers)
    if stored == BFLOAT16:
        halves = carray(pointer(address), (n,), np.uint16)
        for i in range(n):
            halves[i] = to_bfloat16(numbers[i])
    elif stored == FLOAT16:
        halves = carray(pointer(address), (n,), np.uint16)
        for i in range(n):
            halves[i] = to_float16(numbers[i])
    else:
        words = carray(pointer(address), (n,), np.float32)
        for i in range(n):
            words[i] = numbers[i]
