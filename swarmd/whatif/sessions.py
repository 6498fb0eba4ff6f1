"""Conversations in a modelled swarm: routes by the product's own functions, tokens by what passes and trips take.

A token's time is the sum over the hops of its chain: the trip to the hop, waiting for the pass that is under way, the
pass with whoever else is ready, and the hidden states' way over the line. Rates change when a session begins or ends
somewhere on the chain, and are constant in between, so a whole answer is a few events.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from swarmd.errors import Code, NoRoute, Refused
from swarmd.plan.chains.batching import MAX_GUESSED_TOKENS, PREFILL_SHARE, tokens_of_op
from swarmd.plan.chains.codec import choose_codec
from swarmd.plan.chains.routing import HOP_OVERHEAD_S, Hop, Route, RouteQuery, best_route, gather_trips
from swarmd.plan.chains.watch import SUSPECT_AFTER_S
from swarmd.plan.links.coordinates import NetworkPoint
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.wire.tensors import token_bytes
from swarmd.values import PeerId, Span
from swarmd.whatif.clock import VirtualClock
from swarmd.whatif.geography import AccessLine, Geography
from swarmd.whatif.scenario import Load, Scenario, ServedModel
from swarmd.whatif.servers import ModelledServer, ServerPool

WAIT_S = 60.0  # for somebody to serve what is missing (client.sessions.repair_plan)
LOOK_AGAIN_S = 1.0  # while blocks are missing
SHUN_S = 10.0  # that a server is not asked again which had no room (plan.chains.cache_admission)
BUSY_S = 2.0  # after a refusal for lack of room (client.sessions.chain)
UNREACHABLE_S = 8.0  # until a member that is gone without a word has not answered (client.sessions.reservations)
HAND_OVER_S = 10.0  # for caches to move; after it they are replayed (client.sessions.repair)
OPEN_TRIPS = 2  # one way each, to ask a hop and hear that it has room
CONNECT_TRIPS = 7  # to a member that the client has no connection with yet: handshakes and channels
HEARD_OF = 4  # members that a client has measured trips to when it begins: those it is connected with


@dataclass(slots=True)
class ModelledSession:
    """One session: what it is to give, how far it is, and through whom. ``made`` tokens at ``updated_s``."""

    number: int
    load: Load
    line: AccessLine
    begun_s: float
    prompt_tokens: int
    new_tokens: int
    route: Route | None = None
    codec: str = "raw"
    made: float = 0.0
    updated_s: float = math.inf  # while nothing is made
    token_s: float = math.inf
    first_token_s: float | None = None
    paused_s: float = 0.0
    stopped_s: float | None = None  # when it was interrupted, until it goes on
    waiting_since: float | None = None
    refused_since: float | None = None
    next_event: int = -1  # its end, or what it is waiting for
    shunned: set[str] = field(default_factory=set)

    @property
    def owner(self) -> bytes:
        return self.number.to_bytes(8, "big")


@dataclass(slots=True)
class Tally:
    """What became of all conversations. Times are seconds of each that was counted."""

    n_begun: int = 0
    n_done: int = 0
    n_lost: int = 0
    n_lost_while_held: int = 0
    n_refused: int = 0
    n_repairs: int = 0
    replayed_tokens: float = 0.0
    paused_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    parts_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    interrupted_by: Counter[str] = field(default_factory=Counter)
    n_tokens: float = 0.0


class ModelledSessions:
    """All sessions of one run. Those that begin before ``count_from_s`` are not counted."""

    def __init__(
        self,
        scenario: Scenario,
        pool: ServerPool,
        geography: Geography,
        clock: VirtualClock,
        rng: random.Random,
        count_from_s: float,
    ) -> None:
        self.tally = Tally()
        self._scenario = scenario
        self._pool = pool
        self._geography = geography
        self._clock = clock
        self._rng = rng
        self._count_from_s = count_from_s
        self._numbers = 0
        self._through: dict[PeerId, dict[tuple[int, int], ModelledSession]] = defaultdict(dict)  # by number and hop
        self._known: dict[int, set[PeerId]] = defaultdict(set)  # members to whom the clients of a load know the trip
        self._connected: dict[int, set[PeerId]] = defaultdict(set)
        pool.on_gone = self._lose_server

    def begin(self, load: Load, line: AccessLine) -> None:
        """Begin a conversation of a load, at a user's line."""

        def draw(median: float) -> int:
            return max(1, round(median * self._rng.lognormvariate(0.0, load.spread)))

        self._numbers += 1
        session = ModelledSession(
            self._numbers,
            load,
            line,
            begun_s=self._clock.now,
            prompt_tokens=draw(load.prompt_tokens),
            new_tokens=draw(load.new_tokens),
        )
        if self._is_counted(session):
            self.tally.n_begun += 1
        self._open(session)

    def _is_counted(self, session: ModelledSession) -> bool:
        return session.begun_s >= self._count_from_s

    # --- opening -----------------------------------------------------------------------------------------------------

    def _open(self, session: ModelledSession) -> None:
        """Find a route and prefill; or look again."""
        model = self._scenario.model_named(session.load.model)
        try:
            route = self._find_route(session, Span(0, model.blocks))
        except NoRoute:
            self._wait(session)
            return
        gone = [hop for hop in route.hops if not self._pool.servers[hop.peer].is_online]
        if gone:
            session.shunned |= {hop.peer for hop in gone}
            self._again(session, UNREACHABLE_S)
            return
        refusal = self._reserve(session, route)
        if refusal is not None:
            self._take_refusal(session, refusal)
            return
        self._join(session, route, model)
        history = session.prompt_tokens + int(session.made)
        is_first = session.first_token_s is None
        if not is_first:
            self.tally.replayed_tokens += history
        self._resume_after(session, self._prefill_s(session, route.hops, history), is_first)

    def _find_route(self, session: ModelledSession, blocks: Span, previous: PeerId | None = None) -> Route:
        spans = self._pool.serving(session.load.model)
        query = RouteQuery(
            spans,
            blocks,
            client=PeerId("client"),
            trips=self._trips(session, spans),
            is_eligible=lambda span: span.peer not in session.shunned,
            previous=previous,
            cache_tokens=session.prompt_tokens + session.new_tokens,
            client_point=self._pool.locate(session.line, NetworkPoint(), self._rng),
        )
        return best_route(query)

    def _trips(self, session: ModelledSession, spans: list[SpanRecord]) -> dict[tuple[str, str], float]:
        """What servers announced, and what clients of this load have measured so far."""
        known = self._known[id(session.load)]
        if len(known) < HEARD_OF and spans:
            known |= {PeerId(span.peer) for span in self._rng.sample(spans, min(HEARD_OF, len(spans)))}
        measured = {}
        for peer in known:
            measured[peer] = self._geography.trip_s(session.line, self._pool.servers[peer].line)
        return dict(gather_trips(spans, PeerId("client"), measured))

    def _take_refusal(self, session: ModelledSession, refusal: Refused) -> None:
        """Ask elsewhere, until patience is at an end; what no server can hold is given up at once."""
        if session.refused_since is None:
            session.refused_since = self._clock.now
        is_hopeless = refusal.code == Code.TOO_LONG or self._clock.now - session.refused_since >= WAIT_S
        if not is_hopeless:
            self._again(session, BUSY_S)
        elif self._is_counted(session):
            self.tally.n_refused += 1

    def _reserve(self, session: ModelledSession, route: Route) -> Refused | None:
        """Promise cache at each hop, as servers do; returns what one refuses with."""
        n_tokens = session.prompt_tokens + session.new_tokens
        done: list[Hop] = []
        for number, hop in enumerate(route.hops):
            server = self._pool.servers[hop.peer]
            key = (session.owner, number)
            try:
                ending = server.cache.reserve(key, session.owner, n_tokens, self._clock.now)
                server.cache.use(key, session.prompt_tokens, self._clock.now)
            except Refused as refusal:
                for earlier, kept in enumerate(done):
                    self._pool.servers[kept.peer].cache.release((session.owner, earlier))
                session.shunned.add(hop.peer)
                self._clock.plan(self._clock.now + SHUN_S, partial(session.shunned.discard, hop.peer))
                return refusal
            self._end_for_others(server, ending)
            done.append(hop)
        return None

    def _end_for_others(self, server: ModelledServer, ending: list[tuple[bytes, int]]) -> None:
        """Sessions whose promise ended for somebody else go elsewhere."""
        for owner, _ in ending:
            number = int.from_bytes(owner, "big")
            other = next((s for s in self._sessions_at(server.peer) if s.number == number), None)
            if other is not None:
                self._repair(other, server, 0.0)

    def _again(self, session: ModelledSession, after_s: float) -> None:
        self._plan(session, after_s, lambda: self._open(session))

    def _plan(self, session: ModelledSession, after_s: float, event: Callable[[], None]) -> None:
        """Plan what is next for a session, instead of what was."""
        self._clock.call_off(session.next_event)
        session.next_event = self._clock.plan(self._clock.now + after_s, event)

    def _wait(self, session: ModelledSession) -> None:
        """Look again until somebody serves what is missing, or patience is at an end."""
        if session.waiting_since is None:
            session.waiting_since = self._clock.now
        if self._clock.now - session.waiting_since < WAIT_S:
            session.shunned.clear()
            self._again(session, LOOK_AGAIN_S)
            return
        if self._is_counted(session):
            self.tally.n_lost += 1
            if min(self._pool.coverage(session.load.model)) > 0:
                self.tally.n_lost_while_held += 1

    # --- computing ---------------------------------------------------------------------------------------------------

    def _join(self, session: ModelledSession, route: Route, model: ServedModel) -> None:
        session.waiting_since = None
        session.refused_since = None
        session.route = route
        lines = [self._pool.servers[hop.peer].line for hop in route.hops]
        ways = list(zip([session.line, *lines], [*lines, session.line], strict=True))
        trips_s = [self._geography.trip_s(a, b) for a, b in ways]
        rates = [self._geography.bytes_per_s(a, b) for a, b in ways]
        session.codec = choose_codec("auto", "replayed", "bfloat16", trips_s, rates).action
        for place, hop in enumerate(route.hops):
            self._known[id(session.load)].add(hop.peer)
            self._through[hop.peer][session.number, place] = session
            self._pool.note_load(self._pool.servers[hop.peer], 1)
        self._follow_rates({hop.peer for hop in route.hops})

    def _part_session(self, session: ModelledSession) -> None:
        """Take a session from its hops, which may be gone by now."""
        if session.route is None:
            return
        for number, hop in enumerate(session.route.hops):
            server = self._pool.servers[hop.peer]
            if self._through[hop.peer].pop((session.number, number), None) is not None and server.is_online:
                server.cache.release((session.owner, number))
                self._pool.note_load(server, -1)
        peers = {hop.peer for hop in session.route.hops}
        session.route = None
        self._follow_rates(peers)

    def _resume_after(self, session: ModelledSession, delay_s: float, is_first: bool = False) -> None:
        """Go on decoding after a prefill, a replay or a hand-over."""

        def resume() -> None:
            if is_first:
                session.first_token_s = self._clock.now - session.begun_s
                session.made = 1.0
            if session.stopped_s is not None:
                session.paused_s += self._clock.now - session.stopped_s
                session.stopped_s = None
            session.updated_s = self._clock.now
            self._plan_end(session)

        session.updated_s = math.inf  # nothing is made meanwhile
        self._plan(session, delay_s, resume)

    def _plan_end(self, session: ModelledSession) -> None:
        left_s = max(0.0, session.new_tokens - session.made) * session.token_s
        self._plan(session, left_s, lambda: self._end(session))

    def _end(self, session: ModelledSession) -> None:
        if self._is_counted(session) and session.first_token_s is not None:
            tally = self.tally
            tally.n_done += 1
            tally.first_token_s.append(session.first_token_s)
            decoding_s = self._clock.now - session.begun_s - session.first_token_s
            if session.new_tokens > 1 and decoding_s > 0:
                tally.tokens_per_s.append((session.new_tokens - 1) / decoding_s)
            tally.paused_s.append(session.paused_s)
            tally.n_tokens += session.new_tokens
            for part, seconds in self._token_parts(session).items():
                tally.parts_s[part].append(seconds)
        self._part_session(session)

    def _follow_rates(self, peers: set[PeerId]) -> None:
        """Note how far each session through these servers is, and go on at its new rate."""
        touched = {session.number: session for peer in sorted(peers) for session in self._sessions_at(peer)}
        for session in touched.values():
            self._advance(session)
            token_s = sum(self._token_parts(session).values())
            if session.updated_s != math.inf and abs(token_s - session.token_s) > 1e-9:
                session.token_s = token_s
                self._plan_end(session)
            session.token_s = token_s

    def _sessions_at(self, peer: PeerId) -> list[ModelledSession]:
        """Sessions that pass a server, each once."""
        return list({session.number: session for session in self._through[peer].values()}.values())

    def _advance(self, session: ModelledSession) -> None:
        if session.updated_s != math.inf and session.token_s != math.inf:
            session.made += (self._clock.now - session.updated_s) / session.token_s
            session.updated_s = self._clock.now

    # One hop with others: passes follow each other while anybody is ready, and each takes along all that came while
    # the one before it was computed. With ``arriving`` rows a second besides its own, a pass of ``n`` rows lasts
    # s(n) = a + c (n - 1), so n = 1 + arriving s(n), at most everybody. A row that comes finds a pass under way with
    # the chance ``arriving s(n) / n``, and waits for half of it on average.
    def _pass_and_wait_s(self, session: ModelledSession, hop: Hop) -> tuple[float, float]:
        server = self._pool.servers[hop.peer]
        speed = self._pool.speed(server)
        n_blocks = len(hop.span)
        n_others, arriving = self._count_decoding(hop.peer, besides=session)
        first_s = speed.pass_s(n_blocks, 1)
        row_s = n_blocks * speed.row_s
        most_rows = 1.0 + n_others
        rows = most_rows
        if arriving * row_s < 1:
            rows = min(most_rows, (1 + arriving * (first_s - row_s)) / (1 - arriving * row_s))
        pass_s = speed.pass_s(n_blocks, max(1.0, rows))
        busy = min(1.0, arriving * pass_s / max(1.0, rows))
        return pass_s, busy * pass_s / 2

    def _count_decoding(self, peer: PeerId, besides: ModelledSession) -> tuple[int, float]:
        """How many other sessions decode at a server, and how many of their rows come in a second."""
        others = [s for s in self._through[peer].values() if s is not besides and s.updated_s != math.inf]
        return len(others), sum(1 / s.token_s for s in others if s.token_s > 0)

    def _busy_share(self, session: ModelledSession, hop: Hop) -> float:
        """The share of its time that a server computes others' decode passes."""
        speed = self._pool.speed(self._pool.servers[hop.peer])
        _, arriving = self._count_decoding(hop.peer, besides=session)
        return min(1.0, arriving * speed.pass_s(len(hop.span), 1))

    def _token_parts(self, session: ModelledSession) -> dict[str, float]:
        """Seconds of a token: computing, waiting, trips, and the hidden states' way over lines."""
        assert session.route is not None
        model = self._scenario.model_named(session.load.model)
        n_bytes = token_bytes(model.hidden, "bfloat16", session.codec)
        parts = {"computing": 0.0, "waiting": 0.0, "trips": 0.0, "lines": 0.0, "client": session.load.client_ms / 1e3}
        previous = session.line
        for hop in session.route.hops:
            server = self._pool.servers[hop.peer]
            pass_s, wait_s = self._pass_and_wait_s(session, hop)
            parts["computing"] += pass_s
            parts["waiting"] += wait_s + HOP_OVERHEAD_S
            parts["trips"] += self._geography.trip_s(previous, server.line)
            parts["lines"] += n_bytes / self._geography.bytes_per_s(previous, server.line)
            previous = server.line
        parts["trips"] += self._geography.trip_s(previous, session.line)
        parts["lines"] += n_bytes / self._geography.bytes_per_s(previous, session.line)
        return parts

    def _prefill_s(self, session: ModelledSession, hops: tuple[Hop, ...], n_tokens: int) -> float:
        """Seconds until a chain, or a part of one, has computed so many tokens: ops flow through it as a pipeline."""
        model = self._scenario.model_named(session.load.model)
        rates = []
        for hop in hops:
            speed = self._pool.speed(self._pool.servers[hop.peer])
            rates.append(1 / (len(hop.span) * speed.prefill_s))
        op_tokens = tokens_of_op(1, n_tokens, rates)
        n_ops = math.ceil(n_tokens / op_tokens)
        op_bytes = op_tokens * token_bytes(model.hidden, "bfloat16", session.codec)
        stages_s = []
        trips_s = 0.0
        previous = session.line
        for hop in hops:
            server = self._pool.servers[hop.peer]
            speed = self._pool.speed(server)
            is_step = n_tokens <= MAX_GUESSED_TOKENS  # so short a prompt goes with the others' steps
            busy = 0.0 if is_step else self._busy_share(session, hop)
            slowed = 1 + busy / PREFILL_SHARE  # a prompt gets what decode passes leave
            stages_s.append(op_bytes / self._geography.bytes_per_s(previous, server.line))
            computing_s = max(op_tokens * speed.prefill_s, speed.block_s) * len(hop.span)
            stages_s.append(slowed * computing_s + HOP_OVERHEAD_S)
            trips_s += self._geography.trip_s(previous, server.line)
            previous = server.line
        trips_s += self._geography.trip_s(previous, session.line)
        known = self._connected[id(session.load)]
        opening_s = 0.0
        for hop in hops:
            n_trips = OPEN_TRIPS if hop.peer in known else OPEN_TRIPS + CONNECT_TRIPS
            opening_s = max(
                opening_s, n_trips * self._geography.trip_s(session.line, self._pool.servers[hop.peer].line)
            )
            known.add(hop.peer)
        return opening_s + trips_s + sum(stages_s) + (n_ops - 1) * max(stages_s) + session.load.client_ms / 1e3

    # --- repairs -----------------------------------------------------------------------------------------------------

    def _lose_server(self, server: ModelledServer, is_crash: bool) -> None:
        """A server stops serving: its sessions go on elsewhere."""
        for session in self._sessions_at(server.peer):
            if session.route is None:
                continue  # it gave way to one of the others that were repaired just now
            self.tally.interrupted_by[server.kind.name] += self._is_counted(session)
            self._repair(session, server, SUSPECT_AFTER_S if is_crash else 0.0, can_hand_over=not is_crash)
        self._through[server.peer].clear()

    def _repair(
        self, session: ModelledSession, lost: ModelledServer, noticed_s: float, can_hand_over: bool = False
    ) -> None:
        """Replace one hop: by the cache that it hands over, or by a replay of what its predecessor kept."""
        assert session.route is not None
        self._advance(session)
        was_decoding = session.updated_s != math.inf
        session.updated_s = math.inf
        if was_decoding:
            session.stopped_s = self._clock.now
        self.tally.n_repairs += self._is_counted(session)
        route = session.route
        index = next(i for i, hop in enumerate(route.hops) if hop.peer == lost.peer)
        self._part_session(session)
        session.shunned.add(lost.peer)
        blocks = Span(route.hops[index].span.start, route.hops[index].span.end)
        if not was_decoding:
            self._again(session, noticed_s)  # it begins again
            return
        previous = route.hops[index - 1].peer if index else None
        try:
            part = self._find_route(session, blocks, previous)
        except NoRoute:
            self._again(session, noticed_s + LOOK_AGAIN_S)
            return
        hops = (*route.hops[:index], *part.hops, *route.hops[index + 1 :])
        repaired = Route(hops, route.cost_s, route.why)
        is_whole = all(self._pool.servers[hop.peer].is_online for hop in hops)
        if not is_whole or self._reserve(session, repaired) is not None:
            self._again(session, noticed_s + BUSY_S)
            return
        model = self._scenario.model_named(session.load.model)
        n_tokens = session.prompt_tokens + int(session.made)
        delay_s = noticed_s + self._prefill_s(session, part.hops, n_tokens)
        if can_hand_over:
            n_bytes = n_tokens * len(blocks) * model.cache_numbers * 2
            target = self._pool.servers[part.hops[0].peer]
            moving_s = n_bytes / self._geography.bytes_per_s(lost.line, target.line)
            if moving_s < HAND_OVER_S:
                delay_s = min(delay_s, moving_s)
        if not can_hand_over or delay_s > HAND_OVER_S:
            self.tally.replayed_tokens += n_tokens * len(blocks) / model.blocks
        self._join(session, repaired, model)
        self._resume_after(session, delay_s)
