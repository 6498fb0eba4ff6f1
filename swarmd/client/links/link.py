"""What a chain session is made of: the swarm's services, its options, its links, and the record of what happened."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from swarmd.client.links.client_parameters import TunedParameters
from swarmd.client.links.timing import PassTimes
from swarmd.errors import ConfigError
from swarmd.net.rpc import Rpc
from swarmd.plan.chains.routing import Hop
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.chains.watch import Watch
from swarmd.plan.links.coordinates import NetworkPoint
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

    def locate(self, spans: Sequence[SpanRecord]) -> NetworkPoint | None: ...

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
    readers = {span.peer, *span.team}
    if readers & terms.without:
        return False
    if terms.only and not readers <= terms.only:
        return False
    return span.dtype == terms.dtype and terms.quantize in ("any", span.quantize)


def needs_of(terms: SessionOptions, codec: str, has_void: bool = False) -> frozenset[str]:
    """Name what servers must understand for a session with these options that travels in ``codec``.

    ``has_void``: some of its ops may be void.
    """
    needs = {
        "exact": terms.grade == "exact",
        "codec": codec not in ("auto", "raw"),
        "adapter": bool(terms.adapter),
        "tuned": terms.tuned is not None,
        "changes": codec == CHANGES,
        "absent": has_void,
    }
    return frozenset(need for need, is_needed in needs.items() if is_needed)


def is_compatible(view: SwarmView, span: SpanRecord, terms: SessionOptions, has_void: bool = False) -> bool:
    """Does a server announce all that a session with these options uses? ``has_void``: see ``needs_of``."""
    codec = CHANGES_CODEC if terms.codec == CHANGES else terms.codec
    record = view.peers.get(PeerId(span.peer))
    return understanding_of(record).knows(codec, needs_of(terms, terms.codec, has_void))


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


@dataclass(slots=True)
class Position:
    """How far a session is: the last op that was sent, and the last whose answer is here."""

    seq: int = 0
    answered: int = 0


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
    n_void: int = 0  # ops that nobody wanted any more before they were answered
    n_logits: int = 0  # tokens whose largest logits the last hop gave
    repairs: list[Repair] = field(default_factory=list)
    blamed: list[tuple[PeerId, str]] = field(default_factory=list)
    doubts: list[Doubt] = field(default_factory=list)
    passes: PassTimes = field(default_factory=PassTimes)
