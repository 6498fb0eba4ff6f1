"""Groups of a round: how a leader forms and changes them, and whether a member can take part. Pure."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from swarmd.errors import RemoteProtocolError
from swarmd.plan.runs import partition, topology
from swarmd.protocol.runs.recipe import Recipe, Run
from swarmd.protocol.wire.rounds import MAX_PARTS, Group, GroupMember, GroupPart, JoinRound
from swarmd.train.vectors.codecs import codec_of
from swarmd.values import Decision, PeerId

LEAST_BYTES_PER_S = 1e3  # of an announced link: 0 would make a deadline of never
MOST_ELEMENTS = 2**34  # of a vector: 64 GiB in float32


# Any member may lead, and send a group. What is checked is all that this peer relies on when it allocates memory and
# sends numbers. A group that is sound and unfair costs a round, no more: anchors sign only sums that its members stand
# for.


def check_group(
    group: Group,
    previous: Group | None,
    n_elements: int | None,
    recipe: Recipe,
) -> None:
    """Refuse a group that does not divide this peer's vector among its members. Raises RemoteProtocolError.

    ``n_elements`` is None where this peer has no vector of its own.
    """
    peers = [m.peer for m in group.members]
    edges = [0, *(p.end for p in group.parts)]
    starts = [p.start for p in group.parts]
    is_divided = starts == edges[:-1] and edges[-1] == group.n_elements
    is_ours = group.dtype == recipe.precision and n_elements in (None, group.n_elements)
    is_sound = is_ours and 0 < group.n_elements < MOST_ELEMENTS and len(set(peers)) == len(peers)
    if not is_sound or not is_divided:
        raise RemoteProtocolError("a group that does not divide the run's vector among its members")
    if any(p.start >= p.end or p.reducer >= len(peers) for p in group.parts):
        raise RemoteProtocolError("a group with an empty part, or one that nobody reduces")
    if any(m.row >= len(peers) or (m.collects and not m.receives) for m in group.members):
        raise RemoteProtocolError("a group with a row that cannot be, or with who collects and gets no results")
    block = codec_of(recipe).block
    if any(p.start % block for p in group.parts):
        raise RemoteProtocolError(f"a group with a part that does not begin at a multiple of {block}")
    if not any(m.n and m.is_counted for m in group.members):
        raise RemoteProtocolError("a group of which nobody counts")
    if previous is None:
        return
    samples = [(m.peer, m.first, m.n) for m in group.members]
    if samples != [(m.peer, m.first, m.n) for m in previous.members]:
        raise RemoteProtocolError("another version of a group with other members")


def counted_of(group: Group) -> list[GroupMember]:
    """Return the contributors of a group, in the order in which a commit names them."""
    return [m for m in group.members if m.n and m.is_counted]


def form_group(
    run: Run,
    parent: bytes,
    joined: Mapping[PeerId, JoinRound],
    n_elements: int,
) -> Decision[Group]:
    """Divide the work among who joined, in their order. Raises ValueError when it cannot be divided."""
    codec = codec_of(run.recipe)
    members_able = [_partition_member(p, j) for p, j in joined.items()]
    chosen = topology.lay_out_group(run.recipe.topology, members_able, _group_sites(joined))
    layout = chosen.action
    sizes = codec.sizes(n_elements, sum(j.n > 0 for j in joined.values()))
    plan = partition.divide_vector(layout.members, sizes, layout.trees).action
    ranges = partition.cut_ranges(plan.shares, n_elements, codec.block)
    members = []
    for member, row in zip(members_able, layout.rows, strict=True):
        message = joined[member.peer]
        members.append(
            GroupMember(
                peer=member.peer,
                first=message.first,
                n=message.n,
                receives=member.receives,
                is_counted=True,
                row=row,
                collects=topology.may_collect(member),
            )
        )
    group = Group(
        run=run.id,
        round=os.urandom(16),
        parent=parent,
        n_elements=n_elements,
        dtype=run.recipe.precision,
        members=tuple(members),
        parts=tuple(GroupPart(i, start, end) for i, (start, end) in enumerate(ranges) if start < end),
        expected_s=plan.expected_s,
        topology=layout.kind,
    )
    return Decision(group, chosen.reason)


def _group_sites(joined: Mapping[PeerId, JoinRound]) -> list[int]:
    """Assign a site to each who joined, as they say who is near."""
    places = {peer: place for place, peer in enumerate(joined)}
    near = {}
    for peer, message in joined.items():
        neighbours = [PeerId(neighbour) for neighbour in message.near if neighbour in places]
        near[places[peer]] = frozenset(places[neighbour] for neighbour in neighbours)
    return topology.sites_of(near, len(joined))


def shrink_group(
    old: Group, lost: Collection[PeerId], idle: Collection[str], leader: PeerId, block: int
) -> Group | None:
    """Make the next version: ``lost`` no longer count, ``idle`` add up nothing more, others get their parts.

    Those are cut at multiples of ``block``. The leader gets results in any case: it says how to clip. None if nobody is
    left to count or to reduce.
    """
    members = []
    for member in old.members:
        if member.peer in lost:
            receives = member.receives and member.peer == leader
            members.append(
                replace(
                    member,
                    receives=receives,
                    is_counted=False,
                    collects=False,
                )
            )
        else:
            members.append(replace(member, collects=member.collects and member.peer not in idle))
    reducers = [i for i, m in enumerate(members) if m.peer not in idle]
    if not reducers or not any(m.n and m.is_counted for m in members):
        return None
    # A part whose reducer is idle is cut among the others, as far as a message has room for more parts. Numbers that
    # the old reducer had are sent again by their members, who keep them until the round's end.
    parts: list[GroupPart] = []
    room = MAX_PARTS - len(old.parts)
    for number, part in enumerate(old.parts):
        if part.reducer in reducers:
            parts.append(part)
            continue
        n_heirs = min(len(reducers), 1 + room)
        heirs = [reducers[(number + i) % len(reducers)] for i in range(n_heirs)]
        equal = [1 / n_heirs] * n_heirs
        pieces = partition.cut_ranges(equal, part.end - part.start, block)
        pieces_of_part = []
        for heir, (start, end) in zip(heirs, pieces, strict=True):
            if start < end:
                pieces_of_part.append(GroupPart(heir, part.start + start, part.start + end))
        room -= len(pieces_of_part) - 1
        parts += pieces_of_part
    return replace(
        old,
        version=old.version + 1,
        members=tuple(members),
        parts=tuple(parts),
    )


def bounded_rate(announced: float) -> float:
    """Bound the bandwidth that a member says it has, so that the program can count with it."""
    return max(LEAST_BYTES_PER_S, announced)


def _partition_member(peer: PeerId, joined: JoinRound) -> partition.PartitionMember:
    up = None if joined.up_bytes_per_s is None else bounded_rate(joined.up_bytes_per_s)
    down = None if joined.down_bytes_per_s is None else bounded_rate(joined.down_bytes_per_s)
    return partition.PartitionMember(
        peer,
        contributes=joined.n > 0,
        receives=joined.receives,
        can_reduce=joined.can_reduce,
        up_bytes_per_s=up,
        down_bytes_per_s=down,
    )
