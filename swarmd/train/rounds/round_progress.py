"""How far a member is in one version of its round's group: what it has of the average, and what it has found out.

Another version begins anew, from the contributions that are here (train.rounds.parts). No I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarmd.errors import OutOfStep
from swarmd.protocol.runs.backing import ContributionShare
from swarmd.protocol.wire.rounds import Beat, Group, GroupPart, Reduced
from swarmd.train.rounds.accounts import AverageProjection
from swarmd.train.rounds.duties import Duties, Key, duties_of, has_all_inputs
from swarmd.train.rounds.groups import counted_of
from swarmd.train.rounds.heartbeats import HeartbeatState, make_heartbeat
from swarmd.train.rounds.parts import MOST_SQUARES, ReducedPart, Result
from swarmd.train.vectors.codecs import Buffer
from swarmd.train.vectors.scratch import NewVector
from swarmd.train.vectors.state import Vector
from swarmd.train.vectors.sums import squares_of
from swarmd.values import PeerId

# One version, at one member, and what its beats tell meanwhile:
#
#     gathering ----------------> whole -------------------> finished
#        |     all that it adds up   |  hashed, accounted for    |
#        |     and all results       |                           |
#     squares, faults             the same                    its share, then its assent
#
# Each part's average comes in order, from one member (its bringer), so that one position says how far it is. Nothing is
# counted twice: what does not begin at that position, or comes from another, is refused.


@dataclass(frozen=True, slots=True)
class ReadyParts:
    """What can be sent on of each part: sums that go up, averages that go down."""

    sums: Mapping[Key, Sequence[Result]]
    averages: Mapping[Key, Sequence[Result]]


@dataclass(slots=True)
class RoundProgress:
    """See the module. ``upto``: how far each part's average has come, by its first element.

    ``relayed``: results that this member passes on; ``squares`` of its own numbers, by whom they go to; ``faults`` of
    results, by the place of their reducer; ``result``: the hash of the whole average, b"" before.
    """

    group: Group
    me: PeerId
    chunk: int
    parts: Mapping[Key, ReducedPart]
    duties: Duties
    average: Vector | None
    relayed: dict[Key, list[Result]]
    upto: dict[int, int] = field(default_factory=dict)
    squares: dict[PeerId, float] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    result: bytes = b""
    account: AverageProjection | None = None
    share: ContributionShare | None = None
    assent: bytes = b""

    @property
    def is_counted(self) -> bool:
        """Does what this member gave count?"""
        return any(m.peer == self.me for m in counted_of(self.group))

    @property
    def has_all_inputs(self) -> bool:
        """Is all here that this member adds up?"""
        return has_all_inputs(self.duties, self.parts)

    @property
    def is_whole(self) -> bool:
        """Is the whole average here, or added up here?"""
        is_brought = all(self.upto.get(start, start) == end for start, end in self.duties.bringers)
        return is_brought and all(self.parts[key].reduced_to == key[1] for key in self.duties.sources)

    @property
    def results_here(self) -> dict[int, int]:
        """Count the elements of each part's average that are here, by its first one."""
        made = {start: self.parts[start, end].reduced_to - start for start, end in self.duties.averages}
        return made | {start: upto - start for start, upto in self.upto.items()}

    @property
    def ready_parts(self) -> ReadyParts:
        """What can be sent on so far."""
        made = {key: self.parts[key].results for key in self.duties.sources}
        averages = {key: made[key] for key in self.duties.averages}
        return ReadyParts(made, {**self.relayed, **averages})

    def find_wanted_part(self, peer: PeerId, message: Reduced) -> GroupPart | None:
        """Find of which part these results are the next; None if they are here, or not wanted. Raises OutOfStep."""
        if self.average is None or self.result or message.version != self.group.version:
            return None
        part = next((p for p in self.group.parts if p.start <= message.start < p.end), None)
        upto = self.upto.get(part.start, part.start) if part is not None else 0
        if message.start + message.n_elements <= upto:
            return None
        if part is None or self.duties.bringers.get((part.start, part.end)) != peer:
            raise OutOfStep(f"results from element {message.start} on, which {peer} does not bring")
        if message.start != upto or message.n_elements != min(self.chunk, part.end - upto):
            raise OutOfStep(f"{message.n_elements} results of {peer} from {message.start}, expected them from {upto}")
        return part

    def keep_results(self, part: GroupPart, start: int, values: Vector, payload: Buffer) -> bool:
        """Keep a part's next results; those that cannot be are a fault of its reducer, and False is returned."""
        if not squares_of(values) < MOST_SQUARES:
            self.faults[part.reducer] = "its results are not finite, or beyond all bounds"
            return False
        assert self.average is not None
        end = start + len(values)
        self.average[start:end] = values
        self.upto[part.start] = end
        key = (part.start, part.end)
        if key in self.relayed:
            self.relayed[key].append(Result(start, len(values), bytes(payload)))
        return True

    def make_beat(self) -> Beat:
        """Make what the leader is told."""
        parts = {key: self.parts[key] for key in self.duties.sources}
        squares = self.squares if self.is_counted else {}
        state = HeartbeatState(
            self.results_here,
            parts,
            squares,
            self.faults,
            self.account,
        )
        return make_heartbeat(
            self.group,
            self.duties,
            state,
            self.result,
            self.share,
            self.assent,
        )


@dataclass(slots=True)
class PresentVersion:
    """How far a member is in the version that counts now.

    What sends and what receives looks here, and not at the round that holds both: in a circle of references numbers
    would stay until the next collection of garbage, which knows nothing of their size.
    """

    progress: RoundProgress


def begin_version(
    group: Group,
    me: PeerId,
    chunk: int,
    parts: Mapping[Key, ReducedPart],
    new_vector: NewVector,
) -> RoundProgress:
    """Begin a version of a group as one of its members, who has nothing of its average."""
    duties = duties_of(group, me)
    gets_average = any(m.peer == me and m.receives for m in group.members)
    average = new_vector(group.n_elements, group.dtype) if gets_average else None
    told = {(part.start, part.end) for told_parts in duties.tells.values() for part in told_parts}
    relayed: dict[Key, list[Result]] = {key: [] for key in told & duties.bringers.keys()}
    return RoundProgress(group, me, chunk, parts, duties, average, relayed)
