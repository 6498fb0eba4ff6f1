"""A CPU's unit for matrices (Intel AMX): its instructions, and what they need beside them.

It has eight registers, *tiles* of up to SIDE rows of 64 bytes, whose shapes are told to it first. One instruction adds
products of two of them to a third, which has sums of 32 bits: of SIDE rows by as many columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from swarmd.compute.compiled.layout import SIDE
from swarmd.compute.compiled.machine import Made, fast, instruction

TILE, ROW = 1_024, 64  # bytes
byte, half, word, wide = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
words, floats = ir.VectorType(word, SIDE), ir.VectorType(ir.FloatType(), SIDE)


def call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), args)


def pointer_to(builder: Any, address: Any, offset: Any, kind: Any = byte) -> Any:
    """A pointer so many bytes after an address."""
    return builder.inttoptr(
        builder.add(address, address.type(offset) if isinstance(offset, int) else offset), kind.as_pointer()
    )


def _about_shapes(name: str) -> Made:
    """An instruction that reads or writes what shapes registers have: 64 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, name, pointer_to(builder, args[0], 0))
        return context.get_dummy_value()

    def made(typingctx: Any, place: Any) -> Any:
        return types.void(types.int64), generate

    return instruction(made)


set_shapes, get_shapes = _about_shapes("ldtilecfg"), _about_shapes("sttilecfg")


def write_flipped(builder: Any, rows: list[Any], to: Any) -> None:
    """SIDE rows of as many numbers of 32 bits, as rows of what were columns."""
    distance = 1
    while distance < SIDE:  # squares of this side change places with those beside them
        for i in (i for i in range(SIDE) if not i & distance):
            pair = rows[i], rows[i + distance]
            for k, row in enumerate((i, i + distance)):
                places = [(j & ~distance | k * distance) + (SIDE if j & distance else 0) for j in range(SIDE)]
                rows[row] = builder.shuffle_vector(*pair, ir.Constant(words, places))
        distance *= 2
    for i, row in enumerate(rows):
        builder.store(row, pointer_to(builder, to, ROW * i, words), align=4)


def rows_at(builder: Any, address: Any) -> list[Any]:
    return [builder.load(pointer_to(builder, address, ROW * i, words), align=4) for i in range(SIDE)]


@instruction
def flip(typingctx: Any, rows: Any, columns: Any) -> Any:
    """SIDE rows of as many numbers of 32 bits, as rows of what were columns: by addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        write_flipped(builder, rows_at(builder, args[0]), args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@fast
def aligned(room: Any) -> Any:
    """The first address of an array that a row of a tile may have."""
    return -(-room.ctypes.data // ROW) * ROW


@fast
def new_shapes() -> Any:
    """What tells the unit which shapes its registers have: none yet."""
    shapes = np.zeros(ROW, np.uint8)
    shapes[0] = 1  # the palette: all that there is yet
    return shapes


@fast
def has_shape(shapes: Any, register: Any, n_rows: Any, n_bytes: Any) -> Any:
    shapes[16 + 2 * register] = n_bytes
    shapes[48 + register] = n_rows


@fast
def exchange(shapes: Any) -> Any:
    """Have registers these shapes; returns those that they had, which others may rely on."""
    before = new_shapes()
    get_shapes(before.ctypes.data)
    reshape(shapes)
    return before


@fast
def reshape(shapes: Any) -> Any:
    """Who calls keeps the array for so long; one that is not used any more would be given back before."""
    set_shapes(shapes.ctypes.data)
