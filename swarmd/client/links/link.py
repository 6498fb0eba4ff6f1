"""What a chain session is made of: the swarm's services, its options, its links, and the record of what happened."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from swarmd.client.links.client_parameters import TunedParameters
from swarmd.client.links.timing import PassTimes
from swarmd.errors import ConfigError
from swarmd.net.rpc import Rpc
from swarmd.plan.chains.routing import Hop
from swarmd.plan.chains.session import Watch
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.trust.reputation import Trust
from swarmd.plan.trust.standing import SECOND_CHANCE_S
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.understanding import understanding_of
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage
from swarmd.protocol.wire.tensors import CHANGES, CODECS
from swarmd.values import ModelId, PeerId, Span
from swarmd.wire.top import Top


class Listener(Protocol):
    """A session or a lane: takes what comes under its key."""

    async def on_message(self, peer: PeerId, message: AnyMessage, frame: Frame) -> None: ...

    def on_gone(self, peer: PeerId) -> None: ...


Listeners = dict[bytes, Listener]


class SessionServices(Protocol):
    """What a session needs of the swarm."""

    rpc: Rpc
    wall_clock: Callable[[], float]
    audits: bool
    identity: Identity

    def view(self) -> SwarmView: ...

    def trips(
        self,
        spans: Sequence[SpanRecord],
    ) -> dict[tuple[str, str], float]: ...

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]: ...

    def trust(self) -> Mapping[tuple[str, int], Trust]:
        """How each server, (peer, slot), is regarded; one that is not named here is not held back."""

    async def refresh(self) -> None: ...

    def start_soon(self, function: Callable[[], Awaitable[None]]) -> None: ...


CHANGES_CODEC = "int4"  # how changes against earlier rows travel


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What is fixed when a session opens. Raises ConfigError for a codec that this version does not know.

    A session is of blocks ``start`` to ``n_blocks``, through servers of ``only`` (none: any) and not of ``without``.
    At least the share ``verify`` of what they compute is checked; with 1 every token, by a second chain. With ``head``
    those who give logits come first, where there are any.
    """

    model: ModelId
    n_blocks: int
    batch: int
    max_tokens: int
    dtype: str = "float32"
    grade: str = "replayed"
    route: tuple[Hop, ...] = ()
    codec: str = "auto"
    adapter: str = ""
    quantize: str = "any"
    tuned: TunedParameters | None = None
    start: int = 0
    only: frozenset[PeerId] = frozenset()
    without: frozenset[PeerId] = frozenset()
    verify: float = 0.0
    head: bool = False

    @property
    def blocks(self) -> Span:
        """The blocks that the session goes through."""
        return Span(self.start, self.n_blocks)

    def __post_init__(self) -> None:
        if self.codec not in ("auto", *CODECS, CHANGES):
            raise ConfigError(f"codec is one of auto, {', '.join(CODECS)}, {CHANGES}, not {self.codec!r}")
        if not 0 <= self.verify <= 1:
            raise ConfigError(f"verify is a share from 0 to 1, not {self.verify:g}")
        if self.verify == 1 and self.codec not in ("auto", "raw"):
            raise ConfigError(f"verify=1 compares numbers as they are: codec raw, or auto, not {self.codec}")


def is_suitable(span: SpanRecord, terms: SessionOptions, numerics: str) -> bool:
    """May a session use this server? In the exact grade ``numerics`` binds it, once one is known."""
    if terms.grade == "exact" and numerics not in ("", span.numerics):
        return False
    if span.peer in terms.without:
        return False
    if terms.only and span.peer not in terms.only:
        return False
    return span.dtype == terms.dtype and terms.quantize in ("any", span.quantize)


def needs_of(terms: SessionOptions, codec: str) -> frozenset[str]:
    """Name what servers must understand for a session with these options that travels in ``codec``."""
    needs = {
        "exact": terms.grade == "exact",
        "codec": codec not in ("auto", "raw"),
        "adapter": bool(terms.adapter),
        "tuned": terms.tuned is not None,
        "changes": codec == CHANGES,
    }
    return frozenset(need for need, is_needed in needs.items() if is_needed)


def is_compatible(view: SwarmView, span: SpanRecord, terms: SessionOptions) -> bool:
    """Does a server announce all that a session with these options uses?"""
    codec = CHANGES_CODEC if terms.codec == CHANGES else terms.codec
    record = view.peers.get(PeerId(span.peer))
    return understanding_of(record).knows(codec, needs_of(terms, terms.codec))


@dataclass(slots=True)
class HopLink:
    """One hop as the client sees it. ``received`` is how far it had come when last asked; None: a new hop.

    An heir has its caches from another server. ``n_tokens_at_open``: how many tokens the session had when this hop
    was opened.
    """

    hop: Hop
    watch: Watch = field(default_factory=Watch)
    is_lost: bool = False
    is_leaving: bool = False
    is_heir: bool = False
    n_tokens_at_open: int = 0
    received: int | None = None


