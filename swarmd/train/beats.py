"""What a member of a round tells its leader: how much is here of each member's numbers and each reducer's results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarmd.protocol.backing import Share, Sums
from swarmd.protocol.rounds import Beat, Gave, Group, Received, Reduction
from swarmd.train.accounts import Account
from swarmd.train.duties import Duties, Key
from swarmd.train.parts import MOST_SQUARES, Part
from swarmd.values import PeerId

UNSOUND = "its gradient is not finite, or beyond all bounds"


@dataclass(frozen=True, slots=True)
class Said:
    """What a beat is made of: ``results``, elements that are here of each part, by its first one; ``parts`` that are
    added up here; ``squares`` of its own numbers, by whom they went to; ``faults`` of results, by their reducer."""

    results: Mapping[int, int]
    parts: Mapping[Key, Part]
    squares: Mapping[PeerId, float]
    faults: Mapping[int, str]
    account: Account | None


def beat_of(group: Group, duties: Duties, said: Said, result: bytes, share: Share | None, assent: bytes) -> Beat:
    """A sign of life, with how far this member is."""
    account = said.account
    places = {PeerId(m.peer): place for place, m in enumerate(group.members)}
    passed = account.passed if account is not None else {}
    gave = [
        Gave(places[peer], squares, account.gave.get(peer, ()) if account is not None else ())
        for peer, squares in said.squares.items()
        if squares < MOST_SQUARES
    ]
    return Beat(
        run=group.run,
        round=group.round,
        version=group.version,
        received=_received(duties, said, places, False, account.received if account is not None else {}),
        subtotals=_received(duties, said, places, True, account.subtotals if account is not None else {}),
        gave=tuple(gave),
        passed=tuple(Gave(places[peer], given.squares, given.sums) for peer, given in passed.items()),
        reductions=tuple(_reduction(group, said, place) for place in sorted({p.reducer for p in group.parts})),
        result=result,
        share=share,
        assent=assent,
    )


def _received(
    duties: Duties, said: Said, places: Mapping[PeerId, int], subtotals: bool, sums: Mapping[PeerId, Sums]
) -> tuple[Received, ...]:
    """What is here of each member that gives something: its own numbers, or subtotals."""
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
        else:
            is_whole = here == sum(end - start for start, end in keys)
            found.append(Received(places[peer], here, squares if is_whole else None, sums=sums.get(peer, ())))
    return tuple(found)


def _reduction(group: Group, said: Said, place: int) -> Reduction:
    """What is here of one reducer's results."""
    here = sum(said.results.get(p.start, 0) for p in group.parts if p.reducer == place)
    sums = said.account.reductions[place] if said.account is not None else (b"", (), 0.0)
    return Reduction(place, here, said.faults.get(place, ""), *sums)
