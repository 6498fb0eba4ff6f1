"""Which step of a repair comes next, and why: values in, decisions out. ``repair`` carries them out.

Knows no network and no clock. docs/protocol.md, "Repair", tells what travels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from swarmd.client.links.link import HopLink, Position, Repair
from swarmd.plan.chains.routing import Hop
from swarmd.values import Decision, PeerId, Span

PATIENCE_S = 60.0  # for somebody to serve what is missing


class ReplayGap(NamedTuple):
    """What a receiver lacks, and how much of it the sender is to pass on.

    ``have``: the last op that the receiver has; None: it is new, and has nothing. Ops through ``silent_through`` are
    computed for their caches only, up to block ``end``: behind it they are known.
    """

    have: int | None
    silent_through: int
    end: int


class RouteGap(NamedTuple):
    """Blocks of neighbouring lost hops, and the peer before them; None: the client."""

    span: Span
    previous: PeerId | None


@dataclass(frozen=True, slots=True)
class CacheMove:
    """A hop that stops serving sends its caches to another holder of its blocks."""

    link: HopLink


@dataclass(frozen=True, slots=True)
class HopReplacement:
    """Other servers take the blocks of lost hops."""

    lost: tuple[HopLink, ...]
    gaps: tuple[RouteGap, ...]


@dataclass(frozen=True, slots=True)
class NeighbourUpdate:
    """New hops are opened; surviving ones hear who their neighbours are, and say how far they have come."""

    new: tuple[int, ...]
    surviving: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StuckHopRemoval:
    """A hop got all and passed nothing on: it is lost, and the repair begins again."""

    link: HopLink


@dataclass(frozen=True, slots=True)
class HistoryReplay:
    """A hop, by its number in the chain, gets what it lacks from the one before.

    The client is the sender of hop 0, and the receiver past the last hop.
    """

    receiver: int
    gap: ReplayGap


@dataclass(frozen=True, slots=True)
class RepairEnd:
    """The chain is whole, and every hop is up to date."""


RepairStep = CacheMove | HopReplacement | NeighbourUpdate | StuckHopRemoval | HistoryReplay | RepairEnd


# A repair is a series of attempts, each in an epoch of its own, so that what was sent in an older one is dropped:
#
#     begin_attempt --> CacheMove --> HopReplacement --> NeighbourUpdate --> HistoryReplay --> RepairEnd
#           ^           each that     each that is       one, for all        last pair first
#           |           leaves        lost                   |                     |
#           |                                          StuckHopRemoval             |
#           +------------ a step fails, or another hop is lost meanwhile ----------+
#
# A move that fails makes its hop a lost one. The invariant: a hop's history holds all that its successor may lack. So
# nothing that is answered is computed for the client again, and nothing starts from the prompt while a predecessor
# lives. Peers could die or refuse for ever: PATIENCE_S bounds the whole.
class RepairPlan:
    """One repair: what it has done, and what comes next. Time is an argument."""

    def __init__(
        self,
        names: tuple[str, ...],
        reason: str,
        is_stuck: bool,
        now: float,
    ) -> None:
        """``is_stuck``: all hops show signs of life, and no answer comes."""
        self.reason = reason
        self._is_stuck = is_stuck
        self._names_before = names
        self._started_at = now
        self._lost: list[str] = []
        self._moved: list[str] = []
        self._n_ops = 0
        self._n_tokens = 0
        self._has_neighbours = False
        self._n_behind = 0  # receivers from the first on that may lack something

    def begin_attempt(self) -> None:
        """Begin again in a new epoch: no hop knows its neighbours in that."""
        self._has_neighbours = False

    def next_step(
        self,
        links: Sequence[HopLink],
        position: Position,
        n_blocks: int,
    ) -> Decision[RepairStep]:
        """Choose what is done next for a chain with these hops."""
        if not self._has_neighbours:
            return _rebuild(links)
        if self._is_stuck:
            link = find_stuck(links, position)
            return Decision(StuckHopRemoval(link), f"no answer comes, and {link.hop} is the last that has everything")
        while self._n_behind:
            receiver = self._n_behind - 1
            gap = plan_replay(links, receiver, position, n_blocks)
            if gap is not None:
                return Decision(HistoryReplay(receiver, gap), _explain_replay(links, receiver, gap))
            self._n_behind -= 1
        return Decision(RepairEnd(), "every hop has what was sent")

    def on_moved(self, link: HopLink) -> None:
        """The caches of a hop that leaves are at another server."""
        self._moved.append(str(link.hop))

    def on_lost(self, links: Sequence[HopLink]) -> None:
        """Hops are lost: others take their blocks."""
        self._lost += [str(link.hop) for link in links if str(link.hop) not in self._lost]

    def on_neighbours_known(self, links: Sequence[HopLink]) -> None:
        """Every hop is open and knows its neighbours."""
        self._has_neighbours = True
        self._n_behind = len(links) + 1

    def on_stuck_removed(self) -> None:
        """The hop that passed nothing on is lost."""
        self._is_stuck = False

    def on_replayed(self, replay: HistoryReplay, n_ops: int, n_tokens: int) -> None:
        """A receiver was given what it lacked; ``n_tokens`` are those of the sender's merged history."""
        self._n_behind = replay.receiver
        self._n_ops += n_ops
        if replay.gap.have is None:
            self._n_tokens += n_tokens

    def is_overdue(self, now: float) -> bool:
        """Has it been tried for long enough?"""
        return now - self._started_at > PATIENCE_S

    def summarise(self, names: tuple[str, ...], now: float) -> Repair:
        """Tell people what was done; ``names`` are the hops now."""
        return Repair(
            lost=tuple(self._lost),
            chain_before=self._names_before,
            chain_after=names,
            replayed_ops=self._n_ops,
            replayed_tokens=self._n_tokens,
            from_client=self._names_before[0] in self._lost,
            stall_s=now - self._started_at,
            reason=self.reason,
            handed_over=tuple(self._moved),
        )