@dataclass(frozen=True, slots=True)
class ServedLogits:
    """Logits that came with an answer, by whom, and how the hidden states beside them travelled."""

    top: Top
    link: HopLink
    codec: str

    @property
    def giver(self) -> str:
        """Which worker of which peer."""
        return f"{self.link.hop.peer}/{self.link.hop.slot}"


def merge_neighbours(links: list[HopLink]) -> list[HopLink]:
    """Make one hop of neighbouring new ones on the same peer."""
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


class ReplayGap(NamedTuple):
    """What a receiver lacks, and how much of it the sender is to pass on.

    ``have``: the last op that the receiver has; None: it is new, and has nothing. Ops through ``silent_through`` are
    computed for their caches only, up to block ``end``: behind it they are known.
    """

    have: int | None
    silent_through: int
    end: int


# A repair brings every hop to the last op that was sent. Each sender gives its receiver what that lacks. An example,
# with the last op that each has received:
#
#     client (sent 9) --> hop A (9) --> hop B (new) --> hop C (7) --> client (has answers 1 to 7)
#
# A lacks nothing. B has nothing, so A replays ops 1 to 9 from its history. Ops 1 to 7 are silent: B computes them for
# its caches only, and they end at C's first block, because C has them. B passes ops 8 and 9 on to C by itself, and C
# answers them. So no hop computes an op twice, and the client gets no answer twice.


def plan_replay(
    links: list[HopLink],
    index: int,
    seq: int,
    answered: int,
    n_blocks: int,
) -> ReplayGap | None:
    """Say what hop ``index`` (past the last: the client) lacks of the one before; None if nothing is to be asked."""
    sender = seq if index == 0 else links[index - 1].received
    if sender is None:
        return None  # a new hop passes on by itself what it is given
    if index == len(links):
        return ReplayGap(answered, 0, 0) if sender > answered else None
    have = links[index].received
    if have is not None:
        return ReplayGap(have, 0, 0) if sender > have else None
    next_survivor = next((link for link in links[index:] if link.received is not None), None)
    if next_survivor is None:
        return ReplayGap(None, answered, n_blocks)
    return ReplayGap(None, next_survivor.received or 0, next_survivor.hop.span.start)


@dataclass(slots=True)
class Backoff:
    """Servers that one session or pipeline does not ask for a while, or (UNSUPPORTED) for as long as it lives.

    Nothing is held against them (Blame.UNAVAILABLE, AMBIGUOUS). Where nobody else is left, those of a while are soon
    asked again.
    """

    _times: dict[PeerId, tuple[float, float]] = field(default_factory=dict)
    _strikes: Counter[PeerId] = field(default_factory=Counter)

    def add(
        self,
        peer: PeerId,
        now: float,
        for_s: float,
        longest_s: float = 0.0,
    ) -> None:
        """Do not ask a peer for a while; up to ``longest_s`` twice as long each time until ``forgive``."""
        pause_s = for_s
        if longest_s > for_s:
            pause_s = min(longest_s, for_s * 2 ** self._strikes[peer])
        self._strikes[peer] = min(self._strikes[peer] + 1, 32)
        self._times[peer] = now, now + pause_s

    def forgive(self, peer: PeerId) -> None:
        """Forget how often a peer was added: the next time is the first."""
        self._strikes.pop(peer, None)

    def is_allowed(self, peer: PeerId, now: float, is_last_resort: bool) -> bool:
        """May a peer be asked now? With ``is_last_resort`` it may be sooner, unless that is for good."""
        since, until = self._times.get(peer, (0.0, 0.0))
        if is_last_resort and until < math.inf:
            return now >= min(until, since + SECOND_CHANCE_S)
        return now >= until

    def is_final(self, peer: PeerId) -> bool:
        """Is a peer not asked for as long as the session lives?"""
        _, until = self._times.get(peer, (0.0, 0.0))
        return until == math.inf


@dataclass(frozen=True, slots=True)
class Repair:
    """One repair of a chain, for people and tests."""

    lost: tuple[str, ...]
    chain_before: tuple[str, ...]
    chain_after: tuple[str, ...]
    replayed_ops: int
    replayed_tokens: int
    from_client: bool
    stall_s: float
    reason: str
    handed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Doubt:
    """Tokens of a session, from this one on, that may be wrong: a hop was found to be, or it cannot be checked."""

    first_token: int
    hop: str
    reason: str


@dataclass(slots=True)
class Statistics:
    """What happened in one session."""

    steps: int = 0
    frames_sent: int = 0
    frames_received: int = 0
    forwarded: int = 0
    n_logits: int = 0  # tokens whose largest logits the last hop gave
    repairs: list[Repair] = field(default_factory=list)
    blamed: list[tuple[PeerId, str]] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)
    passes: PassTimes = field(default_factory=PassTimes)
