"""What one member does in one version of a group: whose numbers it adds up, whom it gives what (plan.runs.topology)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarmd.plan.runs.topology import trees_of
from swarmd.protocol.wire.rounds import Group, GroupPart
from swarmd.train.rounds.parts import InputSource, ReducedPart
from swarmd.values import PeerId

Key = tuple[int, int]
"""A part, by its first element and the one behind its last."""


@dataclass(frozen=True, slots=True)
class Duties:
    """``sources``: of each part that this member adds up, whose numbers, in order; ``averages``: those that it reduces.

    ``gives``: parts of its own numbers, by whom they go to; ``passes``: subtotals; ``tells``: results. ``bringers``:
    who brings the results of a part.
    """

    sources: Mapping[Key, tuple[InputSource, ...]]
    averages: frozenset[Key]
    gives: Mapping[PeerId, list[Key]]
    passes: Mapping[PeerId, list[Key]]
    tells: Mapping[PeerId, list[GroupPart]]
    bringers: Mapping[Key, PeerId]


def duties_of(group: Group, me: PeerId) -> Duties:
    """List the duties of ``me``, a member of the group."""
    own_place = next(place for place, member in enumerate(group.members) if member.peer == me)
    trees = trees_of(group)
    sources: dict[Key, tuple[InputSource, ...]] = {}
    gives: dict[PeerId, list[Key]] = {}
    passes: dict[PeerId, list[Key]] = {}
    tells: dict[PeerId, list[GroupPart]] = {}
    bringers: dict[Key, PeerId] = {}
    averages = set[Key]()

    def peer_at(place: int) -> PeerId:
        return PeerId(group.members[place].peer)

    for part in group.parts:
        tree = trees[part.reducer]
        key = (part.start, part.end)
        parent = peer_at(tree.parents[own_place])
        if part.reducer == own_place:
            averages.add(key)
        else:
            bringers[key] = parent
        if part.reducer == own_place or tree.passes_on(own_place):
            sources[key] = tuple(
                InputSource(peer_at(source.place), source.is_subtotal, source.n_contributors)
                for source in tree.sources.get(own_place, ())
            )
            if part.reducer != own_place:
                passes.setdefault(parent, []).append(key)
        else:
            gives.setdefault(parent, []).append(key)
        for child in tree.receivers.get(own_place, ()):
            tells.setdefault(peer_at(child), []).append(part)
    return Duties(sources, frozenset(averages), gives, passes, tells, bringers)


def has_all_inputs(duties: Duties, parts: Mapping[Key, ReducedPart]) -> bool:
    """Is all here that this member adds up?"""
    for key, sources in duties.sources.items():
        if not all(parts[key].is_done_with(source.peer, source.is_subtotal) for source in sources):
            return False
    return True
