"""A part of the vector at who adds it up: what came from each member, how far the sum is, and what goes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swarmd.errors import OutOfStep
from swarmd.plan.runs.partition import CHUNK_BYTES
from swarmd.train.vectors.codecs import Buffer, Codec, CodedVector
from swarmd.train.vectors.coded_sums import add_contributions, reduce_contributions
from swarmd.train.vectors.scratch import NewVector, new_in_memory
from swarmd.train.vectors.state import Vector
from swarmd.train.vectors.sums import squares_of
from swarmd.values import PeerId

MOST_ELEMENTS = 1 << 20  # of a chunk, however little it takes: 4 MiB to sum
MOST_SQUARES = 1e29  # of a contribution: what is no number is not below it either


@dataclass(frozen=True, slots=True)
class Result:
    """Averaged (or, on their way to the root, added) elements from ``start`` on, in the form in which they travel."""

    start: int
    n: int
    payload: Buffer


@dataclass(frozen=True, slots=True)
class InputSource:
    """Whose numbers are added up: a member's own, or the subtotal of ``n_contributors``."""

    peer: PeerId
    is_subtotal: bool = False
    n_contributors: int = 1


@dataclass(frozen=True, slots=True)
class Input:
    """Numbers of one source, and how they came where that is forwarded; ``n_contributors``: of a subtotal."""

    values: Vector
    payload: Buffer
    n_contributors: int | None


@dataclass(slots=True)
class IncomingPart:
    """What has come of one member: its numbers up to an element, the sum of their squares, and how they came."""

    values: Vector
    upto: int
    squares: float = 0.0
    payloads: dict[int, Buffer] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        """Are these numbers, within all bounds?"""
        return self.squares < MOST_SQUARES


# One part, at who adds it up. Numbers of each member come in order, so that one position says how far each is:
#
#     member a   [=========upto      ]
#     member b   [====upto           ]
#     results    [====]                 as far as the slowest: summed in the order of the sources, then sent on
#
# Floating-point sums depend on their order. It is that of the group's members, and not of arrival, so that everybody
# who sums the same numbers gets the same bits. Contributions stay until the round ends: another version sums anew.
# A member may send anything: chunks out of step end its channel, and numbers beyond all bounds are kept out of sums.


