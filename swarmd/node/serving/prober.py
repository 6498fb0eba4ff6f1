"""Holders of the same blocks compare: a seeded input through another's blocks, and through one's own.

It finds broken memory, wrong weights and undeclared rounding before anybody's text meets them, for the price of 32
tokens. To who is probed it is a session like any other. What is found is announced, and what others claim of a third
(``Accuse``) is computed here before it is believed. Whom to probe is ``plan.trust.reputation``'s.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress

import numpy as np
import trio

from swarmd.errors import (
    Code,
    PeerTimeout,
    Refused,
    RemoteProtocolError,
    SwarmError,
    SwarmUnavailable,
)
from swarmd.net.rpc import Channel
from swarmd.node.serving.choosing import HostingServices
from swarmd.node.serving.hosts import Hosts
from swarmd.node.serving.server import Server
from swarmd.node.serving.short_session import opening_of, short_session
from swarmd.plan.trust.equality import bound_of, errors, is_equal
from swarmd.plan.trust.reputation import (
    PROBE_LIFETIME_S,
    PROBES_OF_EACH,
    choose_probes,
    count_speakers,
    make_finding,
    name_of,
    shared_blocks,
)
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.accounts.evidence import CoherentEvidence, read_untrusted
from swarmd.protocol.membership.records import PeerRecord, ProbeFinding, SpanRecord
from swarmd.protocol.wire.arrays import Floats, pack_array, round_to_dtype, unpack_array_untrusted
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import (
    Accuse,
    AnyMessage,
    Believed,
    Op,
    Opened,
    Progress,
    ReceiptIs,
)
from swarmd.status import ProbeRow
from swarmd.values import Decision, PeerId, Span

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 2.0  # how long a newcomer waits to be probed, about
N_TOKENS = 32  # of a probe
PROBE_TIMEOUT_S = 10.0  # a server that is busy is probed later
AGAIN_S = 60.0  # after a probe to which there was no answer
CLEARLY_BELOW = 0.1  # of the bound: who accuses at its edge has seen what another machine sees otherwise
EVIDENCE_LIFETIME_S = 3_600.0  # who was repaired since is not accused again
MAX_REMEMBERED = 1_024  # servers, the newest
MAX_FOUND = 32  # of a record: wrong ones first


class Prober:
    """What this daemon has found of others, and goes on finding."""

    def __init__(self, around: HostingServices, hosts: Hosts) -> None:
        self._around = around
        self._hosts = hosts
        self._probed_at: dict[tuple[str, bytes], float] = {}
        self._found: dict[tuple[str, bytes], tuple[ProbeFinding, str]] = {}
        self._unsaid_since: dict[tuple[str, bytes], float] = {}  # servers of which too few have said anything
        self._judging = trio.Lock()
        self._judged: dict[tuple[str, bytes], None] = {}  # whom, and of which session
        self._answers: dict[tuple[bytes, PeerId], trio.MemorySendChannel[Floats]] = {}

    def announced(self) -> tuple[ProbeFinding, ...]:
        """What is found of servers that are there, and who of those that left was wrong, as records carry it."""
        present = {(s.peer, name_of(s)) for s in self._around.directory.view().spans}
        found = [found for key, (found, _) in self._found.items() if key in present or not found.is_right]
        there = {peer for peer, _ in present}
        return tuple(sorted(found, key=lambda f: (f.is_right, f.peer not in there))[:MAX_FOUND])

    def snapshot(self) -> tuple[ProbeRow, ...]:
        return tuple(ProbeRow(peer=f.peer, is_right=f.is_right, why=why) for f, why in self._found.values())

    async def run(self) -> None:
        """Probe whoever is to be probed, one after the other, until cancelled."""
        around = self._around
        while True:
            await trio.sleep(LOOK_INTERVAL_S * around.rng.uniform(0.75, 1.25))
            now, view = around.wall_clock(), around.directory.view()
            spans = view.listed()
            unsaid_s = self._look_who_is_unsaid(spans, view.peers.values(), now)
            due = choose_probes(around.me, spans, around.exchange.voucher_of, self._probed_at, now, unsaid_s)
            for target, mine in due:
                key = target.peer, name_of(target)
                try:
                    decision = await self._probe(target, mine)
                except SwarmError as error:  # gone, busy, or this machine's own worker is
                    logger.info("no probe of %s: %s", target.peer[-8:], error)
                    self._probed_at[key] = around.wall_clock() - PROBE_LIFETIME_S + AGAIN_S
                    continue
                self._probed_at[key] = around.wall_clock()
                while len(self._probed_at) > MAX_REMEMBERED:
                    del self._probed_at[next(iter(self._probed_at))]
                self._note(target, decision)

    def _look_who_is_unsaid(
        self, spans: Sequence[SpanRecord], peers: Iterable[PeerRecord], now: float
    ) -> dict[tuple[str, bytes], float]:
        """For how long fewer than enough have said something of a server, by (peer, name)."""
        unsaid = [about for about, n in count_speakers(spans, peers).items() if n < PROBES_OF_EACH]
        self._unsaid_since = {about: self._unsaid_since.get(about, now) for about in unsaid}
        return {about: now - since for about, since in self._unsaid_since.items()}

    def _note(self, target: SpanRecord, decision: Decision[bool]) -> None:
        level = logging.INFO if decision.action else logging.WARNING
        logger.log(level, "probe of [%d,%d) on %s: %s", target.start, target.end, target.peer, decision.reason)
        voucher = self._around.exchange.voucher_of(PeerId(target.peer))
        self._found.pop((target.peer, name_of(target)), None)  # the newest last
        self._found[target.peer, name_of(target)] = make_finding(target, decision.action, voucher), decision.reason
        while len(self._found) > MAX_REMEMBERED:
            del self._found[next(iter(self._found))]
        self._around.directory.announce_soon()

    def _server_of(self, span: SpanRecord) -> Server:
        """This daemon's own server of a span. Raises PeerTimeout when it serves it no more."""
        for hosting in self._hosts:
            if hosting.slot == span.slot and hosting.server is not None and hosting.is_online:
                return hosting.server
        raise PeerTimeout("this machine does not serve these blocks any more")

    # --- what others claim -----------------------------------------------------------------------------------

    async def judge(self, channel: Channel, message: Accuse, payload: memoryview) -> None:
        """Compute what somebody is accused of, and believe that. Raises Refused, RemoteProtocolError."""
        spans = self._around.directory.view().spans
        about = (message.peer, message.model, message.slot)
        accused = next((s for s in spans if (s.peer, s.model, s.slot) == about), None)
        mine = [s for s in spans if s.peer == self._around.me and accused is not None and shared_blocks(s, accused)]
        if accused is None or not mine:
            raise Refused(Code.NOT_HERE, "these blocks are not served here, or not by who is accused")
        if self._judging.locked():
            raise Refused(Code.NO_CAPACITY, "another accusation is looked at", AGAIN_S)
        async with self._judging:
            shown = read_untrusted(payload, message.peer)
            about_session = (message.peer, shown.receipt.session)
            age_s = self._around.wall_clock() - shown.at
            if about_session in self._judged or abs(age_s) > EVIDENCE_LIFETIME_S:
                raise Refused(Code.REFUSED, f"evidence of {age_s:.0f} s ago, or judged before")
            if not Span(mine[0].start, mine[0].end).covers(shown.span) or shown.receipt.model != accused.model:
                raise Refused(Code.NOT_HERE, f"blocks {shown.span} are not served here")
            if (shown.receipt.numerics, shown.dtype) != (accused.numerics, accused.dtype):
                raise Refused(Code.REFUSED, "the accused computes otherwise by now than it did then")
            decision, is_clear = await self._recomputed(shown, accused, mine[0])
        if decision.action and is_clear:
            self._around.rpc.standing.fault(channel.peer, Fault.FALSE_ACCUSATION, decision.reason)
        if not decision.action:
            self._judged[about_session] = None
            while len(self._judged) > MAX_REMEMBERED:
                del self._judged[next(iter(self._judged))]
            self._around.rpc.standing.fault(PeerId(accused.peer), Fault.WRONG_RESULTS, decision.reason)
            self._note(accused, decision)
        await channel.send(Believed(re=message.id, is_wrong=not decision.action, why=decision.reason))

    async def _recomputed(
        self, shown: CoherentEvidence, accused: SpanRecord, mine: SpanRecord
    ) -> tuple[Decision[bool], bool]:
        """Is it equal, and clearly so?"""
        b, n, _ = shown.entered.shape
        try:
            server = self._server_of(mine)
            if b * n > server.ledger.room_tokens:
                raise Refused(Code.NO_CAPACITY, f"no room for {b * n} tokens now", AGAIN_S)
            here = await server.own.compute(shown.span, shown.entered)
        except (SwarmUnavailable, PeerTimeout) as error:
            raise Refused(Code.NO_CAPACITY, str(error), AGAIN_S) from None
        last = slice(-shown.left.shape[1], None)
        if not np.isfinite(here).all():
            raise Refused(Code.REFUSED, "these numbers overflow here, too")
        bound = bound_of(accused.dtype, accused.quantize)
        found = errors(shown.entered[:, last], shown.left, here[:, last], bound)
        return is_equal(found, bound), float(found.max()) < CLEARLY_BELOW * bound.token

    # --- one probe -------------------------------------------------------------------------------------------

    async def _probe(self, target: SpanRecord, mine: SpanRecord) -> Decision[bool]:
        """Compare what both make of the same input. Raises SwarmError when there is nothing to compare."""
        span, server = shared_blocks(mine, target), self._server_of(mine)
        hidden = server.own.hidden_size
        if span is None or not hidden:
            raise PeerTimeout("nothing to compare")
        seed = self._around.rng.getrandbits(63)
        values = np.random.default_rng(seed).standard_normal((1, N_TOKENS, hidden), dtype=np.float32)
        entered = round_to_dtype(values, target.dtype)
        here = await server.own.compute(span, entered)
        with trio.move_on_after(PROBE_TIMEOUT_S):
            there = await self._ask(target, span, entered)
            if there.shape != here.shape:
                return Decision(False, f"expected hidden states {here.shape}, got {there.shape}")
            bound = bound_of(target.dtype, target.quantize)
            return is_equal(errors(entered, there, here, bound), bound)
        raise PeerTimeout(f"{target.peer[-8:]} did not answer within {PROBE_TIMEOUT_S:.0f} s")

    async def _ask(self, target: SpanRecord, span: Span, entered: Floats) -> Floats:
        """What another server makes of an input [1, t, d]. Raises PeerError."""
        rpc, peer, key = self._around.rpc, PeerId(target.peer), os.urandom(16)
        answers, coming = trio.open_memory_channel[Floats](1)
        self._answers[key, peer] = answers
        opening = opening_of(key, target, span, entered.shape[1] + 1, receipts=True)
        try:
            async with short_session(rpc, self._around.exchange, peer, opening) as (reply, _):
                if not isinstance(reply, Opened):
                    raise RemoteProtocolError(f"expected an opened session, got {type(reply).__name__}")
                meta, payload = pack_array(entered, target.dtype)
                channel = await rpc.channel(peer)
                await channel.send(Op(session=key, start=span.start, epoch=1, seq=1, tensor=meta), payload)
                return await coming.receive()
        finally:
            del self._answers[key, peer]

    def take(self, peer: PeerId, message: AnyMessage, frame: Frame) -> bool:
        """Take what comes for a probe. Raises RemoteProtocolError for numbers that cannot be read."""
        if not self._answers or not isinstance(message, Op | Progress | ReceiptIs):
            return False
        waiting = self._answers.get((message.session, peer))
        if waiting is None:
            return False
        if isinstance(message, Op) and message.tensor is not None:
            with suppress(trio.WouldBlock):
                waiting.send_nowait(unpack_array_untrusted(message.tensor, frame.payload))
        return True
