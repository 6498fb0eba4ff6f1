"""Several tokens times a weight by a CPU's unit for matrices (Intel AMX), which multiplies in bfloat16.

A float32 has three times bfloat16's bits, and is the sum of three such numbers, its terms; what was written in float16
is one of two. Of a product of two numbers six parts are computed and added up in float32, firsts with firsts to thirds:
the others are less than what float32 rounds. What comes is as exact as by AVX-512 for numbers of usual sizes (to this
unit what is below 1e-38 is nothing, terms too), and sooner: 512 products a cycle for 32. Weights are read where they
lie, row by row, and split on the way, so one session's steps read them as they are.

The unit has eight registers, *tiles* of SIDE rows of 64 bytes. In one are STEP numbers of SIDE rows of a weight; in one
pairs of numbers of SIDE tokens; in one sums, of SIDE rows by SIDE tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from swarmd.compute.compiled.layout import BFLOAT16, FLOAT16, FLOAT32, SIDE, STEP, TERMS
from swarmd.compute.compiled.machine import Made, alone, ask_for, fast, instruction, meet, number_bytes
from swarmd.compute.compiled.products import BYTES, widened

TILE, ROW = 1_024, 64  # bytes
BESIDE = 4  # tiles of a weight that are multiplied at the same time: a product takes 52 cycles, one begins in 16
ENTERING, WEIGHT = BESIDE, BESIDE + TERMS  # registers, of what enters the first of three, beside those of sums
TERMS_OF = {FLOAT32: TERMS, FLOAT16: 2, BFLOAT16: 1}
SPLIT_TILES = 24  # of a weight's terms, which many tokens read from the first cache
byte, word, wide = ir.IntType(8), ir.IntType(32), ir.IntType(64)
words, floats = ir.VectorType(word, SIDE), ir.VectorType(ir.FloatType(), SIDE)


def _everywhere(bits: int) -> Any:
    return ir.Constant(words, [bits] * SIDE)


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), args)


def _at(builder: Any, address: Any, offset: Any, kind: Any = byte) -> Any:
    """A pointer so many bytes after an address."""
    return builder.inttoptr(
        builder.add(address, address.type(offset) if isinstance(offset, int) else offset), kind.as_pointer()
    )


def _about_shapes(name: str) -> Made:
    """An instruction that reads or writes what shapes registers have: 64 bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, name, _at(builder, args[0], 0))
        return context.get_dummy_value()

    def made(typingctx: Any, place: Any) -> Any:
        return types.void(types.int64), generate

    return instruction(made)


_shape, _what_shape = _about_shapes("ldtilecfg"), _about_shapes("sttilecfg")


@instruction
def _clear(typingctx: Any) -> Any:
    """All sums are 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for total in range(BESIDE):
            _call(builder, "tilezero", byte(total))
        return context.get_dummy_value()

    return types.void(), generate


def _with_sums(name: str) -> Made:
    """An instruction between all sums and an address, [BESIDE, SIDE, SIDE] float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for total in range(BESIDE):
            _call(builder, name, byte(total), _at(builder, args[0], total * TILE), wide(ROW))
        return context.get_dummy_value()

    def made(typingctx: Any, sums: Any) -> Any:
        return types.void(types.int64), generate

    return instruction(made)


_load, _store = _with_sums("tileloadd64"), _with_sums("tilestored64")


