"""The chain of one session as its client keeps it: which hops, in which epoch, what is wrong with them.

Hops are opened and given back by ``reservations``. A session sends ops through them (``session``), and a repair
(``repair``) makes the chain whole again. Tasks that wait for news of it wait for ``changed``.
"""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence

import trio

from swarmd.client.links.link import (
    Doubt,
    HopLink,
    Position,
    SessionOptions,
    SessionServices,
    Statistics,
)
from swarmd.client.sessions.receipts import HopAccounts
from swarmd.client.sessions.route_choice import RouteChoice
from swarmd.errors import (
    Code,
    PeerError,
    Refused,
)
from swarmd.plan.trust.blame import Blame
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import Decision, PeerId

logger = logging.getLogger(__name__)

AMBIGUOUS_FOR_S = 60.0  # one of a chain is wrong: the session does without all of it while others are there
LEAVING_FOR_S = 20.0  # a server that stops serving is not asked for so long
BUSY_FOR_S = 2.0  # after a refusal that names no time
MOST_LOSSES = 5  # of caches by one hop, with no answer between: it fails by itself, whatever it says


# What becomes of a hop (``HopLink``), by what the client knows of it:
#
#     new --opened--> open --is_leaving--> its caches move to an heir, which is open then
#      ^                |                       | the move fails
#      |                | exclude, fail_hop     v
#      +-- replaced <-- is_lost <---------------+
#
# Whatever makes a hop a lost one, or the chain unfit in another way, is ``trouble``: the first reason counts, until a
# repair begins. How much is held against the hop's server is its Blame (``plan.trust.blame``).
class Chain:
    """The chain of one session. Waits for nothing; all of it runs in the client's trio thread."""

    def __init__(self, swarm: SessionServices, terms: SessionOptions) -> None:
        self.key = os.urandom(16)
        self.terms = terms
        self.swarm = swarm
        self.position = Position()
        self.links: list[HopLink] = []
        self.epoch = 1
        self.trouble: str | None = None
        self.is_under_repair = False
        self.changed = trio.Event()
        self.on_lost: Callable[[list[HopLink]], None] = lambda links: None  # before others take their places
        self.statistics = Statistics()
        tuned_version = terms.tuned.version if terms.tuned else b""
        subject = (terms.model, terms.adapter, tuned_version)
        self.accounts = HopAccounts(self.key, swarm.rpc.network.peer_id, terms.max_tokens, subject)
        self.layer_arity = 0
        self.codec = Decision("raw", "not opened yet")
        self.routes = RouteChoice(swarm, terms)
        self._losses: Counter[tuple[PeerId, int]] = Counter()  # by hop, since the last answer

    def __str__(self) -> str:
        return " -> ".join(self.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The hops in order, as people read them."""
        return tuple(str(link.hop) for link in self.links)

    def index_at(self, start: int) -> int | None:
        """Return the place in the chain of the hop whose first block is ``start``; None if there is none now."""
        for index, link in enumerate(self.links):
            if link.hop.span.start == start:
                return index
        return None

    def links_from(self, link: HopLink) -> list[HopLink]:
        """A hop and all behind it; none when it was replaced."""
        return self.links[self.links.index(link) :] if link in self.links else []

    def link_at(self, start: int) -> HopLink | None:
        """Return the hop whose first block is ``start``; None if there is none now."""
        index = self.index_at(start)
        return None if index is None else self.links[index]

    def prefill_speeds(self) -> list[float]:
        """Tokens a second that each hop's server says it prefills; 0 where it says nothing."""
        return prefill_speeds(self.records())

    def records(self) -> list[SpanRecord | None]:
        """What each hop's server announces."""
        spans = {span.peer: span for span in self.swarm.view().serving(self.terms.model)}
        return [spans.get(link.hop.peer) for link in self.links]

    # --- what is wrong with hops -----------------------------------------------------------------------------

    def exclude(
        self,
        link: HopLink,
        blame: Blame,
        reason: str,
        for_s: float = AMBIGUOUS_FOR_S,
    ) -> None:
        """Do without a hop from now on; ``blame`` says what follows for its server, for ``for_s`` if not remembered."""
        link.is_lost = True
        self.note_trouble(f"{link.hop}: {reason}")
        peer = link.hop.peer
        if not blame.is_remembered:
            self.routes.back_off(peer, for_s)
            return
        self.statistics.blamed.append((peer, reason))
        is_relayed = blame is Blame.SILENT and self.swarm.rpc.leave_relay(peer)
        self.swarm.rpc.standing.leave_out(peer, reason, is_relayed=is_relayed)

    def fail_hop(self, link: HopLink, error: PeerError) -> None:
        """A hop failed a request: it is silent, or says why it cannot."""
        if not isinstance(error, Refused):
            self.exclude(link, Blame.SILENT, str(error))
            return
        link.is_lost = True
        self.note_trouble(f"{link.hop}: {error}")
        if error.code is not Code.STALE_EPOCH:
            for_s = math.inf if is_final(error) else error.retry_after_s or BUSY_FOR_S
            logger.info("not asking %s for %.0f s: %s", link.hop.peer, for_s, error)
            self.exclude(link, Blame.UNAVAILABLE, str(error), for_s)

    def lose_caches(self, link: HopLink, reason: str) -> None:
        """A hop says that its caches are gone: nobody is blamed, unless it says so again and again."""
        place = (link.hop.peer, link.hop.span.start)
        self._losses[place] += not link.is_lost
        if not link.is_lost and self._losses[place] >= MOST_LOSSES:
            text = f"{reason} ({self._losses[place]} times, without an answer)"
            self.exclude(link, Blame.UNAVAILABLE, text, math.inf)
        link.is_lost = True
        self.note_trouble(f"{link.hop}: {reason}")

    def exclude_silent(self, now: float) -> None:
        """Do without every hop that gives no sign of life though an op is outstanding there."""
        for link in self.links:
            reason = link.watch.suspicion(now)
            if reason is not None:
                self.exclude(link, Blame.SILENT, reason)

    def on_answered(self, seq: int, now: float) -> None:
        """Op ``seq`` is answered: every hop on the way of an answer is alive, and did well."""
        self.position.answered = seq
        self._losses.clear()
        for link in self.links:
            link.watch.on_progress(seq, now)
            self.swarm.rpc.standing.did_well(link.hop.peer)
        self.notify()

    def note_trouble(self, reason: str) -> None:
        """Note that the chain needs a repair, and why; the first reason counts."""
        self.trouble = self.trouble or reason
        self.notify()

    def notify(self) -> None:
        """Wake everything that waits for news of the chain."""
        self.changed.set()
        self.changed = trio.Event()

    def reject_hop(self, link: HopLink, doubt: Doubt, kind: Fault = Fault.WRONG_RESULTS) -> None:
        """A hop computed wrongly: it is done without, and all behind it begin anew from what is right."""
        self.statistics.doubts.append(doubt)
        self.swarm.rpc.standing.fault(link.hop.peer, kind, doubt.reason)
        affected = self.links_from(link)
        for lost in affected:
            lost.is_lost = True
        if affected:
            self.exclude(link, Blame.FAILING, doubt.reason)

    def exclude_all(self, links: list[HopLink], reason: str) -> None:
        """Have others take over: one of these lies, or computed on with what a liar gave, and nobody knows which."""
        self.note_trouble(reason)
        for link in links:
            self.exclude(link, Blame.AMBIGUOUS, reason)


def is_final(error: PeerError) -> bool:
    """Did a server say that it can never do what was asked, and not when to ask again?"""
    return isinstance(error, Refused) and error.code is Code.UNSUPPORTED and error.retry_after_s is None


def prefill_speeds(records: Sequence[SpanRecord | None]) -> list[float]:
    """Tokens a second that each server says it prefills; 0 where it says nothing."""
    return [(record.prefill_tokens_per_s or 0.0) if record else 0.0 for record in records]


def most_members(records: Sequence[SpanRecord | None]) -> int:
    """How many members the largest team of some servers has; 1 where all compute alone."""
    return 1 + max((len(record.team) for record in records if record), default=0)
