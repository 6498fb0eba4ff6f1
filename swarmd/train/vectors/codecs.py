"""How the numbers of a round travel: what a peer gives is rounded or thinned out before it, and exact after.

Whatever a codec makes of a vector is decided at its source: what the contribution *stands for* is what everybody sums,
signs and accounts for, and its coded form says exactly that. Codecs work on blocks of elements, so that parts of a
vector can be coded and read apart. Averages travel in one of two ways: dense codecs round them once more, at the
reducer; codecs that leave most out have the contributions themselves *forwarded*, and everybody sums those.

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
SCALE_GROUP = 256  # elements that share a scale in int8: an outlier coarsens no more than those
SQUARE_SIDE = 256  # a low-rank block is a square of as many rows and columns
N_POWER = 2  # power iterations for its factors, from a fixed start
ROUNDING_SIGMAS = 8.0  # standard deviations: rounding never comes to more along a random direction
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
        """Say how many times as large as a contribution an average is on its way."""
        return n_contributors if self.forwards else 1

    def sizes(self, n_elements: int, n_contributors: int) -> Sizes:
        """Compute what a round of so many elements moves."""
        n_bytes = max(1, self.n_bytes(n_elements))
        plain = n_elements * self.dtype.itemsize / n_bytes
        return Sizes(n_bytes, float(self.weight(n_contributors)), plain, self.forwards)

    def code(self, values: Vector, thresholds: Vector | None = None) -> CodedVector:
        """Code a vector of finite numbers. ``thresholds``: what each element must exceed."""
        return CodedVector(values, lambda start, end: values[start:end].view(np.uint8).data)

    def read(self, payload: Buffer, n_elements: int, n_vectors: int = 1) -> list[Vector]:
        """The vectors in a payload, of so many elements each. Raises RemoteProtocolError when it holds others."""
        return list(_split_payload(payload, n_vectors, n_elements * self.dtype.itemsize).view(self.dtype))

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

    def code(self, values: Vector, thresholds: Vector | None = None) -> CodedVector:
        coded = self._pack_rows(_as_rows(values, self.block))
        stands_for = self._unpack_rows(coded).reshape(-1)[: len(values)].astype(self.dtype)

        def cut_payload(start: int, end: int) -> bytes:
            last = -(-end // self.block)
            return coded[start // self.block : last].tobytes()

        return CodedVector(stands_for, cut_payload)

    def read(self, payload: Buffer, n_elements: int, n_vectors: int = 1) -> list[Vector]:
        flat = _split_payload(payload, n_vectors, self.n_bytes(n_elements))
        vectors = []
        with _ignore_float_errors():
            for coded in flat.reshape(n_vectors, -1, self.size):
                numbers = self._unpack_rows(coded).reshape(-1)[:n_elements]
                vectors.append(numbers.astype(self.dtype))
        return vectors

    def _pack_rows(self, rows: Rows) -> Bytes:
        """Code [n, block] numbers as [n, size] bytes."""
        raise NotImplementedError

    def _unpack_rows(self, coded: Bytes) -> Rows:
        """Decode what those bytes stand for. Raises RemoteProtocolError."""
        raise NotImplementedError


class Float16(Blocks):
    """Half precision, each block times a power of two that brings its largest to the upper end of the range."""

    size = 2 + 2 * BLOCK

    def _pack_rows(self, rows: Rows) -> Bytes:
        exponents, halves = _to_halves(rows)
        return _join_rows(exponents, halves)

    def _unpack_rows(self, coded: Bytes) -> Rows:
        return _from_halves(coded[:, :2], coded[:, 2:])

    def rounding(self, average: Vector) -> float:
        return ROUNDING_SIGMAS * 2.0**-11 * math.sqrt(float(np.dot(average, average)))


class Int8(Blocks):
    """Linear, symmetric int8; ``SCALE_GROUP`` elements share a scale."""

    size = 4 * (BLOCK // SCALE_GROUP) + BLOCK

    def _pack_rows(self, rows: Rows) -> Bytes:
        pieces = rows.reshape(len(rows), -1, SCALE_GROUP)
        largest = np.abs(pieces).max(axis=2)
        scale = (largest / np.float32(LEVELS)).astype(np.float32)
        divisors = np.where(scale > 0, scale, 1)
        steps = np.rint(pieces / divisors[:, :, None])
        return _join_rows(scale, np.clip(steps, -LEVELS, LEVELS).astype(np.int8))

    def _unpack_rows(self, coded: Bytes) -> Rows:
        n_scales = 4 * (BLOCK // SCALE_GROUP)
        scale = np.ascontiguousarray(coded[:, :n_scales]).view(np.float32)
        steps = coded[:, n_scales:].view(np.int8)
        steps = steps.reshape(len(coded), -1, SCALE_GROUP)
        return (steps * scale[:, :, None]).reshape(len(coded), -1)

    def rounding(self, average: Vector) -> float:
        largest = np.abs(_as_rows(average, SCALE_GROUP)).max(axis=1)
        scale = largest.astype(np.float64) / LEVELS
        return ROUNDING_SIGMAS * math.sqrt(SCALE_GROUP / 12 * float(np.dot(scale, scale)))


class TopK(Blocks):
    """The ``keep`` largest of each block, by sign and one of two sizes: 2 bits (SparseLoCo, 2508.15706, section 3).

    Their places are written as Elias and Fano do: low bits as they are, high bits as gaps in a row of ones.
    """

    forwards = True
    leaves_out = True

    # One block, in bits; ``keep`` places of BLOCK, of which each has ``_low`` low bits:
    #
    #     | small, large    | signs, is_large | low bits of each place | high bits of all places |
    #     | 2 float32: 64 b | 2 * keep        | _low * keep            | _n_high                 |
    #
    # High bits never fall from one place to the next. Place number i with high bits h sets bit h + i of the last
    # field: exactly ``keep`` ones. So the field costs 2 to 3 bits a place, and log2(BLOCK / keep) more for the low
    # bits, near what any code needs. A peer can write any bits: both checks in ``_unpack_rows`` are for that.

    def __init__(self, dtype: str, keep: int) -> None:
        super().__init__(dtype)
        self._keep = keep
        self._low = int(math.log2(BLOCK // keep))
        self._n_high = keep + (BLOCK >> self._low)
        n_bits = (2 * keep, self._low * keep, self._n_high)
        n_bytes = [-(-n // 8) for n in n_bits]
        self._cuts = np.cumsum([8, *n_bytes])
        self.size = int(self._cuts[-1])

    def _pack_rows(self, rows: Rows) -> Bytes:
        places = _find_largest(np.abs(rows), self._keep)
        chosen = np.take_along_axis(rows, places, axis=1)
        sizes = np.abs(chosen)
        is_large = sizes >= sizes.mean(axis=1, keepdims=True)
        n_large = is_large.sum(axis=1)
        large = (sizes * is_large).sum(axis=1) / np.maximum(1, n_large)
        n_small = np.maximum(1, self._keep - n_large)
        small = (sizes * ~is_large).sum(axis=1) / n_small
        high_bits = np.zeros((len(rows), self._n_high), np.uint8)
        np.put_along_axis(
            high_bits,
            (places >> self._low) + np.arange(self._keep),
            1,
            axis=1,
        )
        low_bits = (places[:, :, None] >> np.arange(self._low)) & 1
        flags = np.concatenate([chosen < 0, is_large], axis=1)
        levels = np.stack([small, large], axis=1).astype(np.float32)
        return _join_rows(
            levels,
            _pack_bits(flags),
            _pack_bits(low_bits.reshape(len(rows), -1)),
            _pack_bits(high_bits),
        )

    def _unpack_rows(self, coded: Bytes) -> Rows:
        levels, packed_flags, low_bits, high_bits = np.split(coded, self._cuts[:-1], axis=1)
        places = self._read_places(low_bits, high_bits)
        flags = np.unpackbits(packed_flags, axis=1, count=2 * self._keep)
        signs, larges = np.split(flags, 2, axis=1)
        sizes = np.ascontiguousarray(levels).view(np.float32)
        signed = np.where(signs, np.float32(-1), np.float32(1))
        absolute = np.where(larges, sizes[:, 1:], sizes[:, :1])
        chosen = absolute * signed
        rows = np.zeros((len(coded), BLOCK), np.float32)
        np.put_along_axis(rows, places, chosen, axis=1)
        return rows

    def _read_places(self, low_bits: Bytes, high_bits: Bytes) -> npt.NDArray[np.int64]:
        """Read [n, keep] places of elements, below ``BLOCK``. Raises RemoteProtocolError."""
        ones = np.unpackbits(high_bits, axis=1, count=self._n_high)
        if not (ones.sum(axis=1) == self._keep).all():
            raise RemoteProtocolError(f"a block that names other than {self._keep} elements")
        columns = np.nonzero(ones)[1].reshape(-1, self._keep)
        gaps = columns - np.arange(self._keep)
        bits = np.unpackbits(low_bits, axis=1, count=self._low * self._keep)
        bits = bits.reshape(len(low_bits), self._keep, self._low)
        shifted = bits.astype(np.int64) << np.arange(self._low)
        low_parts = shifted.sum(axis=2)
        places: npt.NDArray[np.int64] = (gaps << self._low) + low_parts
        if not (places < BLOCK).all():
            raise RemoteProtocolError(f"a block that names elements beyond its {BLOCK}")
        return places


class LowRank(Blocks):
    """Squares of the vector as products of two thin matrices (PowerSGD, Vogels et al. 2019, 1905.13727, algorithm 1).

    Each peer's own, from a fixed start: what is averaged is what the products come to, and nothing but the error
    feedback is carried from round to round.
    """

    block = SQUARE_SIDE * SQUARE_SIDE
    forwards = True
    leaves_out = True

    def __init__(self, dtype: str, rank: int) -> None:
        super().__init__(dtype)
        self._rank = rank
        self.size = 2 * (2 + 2 * SQUARE_SIDE * rank)
        raw = np.random.Philox(key=0).random_raw(SQUARE_SIDE * rank)
        raw = raw.reshape(SQUARE_SIDE, rank)
        uniform = (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
        self._start = (uniform - 0.5).astype(np.float32)

    def _pack_rows(self, rows: Rows) -> Bytes:
        # Power iteration: squares @ right spans nearly the largest singular vectors, and qr makes them orthonormal.
        # Then left @ (squares.T @ left).T is the closest matrix in that span. Bits may differ between machines here:
        # what counts is what the written factors stand for.
        squares = rows.reshape(-1, SQUARE_SIDE, SQUARE_SIDE)
        right_factor = np.broadcast_to(self._start, (len(rows), SQUARE_SIDE, self._rank))
        for _ in range(N_POWER):
            left_factor = np.linalg.qr(squares @ right_factor)[0].astype(np.float32)
            right_factor = squares.transpose(0, 2, 1) @ left_factor
        left_exponents, left_halves = _to_halves(left_factor.reshape(len(rows), -1))
        right_exponents, right_halves = _to_halves(right_factor.reshape(len(rows), -1))
        return _join_rows(left_exponents, left_halves, right_exponents, right_halves)

    def _unpack_rows(self, coded: Bytes) -> Rows:
        half = self.size // 2
        left_factor = self._read_factor(coded[:, :half])
        right_factor = self._read_factor(coded[:, half:])
        # Summed rank by rank, not by a matrix product, whose order of sums depends on the machine.
        squares = np.zeros((len(coded), SQUARE_SIDE, SQUARE_SIDE), np.float32)
        for k in range(self._rank):
            squares += left_factor[:, :, None, k] * right_factor[:, None, :, k]
        return squares.reshape(len(coded), -1)

    def _read_factor(self, coded: Bytes) -> Rows:
        """Read [n, SQUARE_SIDE, rank] numbers from one half of each block."""
        numbers = _from_halves(coded[:, :2], coded[:, 2:])
        return numbers.reshape(-1, SQUARE_SIDE, self._rank)


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

    def code(self, values: Vector, thresholds: Vector | None = None) -> CodedVector:
        rows = _as_rows(values, BLOCK)
        sizes = np.abs(rows)
        limits = _as_rows(thresholds if thresholds is not None else np.zeros_like(values), BLOCK)
        chosen = sizes > limits
        chosen |= (sizes == sizes.max(axis=1, keepdims=True)) & (sizes > 0)
        exponents, halves = _to_halves(np.where(chosen, rows, 0))
        mask = _pack_bits(chosen)
        pieces = []
        for i in range(len(rows)):
            head = exponents[i].tobytes() + mask[i].tobytes()
            pieces.append(head + halves[i][chosen[i]].tobytes())
        stands_for = self.read(b"".join(pieces), len(values))[0]

        def cut_payload(start: int, end: int) -> bytes:
            last = -(-end // BLOCK)
            return b"".join(pieces[start // BLOCK : last])

        return CodedVector(stands_for, cut_payload)

    def read(self, payload: Buffer, n_elements: int, n_vectors: int = 1) -> list[Vector]:
        vectors = []
        offset = 0
        for _ in range(n_vectors):
            rows = np.zeros((-(-n_elements // BLOCK), BLOCK), np.float32)
            for row in rows:
                with _ignore_float_errors():
                    offset = _read_chosen(payload, offset, row)
            vectors.append(rows.reshape(-1)[:n_elements].astype(self.dtype))
        if offset != len(payload):
            raise RemoteProtocolError(f"{len(payload)} B of coded numbers, of which {offset} say something")
        return vectors


def codec_of(recipe: Recipe) -> Codec:
    """Return the codec that a run's recipe names."""
    return codec_of_parts(recipe.parts, recipe.precision)