def _add_step(builder: Any, stored: int, n_tiles: int, args: Any) -> None:
    """STEP numbers of SIDE tokens times those of so many tiles of a weight: see ``_add``."""
    x, weight, below, beside, ahead = args
    terms = TERMS_OF[stored]
    n_lines = SIDE * STEP * BYTES[stored] // ROW
    hints = -(-n_lines // terms)  # after each tile, as many as are read of it
    for term in range(TERMS):
        _call(builder, "tileloadd64", byte(ENTERING + term), _at(builder, x, term * TILE), wide(ROW))
    for term in range(terms):
        for tile in range(n_tiles):
            place = builder.add(builder.mul(beside, wide(tile)), wide(term * TILE))
            _call(builder, "tileloadd64", byte(WEIGHT), _at(builder, weight, place), below)
            for other in range(TERMS - term):
                _call(builder, "tdpbf16ps", byte(tile), byte(WEIGHT), byte(ENTERING + other))
            with builder.if_then(builder.icmp_signed("!=", ahead, wide(0))):
                for hint in range(hints):
                    ask_for(builder, _at(builder, ahead, ((term * n_tiles + tile) * hints + hint) * ROW), cache=2)


@instruction
def _add(typingctx: Any, stored: Any, n_tiles: Any, x: Any, weight: Any, below: Any, beside: Any, ahead: Any) -> Any:
    """Add products of STEP numbers to the sums of up to BESIDE tiles of a weight.

    By addresses what enters, [TERMS, STEP / 2, SIDE, 2]; the weight's first tile, how far apart its rows are, how far
    the next tile's are, and what will be read soon, if that is to be asked for.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for kind in TERMS_OF:
            with builder.if_then(builder.icmp_signed("==", args[0], wide(kind))):
                for n in range(1, BESIDE + 1):
                    with builder.if_then(builder.icmp_signed("==", args[1], wide(n))):
                        _add_step(builder, kind, n, args[2:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


def _split(builder: Any, lower: Any, upper: Any, terms: int, is_cut: bool, place: Any) -> None:
    """Two vectors of SIDE numbers to ``terms`` rows of as many pairs, TILE bytes apart.

    A term is what is left, cut, or rounded to the nearest, ties to even.
    """
    for term in range(terms):
        pair = []
        for rest in (lower, upper):
            bits = builder.bitcast(rest, words)
            if not is_cut:
                odd = builder.and_(builder.lshr(bits, _everywhere(16)), _everywhere(1))
                rounded = builder.add(builder.add(bits, _everywhere(0x7FFF)), odd)
                is_none = builder.fcmp_unordered("uno", rest, rest)  # no number, which rounding might make one of
                bits = builder.select(is_none, _everywhere(0x7FC0_0000), rounded)
            pair.append(builder.and_(bits, _everywhere(0xFFFF_0000)))
        both = builder.or_(builder.lshr(pair[0], _everywhere(16)), pair[1])
        builder.store(both, _at(builder, place, term * TILE, words), align=4)
        lower, upper = (
            builder.fsub(rest, builder.bitcast(bits, floats)) for rest, bits in zip((lower, upper), pair, strict=True)
        )


@instruction
def _split_tokens(typingctx: Any, numbers: Any, is_in_order: Any, place: Any) -> Any:
    """STEP numbers that enter to a row of pairs in each of TERMS tiles: of neighbours, or of i and i + STEP / 2."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lower, upper = (widened(builder, FLOAT32, _at(builder, args[0], ROW * half), SIDE) for half in range(2))
        even, odd = (
            builder.shuffle_vector(lower, upper, ir.Constant(words, list(range(first, STEP, 2)))) for first in range(2)
        )
        lower, upper = builder.select(args[1], even, lower), builder.select(args[1], odd, upper)
        _split(builder, lower, upper, TERMS, False, args[2])
        return context.get_dummy_value()

    return types.void(types.int64, types.boolean, types.int64), generate


def _split_row_of(stored: int) -> Made:
    """STEP numbers of a row of a weight to a row of as many tiles as it has terms: pairs of i and i + STEP / 2, or of
    neighbours, as they are, where it has one."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if stored == BFLOAT16:
            row = ir.VectorType(ir.IntType(16), STEP)
            builder.store(builder.load(_at(builder, args[0], 0, row), align=2), _at(builder, args[1], 0, row), align=2)
        else:
            n_bytes = SIDE * BYTES[stored]
            lower, upper = (widened(builder, stored, _at(builder, args[0], n_bytes * half), SIDE) for half in range(2))
            _split(builder, lower, upper, TERMS_OF[stored], True, args[1])
        return context.get_dummy_value()

    def made(typingctx: Any, numbers: Any, place: Any) -> Any:
        return types.void(types.int64, types.int64), generate

    return instruction(made)


_split_row_of_32_bits, _split_row_of_16_bits = _split_row_of(FLOAT32), _split_row_of(FLOAT16)
_copy_row = _split_row_of(BFLOAT16)


@instruction
def _flip(typingctx: Any, rows: Any, columns: Any) -> Any:
    """SIDE rows of as many numbers of 32 bits, as rows of what were columns: by addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rows = [builder.load(_at(builder, args[0], ROW * i, words), align=4) for i in range(SIDE)]
        distance = 1
        while distance < SIDE:  # squares of this side change places with those beside them
            for i in (i for i in range(SIDE) if not i & distance):
                pair = rows[i], rows[i + distance]
                for k, row in enumerate((i, i + distance)):
                    places = [(j & ~distance | k * distance) + (SIDE if j & distance else 0) for j in range(SIDE)]
                    rows[row] = builder.shuffle_vector(*pair, ir.Constant(words, places))
            distance *= 2
        for i, row in enumerate(rows):
            builder.store(row, _at(builder, args[1], ROW * i, words), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@fast
def room_for(n: Any, k: Any) -> Any:
    """How many bytes n tokens of k numbers take, split."""
    return ROW + -(-n // SIDE) * (k // STEP) * TERMS * TILE


@fast
def _place(room: Any) -> Any:
    """The first address of an array that a row of a tile may have."""
    return -(-room.ctypes.data // ROW) * ROW


@fast
def enter(stored: Any, x: Any, room: Any, first: Any, last: Any) -> Any:
    """Groups ``first`` to ``last`` of SIDE tokens of x [n, k] float32 to tiles, for a weight that is stored so."""
    n, k = x.shape
    rows = np.zeros((TERMS, SIDE, SIDE), np.uint32)
    place = _place(room) + first * (k // STEP) * TERMS * TILE
    for group in range(first, last):
        for step in range(k // STEP):
            for t in range(min(SIDE, n - group * SIDE)):
                numbers = x.ctypes.data + 4 * ((group * SIDE + t) * k + step * STEP)
                _split_tokens(numbers, stored == BFLOAT16, rows.ctypes.data + t * ROW)
            for term in range(TERMS):
                _flip(rows.ctypes.data + term * TILE, place)
                place += TILE


@fast
def _terms(stored: Any) -> Any:
    return TERMS if stored == FLOAT32 else 2 if stored == FLOAT16 else 1


@fast
def _split_rows(stored: Any, weight: Any, below: Any, n_tiles: Any, place: Any) -> Any:
    """STEP numbers of each row of so many tiles of a weight, to tiles of its terms."""
    for tile in range(n_tiles):
        to, rows = place + tile * TILE * _terms(stored), weight + tile * SIDE * below
        if stored == FLOAT32:
            for row in range(SIDE):
                _split_row_of_32_bits(rows + row * below, to + row * ROW)
        elif stored == FLOAT16:
            for row in range(SIDE):
                _split_row_of_16_bits(rows + row * below, to + row * ROW)
        else:
            for row in range(SIDE):
                _copy_row(rows + row * below, to + row * ROW)


@fast
def _multiply_block(
    stored: Any, entered: Any, n_groups: Any, k: Any, weight: Any, n_tiles: Any, pieces: Any, sums: Any
) -> Any:
    """Groups of tokens times so many tiles of a weight, to sums [n_groups, BESIDE, SIDE, SIDE]."""
    size, terms = number_bytes(stored), _terms(stored)
    n_steps, below, in_place = k // STEP, size * k, stored == BFLOAT16 and n_groups == 1
    at_once = n_steps if in_place else SPLIT_TILES // (BESIDE * terms)  # steps, of one group after the other
    ahead = weight + SIDE * n_tiles * below
    for first in range(0, n_steps, at_once):
        last = min(first + at_once, n_steps)
        for group in range(n_groups):
            if first == 0:
                _clear()
            elif n_groups > 1:
                _load(sums + group * BESIDE * TILE)
            for step in range(first, last):
                x = entered + (group * n_steps + step) * TERMS * TILE
                rows, place = weight + step * STEP * size, pieces + (step - first) * BESIDE * terms * TILE
                soon = ahead + step * STEP * size * SIDE * n_tiles if group == 0 else 0
                if in_place:
                    _add(stored, n_tiles, x, rows, below, SIDE * below, soon)
                    continue
                if group == 0:
                    _split_rows(stored, rows, below, n_tiles, place)
                _add(stored, n_tiles, x, place, ROW, terms * TILE, soon)
            if n_groups > 1 or last == n_steps:
                _store(sums + group * BESIDE * TILE)


@fast
def _put(sums: Any, flipped: Any, n_tiles: Any, out: Any, first: Any, at: Any, adds: Any) -> Any:
    """Sums, [BESIDE * SIDE, SIDE], to or onto ``out`` [n, m] from a token and a row of the weight on."""
    for tile in range(n_tiles):
        _flip(sums.ctypes.data + tile * TILE, flipped.ctypes.data)
        for t in range(min(SIDE, len(out) - first)):
            to = out[first + t, at + tile * SIDE : at + (tile + 1) * SIDE]
            for i in range(SIDE):
                to[i] = flipped[t, i] + (to[i] if adds else np.float32(0))


@fast
def _restore(shapes: Any) -> Any:
    """Who calls keeps the array for so long; one that is not used any more would be given back before."""
    _shape(shapes.ctypes.data)


@fast
def times_rows(stored: Any, room: Any, k: Any, weight: Any, out: Any, adds: Any, first: Any, last: Any) -> Any:
    """Tokens that have entered times tiles ``first`` to ``last`` (of SIDE rows) of a weight, to or onto out [n, m].

    The weight [m, k] is stored as FLOAT32, FLOAT16 or BFLOAT16, by its address.
    """
    n_groups = -(-len(out) // SIDE)
    pieces = np.empty(ROW + SPLIT_TILES * TILE, np.uint8)
    sums, flipped = np.empty((n_groups, BESIDE * SIDE, SIDE), np.float32), np.empty((SIDE, SIDE), np.float32)
    shapes, before = np.zeros(ROW, np.uint8), np.zeros(ROW, np.uint8)
    shapes[0] = 1  # the palette: all that there is yet
    for register in range(WEIGHT + 1):
        shapes[16 + 2 * register] = ROW
        shapes[48 + register] = SIDE
    _what_shape(before.ctypes.data)
    _restore(shapes)
    for tile in range(first, last, BESIDE):
        n_tiles, rows = min(BESIDE, last - tile), weight + tile * SIDE * k * number_bytes(stored)
        _multiply_block(stored, _place(room), n_groups, k, rows, n_tiles, _place(pieces), sums.ctypes.data)
        for group in range(n_groups):
            _put(sums[group], flipped, n_tiles, out, group * SIDE, tile * SIDE, adds)
    _restore(before)  # others have shapes of their own, and may rely on them


@alone
def multiply(stored: Any, x: Any, weight: Any, room: Any, out: Any, team: Any) -> Any:
    """x [n, k] times a weight [m, k], to out [n, m], float32; k is a multiple of STEP, m of SIDE.

    ``room``: uint8 [room_for(n, k)]. ``team``: meeting, part, parts, as of a step.
    """
    meeting, part, parts = team
    n, k = x.shape
    n_groups, n_tiles, place = -(-n // SIDE), out.shape[1] // SIDE, meeting.ctypes.data
    enter(stored, x, room, n_groups * part // parts, n_groups * (part + 1) // parts)
    n_met = meet(place, 0, parts)
    times_rows(stored, room, k, weight, out, False, n_tiles * part // parts, n_tiles * (part + 1) // parts)
    meet(place, n_met, parts)
