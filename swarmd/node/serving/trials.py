"""Whether servers that claim blocks serve them: a session is opened with them, as a client does, and closed again.

A record proves nothing. Members that claim blocks and are always full would make honest servers leave these blocks,
come back when the claims change, and leave again. So each daemon tries some claims now and then, and all claims that
matter before it acts on them. A server that refuses twice, some time apart, does not count as a holder until it takes a
session again. One refusal is no proof: any server is full now and then. A server that stays full needs another one
beside it in any case.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import trio

from swarmd.errors import OUR_MEMBERSHIP, Code, PeerError, Refused
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Rpc
from swarmd.node.serving.short_session import opening_of, short_session
from swarmd.plan.chains.placement import Own
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import PeerId, Span

TRIED_AT_ONCE = 16  # servers: most answer within a round trip
TRIED_EACH_LOOK = 2  # of a swarm of 126 all are tried within an hour
TRIAL_TOKENS = 64  # of a session: what a short question takes
OPEN_TIMEOUT_S = 8.0  # as a client waits
APART_S = 30.0  # between two refusals that count as two
REFUSALS = 2  # in a row: any server is full now and then
JOINING_S = 2 * 3_600.0  # that a claim counts which is said to be loading: none takes sessions meanwhile
MAX_REMEMBERED = 4_096  # servers that were tried
NO_WORD_ABOUT_IT = (*OUR_MEMBERSHIP, Code.BANNED, Code.UNSUPPORTED)  # of this peer, or its version


@dataclass(slots=True)
class _TrialResult:
    """When a server was tried, and how many refusals in a row count by then."""

    tried_at: float
    n_refusals: int = 0


def claimant_of(span: SpanRecord) -> Own:
    """The server that a record is of: its peer, and the slot of its worker."""
    return span.peer, span.slot


class Trials:
    """What one daemon has tried."""

    def __init__(self, rpc: Rpc, exchange: Exchange, rng: random.Random) -> None:
        self._rpc = rpc
        self._exchange = exchange
        self._rng = rng
        self._results: dict[Own, _TrialResult] = {}
        self._joining_since: dict[Own, float] = {}

    def select_believed(self, spans: Sequence[SpanRecord]) -> list[SpanRecord]:
        """Give the records whose claims count: all but those of servers that refused again and again, or load for ever.

        Where that leaves nobody else, the fault may be here: all count.
        """
        me = self._rpc.network.peer_id
        now = trio.current_time()
        claimants = {claimant_of(s) for s in spans}
        self._joining_since = {
            claimant: since for claimant, since in self._joining_since.items() if claimant in claimants
        }
        for span in spans:
            if span.state == "joining":
                self._joining_since.setdefault(claimant_of(span), now)
        counted = [s for s in spans if s.peer == me or self._counts(s, now)]
        return counted if any(s.peer != me for s in counted) else list(spans)

    def _counts(self, span: SpanRecord, now: float) -> bool:
        joining_s = now - self._joining_since.get(claimant_of(span), now)
        is_loading_for_ever = span.state == "joining" and joining_s > JOINING_S
        return self._refusals(span) < REFUSALS and not is_loading_for_ever

    async def try_some(self, spans: Iterable[SpanRecord]) -> None:
        """Try a few claims, those first that were not tried for longest."""

        def tried_at(span: SpanRecord) -> float:
            result = self._results.get(claimant_of(span))
            return -1.0 if result is None else result.tried_at

        me = self._rpc.network.peer_id
        online_spans = [s for s in spans if s.peer != me and s.state == "online"]
        self._rng.shuffle(online_spans)
        online_spans.sort(key=tried_at)
        await self.find_serving(online_spans[:TRIED_EACH_LOOK])

    async def find_serving(self, spans: Iterable[SpanRecord]) -> set[Own]:
        """Try claims now; returns those that take a session."""
        accepting = set[Own]()
        limit = trio.CapacityLimiter(TRIED_AT_ONCE)

        async def attempt(span: SpanRecord) -> None:
            async with limit:
                is_serving = await self._takes_session(span)
            self._note(span, is_serving)
            if is_serving:
                accepting.add(claimant_of(span))
                self._joining_since.pop(claimant_of(span), None)

        async with trio.open_nursery() as nursery:
            for span in spans:
                nursery.start_soon(attempt, span)
        return accepting

    async def _takes_session(self, span: SpanRecord) -> bool:
        blocks = Span(span.start, span.end)
        opening = opening_of(os.urandom(16), span, blocks, TRIAL_TOKENS)
        peer = PeerId(span.peer)
        try:
            async with short_session(self._rpc, self._exchange, peer, opening, OPEN_TIMEOUT_S):
                return True
        except Refused as error:
            return error.code in NO_WORD_ABOUT_IT
        except PeerError:
            return False

    def _refusals(self, span: SpanRecord) -> int:
        result = self._results.get(claimant_of(span))
        return result.n_refusals if result is not None else 0

    def _note(self, span: SpanRecord, is_serving: bool) -> None:
        now = trio.current_time()
        previous = self._results.pop(claimant_of(span), None)
        if is_serving:
            result = _TrialResult(now)
        elif previous is None:
            result = _TrialResult(now, n_refusals=1)
        elif now - previous.tried_at < APART_S:
            result = previous  # too soon for a second refusal: one full moment is one refusal
        else:
            result = _TrialResult(now, previous.n_refusals + 1)
        self._results[claimant_of(span)] = result  # at the end: the oldest is forgotten first
        if len(self._results) > MAX_REMEMBERED:
            del self._results[next(iter(self._results))]
