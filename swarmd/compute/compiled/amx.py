"""A CPU's matrix unit (Intel AMX): its instructions, and what they need beside them.

It has eight registers, *tiles* of up to SIDE rows of 64 bytes, whose shapes are told to it first. One instruction adds
products of two of them to a third, which has sums of 32 bits: of SIDE rows by as many columns.

                                  +--- 64 bytes ---+
                                  | b0 of column 0 | ...     each row of the second tile: 2 numbers of 16 bits,
                                  |       ...      |         or 4 of 8, for each of 16 columns
                                  +----------------+
    +--- 64 bytes ---+            +- 16 of 32 bits +
    | row 0          |            |                |
    | ...            |    --->    | sums += a b    |
    | row 15         |            |                |
    +----------------+            +----------------+
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from swarmd.compute.compiled.layout import SIDE
from swarmd.compute.compiled.machine import CompiledFunction, fast, instruction

TILE, ROW = 1_024, 64  # bytes
int8 = ir.IntType(8)
int16 = ir.IntType(16)
int32 = ir.IntType(32)
int64 = ir.IntType(64)
int32_row = ir.VectorType(int32, SIDE)
float32_row = ir.VectorType(ir.FloatType(), SIDE)


def call_unit(builder: Any, name: str, *args: Any) -> None:
    """Write an instruction of the unit, by LLVM's name."""
    function_type = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), function_type), args)


def pointer_to(builder: Any, address: Any, offset: Any, element: Any = int8) -> Any:
    """Make a pointer so many bytes after an address."""
    offset = address.type(offset) if isinstance(offset, int) else offset
    return builder.inttoptr(builder.add(address, offset), element.as_pointer())


def _with_shapes(name: str) -> CompiledFunction:
    """Make an instruction that reads or writes the shapes of all registers: 64 bytes at an address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_unit(builder, name, pointer_to(builder, args[0], 0))
        return context.get_dummy_value()

    def typed(typingctx: Any, place: Any) -> Any:
        return types.void(types.int64), generate

    return instruction(typed)


set_shapes = _with_shapes("ldtilecfg")
get_shapes = _with_shapes("sttilecfg")


# A square is transposed by exchanging smaller squares, first of side 1, then 2, 4, 8: each step is one shuffle of two
# rows that lie ``distance`` apart.
#
#     distance 1                 distance 2
#     a0 a1 | a2 a3      a0 b0 | a2 b2        a0 b0 c0 d0
#     b0 b1 | b2 b3  ->  a1 b1 | a3 b3   ->   a1 b1 c1 d1
#     c0 c1 | c2 c3      c0 d0 | c2 d2        a2 b2 c2 d2
#     d0 d1 | d2 d3      c1 d1 | c3 d3        a3 b3 c3 d3
def store_transposed(builder: Any, rows: list[Any], out: Any) -> None:
    """Write SIDE rows of as many numbers of 32 bits to an address, columns as rows."""
    distance = 1
    while distance < SIDE:
        for i in (i for i in range(SIDE) if not i & distance):
            first = rows[i]
            second = rows[i + distance]
            for k in range(2):
                places = []
                for j in range(SIDE):
                    row = SIDE if j & distance else 0  # the second row's numbers are behind those of the first
                    places.append(row + (j & ~distance | k * distance))
                mask = ir.Constant(int32_row, places)
                rows[i + k * distance] = builder.shuffle_vector(first, second, mask)
        distance *= 2
    for i, row in enumerate(rows):
        builder.store(row, pointer_to(builder, out, ROW * i, int32_row), align=4)


def load_rows(builder: Any, address: Any) -> list[Any]:
    """Read SIDE rows of as many numbers of 32 bits."""
    places = [pointer_to(builder, address, ROW * i, int32_row) for i in range(SIDE)]
    return [builder.load(place, align=4) for place in places]


@instruction
def transpose(typingctx: Any, rows: Any, columns: Any) -> Any:
    """Write SIDE rows of as many numbers of 32 bits, columns as rows: by addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        store_transposed(builder, load_rows(builder, args[0]), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@fast
def aligned(room: Any) -> Any:
    """Return the first address of an array at which a row of a tile may begin."""
    return -(-room.ctypes.data // ROW) * ROW


# The 64 bytes that describe all registers (Intel's manual, LDTILECFG):
#
#     byte 0       1        2..15    16..31                          48..55
#     palette 1 | start 0 | zeros |  bytes of a row, 2 bytes each  | rows, 1 byte each
@fast
def new_shapes() -> Any:
    """Make what tells the unit which shapes its registers have: none yet."""
    shapes = np.zeros(ROW, np.uint8)
    shapes[0] = 1  # the palette: the only one so far
    return shapes


@fast
def set_register_shape(shapes: Any, register: Any, n_rows: Any, n_bytes: Any) -> Any:
    """Describe one register: so many rows of so many bytes."""
    shapes[16 + 2 * register] = n_bytes
    shapes[48 + register] = n_rows


@fast
def exchange_shapes(shapes: Any) -> Any:
    """Give registers these shapes; returns those that they had, which other code of this thread may rely on."""
    previous = new_shapes()
    get_shapes(previous.ctypes.data)
    apply_shapes(shapes)
    return previous


@fast
def apply_shapes(shapes: Any) -> Any:
    """Give registers these shapes.

    The caller's reference keeps the array alive until the instruction has read it: here Numba would free an array as
    soon as its address is taken.
    """
    set_shapes(shapes.ctypes.data)
