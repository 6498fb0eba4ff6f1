"""Several tokens times a weight by a CPU's unit for matrices (Intel AMX), which multiplies in bfloat16.

A float32 has three times bfloat16's bits, and is the sum of three such numbers, its terms; what was written in float16
is one of two. Of a product of two numbers six parts are computed and added up in float32, firsts with firsts to thirds:
the others are less than what float32 rounds. What comes is as exact as by AVX-512 for numbers of usual sizes (to this
unit what is below 1e-38 is nothing, terms too), and sooner: 512 products a cycle for 32. Weights are read where they
lie, row by row, and split on the way, so one session's steps read them as they are.

Levels of 8 bits are multiplied in whole numbers, 1,024 products a cycle: a token's levels, of 16 bits, have two terms
then, their upper byte and their lower one, with sums of their own (``levels``).

In one register (``unit``) are numbers of SIDE rows of a weight, in one pairs or fours of numbers of SIDE tokens, in one
sums, of SIDE rows by SIDE tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from swarmd.compute.compiled.amx import (
    ROW,
    TILE,
    aligned,
    byte,
    call,
    exchange,
    flip,
    floats,
    has_shape,
    new_shapes,
    pointer_to,
    reshape,
    rows_at,
    wide,
    words,
    write_flipped,
)
from swarmd.compute.compiled.layout import BFLOAT16, FLOAT16, FLOAT32, INT8, LEVEL_STEP, LEVEL_TERMS, SIDE, STEP, TERMS
from swarmd.compute.compiled.machine import Made, alone, anywhere, ask_for, fast, instruction, meet, number_bytes
from swarmd.compute.compiled.products import BYTES, everywhere, plus
from swarmd.compute.compiled.split_parts import (
    copy_row,
    split_levels,
    split_row_of_16_bits,
    split_row_of_32_bits,
    split_tokens,
)

SUMS = 4  # registers that are added up at the same time: a product takes 52 cycles, one begins in 16
ENTERING, WEIGHT = SUMS, SUMS + TERMS  # registers, of what enters the first of three, beside those of sums
FORMATS = (FLOAT32, FLOAT16, BFLOAT16, INT8)
SPLIT_TILES = 24  # of a weight's terms, which many tokens read from the first cache


@anywhere
def _terms(stored: Any) -> Any:
    """Of a number of a weight."""
    return TERMS if stored == FLOAT32 else 2 if stored == FLOAT16 else 1


@anywhere
def _entering_terms(stored: Any) -> Any:
    """Of a number of a token."""
    return LEVEL_TERMS if stored == INT8 else TERMS


@anywhere
def _numbers(stored: Any) -> Any:
    """How many of each row one step multiplies."""
    return LEVEL_STEP if stored == INT8 else STEP


@anywhere
def _beside(stored: Any) -> Any:
    """How many tiles of a weight are multiplied at the same time."""
    return SUMS // LEVEL_TERMS if stored == INT8 else SUMS


@instruction
def _clear(typingctx: Any) -> Any:
    """All sums are 0."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for total in range(SUMS):
            call(builder, "tilezero", byte(total))
        return context.get_dummy_value()

    return types.void(), generate


