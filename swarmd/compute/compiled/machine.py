"""What compiled code needs beside loops: memory by its address, number formats, prefetching, a fast exp, a barrier.

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
CompiledFunction = Callable[..., Any]


def jitable(function: CompiledFunction) -> CompiledFunction:
    """Mark a function that compiled code calls, and so does Python that generates instructions."""
    marked: CompiledFunction = register_jitable(function)
    return marked


def exact(function: CompiledFunction) -> CompiledFunction:
    """Compile a function at its first call, with its arithmetic as it is written."""
    return cast(CompiledFunction, njit(cache=True, error_model="numpy")(function))


def fast(function: CompiledFunction) -> CompiledFunction:
    """Compile a function at its first call; sums may be added up in any order."""
    return cast(CompiledFunction, njit(cache=True, error_model="numpy", fastmath=ANY_ORDER)(function))


def fast_without_lock(function: CompiledFunction) -> CompiledFunction:
    """Compile as ``fast`` does; other threads of Python run meanwhile."""
    compiled = njit(cache=True, error_model="numpy", fastmath=ANY_ORDER, nogil=True)(function)
    return cast(CompiledFunction, compiled)


def instruction(function: CompiledFunction) -> CompiledFunction:
    """Mark a function that returns its type and a generator of the LLVM instructions it stands for."""
    return cast(CompiledFunction, intrinsic(function))


# --- memory ----------------------------------------------------------------------------------------------------------


@instruction
def pointer(typingctx: Any, address: Any) -> Any:
    """Make a pointer of an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


def emit_prefetch(builder: Any, place: Any, cache: int = 1) -> None:
    """Write a hint to read what is at a pointer, any will do, into the first cache or the second."""
    byte_pointer = ir.IntType(8).as_pointer()
    int32 = ir.IntType(32)
    function_type = ir.FunctionType(ir.VoidType(), [byte_pointer, int32, int32, int32])
    hint = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], function_type)
    is_write = int32(0)
    locality = int32(4 - cache)  # 3 is the first cache
    is_data = int32(1)
    builder.call(hint, [place, is_write, locality, is_data])


@instruction
def prefetch(typingctx: Any, address: Any) -> Any:
    """Hint to read what is at an address; any will do."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        emit_prefetch(builder, place)
        return context.get_dummy_value()

    return types.void(types.int64), generate


# What is read lies in rows of weights, of keys, of values. The machine's own prefetcher stops at the end of a page of
# 4,096 bytes and starts slowly behind it. So each row that is read asks for what lies AHEAD_BYTES further on:
#
#     row r       row r + 1     ...       address + AHEAD_BYTES
#     |==read==>  |             |         |--asked for-->|
@fast
def prefetch_ahead(address: Any, n_bytes: Any) -> Any:
    """Ask for what will be read in a moment: what the machine guesses by itself comes late at page ends."""
    for offset in range(0, n_bytes, CACHE_LINE):
        prefetch(address + AHEAD_BYTES + offset)


# --- formats of numbers ----------------------------------------------------------------------------------------------


@exact
def number_bytes(stored: Any) -> Any:
    """Return the bytes of one number of 8 bits or more, as it lies in memory."""
    if stored == INT8:
        return 1
    return 4 if stored == FLOAT32 else 2


@instruction
def to_float16(typingctx: Any, number: Any) -> Any:
    """Round a float32 to the bits of a float16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        half = builder.fptrunc(args[0], ir.HalfType())
        return builder.bitcast(half, ir.IntType(16))

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
def largest_magnitude(numbers: Any) -> Any:
    """Return the largest float32 without its sign; NaN if one of them is NaN.

    Their bits without the sign are in the same order as the numbers, with NaN at the top. Numba makes vectors of a
    maximum of whole numbers, and none of one of float32.
    """
    bits = numbers.view(np.int32)
    largest_bits = np.int32(0)
    for i in range(len(bits)):
        largest_bits = max(largest_bits, bits[i] & np.int32(0x7FFF_FFFF))
    return _of_bits(largest_bits)


@fast
def quantisation_scale(numbers: Any, n_levels: Any) -> Any:
    """Return the scale at which ``n_levels`` stands for the largest number, twice: to divide by, and to keep.

    The one to keep is NaN where a number is NaN or infinite, so that every product with it shows that.
    """
    largest = largest_magnitude(numbers)
    scale = max(largest, np.float32(TINIEST)) / np.float32(n_levels)
    return scale, scale + largest * np.float32(0)


@exact
def to_bfloat16(number: Any) -> Any:
    """Round a float32 to the bits of the nearest bfloat16, ties to even."""
    bits = _bits(number)
    last_bit = (bits >> np.uint32(16)) & np.uint32(1)  # of the result, if it was cut
    rounded = bits + np.uint32(0x7FFF) + last_bit
    return np.uint16(rounded >> np.uint32(16))


# exp(x) = 2**n * exp(r) with x = n * ln 2 + r and |r| <= ln 2 / 2. The polynomial gives exp(r); 2**n is made by
# writing n + 127 into the exponent's bits of a float32:
#
#     | sign | exponent: n + 127 | fraction: 0 |
#       31     30 ... 23           22 ... 0
#
# ln 2 is subtracted in two parts, of which the first has so few bits that n times it is exact.
@exact
def exp(x: Any) -> Any:
    """Return e to a float32, within two units in the last place: Cephes' expf.

    A plain function, so that loops vectorise; libm's would be called number by number.
    """
    x = max(x, np.float32(-87.0))
    x = min(x, np.float32(88.0))
    n = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    exponent = np.int32(n) + np.int32(127)
    return p * _of_bits(exponent << np.int32(23))


@fast
def narrow(stored: Any, numbers: Any, address: Any) -> Any:
    """Write float32 numbers to an address in 16 or 32 bits each."""
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


# --- a barrier of threads --------------------------------------------------------------------------------------------


@instruction
def _count_arrival(typingctx: Any, address: Any) -> Any:
    """Add one to an int64 in memory, for all threads to see."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, ir.IntType(64)(1), "seq_cst")

    return types.int64(types.int64), generate


@instruction
def _n_arrivals(typingctx: Any, address: Any) -> Any:
    """Read an int64 in memory, and see all that was written before it became that."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(counter, "acquire", 8)

    return types.int64(types.int64), generate


@instruction
def _yield_processor(typingctx: Any) -> Any:
    """Let other threads have this processor (sched_yield(2))."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function_type = ir.FunctionType(ir.IntType(32), [])
        function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
            builder.module, function_type, "sched_yield"
        )
        return builder.call(function, [])

    return types.int32(), generate


# A counter that only grows needs no second barrier to be set to 0 again. Each thread knows how many barriers it has
# passed, and waits until all threads have arrived at this one as well:
#
#     counter of 3 threads    0 . . 3 . . 6 . . 9
#                             |     |     |     |
#     barriers passed         0     1     2     3     wait while counter < passed * n_threads
#
# A thread spins, since the others arrive within microseconds. It yields only after PATIENCE looks: then the thread
# that is late may be waiting for this very processor.
@fast
def wait_at_barrier(address: Any, n_passed: Any, n_threads: Any) -> Any:
    """Wait until all threads are here, each of which has passed as many barriers; returns how many are passed now."""
    if n_threads == 1:
        return n_passed
    n_passed += 1
    _count_arrival(address)
    n_looks = 0
    while _n_arrivals(address) < n_passed * n_threads:
        n_looks += 1
        if n_looks > PATIENCE:
            _yield_processor()
    return n_passed
