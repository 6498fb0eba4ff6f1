"""A part of the vector at who reduces it: what came from each member, how far its average is, and what goes out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from swarmd.errors import OutOfStep
from swarmd.train.codecs import Buffer, Codec, Coded, reduce
from swarmd.train.state import Vector
from swarmd.train.sums import squares_of
from swarmd.values import PeerId

CHUNK_BYTES = 512 * 1024  # of a part that is reduced while the next one travels
MOST_ELEMENTS = 1 << 20  # of a chunk, however little it takes: 4 MiB to sum
MOST_SQUARES = 1e29  # of a contribution: what is no number is not below it either


@dataclass(frozen=True, slots=True)
class Result:
    """Averaged elements from ``start`` on, in the form in which they travel."""

    start: int
    n: int
    payload: Buffer


@dataclass(slots=True)
class Part:
    """See the module. Elements [start, end); numbers come, and go, in chunks of ``chunk`` elements."""

    start: int
    end: int
    chunk: int
    codec: Codec
    total: Vector
    own: tuple[PeerId, Coded] | None = None
    values: dict[PeerId, Vector] = field(default_factory=dict)
    upto: dict[PeerId, int] = field(default_factory=dict)
    squares: dict[PeerId, float] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)
    _payloads: dict[tuple[PeerId, int], Buffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.own is not None:
            me, given = self.own
            mine = self.values[me] = given.values[self.start : self.end]
            self.squares[me] = squares_of(mine)
            self.upto[me] = self.end if self.squares[me] < MOST_SQUARES else self.start

    @property
    def reduced_to(self) -> int:
        return self.results[-1].start + self.results[-1].n if self.results else self.start

    def begin_again(self) -> None:
        """Of other members, from what is here."""
        self.total, self.results = np.empty_like(self.total), []

    def lacks(self, peer: PeerId, start: int, n: int) -> bool:
        """Are these elements of a member the next that are not here? Raises OutOfStep when they cannot be."""
        upto = self.upto.get(peer, self.start)
        if start + n <= upto:
            return False
        if start != upto or n != min(self.chunk, self.end - upto):
            raise OutOfStep(f"{n} elements of {peer} from {start} on, expected {self.chunk} from {upto}")
        return self.squares.get(peer, 0.0) < MOST_SQUARES

    def take(self, peer: PeerId, start: int, fresh: Vector, payload: Buffer) -> None:
        """Keep a member's next numbers; those that are not finite are not summed, and the leader hears of it."""
        squares = self.squares[peer] = self.squares.get(peer, 0.0) + squares_of(fresh)
        if squares < MOST_SQUARES:
            kept = self.values.setdefault(peer, np.empty_like(self.total))
            kept[start - self.start : start - self.start + len(fresh)] = fresh
            self.upto[peer] = start + len(fresh)
            if self.codec.forwards:
                self._payloads[peer, start] = bytes(payload)

    def is_done_with(self, peer: PeerId) -> bool:
        """Is everything here, or nothing more of use?"""
        return self.upto.get(peer) == self.end or not self.squares.get(peer, 0.0) < MOST_SQUARES

    def next_chunk(self, counted: Collection[PeerId]) -> tuple[int, int] | None:
        """Elements [start, end) that are here of everybody and not reduced yet."""
        at = self.reduced_to
        end = min(at + self.chunk, self.end)
        is_here = at < self.end and all(self.upto.get(peer, self.start) >= end for peer in counted)
        return (at, end) if is_here else None

    def reduce(self, counted: Sequence[PeerId], n_samples: int, start: int, end: int, total: Vector) -> Result:
        """Average some elements, in the order of ``counted``, into ``total``. Call it in a thread."""
        place = slice(start - self.start, end - self.start)
        given = [(self.values[peer][place], self._payload(peer, start, end)) for peer in counted]
        return Result(start, end - start, reduce(self.codec, given, n_samples, total[place]))

    def _payload(self, peer: PeerId, start: int, end: int) -> Buffer:
        if self.own is not None and peer == self.own[0]:
            return self.own[1].payload(start, end) if self.codec.forwards else b""
        return self._payloads.get((peer, start), b"")


def chunk_of(codec: Codec) -> int:
    """How many elements travel at once."""
    most = CHUNK_BYTES * MOST_ELEMENTS // codec.n_bytes(MOST_ELEMENTS)
    return max(1, min(most, MOST_ELEMENTS) // codec.block) * codec.block