def _with_sums(name: str) -> Made:
    """An instruction between all sums and an address, [SUMS, SIDE, SIDE] of 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for total in range(SUMS):
            call(builder, name, byte(total), pointer_to(builder, args[0], total * TILE), wide(ROW))
        return context.get_dummy_value()

    def made(typingctx: Any, sums: Any) -> Any:
        return types.void(types.int64), generate

    return instruction(made)


_load, _store = _with_sums("tileloadd64"), _with_sums("tilestored64")


def _products(stored: int, term: int) -> list[tuple[str, int]]:
    """Which instructions multiply a weight's term with terms of what enters, and which of a tile's sums they add to."""
    if stored == INT8:
        return [("tdpbssd", 0), ("tdpbsud", 1)]  # signed bytes times signed ones, and times unsigned ones
    return [("tdpbf16ps", 0)] * (TERMS - term)


def _add_step(builder: Any, stored: int, n_tiles: int, args: Any) -> None:
    """A step of SIDE tokens times that of so many tiles of a weight: see ``_add``."""
    x, weight, below, beside, ahead = args
    terms, n_sums = _terms(stored), SUMS // _beside(stored)
    n_lines = SIDE * _numbers(stored) * BYTES[stored] // ROW
    hints = -(-n_lines // terms)  # after each tile, as many as are read of it
    for term in range(_entering_terms(stored)):
        call(builder, "tileloadd64", byte(ENTERING + term), pointer_to(builder, x, term * TILE), wide(ROW))
    for term in range(terms):
        for tile in range(n_tiles):
            place = builder.add(builder.mul(beside, wide(tile)), wide(term * TILE))
            call(builder, "tileloadd64", byte(WEIGHT), pointer_to(builder, weight, place), below)
            for other, (name, total) in enumerate(_products(stored, term)):
                call(builder, name, byte(n_sums * tile + total), byte(WEIGHT), byte(ENTERING + other))
            with builder.if_then(builder.icmp_signed("!=", ahead, wide(0))):
                for hint in range(hints):
                    ask_for(
                        builder, pointer_to(builder, ahead, ((term * n_tiles + tile) * hints + hint) * ROW), cache=2
                    )


@instruction
def _add(typingctx: Any, stored: Any, n_tiles: Any, x: Any, weight: Any, below: Any, beside: Any, ahead: Any) -> Any:
    """Add products of a step's numbers to the sums of as many tiles of a weight as there are sums for.

    By addresses what enters, [terms, SIDE, SIDE, 2 or 4]; the first tile of the weight, how far apart its rows are, how
    far the next tile's are, and what will be read soon, if that is to be asked for.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for kind in FORMATS:
            with builder.if_then(builder.icmp_signed("==", args[0], wide(kind))):
                for n in range(1, _beside(kind) + 1):
                    with builder.if_then(builder.icmp_signed("==", args[1], wide(n))):
                        _add_step(builder, kind, n, args[2:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), generate


@instruction
def _join_and_flip(typingctx: Any, rows: Any, columns: Any) -> Any:
    """The same of what two sums of whole numbers, of upper bytes and of lower ones, are together: float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        upper, lower = (
            [builder.sitofp(row, floats) for row in rows_at(builder, builder.add(args[0], wide(term * TILE)))]
            for term in range(LEVEL_TERMS)
        )
        bytes_apart = ir.Constant(floats, [256.0] * SIDE)
        totals = [plus(builder, b, a, bytes_apart) for a, b in zip(upper, lower, strict=True)]
        write_flipped(builder, [builder.bitcast(total, words) for total in totals], args[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def _onto(builder: Any, numbers: Any, to: Any, adds: Any) -> None:
    """SIDE numbers to a place, or onto what is there."""
    place = pointer_to(builder, to, 0, floats)
    sums = builder.fadd(numbers, builder.load(place, align=4))
    builder.store(builder.select(adds, sums, numbers), place, align=4)


@instruction
def _put_numbers(typingctx: Any, numbers: Any, to: Any, adds: Any) -> Any:
    """SIDE numbers to or onto others, by their addresses."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _onto(builder, builder.load(pointer_to(builder, args[0], 0, floats), align=4), *args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.boolean), generate


@instruction
def put_levels(typingctx: Any, numbers: Any, to: Any, adds: Any, scales: Any, unit: Any) -> Any:
    """The same of sums of levels, times what each is worth, at an address, and all are."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, worth = (builder.load(pointer_to(builder, place, 0, floats), align=4) for place in (args[0], args[3]))
        _onto(builder, builder.fmul(sums, builder.fmul(worth, everywhere(builder, args[4], SIDE))), *args[1:3])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.boolean, types.int64, types.float32), generate


@fast
def room_for(stored: Any, n: Any, k: Any) -> Any:
    """How many bytes n tokens of k numbers take, split for a weight that is stored so."""
    return ROW + -(-n // SIDE) * (k // _numbers(stored)) * _entering_terms(stored) * TILE


@fast
def enter(stored: Any, x: Any, room: Any, first: Any, last: Any) -> Any:
    """Groups ``first`` to ``last`` of SIDE tokens to tiles, for a weight that is stored so.

    x [n, k]: float32, or levels of 16 bits for a weight of levels.
    """
    n, k = x.shape
    terms, numbers = _entering_terms(stored), _numbers(stored)
    rows = np.zeros((terms, SIDE, SIDE), np.uint32)
    place = aligned(room) + first * (k // numbers) * terms * TILE
    for group in range(first, last):
        for step in range(k // numbers):
            for t in range(min(SIDE, n - group * SIDE)):
                some, to = (
                    x.ctypes.data + x.itemsize * ((group * SIDE + t) * k + step * numbers),
                    rows.ctypes.data + t * ROW,
                )
                if stored == INT8:
                    split_levels(some, to)
                else:
                    split_tokens(some, stored == BFLOAT16, to)
            for term in range(terms):
                flip(rows.ctypes.data + term * TILE, place)
                place += TILE


@fast
def _split_rows(stored: Any, weight: Any, below: Any, n_tiles: Any, place: Any) -> Any:
    """A step's numbers of each row of so many tiles of a weight, to tiles of its terms."""
    for tile in range(n_tiles):
        to, rows = place + tile * TILE * _terms(stored), weight + tile * SIDE * below
        if stored == FLOAT32:
            for row in range(SIDE):
                split_row_of_32_bits(rows + row * below, to + row * ROW)
        elif stored == FLOAT16:
            for row in range(SIDE):
                split_row_of_16_bits(rows + row * below, to + row * ROW)
        else:
            for row in range(SIDE):
                copy_row(rows + row * below, to + row * ROW)


@fast
def _multiply_block(
    stored: Any, entered: Any, n_groups: Any, k: Any, weight: Any, n_tiles: Any, pieces: Any, sums: Any
) -> Any:
    """Groups of tokens times so many tiles of a weight, to sums [n_groups, SUMS, SIDE, SIDE]."""
    size, terms, beside, numbers = number_bytes(stored), _terms(stored), _beside(stored), _numbers(stored)
    n_steps, below, in_place = k // numbers, size * k, terms == 1 and n_groups == 1
    at_once = n_steps if in_place else SPLIT_TILES // (beside * terms)  # steps, of one group after the other
    ahead = weight + SIDE * n_tiles * below
    for first in range(0, n_steps, at_once):
        last = min(first + at_once, n_steps)
        for group in range(n_groups):
            if first == 0:
                _clear()
            elif n_groups > 1:
                _load(sums + group * SUMS * TILE)
            for step in range(first, last):
                x = entered + (group * n_steps + step) * _entering_terms(stored) * TILE
                rows, place = weight + step * numbers * size, pieces + (step - first) * beside * terms * TILE
                soon = ahead + step * numbers * size * SIDE * n_tiles if group == 0 else 0
                if in_place:
                    _add(stored, n_tiles, x, rows, below, SIDE * below, soon)
                    continue
                if group == 0:
                    _split_rows(stored, rows, below, n_tiles, place)
                _add(stored, n_tiles, x, place, ROW, terms * TILE, soon)
            if n_groups > 1 or last == n_steps:
                _store(sums + group * SUMS * TILE)


@fast
def _put(
    stored: Any, sums: Any, flipped: Any, units: Any, n_tiles: Any, out: Any, first: Any, at: Any, adds: Any
) -> Any:
    """Sums [SUMS, SIDE, SIDE], by their address, to or onto ``out`` [n, m] from a token and a row of the weight on.

    ``units``: what each row's levels are worth and each token's; of numbers there are none.
    """
    (of_rows, of_tokens), (n, m) = units, out.shape
    for tile in range(n_tiles):
        column = at + tile * SIDE
        if stored == INT8:
            _join_and_flip(sums + tile * LEVEL_TERMS * TILE, flipped)
        else:
            flip(sums + tile * TILE, flipped)
        for t in range(min(SIDE, n - first)):
            to = out.ctypes.data + 4 * ((first + t) * m + column)
            if stored == INT8:
                put_levels(flipped + t * ROW, to, adds, of_rows.ctypes.data + 4 * column, of_tokens[first + t])
            else:
                _put_numbers(flipped + t * ROW, to, adds)


@fast
def times_rows(
    stored: Any, room: Any, k: Any, weight: Any, units: Any, out: Any, adds: Any, first: Any, last: Any
) -> Any:
    """Tokens that have entered times tiles ``first`` to ``last`` (of SIDE rows) of a weight, to or onto out [n, m].

    The weight [m, k] is stored as FLOAT32, FLOAT16, BFLOAT16 or INT8, by its address. ``units``: of levels what each
    row's are worth [m] and each token's [n], else empty.
    """
    n_groups, beside = -(-len(out) // SIDE), _beside(stored)
    pieces = np.empty(ROW + SPLIT_TILES * TILE, np.uint8)
    sums, flipped = np.empty((n_groups, SUMS * SIDE, SIDE), np.float32), np.empty((SIDE, SIDE), np.float32)
    shapes = new_shapes()
    for register in range(WEIGHT + 1):
        has_shape(shapes, register, SIDE, ROW)
    before = exchange(shapes)
    for tile in range(first, last, beside):
        n_tiles, rows = min(beside, last - tile), weight + tile * SIDE * k * number_bytes(stored)
        _multiply_block(stored, aligned(room), n_groups, k, rows, n_tiles, aligned(pieces), sums.ctypes.data)
        for group in range(n_groups):
            place = sums.ctypes.data + group * SUMS * TILE
            _put(stored, place, flipped.ctypes.data, units, n_tiles, out, group * SIDE, tile * SIDE, adds)
    reshape(before)


@alone
def multiply(stored: Any, x: Any, weight: Any, room: Any, out: Any, team: Any) -> Any:
    """x [n, k] float32 times a weight [m, k] of numbers, to out [n, m]; k is a multiple of STEP, m of SIDE.

    ``room``: uint8 [room_for(stored, n, k)]. ``team``: meeting, part, parts, as of a step.
    """
    meeting, part, parts = team
    n, k = x.shape
    n_groups, n_tiles, place = -(-n // SIDE), out.shape[1] // SIDE, meeting.ctypes.data
    enter(stored, x, room, n_groups * part // parts, n_groups * (part + 1) // parts)
    n_met = meet(place, 0, parts)
    units = np.empty(0, np.float32), np.empty(0, np.float32)
    times_rows(stored, room, k, weight, units, out, n < 0, n_tiles * part // parts, n_tiles * (part + 1) // parts)
    meet(place, n_met, parts)
