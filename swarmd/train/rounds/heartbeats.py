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


def beat_of(
    group: Group, duties: Duties, said: HeartbeatState, result: bytes, share: ContributionShare | None, assent: bytes
) -> Beat:
    """A sign of life, with how far this member is."""
    account = said.account
    places = {PeerId(m.peer): place for place, m in enumerate(group.members)}
    passed = account.passed if account is not None else {}
    gave = [
        Gave(places[peer], squares, account.gave.get(peer, ()) if account is not None else ())
        for peer, squares in said.squares.items()
        if squares < MOST_SQUARES
    ]
    came = [said.parts[key].of(s.peer, s.is_subtotal).upto - key[0] for key, of in duties.sources.items() for s in of]
    return Beat(
        run=group.run,
        round=group.round,
        version=group.version,
        received=_received(duties, said, places, False, account.received if account is not None else {}),
        subtotals=_received(duties, said, places, True, account.subtotals if account is not None else {}),
        gave=tuple(gave),
        passed=tuple(Gave(places[peer], given.squares, given.sums) for peer, given in passed.items()),
        reductions=tuple(_reductions(group, said)),
        result=result,
        share=share,
        assent=assent,
        n_elements=sum(came) + sum(said.results.values()),
    )


def for_others(beat: Beat) -> Beat:
    """Without what only a leader needs, of itself."""
    return replace(beat, reductions=tuple(replace(r, total=(), rounding=0.0) for r in beat.reductions))


def _received(
    duties: Duties, said: HeartbeatState, places: Mapping[PeerId, int], subtotals: bool, sums: Mapping[PeerId, Sums]
) -> tuple[Received, ...]:
    """Of whom all is here that it gives, its own numbers or subtotals, or what is wrong with them."""
    wanted: dict[PeerId, list[Key]] = {}
    for key, sources in duties.sources.items():
        for source in sources:
            if source.is_subtotal == subtotals:
                wanted.setdefault(source.peer, []).append(key)
    found = []
    for peer, keys in wanted.items():
        came = [(key, said.parts[key].of(peer, subtotals)) for key in keys]
        here = sum(c.upto - key[0] for key, c in came)
        squares = sum(c.squares for _, c in came)
        if not squares < MOST_SQUARES:
            found.append(Received(places[peer], here, None, UNSOUND))
        elif here == sum(end - start for start, end in keys):
            found.append(Received(places[peer], here, squares, sums=sums.get(peer, ())))
    return tuple(found)


def _reductions(group: Group, said: HeartbeatState) -> Iterator[Reduction]:
    """Whose results are all here, or faulty."""
    sizes: dict[int, int] = {}
    here: dict[int, int] = {}
    for part in group.parts:
        sizes[part.reducer] = sizes.get(part.reducer, 0) + part.end - part.start
        here[part.reducer] = here.get(part.reducer, 0) + said.results.get(part.start, 0)
    for place in sorted(sizes):
        fault = said.faults.get(place, "")
        if fault or here[place] == sizes[place]:
            sums = said.account.reductions[place] if said.account is not None else (b"", (), 0.0)
            yield Reduction(place, here[place], fault, *sums)