@dataclass(slots=True)
class ReducedPart:
    """See the module. Elements [start, end); numbers come, and go, in chunks of ``chunk`` elements.

    ``contributions`` of members are kept from version to version of the group; ``subtotals``, what comes of all below
    one, are of one version, and so are ``results``: averages at the root, subtotals where they are passed on.
    """

    start: int
    end: int
    chunk: int
    codec: Codec
    total: Vector
    new_vector: NewVector = new_in_memory
    own_contribution: tuple[PeerId, CodedVector] | None = None
    contributions: dict[PeerId, IncomingPart] = field(default_factory=dict)
    subtotals: dict[PeerId, IncomingPart] = field(default_factory=dict)
    results: list[Result] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.own_contribution is not None:
            me, coded = self.own_contribution
            values = coded.values[self.start : self.end]
            incoming = IncomingPart(values, self.end, squares_of(values))
            self.contributions[me] = incoming
            if not incoming.is_sound:
                incoming.upto = self.start

    @property
    def reduced_to(self) -> int:
        """The element up to which it is added up."""
        if not self.results:
            return self.start
        return self.results[-1].start + self.results[-1].n

    def begin_again(self) -> None:
        """Begin another version of the group, from what is here."""
        self.total = self._new_vector()
        self.results = []
        self.subtotals = {}

    def _new_vector(self) -> Vector:
        return self.new_vector(self.end - self.start, str(self.total.dtype))

    def incoming_from(self, peer: PeerId, is_subtotal: bool = False) -> IncomingPart:
        """Return what has come of a member: its own numbers, or what all below it give."""
        incoming = self.subtotals if is_subtotal else self.contributions
        if peer not in incoming:
            incoming[peer] = IncomingPart(self._new_vector(), self.start)
        return incoming[peer]

    def lacks(
        self,
        peer: PeerId,
        start: int,
        n: int,
        is_subtotal: bool = False,
    ) -> bool:
        """Are these elements of a member the next that are not here? Raises OutOfStep when they cannot be."""
        incoming = self.incoming_from(peer, is_subtotal)
        if start + n <= incoming.upto:
            return False
        if start != incoming.upto or n != min(self.chunk, self.end - incoming.upto):
            raise OutOfStep(f"{n} elements of {peer} from {start} on, expected {self.chunk} from {incoming.upto}")
        return incoming.is_sound

    def take(
        self,
        peer: PeerId,
        start: int,
        fresh: Vector,
        payload: Buffer,
        is_subtotal: bool = False,
    ) -> None:
        """Keep a member's next numbers; those that are not finite are not summed, and the leader hears of it."""
        incoming = self.incoming_from(peer, is_subtotal)
        incoming.squares += squares_of(fresh)
        if incoming.is_sound:
            offset = start - self.start
            incoming.values[offset : offset + len(fresh)] = fresh
            incoming.upto = start + len(fresh)
            if self.codec.forwards:
                incoming.payloads[start] = bytes(payload)

    def is_done_with(self, peer: PeerId, is_subtotal: bool = False) -> bool:
        """Is everything here, or nothing more of use?"""
        incoming = self.incoming_from(peer, is_subtotal)
        return incoming.upto == self.end or not incoming.is_sound

    def next_chunk(self, sources: Sequence[InputSource]) -> tuple[int, int] | None:
        """Return the elements [start, end) that are here of everybody and not added up yet."""
        start = self.reduced_to
        end = min(start + self.chunk, self.end)
        if start >= self.end:
            return None
        is_here = all(self.incoming_from(s.peer, s.is_subtotal).upto >= end for s in sources)
        return (start, end) if is_here else None

    def inputs(
        self,
        sources: Sequence[InputSource],
        start: int,
        end: int,
    ) -> list[Input]:
        """Collect what is to be added up, in the order of ``sources``: the group may change while a thread does it."""
        place = slice(start - self.start, end - self.start)
        chosen = []
        for source in sources:
            incoming = self.incoming_from(source.peer, source.is_subtotal)
            payload: Buffer = b""
            if self.codec.forwards:
                payload = self._payload(source.peer, incoming, start, end)
            n_contributors = source.n_contributors if source.is_subtotal else None
            chosen.append(Input(incoming.values[place], payload, n_contributors))
        return chosen

    def _payload(
        self,
        peer: PeerId,
        incoming: IncomingPart,
        start: int,
        end: int,
    ) -> Buffer:
        """Return how some of a member's numbers travelled, or would."""
        if self.own_contribution is not None and peer == self.own_contribution[0]:
            return self.own_contribution[1].payload(start, end)
        return incoming.payloads[start]

    def reduce(
        self,
        inputs: Sequence[Input],
        n_samples: int | None,
        start: int,
        end: int,
        total: Vector,
    ) -> Result:
        """Add up some elements into ``total``. Call it in a thread.

        ``n_samples``: of which it is to be the average; None: a subtotal.
        """
        place = slice(start - self.start, end - self.start)
        vectors = [pair for summand in inputs for pair in self._unpack_input(summand)]
        if n_samples is None:
            return Result(start, end - start, add_contributions(self.codec, vectors, total[place]))
        return Result(start, end - start, reduce_contributions(self.codec, vectors, n_samples, total[place]))

    def _unpack_input(self, summand: Input) -> list[tuple[Vector, Buffer]]:
        """Return one pair for each contributor where those are forwarded."""
        if not self.codec.forwards or summand.n_contributors is None:
            return [(summand.values, summand.payload)]
        vectors = self.codec.read(summand.payload, len(summand.values), summand.n_contributors)
        return [(vector, summand.payload if i == 0 else b"") for i, vector in enumerate(vectors)]


def chunk_elements(codec: Codec) -> int:
    """Compute how many elements travel at once."""
    n_elements = CHUNK_BYTES * MOST_ELEMENTS // codec.n_bytes(MOST_ELEMENTS)
    return max(1, min(n_elements, MOST_ELEMENTS) // codec.block) * codec.block
