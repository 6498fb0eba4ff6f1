"""What a member of a round tells its leader: of whom all is here that it gives, and whose results.

With many members these lists are long, and all go to one: they hold what is whole or faulty, and nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from swarmd.protocol.runs.backing import ContributionShare, Sums
from swarmd.protocol.wire.rounds import Beat, Gave, Group, Received, Reduction
from swarmd.train.rounds.accounts import AverageProjection
from swarmd.train.rounds.duties import Duties, Key
from swarmd.train.rounds.parts import MOST_SQUARES, ReducedPart
from swarmd.values import PeerId

UNSOUND = "its gradient is not finite, or beyond all bounds"


@dataclass(frozen=True, slots=True)
class HeartbeatState:
    """What a beat is made of: ``results``, elements that are here of each part, by its first one; ``parts`` that are
    added up here; ``squares`` of its own numbers, by whom they went to; ``faults`` of results, by their reducer."""

    results: Mapping[int, int]
    parts: Mapping[Key, ReducedPart]
    squares: Mapping[PeerId, float]
    faults: Mapping[int, str]
    account: AverageProjection | None


def make_heartbeat(
    group: Group, duties: Duties, state: HeartbeatState, result: bytes, share: ContributionShare | None, assent: bytes
) -> Beat:
    """Make a sign of life, with how far this member is."""
    account = state.account
    places = {PeerId(m.peer): place for place, m in enumerate(group.members)}
    passed = account.passed if account is not None else {}
    sent = []
    for peer, squares in state.squares.items():
        if squares < MOST_SQUARES:
            sums = account.sent.get(peer, ()) if account is not None else ()
            sent.append(Gave(places[peer], squares, sums))
    n_received = 0
    for key, sources in duties.sources.items():
        for source in sources:
            incoming = state.parts[key].incoming_from(source.peer, source.is_subtotal)
            n_received += incoming.upto - key[0]
    received_sums = account.received if account is not None else {}
    subtotal_sums = account.subtotals if account is not None else {}
    return Beat(
        run=group.run,
        round=group.round,
        version=group.version,
        received=_list_received(duties, state, places, subtotals=False, sums=received_sums),
        subtotals=_list_received(duties, state, places, subtotals=True, sums=subtotal_sums),
        gave=tuple(sent),
        passed=tuple(Gave(places[peer], projection.squares, projection.sums) for peer, projection in passed.items()),
        reductions=tuple(_list_reductions(group, state)),
        result=result,
        share=share,
        assent=assent,
        n_elements=n_received + sum(state.results.values()),
    )


def strip_for_others(beat: Beat) -> Beat:
    """Leave out what a leader only tells itself."""
    reductions = [replace(r, total=(), rounding=0.0) for r in beat.reductions]
    return replace(beat, reductions=tuple(reductions))


def _list_received(
    duties: Duties,
    state: HeartbeatState,
    places: Mapping[PeerId, int],
    subtotals: bool,
    sums: Mapping[PeerId, Sums],
) -> tuple[Received, ...]:
    """List members whose numbers (or ``subtotals``) are all here, or what is wrong with them."""
    keys_by_peer: dict[PeerId, list[Key]] = {}
    for key, sources in duties.sources.items():
        for source in sources:
            if source.is_subtotal == subtotals:
                keys_by_peer.setdefault(source.peer, []).append(key)
    received = []
    for peer, keys in keys_by_peer.items():
        incoming = [(key, state.parts[key].incoming_from(peer, subtotals)) for key in keys]
        n_received = sum(c.upto - key[0] for key, c in incoming)
        squares = sum(c.squares for _, c in incoming)
        if not squares < MOST_SQUARES:
            received.append(Received(places[peer], n_received, None, UNSOUND))
        elif n_received == sum(end - start for start, end in keys):
            received.append(Received(places[peer], n_received, squares, sums=sums.get(peer, ())))
    return tuple(received)


def _list_reductions(group: Group, state: HeartbeatState) -> Iterator[Reduction]:
    """List reducers whose results are all here, or faulty."""
    sizes: dict[int, int] = {}
    n_received: dict[int, int] = {}
    for part in group.parts:
        n_elements = part.end - part.start
        sizes[part.reducer] = sizes.get(part.reducer, 0) + n_elements
        n_here = state.results.get(part.start, 0)
        n_received[part.reducer] = n_received.get(part.reducer, 0) + n_here
    for place in sorted(sizes):
        fault = state.faults.get(place, "")
        if not fault and n_received[place] != sizes[place]:
            continue
        if state.account is None:
            yield Reduction(place, n_received[place], fault)
            continue
        digest, total, rounding = state.account.reductions[place]
        yield Reduction(
            place,
            n_received[place],
            fault,
            digest=digest,
            total=total,
            rounding=rounding,
        )
