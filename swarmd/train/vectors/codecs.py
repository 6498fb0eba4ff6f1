"""How the numbers of a round travel: what a peer gives is rounded or thinned out before it, and exact after.

Whatever a codec makes of a vector is decided at its source: what the contribution *stands for* is what everybody sums,
signs and accounts for, and its coded form says exactly that. Codecs work on blocks of elements, so that parts of a
vector can be coded and read apart. Averages travel in one of two ways: dense codecs round them once more, at whoever
reduces; codecs that leave most out have the contributions themselves *forwarded*, and everybody sums those.

Pure. The same input gives the same bytes, and reading is elementwise: the same bits on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmd.errors import RemoteProtocolError
from swarmd.plan.runs.partition import Sizes
from swarmd.protocol.runs.recipe import Parts, Recipe
from swarmd.train.vectors.state import Vector

BLOCK = 4_096  # elements that are coded together
SCALED = 256  # elements that share a scale in int8: an outlier coarsens no more than those
SIDE = 256  # a low-rank block is a square of as many rows and columns
N_POWER = 2  # power iterations for its factors, from a fixed start
SURE = 8.0  # standard deviations: rounding never comes to more along a random direction
LEVELS = 127.0  # of int8, on each side of zero

Buffer = bytes | memoryview
Rows = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class CodedVector:
    """A vector in the form in which it travels: what it stands for, and the bytes of elements [start, end)."""

    values: Vector
    payload: Callable[[int, int], Buffer]


class Codec:
    """Numbers as they are. ``block``: cuts lie at its multiples; ``forwards``, ``leaves_out``: see the module."""

    block = 16
    is_plain = True
    forwards = False
    leaves_out = False

    def __init__(self, dtype: str) -> None:
        self.dtype = np.dtype(dtype)

    def n_bytes(self, n_elements: int) -> int:
        """About how many bytes so many elements take."""
        return n_elements * self.dtype.itemsize

    def weight(self, n_contributors: int) -> int:
        """How many times as large as a contribution an average is on its way."""
        return n_contributors if self.forwards else 1

    def sizes(self, n_elements: int, n_contributors: int) -> Sizes:
        """What a round of so many elements moves."""
        n_bytes = max(1, self.n_bytes(n_elements))
        plain = n_elements * self.dtype.itemsize / n_bytes
        return Sizes(n_bytes, float(self.weight(n_contributors)), plain, self.forwards)

    def code(self, values: Vector, least: Vector | None = None) -> CodedVector:
        """Code a vector of finite numbers. ``least``: what each element must exceed to matter, for who asks for it."""
        return CodedVector(values, lambda start, end: values[start:end].view(np.uint8).data)

    def read(self, payload: Buffer, n_elements: int, n_vectors: int = 1) -> list[Vector]:
        """The vectors in a payload, of so many elements each. Raises RemoteProtocolError when it holds others."""
        return list(_whole(payload, n_vectors, n_elements * self.dtype.itemsize).view(self.dtype))

    def rounding(self, average: Vector) -> float:
        """What rounding may have come to, at most, along a random direction, in an average that travelled."""
        return 0.0


class Blocks(Codec):
    """A codec whose blocks take ``size`` bytes each; the last one is filled up with zeros."""

    block = BLOCK
    is_plain = False
    size: int

    def n_bytes(self, n_elements: int) -> int:
        return -(-n_elements // self.block) * self.size

    def code(self, values: Vector, least: Vector | None = None) -> CodedVector:
        coded = self._pack(_rows(values, self.block))
        stands_for = self._unpack(coded).reshape(-1)[: len(values)].astype(self.dtype)
        return CodedVector(stands_for, lambda start, end: coded[start // self.block : -(-end // self.block)].tobytes())

    def read(self, payload: Buffer, n_elements: int, n_vectors: int = 1) -> list[Vector]:
        each = _whole(payload, n_vectors, self.n_bytes(n_elements)).reshape(n_vectors, -1, self.size)
        with _anything():
            return [self._unpack(coded).reshape(-1)[:n_elements].astype(self.dtype) for coded in each]

    def _pack(self, rows: Rows) -> Bytes:
        """[n, block] numbers to [n, size] bytes."""
        raise NotImplementedError

    def _unpack(self, coded: Bytes) -> Rows:
        """What those bytes stand for. Raises RemoteProtocolError."""
        raise NotImplementedError


class Float16(Blocks):
    """Half precision, each block times a power of two that brings its largest to the upper end of the range."""

    size = 2 + 2 * BLOCK

    def _pack(self, rows: Rows) -> Bytes:
        return _join(*_halves(rows))

    def _unpack(self, coded: Bytes) -> Rows:
        return _from_halves(coded[:, :2], coded[:, 2:])

    def rounding(self, average: Vector) -> float:
        return SURE * 2.0**-11 * math.sqrt(float(np.dot(average, average)))


class Int8(Blocks):
    """Linear, symmetric int8; ``SCALED`` elements share a scale."""

    size = 4 * (BLOCK // SCALED) + BLOCK

    def _pack(self, rows: Rows) -> Bytes:
        pieces = rows.reshape(len(rows), -1, SCALED)
        scale = (np.abs(pieces).max(axis=2) / np.float32(LEVELS)).astype(np.float32)
        steps = np.rint(pieces / np.where(scale > 0, scale, 1)[:, :, None])
        return _join(scale, np.clip(steps, -LEVELS, LEVELS).astype(np.int8))

    def _unpack(self, coded: Bytes) -> Rows:
        n_scales = 4 * (BLOCK // SCALED)
        scale = np.ascontiguousarray(coded[:, :n_scales]).view(np.float32)
        steps = coded[:, n_scales:].view(np.int8).reshape(len(coded), -1, SCALED)
        return (steps * scale[:, :, None]).reshape(len(coded), -1)

    def rounding(self, average: Vector) -> float:
        scale = np.abs(_rows(average, SCALED)).max(axis=1).astype(np.float64) / LEVELS
        return SURE * math.sqrt(SCALED / 12 * float(np.dot(scale, scale)))


class TopK(Blocks):
    """The ``keep`` largest of each block, by sign and one of two sizes: 2 bits (SparseLoCo, 2508.15706, section 3).

    Their places are written as Elias and Fano do: low bits as they are, high bits as gaps in a row of ones.
    """

    forwards = True
    leaves_out = True

    def __init__(self, dtype: str, keep: int) -> None:
        super().__init__(dtype)
        self._keep = keep
        self._low = int(math.log2(BLOCK // keep))
        self._n_high = keep + (BLOCK >> self._low)
        self._cuts = np.cumsum([8, *(-(-n // 8) for n in (2 * keep, self._low * keep, self._n_high))])
        self.size = int(self._cuts[-1])

    def _pack(self, rows: Rows) -> Bytes:
        places = _largest(np.abs(rows), self._keep)
        chosen = np.take_along_axis(rows, places, axis=1)
        sizes = np.abs(chosen)
        is_large = sizes >= sizes.mean(axis=1, keepdims=True)
        n_large = is_large.sum(axis=1)
        large = (sizes * is_large).sum(axis=1) / np.maximum(1, n_large)
        small = (sizes * ~is_large).sum(axis=1) / np.maximum(1, self._keep - n_large)
        high = np.zeros((len(rows), self._n_high), np.uint8)
        np.put_along_axis(high, (places >> self._low) + np.arange(self._keep), 1, axis=1)
        low = (places[:, :, None] >> np.arange(self._low)) & 1
        said = np.concatenate([chosen < 0, is_large], axis=1)
        levels = np.stack([small, large], axis=1).astype(np.float32)
        return _join(levels, _bits(said), _bits(low.reshape(len(rows), -1)), _bits(high))

    def _unpack(self, coded: Bytes) -> Rows:
        levels, said, low, high = np.split(coded, self._cuts[:-1], axis=1)
        ones = np.unpackbits(high, axis=1, count=self._n_high)
        if not (ones.sum(axis=1) == self._keep).all():
            raise RemoteProtocolError(f"a block that names other than {self._keep} elements")
        gaps = np.nonzero(ones)[1].reshape(-1, self._keep) - np.arange(self._keep)
        bits = np.unpackbits(low, axis=1, count=self._low * self._keep).reshape(len(coded), self._keep, self._low)
        places = (gaps << self._low) + (bits.astype(np.int64) << np.arange(self._low)).sum(axis=2)
        if not (places < BLOCK).all():
            raise RemoteProtocolError(f"a block that names elements beyond its {BLOCK}")
        signs, larges = np.split(np.unpackbits(said, axis=1, count=2 * self._keep), 2, axis=1)
        sizes = np.ascontiguousarray(levels).view(np.float32)
        chosen = np.where(larges, sizes[:, 1:], sizes[:, :1]) * np.where(signs, np.float32(-1), np.float32(1))
        rows = np.zeros((len(coded), BLOCK), np.float32)
        np.put_along_axis(rows, places, chosen, axis=1)
        return rows


class LowRank(Blocks):
    """Squares of the vector as products of two thin matrices (PowerSGD, Vogels et al. 2019, 1905.13727, algorithm 1).

    Each peer's own, from a fixed start: what is averaged is what the products come to, and nothing but the error
    feedback is carried from round to round.
    """

    block = SIDE * SIDE
    forwards = True
    leaves_out = True

    def __init__(self, dtype: str, rank: int) -> None:
        super().__init__(dtype)
        self._rank = rank
        self.size = 2 * (2 + 2 * SIDE * rank)
        raw = np.random.Philox(key=0).random_raw(SIDE * rank).reshape(SIDE, rank)
        self._start = ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5).astype(np.float32)

    def _pack(self, rows: Rows) -> Bytes:
        squares = rows.reshape(-1, SIDE, SIDE)
        right = np.broadcast_to(self._start, (len(rows), SIDE, self._rank))
        for _ in range(N_POWER):
            left = np.linalg.qr(squares @ right)[0].astype(np.float32)
            right = squares.transpose(0, 2, 1) @ left
        return _join(*_halves(left.reshape(len(rows), -1)), *_halves(right.reshape(len(rows), -1)))

    def _unpack(self, coded: Bytes) -> Rows:
        half = self.size // 2
        left, right = (
            _from_halves(side[:, :2], side[:, 2:]).reshape(-1, SIDE, self._rank)
            for side in (coded[:, :half], coded[:, half:])
        )
        squares = np.zeros((len(coded), SIDE, SIDE), np.float32)
        for k in range(self._rank):
            squares += left[:, :, None, k] * right[:, None, :, k]
        return squares.reshape(len(coded), -1)


class Significance(Codec):
    """What changes an element by more than a share of its value (Gaia, Hsieh et al. 2017, section 4), in float16.

    A bit for each element says whether it is there. Of each block the largest is, so that nobody's is nothing.
    """

    block = BLOCK
    is_plain = False
    forwards = True
    leaves_out = True

    def n_bytes(self, n_elements: int) -> int:
        return n_elements // 2  # depends on the numbers; about a quarter of them

    def code(self, values: Vector, least: Vector | None = None) -> CodedVector:
        rows = _rows(values, BLOCK)
        sizes = np.abs(rows)
        chosen = sizes > _rows(least if least is not None else np.zeros_like(values), BLOCK)
        chosen |= (sizes == sizes.max(axis=1, keepdims=True)) & (sizes > 0)
        exponents, halves = _halves(np.where(chosen, rows, 0))
        there = _bits(chosen)
        pieces = [
            exponents[i].tobytes() + there[i].tobytes() + halves[i][chosen[i]].tobytes() for i in range(len(rows))
        ]
        stands_for = self.read(b"".join(pieces), len(values))[0]
        return CodedVector(stands_for, lambda start, end: b"".join(pieces[start // BLOCK : -(-end // BLOCK)]))

    def read(self, payload: Buffer, n_elements: int, n_vectors: int = 1) -> list[Vector]:
        found, at = [], 0
        for _ in range(n_vectors):
            rows = np.zeros((-(-n_elements // BLOCK), BLOCK), np.float32)
            for row in rows:
                with _anything():
                    at = _read_chosen(payload, at, row)
            found.append(rows.reshape(-1)[:n_elements].astype(self.dtype))
        if at != len(payload):
            raise RemoteProtocolError(f"{len(payload)} B of coded numbers, of which {at} say something")
        return found


def codec_of(recipe: Recipe) -> Codec:
    """The one that a run's recipe names."""
    return codec_of_parts(recipe.parts, recipe.precision)


