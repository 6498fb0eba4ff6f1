"""Weights in float32 times many tokens by a CPU's unit for matrices (Intel AMX), which multiplies in bfloat16.

A float32 has three times bfloat16's bits, and is the sum of three such numbers, its terms. Of a product of two numbers
six parts are computed and added up in float32, firsts with firsts to thirds: the others are less than what float32
rounds. What comes is as exact as by AVX-512, and sooner: 512 products a cycle for 32. Weights written in bfloat16 are
one term, and three parts are all there are.

Numbers lie in *tiles*, SIDE rows of 64 bytes. Of what enters a tile holds STEP numbers of k of SIDE tokens; of a weight
two numbers of k of SIDE rows, in each row of the tile the next two.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from swarmd.compute.compiled.layout import SIDE, STEP, TERMS
from swarmd.compute.compiled.machine import Made, alone, fast, instruction, look_ahead, meet

TILE, ROW = 1_024, 64  # bytes
UPPER, LOWER, WEIGHT, OTHER = 4, 5, 6, 7  # what the registers beside four sums hold: there are eight
byte, address = ir.IntType(8), ir.IntType(8).as_pointer()


def _clear(register: int) -> Made:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.x86.tilezero", (), ir.FunctionType(ir.VoidType(), [byte]))
        builder.call(function, [byte(register)])
        return context.get_dummy_value()

    def made(typingctx: Any) -> Any:
        return types.void(), generate

    return instruction(made)


def _product(total: int, entering: int) -> Made:
    """Add what is in one register times a weight to one of two sums beside each other: ``total``, or the next."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [byte] * 3)
        function = builder.module.declare_intrinsic("llvm.x86.tdpbf16ps", (), kind)
        with builder.if_else(builder.icmp_signed("==", args[0], args[0].type(0))) as columns:
            for column, there in enumerate(columns):
                with there:
                    builder.call(function, [byte(total + column), byte(entering), byte(WEIGHT)])
        return context.get_dummy_value()

    def made(typingctx: Any, column: Any) -> Any:
        return types.void(types.int64), generate

    return instruction(made)


def _move(name: str, register: int) -> Made:
    """An instruction between a register and memory, told how many bytes after a row the next one is."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [byte, address, ir.IntType(64)])
        function = builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind)
        builder.call(function, [byte(register), builder.inttoptr(args[0], address), args[1]])
        return context.get_dummy_value()

    def made(typingctx: Any, place: Any, stride: Any) -> Any:
        return types.void(types.int64, types.int64), generate

    return instruction(made)


def _about_shapes(name: str) -> Made:
    """An instruction that reads or writes what shapes registers have: 64 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = builder.module.declare_intrinsic(f"llvm.x86.{name}", (), ir.FunctionType(ir.VoidType(), [address]))
        builder.call(function, [builder.inttoptr(args[0], address)])
        return context.get_dummy_value()

    def made(typingctx: Any, place: Any) -> Any:
        return types.void(types.int64), generate

    return instruction(made)


_shape, _what_shape = _about_shapes("ldtilecfg"), _about_shapes("sttilecfg")
_load_upper, _load_lower, _load_weight, _load_other = (
    _move("tileloadd64", register) for register in (UPPER, LOWER, WEIGHT, OTHER)
)
_load_0, _load_1, _load_2, _load_3 = (_move("tileloadd64", total) for total in range(4))
_clear_0, _clear_1, _clear_2, _clear_3 = (_clear(total) for total in range(4))
_store_0, _store_1, _store_2, _store_3 = (_move("tilestored64", total) for total in range(4))
_add_upper, _add_lower = _product(0, UPPER), _product(2, LOWER)
_add_other_to_upper, _add_other_to_lower = _product(0, OTHER), _product(2, OTHER)


