"""The chain of one session as its client keeps it: which hops, in which epoch, what is wrong with them.

Hops are routed, opened, given up and given back here; a session sends ops through them (``session``), and a repair
(``repair``) makes the chain whole again. Tasks that wait for news of any of it wait for ``changed``.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import trio

from swarmd.client.links.client_parameters import upload_parameters
from swarmd.client.links.link import (
    Backoff,
    Doubt,
    HopLink,
    SessionOptions,
    SessionServices,
    Statistics,
    is_compatible,
    is_suitable,
)
from swarmd.client.links.ops import codec_for
from swarmd.client.sessions.receipts import HopAccount, HopAccounts
from swarmd.client.sessions.requests import Requests
from swarmd.errors import (
    OUR_MEMBERSHIP,
    CacheExhausted,
    Code,
    Forged,
    IntegrityError,
    NoRoute,
    PeerError,
    Refused,
    RemoteProtocolError,
    SwarmError,
)
from swarmd.plan.chains.routing import Hop, Route, best_route
from swarmd.plan.trust.blame import Blame
from swarmd.plan.trust.reputation import Trust
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import CloseSession, Opened, ReceiptIs, Taken, WantReceipt
from swarmd.values import Decision, PeerId, Span

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 8.0  # for one hop to say yes or no, a connection included
PATIENCE_S = 60.0  # for somebody to serve what is missing
PINNED_PATIENCE_S = 12.0  # where the user named the chain: nobody else can come
REFRESH_TIMEOUT_S = 0.5  # the member that is asked may be the one that is gone; the client goes on asking by itself
RETRY_PAUSE_S = 0.5  # views change within an exchange
AMBIGUOUS_FOR_S = 60.0  # one of a chain is wrong: the session does without all of it while others are there
LEAVING_FOR_S = 20.0  # a server that stops serving is not asked for so long
BUSY_FOR_S = 2.0  # after a refusal that names no time
RECEIPT_TIMEOUT_S = 5.0  # for a hop to sign what has passed
GIVE_BACK_S = 1.0  # to tell one hop that it is free


@dataclass(slots=True)
class Position:
    """How far a session is: the last op that was sent, and the last whose answer is here."""

    seq: int = 0
    answered: int = 0


class Chain:
    """See the module. All of it runs in the client's trio thread."""

    def __init__(self, swarm: SessionServices, terms: SessionOptions) -> None:
        self.key = os.urandom(16)
        self.terms = terms
        self.swarm = swarm
        self.position = Position()
        self.links: list[HopLink] = []
        self.epoch = 1
        self.trouble: str | None = None
        self.changed = trio.Event()
        self.on_lost: Callable[[list[HopLink]], None] = lambda links: None  # before others take their places
        self.statistics = Statistics()
        subject = (terms.model, terms.adapter, terms.tuned.version if terms.tuned else b"")
        self.accounts = HopAccounts(self.key, swarm.rpc.network.peer_id, terms.max_tokens, subject)
        self.layer_arity = 0
        self.codec = Decision("raw", "not opened yet")
        self.requests = Requests(self.key, terms, swarm.addresses_of, swarm.audits)
        self._backoff = Backoff()
        self._opened: set[tuple[PeerId, int]] = set()
        self._numerics = ""

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

    # --- opening ---------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Choose hops and open each; retries elsewhere while a refusal allows. Raises SwarmError."""
        deadline = trio.current_time() + (PINNED_PATIENCE_S if self.terms.route else PATIENCE_S)
        reason: SwarmError | None = None
        while True:
            try:
                hops = list(self.terms.route) or list(self.route(self.terms.blocks).hops)
                self.links = [HopLink(hop) for hop in hops]
                self.codec = codec_for(self.swarm, self.terms, [hop.peer for hop in hops])
                failures = await self.open_hops(range(len(self.links)))
                if not failures:
                    await self.give_back_strays()
                    return
                self.raise_if_hopeless(failures)
                reason = next(iter(failures.values()))
                for index, error in failures.items():
                    self.fail_hop(self.links[index], error)
                if self.terms.route and all(is_final(error) for error in failures.values()):
                    raise reason
            except NoRoute as error:
                if reason is not None and self._is_refused_for_good():
                    raise reason from None
                reason = reason or error  # what a server said is worth more than that it is left out meanwhile
            if trio.current_time() > deadline:
                raise reason
            self.trouble = None
            await self.wait_for_records()

    async def open_hops(self, indexes: range | list[int]) -> dict[int, PeerError]:
        """Open some hops side by side; returns which failed."""
        failures: dict[int, PeerError] = {}
        async with trio.open_nursery() as nursery:
            for index in indexes:
                nursery.start_soon(self.open_hop, index, failures)
        return failures

    async def open_hop(
        self,
        index: int,
        failures: dict[int, PeerError],
        inherit: str = "",
    ) -> None:
        """Open one hop, with ``inherit`` to take over the caches of that peer; notes why it failed."""
        link = self.links[index]
        self.swarm.rpc.network.learn(link.hop.peer, self.swarm.addresses_of(link.hop.peer))
        is_exact = self.terms.grade == "exact"
        numerics = self._numerics if is_exact else ""
        request = self.requests.open(
            self.links,
            index,
            epoch=self.epoch,
            codec=self.codec.action,
            numerics=numerics,
            inherit=inherit,
        )
        self._opened.add((link.hop.peer, link.hop.span.start))  # whether its answer comes or not
        link.n_tokens_at_open = self.accounts.n_tokens
        try:
            if self.terms.tuned is not None:
                await upload_parameters(self.swarm.rpc, self.terms.model, link.hop, self.terms.tuned)
            reply, _ = await self.swarm.rpc.call(link.hop.peer, request, timeout_s=OPEN_TIMEOUT_S)
        except PeerError as error:
            failures[index] = error
            return
        self.accounts.note_reopened((link.hop.peer, link.hop.span.start))  # what came until now is of the cache before
        if isinstance(reply, Opened):
            self.layer_arity = reply.layer_arity
            link.received = 0 if self.position.seq == 0 else None
            if is_exact and not self._numerics:
                self._numerics = reply.numerics

    def raise_if_hopeless(self, failures: dict[int, PeerError]) -> None:
        """Refusals that no other server would answer differently end the session."""
        for index, error in failures.items():
            if isinstance(error, Refused) and error.code is Code.TOO_LONG:
                raise CacheExhausted(f"{self.links[index].hop}: {error}")
            if isinstance(error, Refused) and error.code in OUR_MEMBERSHIP:
                raise error

    # A route is looked for in stages, and the first stage that finds one decides:
    #   1. servers that probes have proven, the last with a head where the session wants logits;
    #   2. servers that are proven;
    #   3. servers that nobody has probed yet;
    #   4. all that may be asked at all: doubted ones, and those that refused a while ago.
    # So a peer with a fresh key cannot draw sessions from proven servers by announcing more speed. Where no member has
    # published findings yet, ``trust`` names nobody, and the first stages hold nobody back.
    def route(
        self,
        blocks: Span,
        previous: PeerId | None = None,
        is_single_hop: bool = False,
    ) -> Route:
        """Choose the cheapest hops for ``blocks``; ``previous`` is the hop before them. Raises NoRoute.

        With ``is_single_hop`` only servers that hold all of the blocks are considered.
        """
        now = trio.current_time()
        standing = self.swarm.rpc.standing
        trust = self.swarm.trust()
        view = self.swarm.view()
        spans = view.serving(self.terms.model)

        def eligible(min_trust: Trust, with_head: bool, is_last_resort: bool, span: SpanRecord) -> bool:
            if is_single_hop and not Span(span.start, span.end).covers(blocks):
                return False
            if with_head and span.end == self.terms.n_blocks and not span.head:
                return False
            if trust.get((span.peer, span.slot), min_trust) < min_trust:
                return False
            peer = PeerId(span.peer)
            is_allowed = self._backoff.is_allowed(peer, now, is_last_resort) and standing.allows(peer, is_last_resort)
            return (
                is_allowed and is_suitable(span, self.terms, self._numerics) and is_compatible(view, span, self.terms)
            )

        def find(min_trust: Trust, with_head: bool = False, is_last_resort: bool = False) -> Route:
            return best_route(
                spans,
                blocks,
                self.swarm.rpc.network.peer_id,
                self.swarm.trips,
                partial(eligible, min_trust, with_head, is_last_resort),
                previous,
                self.terms.batch * self.terms.max_tokens,
                self.swarm.wall_clock(),
            )

        if self.terms.head:
            with suppress(NoRoute):
                return find(Trust.PROVEN, with_head=True)
        for min_trust in (Trust.PROVEN, Trust.UNKNOWN):  # what is not probed yet
            with suppress(NoRoute):
                return find(min_trust)
        try:
            return find(Trust.DOUBTED, is_last_resort=True)
        except NoRoute as error:
            n_older = sum(not is_compatible(view, span, self.terms) for span in spans)
            if not n_older:
                raise
            raise NoRoute(
                f"{error}; {n_older} that serve it do not announce what this session needs", error.missing
            ) from None

    def _is_refused_for_good(self) -> bool:
        """Would the blocks be served if those who said that they cannot (UNSUPPORTED) could?"""
        spans = self.swarm.view().serving(self.terms.model)

        def able(span: SpanRecord) -> bool:
            has_refused = self._backoff.is_final(PeerId(span.peer))
            return not has_refused and is_suitable(span, self.terms, self._numerics)

        client = self.swarm.rpc.network.peer_id
        try:
            best_route(spans, self.terms.blocks, client, {}, able)
        except NoRoute:
            return any(self._backoff.is_final(PeerId(s.peer)) for s in spans)
        return False

    # --- what is wrong with hops -----------------------------------------------------------------------------

    def exclude(self, link: HopLink, blame: Blame, reason: str, for_s: float = AMBIGUOUS_FOR_S) -> None:
        """Do without a hop from now on; ``blame`` says what follows for its server, for ``for_s`` if not remembered."""
        link.is_lost = True
        self.note_trouble(f"{link.hop}: {reason}")
        peer = link.hop.peer
        if not blame.is_remembered:
            self.back_off(peer, for_s)
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

    def back_off(self, peer: PeerId, for_s: float) -> None:
        """Do not ask a peer again for so long in this session; nothing is held against it."""
        self._backoff.add(peer, trio.current_time(), for_s)

    def note_trouble(self, reason: str) -> None:
        """Note that the chain needs a repair, and why; the first reason counts."""
        self.trouble = self.trouble or reason
        self.notify()

    def notify(self) -> None:
        """Wake everything that waits for news of the chain."""
        self.changed.set()
        self.changed = trio.Event()

    # --- what audits find ------------------------------------------------------------------------------------

    async def ask_receipt(self, link: HopLink) -> HopAccount:
        """All that a hop has signed by now. Raises PeerError."""
        hop = link.hop
        request = WantReceipt(session=self.key, start=hop.span.start)
        reply, frame = await self.swarm.rpc.call(hop.peer, request, timeout_s=RECEIPT_TIMEOUT_S)
        if not isinstance(reply, ReceiptIs):
            raise RemoteProtocolError(f"expected a receipt, got {type(reply).__name__}")
        try:
            return await self._enter_receipt(hop, reply, frame)
        except Forged as error:
            self.swarm.rpc.standing.fault(hop.peer, Fault.FORGED, str(error))
            raise

    async def take_receipt(self, peer: PeerId, message: ReceiptIs, frame: Frame) -> HopAccount:
        """Enter what a hop has signed. Raises Forged for a receipt that no hop of the session gives."""
        link = self.link_at(message.start)
        if link is None or link.hop.peer != peer:
            return HopAccount()  # of a hop that is no more
        return await self._enter_receipt(link.hop, message, frame)

    async def _enter_receipt(self, hop: Hop, message: ReceiptIs, frame: Frame) -> HopAccount:
        """Enter it, and sign the bill that came with it."""
        place = (hop.peer, hop.span.start)
        end = hop.span.end
        now = self.swarm.wall_clock()
        try:
            account = self.accounts.take_untrusted(place, end, bytes(frame.payload), message.signature, now)
            taken = self.accounts.take_bill_untrusted(place, end, message.bill, message.given, self.swarm.identity)
        except IntegrityError as error:
            raise Forged(str(error)) from None
        channel = self.swarm.rpc.find_channel(hop.peer)
        if channel is not None and taken is not None:
            signed = Taken(session=self.key, start=hop.span.start, taken=taken)
            await channel.send(signed, message.bill)
        return account

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
        """Of these one lies, and nobody knows which: others take over."""
        self.note_trouble(reason)
        for link in links:
            self.exclude(link, Blame.AMBIGUOUS, reason)

    # --- giving back -----------------------------------------------------------------------------------------

    async def give_back_strays(self) -> None:
        """Close what was opened on the way to the present chain and is no part of it."""
        await self.give_back({(link.hop.peer, link.hop.span.start) for link in self.links})

    async def give_back(self, in_use: set[tuple[PeerId, int]]) -> None:
        """Close every hop that was opened, but those in ``in_use``."""
        unused = self._opened - in_use
        self._opened &= in_use
        async with trio.open_nursery() as nursery:
            for peer, start in unused:
                nursery.start_soon(self._give_back_one, peer, start)

    async def _give_back_one(self, peer: PeerId, start: int) -> None:
        with trio.move_on_after(GIVE_BACK_S) as scope:
            await self._tell_closed(peer, start)
        if scope.cancelled_caught:  # the machine is busy: nobody waits for it, but the server's room does
            self.swarm.start_soon(partial(self._tell_closed, peer, start))

    async def _tell_closed(self, peer: PeerId, start: int) -> None:
        channel = self.swarm.rpc.find_channel(peer)
        if channel is not None:
            with suppress(PeerError):
                await channel.send(CloseSession(session=self.key, start=start))

    async def wait_for_records(self) -> None:
        """Wait a little and ask for newer records; nobody answering is a reason to go on waiting, not to fail."""
        await trio.sleep(RETRY_PAUSE_S)
        try:
            with trio.move_on_after(REFRESH_TIMEOUT_S):
                await self.swarm.refresh()
        except SwarmError as error:
            logger.info("no newer records: %s", error)


def is_final(error: PeerError) -> bool:
    """Did a server say that it can never do what was asked, and not when to ask again?"""
    return isinstance(error, Refused) and error.code is Code.UNSUPPORTED and error.retry_after_s is None
