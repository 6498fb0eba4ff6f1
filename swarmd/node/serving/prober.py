"""Holders of the same blocks compare: a seeded input through another's blocks, and through one's own.

A probe finds broken memory, wrong weights and undeclared rounding before anybody's text meets them, for the price of 32
tokens. To the probed server it is a session like any other. Findings are announced. An accusation of a third server
(``Accuse``) is computed here before it is believed. ``plan.trust.reputation`` decides which servers are probed.
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
from swarmd.plan.trust.equality import bound_of, is_equal, measure_errors
from swarmd.plan.trust.judge import judge_by_own_result
from swarmd.plan.trust.reputation import (
    PROBE_LIFETIME_S,
    PROBES_OF_EACH,
    choose_probes,
    count_speakers,
    make_finding,
    name_of,
    shared_blocks,
)
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
CLEARLY_BELOW = 0.1  # of the bound: near it, two honest machines may judge the same numbers differently
EVIDENCE_LIFETIME_S = 3_600.0  # a server that was repaired since is not accused again
MAX_REMEMBERED = 1_024  # servers, the newest
MAX_FOUND = 32  # of a record: wrong ones first


# A probe, and what follows from it:
#
#     probed server <-- session with 32 seeded tokens -- this daemon -- the same tokens --> its own worker
#     right or wrong --> this peer's record, as a finding --> all members: ``plan.trust.reputation`` weighs findings
#
# A server cannot know that a session is a probe: it opens, runs and closes as a short question does, and the input
# looks like hidden states of the announced type. A finding counts with the sponsor of its speaker only, so many keys of
# one sponsor are one voice.
#
# A claim about a third server (``judge``) is work that another peer orders. So one is computed at a time, only from
# evidence that the accused has signed; who is blamed then is ``plan.trust.judge.judge_by_own_result``'s.
class Prober:
    """What this daemon has found of others, and goes on finding."""

    def __init__(self, services: HostingServices, hosts: Hosts) -> None:
        self._services = services
        self._hosts = hosts
        self._probed_at: dict[tuple[str, bytes], float] = {}
        self._findings: dict[tuple[str, bytes], tuple[ProbeFinding, str]] = {}
        self._unsaid_since: dict[tuple[str, bytes], float] = {}  # servers of which too few have said anything
        self._judging = trio.Lock()
        self._judged: dict[tuple[str, bytes], None] = {}  # peer and session, in order of their judgement
        self._answers: dict[tuple[bytes, PeerId], trio.MemorySendChannel[Floats]] = {}

    def record_findings(self) -> tuple[ProbeFinding, ...]:
        """Give findings as records carry them: of servers that are present, and of absent ones that were wrong."""
        spans = self._services.directory.view().spans
        present = {(span.peer, name_of(span)) for span in spans}
        present_peers = {span.peer for span in spans}
        findings = []
        for key, (known_finding, _) in self._findings.items():
            if key in present or not known_finding.is_right:
                findings.append(known_finding)
        findings.sort(key=lambda f: (f.is_right, f.peer not in present_peers))
        return tuple(findings[:MAX_FOUND])

    def snapshot(self) -> tuple[ProbeRow, ...]:
        rows = []
        for known_finding, why in self._findings.values():
            rows.append(ProbeRow(peer=known_finding.peer, is_right=known_finding.is_right, why=why))
        return tuple(rows)

    async def run(self) -> None:
        """Probe the servers that are due, one after the other, until cancelled."""
        services = self._services
        while True:
            await trio.sleep(LOOK_INTERVAL_S * services.rng.uniform(0.75, 1.25))
            now = services.steady_clock()
            view = services.directory.view()
            spans = view.listed()
            unsaid_s = self._unsaid_times(spans, view.peers.values(), now)
            due = choose_probes(services.me, spans, services.exchange.roster.voucher_of, self._probed_at, now, unsaid_s)
            for target, mine in due:
                key = (target.peer, name_of(target))
                try:
                    decision = await self._probe(target, mine)
                except SwarmError as error:  # gone, busy, or this machine's own worker is
                    logger.info("no probe of %s: %s", target.peer[-8:], error)
                    self._probed_at[key] = services.steady_clock() - PROBE_LIFETIME_S + AGAIN_S
                    continue
                self._probed_at[key] = services.steady_clock()
                while len(self._probed_at) > MAX_REMEMBERED:
                    del self._probed_at[next(iter(self._probed_at))]
                self._note(target, decision)

    def _unsaid_times(
        self, spans: Sequence[SpanRecord], peers: Iterable[PeerRecord], now: float
    ) -> dict[tuple[str, bytes], float]:
        """Note for how long fewer than PROBES_OF_EACH have said something of a server, in seconds by (peer, name)."""
        unsaid = [server for server, n in count_speakers(spans, peers).items() if n < PROBES_OF_EACH]
        self._unsaid_since = {server: self._unsaid_since.get(server, now) for server in unsaid}
        return {server: now - since for server, since in self._unsaid_since.items()}

    def _note(self, target: SpanRecord, decision: Decision[bool]) -> None:
        level = logging.INFO if decision.action else logging.WARNING
        logger.log(level, "probe of [%d,%d) on %s: %s", target.start, target.end, target.peer, decision.reason)
        voucher = self._services.exchange.roster.voucher_of(PeerId(target.peer))
        key = (target.peer, name_of(target))
        self._findings.pop(key, None)  # the newest last
        self._findings[key] = (make_finding(target, decision.action, voucher), decision.reason)
        while len(self._findings) > MAX_REMEMBERED:
            del self._findings[next(iter(self._findings))]
        self._services.directory.announce_soon()

    def _server_of(self, span: SpanRecord) -> Server:
        """This daemon's own server of a span. Raises PeerTimeout when it serves it no more."""
        for hosting in self._hosts:
            if hosting.slot == span.slot and hosting.server is not None and hosting.is_online:
                return hosting.server
        raise PeerTimeout("this machine does not serve these blocks any more")

    # --- what others claim -----------------------------------------------------------------------------------

    async def judge(self, channel: Channel, message: Accuse, payload: memoryview) -> None:
        """Compute what another server is accused of, and believe that. Raises Refused, RemoteProtocolError."""
        spans = self._services.directory.view().spans
        accused_key = (message.peer, message.model, message.slot)
        matching = [s for s in spans if (s.peer, s.model, s.slot) == accused_key]
        accused = matching[0] if matching else None
        own_spans = [s for s in spans if s.peer == self._services.me]
        comparable = [s for s in own_spans if accused is not None and shared_blocks(s, accused)]
        if accused is None or not comparable:
            raise Refused(Code.NOT_HERE, "these blocks are not served here, or not by who is accused")
        if self._judging.locked():
            raise Refused(Code.NO_CAPACITY, "another accusation is looked at", AGAIN_S)
        mine = comparable[0]
        async with self._judging:
            shown = read_untrusted(payload, message.peer)
            case = (message.peer, shown.receipt.session)
            age_s = self._services.wall_clock() - shown.at
            if case in self._judged or abs(age_s) > EVIDENCE_LIFETIME_S:
                raise Refused(Code.REFUSED, f"evidence of {age_s:.0f} s ago, or judged before")
            is_held = Span(mine.start, mine.end).covers(shown.span)
            if not is_held or shown.receipt.model != accused.model:
                raise Refused(Code.NOT_HERE, f"blocks {shown.span} are not served here")
            if (shown.receipt.numerics, shown.dtype) != (accused.numerics, accused.dtype):
                raise Refused(Code.REFUSED, "the accused computes otherwise by now than it did then")
            decision, is_clear = await self._recompute(shown, accused, mine)
        ruling = judge_by_own_result(PeerId(accused.peer), channel.peer, decision, is_clear=is_clear)
        for charged, fault in ruling.faults.items():
            self._services.rpc.standing.fault(charged, fault, ruling.reason)
        if not ruling.is_cleared:
            self._judged[case] = None
            while len(self._judged) > MAX_REMEMBERED:
                del self._judged[next(iter(self._judged))]
            self._note(accused, decision)
        answer = Believed(re=message.id, is_wrong=not ruling.is_cleared, why=ruling.reason)
        await channel.send(answer)

    async def _recompute(
        self, shown: CoherentEvidence, accused: SpanRecord, mine: SpanRecord
    ) -> tuple[Decision[bool], bool]:
        """Compute the evidence here: was the accused right, and clearly so?"""
        b, n, _ = shown.entered.shape
        try:
            server = self._server_of(mine)
            if b * n > server.ledger.room_tokens(trio.current_time()):
                raise Refused(Code.NO_CAPACITY, f"no room for {b * n} tokens now", AGAIN_S)
            own_output = await server.recompute.compute(shown.span, shown.entered)
        except (SwarmUnavailable, PeerTimeout) as error:
            raise Refused(Code.NO_CAPACITY, str(error), AGAIN_S) from None
        last = slice(-shown.left.shape[1], None)
        if not np.isfinite(own_output).all():
            raise Refused(Code.REFUSED, "these numbers overflow here, too")
        bound = bound_of(accused.dtype, accused.quantize)
        entered = shown.entered[:, last]
        deviations = measure_errors(entered, shown.left, own_output[:, last], bound)
        is_clear = float(deviations.max()) < CLEARLY_BELOW * bound.token
        return is_equal(deviations, bound), is_clear

    # --- one probe -------------------------------------------------------------------------------------------

    async def _probe(self, target: SpanRecord, mine: SpanRecord) -> Decision[bool]:
        """Compare what both make of the same input. Raises SwarmError when there is nothing to compare."""
        span = shared_blocks(mine, target)
        server = self._server_of(mine)
        hidden_size = server.recompute.hidden_size
        if span is None or not hidden_size:
            raise PeerTimeout("nothing to compare")
        seed = self._services.rng.getrandbits(63)
        shape = (1, N_TOKENS, hidden_size)
        values = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
        values[..., hidden_size - server.recompute.n_digits :] = 0.0  # the first token of the vocabulary
        entered = round_to_dtype(values, target.dtype)
        own_output = await server.recompute.compute(span, entered)
        with trio.move_on_after(PROBE_TIMEOUT_S):
            their_output = await self._ask(target, span, entered)
            if their_output.shape != own_output.shape:
                return Decision(False, f"expected hidden states {own_output.shape}, got {their_output.shape}")
            bound = bound_of(target.dtype, target.quantize)
            return is_equal(measure_errors(entered, their_output, own_output, bound), bound)
        raise PeerTimeout(f"{target.peer[-8:]} did not answer within {PROBE_TIMEOUT_S:.0f} s")

    async def _ask(self, target: SpanRecord, span: Span, entered: Floats) -> Floats:
        """What another server makes of an input [1, t, d]. Raises PeerError."""
        rpc = self._services.rpc
        peer = PeerId(target.peer)
        key = os.urandom(16)
        answers, coming = trio.open_memory_channel[Floats](1)
        self._answers[key, peer] = answers
        opening = opening_of(key, target, span, entered.shape[1] + 1, receipts=True)
        try:
            async with short_session(rpc, self._services.exchange, peer, opening) as (reply, _):
                if not isinstance(reply, Opened):
                    raise RemoteProtocolError(f"expected an opened session, got {type(reply).__name__}")
                meta, payload = pack_array(entered, target.dtype)
                channel = await rpc.channel(peer)
                op = Op(session=key, start=span.start, epoch=1, seq=1, tensor=meta)
                await channel.send(op, payload)
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