@fast
def room_for(n: Any, k: Any) -> Any:
    """How many numbers of 16 bits n tokens take, split."""
    return -(-n // SIDE) * SIDE * k * TERMS


@instruction
def _split_step(typingctx: Any, numbers: Any, tile: Any) -> Any:
    """STEP numbers at an address, to a row of TERMS tiles: rounded to the nearest, ties to even, then what is left."""
    words, halves = ir.VectorType(ir.IntType(32), STEP), ir.VectorType(ir.IntType(16), STEP)
    floats = ir.VectorType(ir.FloatType(), STEP)

    def everywhere(bits: int) -> Any:
        return ir.Constant(words, [bits] * STEP)

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rest = builder.load(builder.inttoptr(args[0], floats.as_pointer()), align=4)
        for term in range(TERMS):
            bits = builder.bitcast(rest, words)
            odd = builder.and_(builder.lshr(bits, everywhere(16)), everywhere(1))
            upper = builder.lshr(builder.add(builder.add(bits, everywhere(0x7FFF)), odd), everywhere(16))
            is_none = builder.fcmp_unordered("uno", rest, rest)  # no number, which rounding might make one of
            upper = builder.select(is_none, everywhere(0x7FC0), upper)
            place = builder.add(args[1], args[1].type(term * TILE))
            builder.store(builder.trunc(upper, halves), builder.inttoptr(place, halves.as_pointer()), align=2)
            rest = builder.fsub(rest, builder.bitcast(builder.shl(upper, everywhere(16)), floats))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@fast
def split(x: Any, room: Any, first: Any, last: Any) -> Any:
    """Rows ``first`` to ``last`` of x [n, k] float32 to tiles [n / SIDE, k / STEP, TERMS, SIDE, STEP] of bfloat16."""
    n_steps = x.shape[1] // STEP
    for t in range(first, last):
        numbers = x.ctypes.data + 4 * t * x.shape[1]
        tiles = room.ctypes.data + t // SIDE * n_steps * TERMS * TILE + t % SIDE * ROW
        for step in range(n_steps):
            _split_step(numbers + 4 * STEP * step, tiles + step * TERMS * TILE)


@fast
def _begin(adds: Any, is_pair: Any, out: Any, stride: Any) -> Any:
    """Sums begin with nothing, or with what is there."""
    if not adds:
        _clear_0()
        _clear_1()
        _clear_2()
        _clear_3()
        return
    _load_0(out, stride)
    _load_1(out + ROW, stride)
    if is_pair:
        _load_2(out + SIDE * stride, stride)
        _load_3(out + SIDE * stride + ROW, stride)


@fast
def _end(is_pair: Any, out: Any, stride: Any) -> Any:
    _store_0(out, stride)
    _store_1(out + ROW, stride)
    if is_pair:
        _store_2(out + SIDE * stride, stride)
        _store_3(out + SIDE * stride + ROW, stride)


@fast
def _add_products(column: Any, upper: Any, lower: Any, weight: Any, term: Any, is_pair: Any) -> Any:
    """STEP numbers of k: one or two tiles that enter times one term of a weight, by their addresses."""
    if not is_pair:  # so few tokens wait for memory
        look_ahead(weight, TILE)
    _load_weight(weight, ROW)
    _add_upper(column)
    if is_pair:
        _add_lower(column)
    for more in range(1, TERMS - term):
        _load_other(upper + more * TILE, ROW)
        _add_other_to_upper(column)
        if is_pair:
            _load_other(lower + more * TILE, ROW)
            _add_other_to_lower(column)


@fast
def _times(x: Any, weight: Any, n_steps: Any, terms: Any, adds: Any, is_pair: Any, out: Any, stride: Any) -> Any:
    """One or two rows of tiles times two of a weight, to two or four of ``out``, with ``stride`` bytes in a row."""
    _begin(adds, is_pair, out, stride)
    for step in range(n_steps):
        upper, left = x + step * TERMS * TILE, weight + step * terms * TILE
        lower, right = upper + n_steps * TERMS * TILE, left + n_steps * terms * TILE
        _load_upper(upper, ROW)
        if is_pair:
            _load_lower(lower, ROW)
        for term in range(terms):
            _add_products(0, upper, lower, left + term * TILE, term, is_pair)
            _add_products(1, upper, lower, right + term * TILE, term, is_pair)
    _end(is_pair, out, stride)


@fast
def _restore(shapes: Any) -> Any:
    """Who calls keeps the array for so long; one that is not used any more would be given back before."""
    _shape(shapes.ctypes.data)


@fast
def _with_rows(shapes: Any, n: Any) -> Any:
    """Have registers so many rows, but that of a weight."""
    shapes[0] = 1  # the palette: all that there is yet
    for register in range(OTHER + 1):
        shapes[16 + 2 * register] = ROW
        shapes[48 + register] = SIDE if register == WEIGHT else n
    _shape(shapes.ctypes.data)


@fast
def times_tiles(room: Any, k: Any, weight: Any, terms: Any, out: Any, adds: Any, first: Any, last: Any) -> Any:
    """Columns ``first`` to ``last`` (in 2 * SIDE) of what n tokens, split, times a weight give, to or onto out [n, m].

    ``room`` has them; by its address the weight, [m / SIDE, k / STEP, terms, STEP / 2, SIDE, 2] of bfloat16.
    """
    n, m = out.shape
    n_steps, n_tiles, stride, entering, leaving = k // STEP, n // SIDE, 4 * m, room.ctypes.data, out.ctypes.data
    shapes, before = np.zeros(ROW, np.uint8), np.zeros(ROW, np.uint8)
    _what_shape(before.ctypes.data)
    if n_tiles:
        _with_rows(shapes, SIDE)
        for column in range(first, last):
            rows, to = weight + 2 * column * n_steps * terms * TILE, leaving + 2 * ROW * column
            for tile in range(0, n_tiles, 2):
                x, is_pair = entering + tile * n_steps * TERMS * TILE, tile + 1 < n_tiles
                _times(x, rows, n_steps, terms, adds, is_pair, to + tile * SIDE * stride, stride)
    if n % SIDE:
        _with_rows(shapes, n % SIDE)
        x, to = entering + n_tiles * n_steps * TERMS * TILE, leaving + n_tiles * SIDE * stride
        for column in range(first, last):
            rows = weight + 2 * column * n_steps * terms * TILE
            _times(x, rows, n_steps, terms, adds, False, to + 2 * ROW * column, stride)
    _restore(before)  # others have shapes of their own, and may rely on them


@alone
def multiply(x: Any, weight: Any, terms: Any, room: Any, out: Any, team: Any) -> Any:
    """x [n, k] times a weight [m, k], to out [n, m], float32; k is a multiple of STEP, m of 2 * SIDE.

    ``room``: uint16 [room_for(n, k)]. ``team``: meeting, part, parts, as of a step.
    """
    meeting, part, parts = team
    n, k = x.shape
    n_pairs, place = out.shape[1] // (2 * SIDE), meeting.ctypes.data
    split(x, room, n * part // parts, n * (part + 1) // parts)
    n_met = meet(place, 0, parts)
    times_tiles(room, k, weight, terms, out, False, n_pairs * part // parts, n_pairs * (part + 1) // parts)
    meet(place, n_met, parts)