def codec_of_parts(parts: Parts, dtype: str) -> Codec:
    """The one that a table [parts] of a recipe names."""
    match parts.codec:
        case "float16":
            return Float16(dtype)
        case "int8":
            return Int8(dtype)
        case "topk":
            return TopK(dtype, parts.keep)
        case "powersgd":
            return LowRank(dtype, parts.rank)
        case "significance":
            return Significance(dtype)
    return Codec(dtype)


# --- pieces --------------------------------------------------------------------------------------------------------


def _anything() -> np.errstate:
    """What others sent may be no numbers, or beyond all bounds: it is found out where it is measured."""
    return np.errstate(all="ignore")


def _whole(payload: Buffer, n: int, size: int) -> Bytes:
    """[n, size] bytes. Raises RemoteProtocolError."""
    if len(payload) != n * size:
        raise RemoteProtocolError(f"{len(payload)} B of coded numbers; expected {n} x {size}")
    return np.frombuffer(payload, np.uint8).reshape(n, size)


def _rows(values: Vector, block: int) -> Rows:
    """A vector as [n, block], filled up with zeros."""
    rows = np.zeros((-(-len(values) // block), block), np.float32)
    rows.reshape(-1)[: len(values)] = values
    return rows


def _join(*pieces: npt.NDArray[np.generic]) -> Bytes:
    """What belongs to each row, one after the other, as bytes."""
    flat = [np.ascontiguousarray(p.reshape(len(p), -1)).view(np.uint8) for p in pieces]
    return np.concatenate(flat, axis=1)


def _bits(flags: npt.NDArray[np.generic]) -> Bytes:
    return np.packbits(flags.astype(np.uint8), axis=1)


def _halves(rows: Rows) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float16]]:
    """Rows in half precision, each times a power of two, whose exponent [n, 1] comes first."""
    exponents = np.frexp(np.abs(rows).max(axis=1, keepdims=True))[1]
    return exponents.astype(np.int16), np.ldexp(rows, 15 - exponents).astype(np.float16)


def _from_halves(exponents: Bytes, halves: Bytes) -> Rows:
    raised = np.ascontiguousarray(exponents).view("<i2").astype(np.int32) - 15
    return np.ldexp(np.ascontiguousarray(halves).view("<f2").astype(np.float32), raised)


def _largest(sizes: Rows, n: int) -> npt.NDArray[np.int64]:
    """The places of the ``n`` largest of each row, in order; among equals the first."""
    limit = np.partition(sizes, -n, axis=1)[:, -n, None]
    chosen = sizes >= limit
    for row in np.nonzero(chosen.sum(axis=1) > n)[0]:
        equal = np.nonzero(sizes[row] == limit[row])[0]
        chosen[row, equal[n - int((sizes[row] > limit[row]).sum()) :]] = False
    return np.nonzero(chosen)[1].reshape(-1, n)


def _read_chosen(payload: Buffer, at: int, row: Rows) -> int:
    """Read one block of ``Significance`` into ``row``; returns where the next one begins."""
    values_at = at + 2 + BLOCK // 8
    chosen = np.unpackbits(np.frombuffer(payload[at + 2 : values_at], np.uint8)).astype(bool)
    end = values_at + 2 * int(chosen.sum())
    if len(chosen) != BLOCK or end > len(payload):
        raise RemoteProtocolError("a block of coded numbers that is cut off")
    exponent, halves = (np.frombuffer(payload[a:z], np.uint8)[None] for a, z in ((at, at + 2), (values_at, end)))
    row[chosen] = _from_halves(exponent, halves)[0]
    return end