def _rebuild(links: Sequence[HopLink]) -> Decision[RepairStep]:
    """Choose what brings live hops to all blocks, and the hops in touch with each other."""
    for link in links:
        if link.is_leaving and not link.is_lost:
            return Decision(CacheMove(link), f"{link.hop} stops serving, and its caches are whole")
    lost = tuple(link for link in links if link.is_lost)
    if lost:
        names = ", ".join(str(link.hop) for link in lost)
        replacement = HopReplacement(lost, find_gaps(links))
        return Decision(replacement, f"{names} cannot go on: others hold the same blocks")
    new = tuple(index for index, link in enumerate(links) if link.received is None)
    surviving = tuple(index for index, link in enumerate(links) if link.received is not None)
    update = NeighbourUpdate(new, surviving)
    return Decision(update, f"{len(new)} hops are new, and {len(surviving)} hear of a new epoch")


def find_gaps(links: Sequence[HopLink]) -> tuple[RouteGap, ...]:
    """Find the blocks that nobody computes; neighbouring lost hops leave one gap together."""
    gaps: list[RouteGap] = []
    previous: PeerId | None = None
    for is_lost, group in itertools.groupby(links, key=lambda link: link.is_lost):
        neighbours = list(group)
        if is_lost:
            span = Span(neighbours[0].hop.span.start, neighbours[-1].hop.span.end)
            gaps.append(RouteGap(span, previous))
        else:
            previous = neighbours[-1].hop.peer
    return tuple(gaps)


def fill_gaps(
    links: Sequence[HopLink],
    replacements: Sequence[Sequence[Hop]],
) -> list[HopLink]:
    """Put new hops in the places of lost ones: for each gap its own, in order."""
    filled: list[HopLink] = []
    remaining = iter(replacements)
    for is_lost, group in itertools.groupby(links, key=lambda link: link.is_lost):
        if is_lost:
            filled += [HopLink(hop) for hop in next(remaining)]
        else:
            filled += group
    return merge_neighbours(filled)


def merge_neighbours(links: Sequence[HopLink]) -> list[HopLink]:
    """Make one hop of neighbouring new ones on the same worker."""
    merged: list[HopLink] = []
    for link in links:
        last = merged[-1] if merged else None
        if last is None or not _can_merge(last, link):
            merged.append(link)
        else:
            span = Span(last.hop.span.start, link.hop.span.end)
            merged[-1] = HopLink(replace(link.hop, span=span))
    return merged


def _can_merge(first: HopLink, second: HopLink) -> bool:
    are_new = first.received is None and second.received is None
    return are_new and first.hop.peer == second.hop.peer and first.hop.slot == second.hop.slot


def find_stuck(links: Sequence[HopLink], position: Position) -> HopLink:
    """Find the last hop that says it has everything: the next one has not, or it is the one that should answer."""
    got_all = [link for link in links if link.received == position.seq]
    return got_all[-1] if got_all else links[0]


# A repair brings every hop to the last op that was sent. Each sender gives its receiver what that lacks. An example,
# with the last op that each has received:
#
#     client (sent 9) --> hop A (9) --> hop B (new) --> hop C (7) --> client (has answers 1 to 7)
#
# A lacks nothing. B has nothing, so A replays ops 1 to 9 from its history. Ops 1 to 7 are silent: B computes them for
# its caches only, and they end at C's first block, because C has them. B passes ops 8 and 9 on to C by itself, and C
# answers them. So no hop computes an op twice, and the client gets no answer twice.


def plan_replay(
    links: Sequence[HopLink],
    receiver: int,
    position: Position,
    n_blocks: int,
) -> ReplayGap | None:
    """Say what hop ``receiver`` (past the last: the client) lacks of the one before; None if nothing is to be asked."""
    n_sent = position.seq if receiver == 0 else links[receiver - 1].received
    if n_sent is None:
        return None  # a new hop passes on by itself what it is given
    if receiver == len(links):
        return ReplayGap(position.answered, 0, 0) if n_sent > position.answered else None
    n_received = links[receiver].received
    if n_received is not None:
        return ReplayGap(n_received, 0, 0) if n_sent > n_received else None
    next_survivor = next((link for link in links[receiver:] if link.received is not None), None)
    if next_survivor is None:
        return ReplayGap(None, position.answered, n_blocks)
    return ReplayGap(None, next_survivor.received or 0, next_survivor.hop.span.start)


def _explain_replay(links: Sequence[HopLink], receiver: int, gap: ReplayGap) -> str:
    sender = str(links[receiver - 1].hop) if receiver else "the client"
    if receiver == len(links):
        return f"{sender} answers again what came after op {gap.have}"
    if gap.have is None:
        return f"{sender} replays its whole history: {links[receiver].hop} has no caches"
    return f"{sender} replays what came after op {gap.have}, the last that {links[receiver].hop} has"
