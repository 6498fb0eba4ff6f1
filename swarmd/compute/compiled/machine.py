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
from numba.extending import intrinsic, register_jitable

from swarmd.compute.compiled.layout import BFLOAT16, FLOAT16, FLOAT32, INT8, TINIEST

ANY_ORDER = {"reassoc", "contract", "nsz", "arcp"}  # of sums, which so become as wide as the machine
CACHE_LINE = 64  # bytes
AHEAD_BYTES = 4096  # 1,024 to 16,384 are alike within a tenth
PATIENCE = 4_000  # looks, some 20 microseconds: then a thread that is waited for may have no processor
Made = Callable[..., Any]


def anywhere(function: Made) -> Made:
    """Called by compiled code, and by what writes instructions."""
    made: Made = register_jitable(function)
    return made


def exact(function: Made) -> Made:
    """Compiled when it is first called, as it is written."""
    return cast(Made, njit(cache=True, error_model="numpy")(function))


def fast(function: Made) -> Made:
    """Compiled when it is first called; sums may be added up in any order."""
    return cast(Made, njit(cache=True, error_model="numpy", fastmath=ANY_ORDER)(function))


def alone(function: Made) -> Made:
    """As ``fast``; other threads of Python run meanwhile."""
    return cast(Made, njit(cache=True, error_model="numpy", fastmath=ANY_ORDER, nogil=True)(function))


def instruction(function: Made) -> Made:
    """A function that says which instructions it stands for."""
    return cast(Made, intrinsic(function))


@instruction
def pointer(typingctx: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def ask_for(builder: Any, place: Any, cache: int = 1) -> None:
    """Write a hint to read what is at a pointer, any will do, into the first cache or the second."""
    pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
    hint = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    builder.call(hint, [place, word(0), word(4 - cache), word(1)])  # read, keep, data


@instruction
def prefetch(typingctx: Any, address: Any) -> Any:
    """A hint to read what is there; any address will do."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ask_for(builder, builder.inttoptr(args[0], ir.IntType(8).as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64), generate


@exact
def number_bytes(stored: Any) -> Any:
    """Of one number of 8 bits or more, as it lies in memory."""
    if stored == INT8:
        return 1
    return 4 if stored == FLOAT32 else 2


@fast
def look_ahead(address: Any, n_bytes: Any) -> Any:
    """Ask for what will be read in a moment: what the machine guesses by itself comes late at page ends."""
    for line in range(0, n_bytes, CACHE_LINE):
        prefetch(address + AHEAD_BYTES + line)


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


@fast
def magnitude(numbers: Any) -> Any:
    """The largest of float32 without their signs; no number, if one is none.

    By their bits, which are in the same order: of whole numbers Numba makes vectors here.
    """
    bits, most = numbers.view(np.int32), np.int32(0)
    for i in range(len(bits)):
        most = max(most, bits[i] & np.int32(0x7FFF_FFFF))
    return _of_bits(most)


@fast
def unit_of(numbers: Any, n_levels: Any) -> Any:
    """What a level is worth where so many reach the largest number: to divide by, and to keep.

    That to keep is no number, where one is none: it must not get lost.
    """
    largest = magnitude(numbers)
    unit = max(largest, np.float32(TINIEST)) / np.float32(n_levels)
    return unit, unit + largest * np.float32(0)


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


@instruction
def _arrive(typingctx: Any, address: Any) -> Any:
    """Add one to an int64 in memory, for all threads to see."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.IntType(64)(1), "seq_cst")

    return types.int64(types.int64), generate


@instruction
def _arrived(typingctx: Any, address: Any) -> Any:
    """What an int64 in memory is now, and all that was written before it became that."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(counter, "acquire", 8)

    return types.int64(types.int64), generate


@instruction
def _give_way(typingctx: Any) -> Any:
    """Let other threads have this processor (sched_yield(2))."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        function = cgutils.get_or_insert_function(builder.module, kind, "sched_yield")  # type: ignore[no-untyped-call]
        return builder.call(function, [])

    return types.int32(), generate


@fast
def meet(address: Any, n_met: Any, parts: Any) -> Any:
    """Wait until all threads are here, which have met so often; returns how often they have now."""
    if parts == 1:
        return n_met
    n_met += 1
    _arrive(address)
    n_looks = 0
    while _arrived(address) < n_met * parts:
        n_looks += 1
        if n_looks > PATIENCE:
            _give_way()
    return n_met