def codec_of_parts(parts: Parts, dtype: str) -> Codec:
    """Return the codec that a table [parts] of a recipe names."""
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


def _ignore_float_errors() -> np.errstate:
    """Ignore what others sent that is no number, or beyond all bounds: it is found out where it is measured."""
    return np.errstate(all="ignore")


def _split_payload(payload: Buffer, n: int, size: int) -> Bytes:
    """Split a payload into [n, size] bytes. Raises RemoteProtocolError."""
    if len(payload) != n * size:
        raise RemoteProtocolError(f"{len(payload)} B of coded numbers; expected {n} x {size}")
    return np.frombuffer(payload, np.uint8).reshape(n, size)


def _as_rows(values: Vector, block: int) -> Rows:
    """Cut a vector into [n, block], filled up with zeros."""
    rows = np.zeros((-(-len(values) // block), block), np.float32)
    rows.reshape(-1)[: len(values)] = values
    return rows


def _join_rows(*pieces: npt.NDArray[np.generic]) -> Bytes:
    """Join arrays row by row, as bytes."""
    flat = []
    for piece in pieces:
        row = np.ascontiguousarray(piece.reshape(len(piece), -1))
        flat.append(row.view(np.uint8))
    return np.concatenate(flat, axis=1)


def _pack_bits(flags: npt.NDArray[np.generic]) -> Bytes:
    return np.packbits(flags.astype(np.uint8), axis=1)


def _to_halves(rows: Rows) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.float16]]:
    """Round rows to half precision, each times a power of two, whose exponent [n, 1] comes first."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    exponents = np.frexp(largest)[1]
    halves = np.ldexp(rows, 15 - exponents).astype(np.float16)
    return exponents.astype(np.int16), halves


def _from_halves(exponents: Bytes, halves: Bytes) -> Rows:
    raised = np.ascontiguousarray(exponents).view("<i2").astype(np.int32) - 15
    numbers = np.ascontiguousarray(halves).view("<f2").astype(np.float32)
    return np.ldexp(numbers, raised)


def _find_largest(sizes: Rows, n: int) -> npt.NDArray[np.int64]:
    """Find the places of the ``n`` largest of each row, in order; among equals the first."""
    limit = np.partition(sizes, -n, axis=1)[:, -n, None]
    chosen = sizes >= limit
    for row in np.nonzero(chosen.sum(axis=1) > n)[0]:
        equal = np.nonzero(sizes[row] == limit[row])[0]
        n_equal = n - int((sizes[row] > limit[row]).sum())
        chosen[row, equal[n_equal:]] = False
    return np.nonzero(chosen)[1].reshape(-1, n)


def _read_chosen(payload: Buffer, offset: int, row: Rows) -> int:
    """Read one block of ``Significance`` into ``row``; returns where the next one begins."""
    bits_at = offset + 2
    values_at = bits_at + BLOCK // 8
    mask = np.frombuffer(payload[bits_at:values_at], np.uint8)
    chosen = np.unpackbits(mask).astype(bool)
    end = values_at + 2 * int(chosen.sum())
    if len(chosen) != BLOCK or end > len(payload):
        raise RemoteProtocolError("a block of coded numbers that is cut off")
    exponent = np.frombuffer(payload[offset:bits_at], np.uint8)[None]
    halves = np.frombuffer(payload[values_at:end], np.uint8)[None]
    row[chosen] = _from_halves(exponent, halves)[0]
    return end
