"""A session over a chain of servers: steps through it, notices trouble, repairs the chain and goes on.

The client names the chain, opens a hop on each server, then sends ops to the first only; the answer comes from
the last. When a hop dies it is replaced, and the hop before it replays what the replacement lacks: nothing already
answered is computed for the client again, and nothing starts from the prompt while a predecessor lives.
docs/protocol.md, "Sessions", tells the whole story.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import torch
import trio

from swarmd.client.links import Declined, Link, Repair, Statistics, Swarm, Terms, joined, lacks, suits
from swarmd.client.ops import codec_for, cut, read_answer
from swarmd.client.own import give
from swarmd.client.requests import Requests
from swarmd.compute.history import Budget, History, Sent
from swarmd.compute.session import encode_op, replay_frames
from swarmd.errors import (
    CacheExhausted,
    Code,
    ConfigError,
    NoRoute,
    PeerError,
    PeerTimeout,
    Refused,
    SwarmError,
    SwarmUnavailable,
)
from swarmd.plan.routing import Hop, Route, best_route
from swarmd.plan.session import Watch
from swarmd.protocol.fields import Message
from swarmd.protocol.frames import Frame
from swarmd.protocol.messages import (
    AnyMessage,
    CloseSession,
    Edit,
    Inherited,
    Leaving,
    Op,
    Opened,
    Progress,
    Refusal,
    Replayed,
    Rerouted,
    Suspect,
)
from swarmd.protocol.records import SpanRecord
from swarmd.values import Decision, PeerId, Span

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 8.0
REROUTE_TIMEOUT_S = 5.0
HAND_OVER_TIMEOUT_S = 10.0
MAX_IN_FLIGHT = 16
REPLAY_TIMEOUT_S = 120.0
LOOK_INTERVAL_S = 0.25
PATIENCE_S = 60.0
PINNED_PATIENCE_S = 12.0
RETRY_PAUSE_S = 0.5
LEAVING_FOR_S = 20.0  # a server that stops serving is not asked for so long
BUSY_FOR_S = 2.0
HOP_LOST = (Code.NO_SESSION, Code.SESSION_LOST, Code.NOT_SERVING)
CHAIN_BROKEN = (Code.OP_GAP, Code.STRANGER)


class ChainSession:
    """One session. All methods run in the client's trio thread; steps come one at a time."""

    def __init__(self, swarm: Swarm, terms: Terms, budget: Budget) -> None:
        self.key = os.urandom(16)
        self.terms = terms
        self.links: list[Link] = []
        self.statistics = Statistics()
        self.layer_arity = 0
        self.codec = Decision("raw", "not opened yet")
        self._swarm = swarm
        self._history = History(terms.grade == "exact", budget)
        self._epoch = 1
        self._seq = 0
        self._answered = 0
        self._answers: dict[int, tuple[Op, Frame]] = {}
        self._trouble: str | None = None
        self._fatal: Exception | None = None
        self._declined = Declined()
        self._opened: set[tuple[PeerId, int]] = set()
        self._is_over = self._is_closed = False
        self._quiet_repair: trio.Event | None = None
        self._inherited: dict[int, int] = {}
        self._numerics = ""
        self._requests = Requests(self.key, terms, swarm.addresses_of)
        self._changed = trio.Event()

    # --- the life of a session -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Choose a chain and open every hop of it; retries elsewhere while a refusal allows. Raises SwarmError."""
        deadline = trio.current_time() + (PINNED_PATIENCE_S if self.terms.route else PATIENCE_S)
        reason: SwarmError | None = None
        while True:
            try:
                hops = list(self.terms.route) or list(self._route(Span(0, self.terms.n_blocks)).hops)
                self.links = [Link(hop) for hop in hops]
                self.codec = codec_for(self._swarm, self.terms, [hop.peer for hop in hops])
                failures = await self._open_hops(range(len(self.links)))
                if not failures:
                    await self._give_back_strays()
                    return
                self._raise_if_hopeless(failures)
                reason = next(iter(failures.values()))
                for index, error in failures.items():
                    self._drop(self.links[index], error)
            except NoRoute as error:
                if reason is not None and self._is_declined_for_good():
                    raise reason from None
                reason = reason or error  # what a server said is worth more than that it is left out meanwhile
            if trio.current_time() > deadline:
                raise reason
            self._trouble = None
            await self._look_again()

    async def step(
        self,
        edits: tuple[Edit, ...],
        hidden: torch.Tensor | None,
        positions: torch.Tensor | None,
        mask: torch.Tensor | None,
        record_past: bool,
        want: int | None = None,
    ) -> torch.Tensor | None:
        """Send tokens through the chain; returns the last block's output [b, t, d].

        A long prompt becomes several ops, which fill the chain like a pipeline. With ``want`` only the last so many
        tokens of each row are true, the others zero. Raises SwarmError, after which the session is over: its servers
        may have changed or not.
        """
        while self._quiet_repair is not None:
            await self._quiet_repair.wait()
        if self._is_over:
            raise ConfigError("this session ended with an error: start a new one")
        self._is_over = True  # until the answers are here
        self._fatal = None
        first = self._seq + 1
        whole = Sent(first, edits, hidden, positions, mask, record_past)
        is_exact = self.terms.grade == "exact"  # which must not depend on what was measured
        parts = cut(whole, () if is_exact else self._prefill_speeds())
        outs: list[torch.Tensor] = []
        for n_sent, sent in enumerate(parts, 1):
            left = sum(0 if p.hidden is None else p.hidden.shape[1] for p in parts[n_sent:])
            await self._send(sent, None if want is None else max(0, want - left))
            while n_sent - len(outs) >= (MAX_IN_FLIGHT if n_sent < len(parts) else 1):
                outs.append(await self._receive(first + len(outs), parts[len(outs)].hidden))
        self._is_over = False
        return None if hidden is None else outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _prefill_speeds(self) -> list[float]:
        known = {s.peer: s for s in self._swarm.view().serving(self.terms.model)}
        records = [known.get(link.hop.peer) for link in self.links]
        return [(r.prefill_tokens_per_s or 0.0) if r else 0.0 for r in records]

    async def _send(self, sent: Sent, want: int | None) -> None:
        self._seq = sent.seq
        self.statistics.steps += 1
        if self._trouble is None:
            frame = encode_op(self.key, 0, self._epoch, self._answered, sent, Op(want=want), None, self.codec.action)
            await self._send_to(0, sent.seq, frame)
        self._history.settle(self._answered)  # while the chain computes
        self._history.add(sent)

    async def _receive(self, seq: int, entered: torch.Tensor | None) -> torch.Tensor:
        """Wait for the answer to op ``seq``; what the client did not want comes as zeros. Raises SwarmError."""
        while seq not in self._answers:
            await self._wait()
        op, frame = self._answers.pop(seq)
        return torch.empty(0) if entered is None else read_answer(op, frame, entered)

    async def close(self) -> None:
        self._is_closed = True
        self._history.close()
        await self._give_back(set())

    async def _give_back_strays(self) -> None:
        """Close what was opened on the way to the present chain and is no part of it."""
        await self._give_back({(link.hop.peer, link.hop.span.start) for link in self.links})

    async def _give_back(self, kept: set[tuple[PeerId, int]]) -> None:
        """Close every hop that was opened, but those in ``kept``."""
        for peer, start in self._opened - kept:
            channel = self._swarm.rpc.existing(peer)
            if channel is not None:
                with trio.move_on_after(1):
                    try:
                        await channel.send(CloseSession(session=self.key, start=start))
                    except PeerError:
                        continue
        self._opened &= kept

    async def _look_again(self) -> None:
        """Wait a little and ask for newer records; nobody answering is a reason to go on waiting, not to fail."""
        await trio.sleep(RETRY_PAUSE_S)
        try:
            await self._swarm.refresh()
        except SwarmError as error:
            logger.info("no newer records: %s", error)

    @property
    def chain(self) -> tuple[str, ...]:
        return tuple(str(link.hop) for link in self.links)

    # --- what peers say --------------------------------------------------------------------------------------

    async def on_message(self, peer: PeerId, message: AnyMessage, frame: Frame) -> None:
        """Take one message about this session."""
        if isinstance(message, Op):
            await self._on_op(peer, message, frame)
        elif isinstance(message, Progress):
            link = self._link_at(message.start)
            if link is not None and link.hop.peer == peer and message.epoch == self._epoch:
                link.watch.on_progress(message.finished, trio.current_time())
        elif isinstance(message, Suspect):
            self._on_suspect(peer, message)
        elif isinstance(message, Refusal):
            self._on_refusal(peer, message)
        elif isinstance(message, Inherited):
            link = self._link_at(message.start)
            if link is not None and link.hop.peer == peer and message.epoch == self._epoch:
                self._inherited[message.start] = message.seq
                self._notify()
        elif isinstance(message, Leaving):
            self._on_leaving(peer, message)

    def _on_leaving(self, peer: PeerId, message: Leaving) -> None:
        """A hop will stop serving: move it now, or in the pause between two steps."""
        link = self._link_at(message.start)
        if link is None or link.hop.peer != peer or link.is_leaving:
            return
        link.is_leaving = True
        self._declined.add(peer, trio.current_time(), LEAVING_FOR_S)
        self._worry(f"{link.hop} stops serving")
        if not self._is_over and not self._is_closed:
            self._swarm.start_soon(self._repair_quietly)

    async def _repair_quietly(self) -> None:
        """Repair between two steps; the next step waits for it, and tries again if it failed."""
        if self._is_over or self._quiet_repair is not None:
            return
        self._quiet_repair = trio.Event()
        try:
            await self._repair()
        except SwarmError as error:
            self._worry(str(error))
        finally:
            self._quiet_repair.set()
            self._quiet_repair = None
        if self._is_closed:
            await self._give_back(set())

    def on_gone(self, peer: PeerId) -> None:
        """A connection ended. Whether its peer is dead is found out by asking it."""
        if any(link.hop.peer == peer for link in self.links):
            self._worry(f"the connection to {peer[-8:]} ended")

    async def _on_op(self, peer: PeerId, op: Op, frame: Frame) -> None:
        if op.epoch != self._epoch:
            return
        if op.start < self.terms.n_blocks:
            index = self._index_at(op.start)
            if index and self.links[index - 1].hop.peer == peer:
                self.statistics.forwarded += 1
                await self._send_to(index, op.seq, frame.raw)
            return
        if self.links[-1].hop.peer == peer and op.seq == self._answered + 1 <= self._seq:
            self.statistics.frames_received += 1
            self._answers[op.seq] = op, frame
            self._answered = op.seq
            for link in self.links:  # whoever is in the way of an answer is alive
                link.watch.on_progress(op.seq, trio.current_time())
                self._swarm.rpc.standing.did_well(link.hop.peer)
            self._notify()

    def _on_suspect(self, peer: PeerId, message: Suspect) -> None:
        index = self._index_at(message.start)
        is_neighbour = bool(index) and self.links[(index or 1) - 1].hop.peer == peer
        if index is not None and is_neighbour and message.epoch == self._epoch and message.seq > self._answered:
            self._lose(self.links[index], f"{peer[-8:]} says: {message.reason}")

    def _on_refusal(self, peer: PeerId, refusal: Refusal) -> None:
        code, index = Code(refusal.code), self._index_at(refusal.start)
        if refusal.epoch not in (0, self._epoch) or index is None or code is Code.STALE_EPOCH:
            return
        link = self.links[index]
        if peer not in (link.hop.peer, self.links[max(0, index - 1)].hop.peer):
            return  # of a hop that is no more
        if code in HOP_LOST or code in CHAIN_BROKEN:
            link.is_lost = link.is_lost or code in HOP_LOST  # it says so itself: nobody is blamed
            self._worry(f"{link.hop}: {refusal.message}")
        else:
            text = f"{link.hop} refused: {refusal.message}"
            self._fatal = CacheExhausted(text) if code is Code.TOO_LONG else Refused(code, text)
            self._notify()

    # --- waiting and repairing -------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Wait for news, repair what broke, suspect who is silent. Raises SwarmError when it is hopeless."""
        if self._fatal is not None:
            raise self._fatal
        if self._trouble is not None:
            await self._repair()
            return
        changed = self._changed
        with trio.move_on_after(LOOK_INTERVAL_S) as look:
            await changed.wait()
        if look.cancelled_caught:
            for link in self.links:
                if (reason := link.watch.suspicion(trio.current_time())) is not None:
                    self._lose(link, reason)

    async def _repair(self) -> None:
        """Make the chain whole again and bring every hop up to date. Raises NoRoute after PATIENCE_S."""
        begun = trio.current_time()
        reason, before = self._trouble or "", self.chain
        lost, moved = list[str](), list[str]()
        counts = [0, 0]
        while True:
            self._trouble = None
            self._epoch += 1
            moved += await self._move_leaving()
            lost += [str(link.hop) for link in self.links if link.is_lost and str(link.hop) not in lost]
            try:
                self._replace_lost()
            except NoRoute:
                if trio.current_time() - begun > PATIENCE_S:
                    raise
                self._trouble = reason
                await self._look_again()
                continue
            if await self._tell_neighbours() and await self._catch_up(counts):
                break
            if trio.current_time() - begun > PATIENCE_S:
                raise SwarmUnavailable(f"no repair within {PATIENCE_S:.0f} s: {self._trouble or reason}")
            self._trouble = reason
            await trio.sleep(0.05)
        repair = Repair(
            tuple(lost),
            before,
            self.chain,
            counts[0],
            counts[1],
            bool(lost) and before[0] in lost,
            trio.current_time() - begun,
            reason,
            tuple(moved),
        )
        self.statistics.repairs.append(repair)
        await self._give_back_strays()
        logger.info("chain repaired in %.2f s: %s -> %s (%s)", repair.stall_s, before, self.chain, reason)

    def _replace_lost(self) -> None:
        """Put the cheapest live hops where lost ones were; neighbouring lost hops are replaced together."""
        links: list[Link] = []
        index = 0
        while index < len(self.links):
            if not self.links[index].is_lost:
                links.append(self.links[index])
                index += 1
                continue
            first = index
            while index < len(self.links) and self.links[index].is_lost:
                index += 1
            gap = Span(self.links[first].hop.span.start, self.links[index - 1].hop.span.end)
            previous = links[-1].hop.peer if links else None
            links += [Link(hop) for hop in self._route(gap, previous).hops]
        self.links = joined(links)

    async def _move_leaving(self) -> list[str]:
        """Have hops that stop serving hand their caches to other holders; where that fails they count as lost."""
        moved = []
        for index, link in enumerate(self.links):
            if not link.is_leaving or link.is_lost:
                continue
            try:
                await self._hand_over(index, link)
                moved.append(str(link.hop))
            except (PeerError, NoRoute) as error:
                logger.info("%s cannot hand over: %s", link.hop, error)
                self._trouble = None
                self.links[index] = link
                link.is_lost = True
        return moved

    async def _hand_over(self, index: int, link: Link) -> None:
        """Open the hop at another holder of its blocks and have the caches sent there. Raises PeerError or NoRoute."""
        hop = link.hop
        found = self._route(hop.span, whole=True).hops[0]
        heir = self.links[index] = Link(Hop(found.peer, hop.span, found.numerics))
        failures: dict[int, PeerError] = {}
        self._inherited.pop(hop.span.start, None)
        await self._open_hop(index, failures, inherit=hop.peer)
        if failures:
            raise failures[index]
        request = partial(self._requests.hand_over, link, self._epoch, heir.hop.peer)
        await self._swarm.rpc.call(hop.peer, request, timeout_s=HAND_OVER_TIMEOUT_S)
        with trio.move_on_after(HAND_OVER_TIMEOUT_S):
            while hop.span.start not in self._inherited and not heir.is_lost:
                await self._changed.wait()
        if heir.is_lost or hop.span.start not in self._inherited:
            raise PeerTimeout(f"{heir.hop} did not take the caches over")
        heir.received = self._inherited.pop(hop.span.start)

    async def _tell_neighbours(self) -> bool:
        """Open new hops and give surviving ones their neighbours; False when more was lost on the way."""
        for link in self.links:
            link.watch = Watch()
        fresh = [i for i, link in enumerate(self.links) if link.received is None]
        failures: dict[int, PeerError] = {}
        async with trio.open_nursery() as nursery:
            for index, link in enumerate(self.links):
                if link.received is not None:
                    nursery.start_soon(self._reroute, index, failures)
            failures.update(await self._open_hops(fresh))
        self._raise_if_hopeless({i: e for i, e in failures.items() if i in fresh})
        for index, error in failures.items():
            self._drop(self.links[index], error)
        return not failures

    async def _reroute(self, index: int, failures: dict[int, PeerError]) -> None:
        link = self.links[index]
        request = partial(self._requests.reroute, self.links, index, self._epoch, self._answered)
        try:
            reply, _ = await self._swarm.rpc.call(link.hop.peer, request, timeout_s=REROUTE_TIMEOUT_S)
        except PeerError as error:
            failures[index] = error
            return
        link.received = reply.received if isinstance(reply, Rerouted) else 0
        if self._answered and not link.received:  # a new hop whose replay was lost on the way needs all of it
            await self._open_hop(index, failures)

    async def _catch_up(self, counts: list[int]) -> bool:
        """Have every sender give its receiver what that lacks, the last pair first; False when one of them failed."""
        for index in range(len(self.links), -1, -1):
            plan = lacks(self.links, index, self._seq, self._answered, self.terms.n_blocks)
            if plan is None:
                continue
            have, silent_through, replay_end = plan
            try:
                if index == 0:
                    ops, tokens = await self._replay_own(have, silent_through, replay_end)
                else:
                    ops, tokens = await self._ask_replay(index - 1, have, silent_through, replay_end)
            except PeerError as error:
                if self._trouble is None:
                    self._drop(self.links[max(0, index - 1)], error)
                return False
            counts[0] += ops
            counts[1] += tokens if have is None else 0
        for link in self.links:
            link.received = self._answered if link.received is None else link.received
        return True

    async def _replay_own(self, have: int | None, silent_through: int, replay_end: int) -> tuple[int, int]:
        marks = Op(silent_through=silent_through, replay_end=replay_end)
        n_ops = 0
        for frame in replay_frames(self._history, (self.key, 0, self._epoch), have, marks, self.codec.action):
            n_ops += 1
            channel = await self._swarm.rpc.channel(self.links[0].hop.peer)
            await channel.send_raw(frame)
        self.links[0].watch.on_sent(self._seq, trio.current_time())
        return n_ops, self._history.n_tokens

    async def _ask_replay(self, index: int, have: int | None, silent_through: int, replay_end: int) -> tuple[int, int]:
        link = self.links[index]
        request = partial(self._requests.replay, link, self._epoch, (have, silent_through, replay_end))
        # the sender answers once its worker has reached the request; the neighbours' watches run meanwhile
        reply, _ = await self._call_while_sound(link.hop.peer, request)
        return (reply.ops, reply.tokens) if isinstance(reply, Replayed) else (0, 0)

    async def _call_while_sound(self, peer: PeerId, request: Callable[[int], Message]) -> tuple[AnyMessage, Frame]:
        """Call, but give up as soon as trouble with the chain becomes known. Raises PeerError."""
        result: list[tuple[AnyMessage, Frame]] = []
        failure: list[PeerError] = []

        async def call(scope: trio.CancelScope) -> None:
            try:
                result.append(await self._swarm.rpc.call(peer, request, timeout_s=REPLAY_TIMEOUT_S))
            except PeerError as error:
                failure.append(error)
            scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, nursery.cancel_scope)
            while self._trouble is None:
                await self._changed.wait()
            nursery.cancel_scope.cancel()
        if failure:
            raise failure[0]
        if not result:
            raise PeerTimeout(self._trouble or f"{peer} did not finish its replay")
        return result[0]

    # --- opening ---------------------------------------------------------------------------------------------

    async def _open_hops(self, indexes: range | list[int]) -> dict[int, PeerError]:
        failures: dict[int, PeerError] = {}
        async with trio.open_nursery() as nursery:
            for index in indexes:
                nursery.start_soon(self._open_hop, index, failures)
        return failures

    async def _open_hop(self, index: int, failures: dict[int, PeerError], inherit: str = "") -> None:
        link = self.links[index]
        self._swarm.rpc.network.learn(link.hop.peer, self._swarm.addresses_of(link.hop.peer))
        is_exact = self.terms.grade == "exact"
        numerics = self._numerics if is_exact else ""
        request = partial(self._requests.open, self.links, index, self._epoch, self.codec.action, numerics, inherit)
        try:
            if self.terms.own is not None:
                await give(self._swarm.rpc, self.terms.model, link.hop, self.terms.own)
            reply, _ = await self._swarm.rpc.call(link.hop.peer, request, timeout_s=OPEN_TIMEOUT_S)
        except PeerError as error:
            failures[index] = error
            return
        if isinstance(reply, Opened):
            self._opened.add((link.hop.peer, link.hop.span.start))
            self.layer_arity = reply.layer_arity
            link.received = 0 if self._seq == 0 else None
            if is_exact and not self._numerics:
                self._numerics = reply.numerics

    def _raise_if_hopeless(self, failures: dict[int, PeerError]) -> None:
        """Refusals that no other server would answer differently end the session."""
        for index, error in failures.items():
            if isinstance(error, Refused) and error.code is Code.TOO_LONG:
                raise CacheExhausted(f"{self.links[index].hop}: {error}")
            if isinstance(error, Refused) and error.code in (Code.NOT_A_MEMBER, Code.REVOKED):
                raise error

    def _route(self, wanted: Span, previous: PeerId | None = None, whole: bool = False) -> Route:
        now, is_last_resort, standing = trio.current_time(), False, self._swarm.rpc.standing
        spans = self._swarm.view().serving(self.terms.model)

        def eligible(span: SpanRecord) -> bool:
            covers = not whole or Span(span.start, span.end).covers(wanted)
            peer = PeerId(span.peer)
            allowed = self._declined.allow(peer, now, is_last_resort) and standing.allows(peer, is_last_resort)
            return covers and allowed and suits(span, self.terms, self._numerics)

        client = self._swarm.rpc.network.peer_id
        n_tokens = self.terms.batch * self.terms.max_tokens
        find = partial(best_route, spans, wanted, client, self._swarm.trips(spans), eligible, previous, n_tokens)
        with suppress(NoRoute):
            return find()
        is_last_resort = True
        return find()

    def _is_declined_for_good(self) -> bool:
        """Would the blocks be served if those who said that they cannot (UNSUPPORTED) could?"""
        spans = self._swarm.view().serving(self.terms.model)

        def able(span: SpanRecord) -> bool:
            return not self._declined.is_final(PeerId(span.peer)) and suits(span, self.terms, self._numerics)

        client = self._swarm.rpc.network.peer_id
        try:
            best_route(spans, Span(0, self.terms.n_blocks), client, {}, able)
        except NoRoute:
            return any(self._declined.is_final(PeerId(s.peer)) for s in spans)
        return False

    # --- small things ----------------------------------------------------------------------------------------

    async def _send_to(self, index: int, seq: int, frame: bytes) -> None:
        link = self.links[index]
        link.watch.on_sent(seq, trio.current_time())
        if index == 0:
            self.statistics.frames_sent += 1
        try:
            channel = await self._swarm.rpc.channel(link.hop.peer)
            with trio.fail_after(OPEN_TIMEOUT_S):
                await channel.send_raw(frame)
        except (PeerError, trio.TooSlowError) as error:
            self._worry(f"{link.hop}: {error}")

    def _lose(self, link: Link, reason: str) -> None:
        link.is_lost = True
        self.statistics.blamed.append((link.hop.peer, reason))
        self._swarm.rpc.standing.leave_out(link.hop.peer, reason)
        self._worry(f"{link.hop}: {reason}")

    def _drop(self, link: Link, error: PeerError) -> None:
        """A hop failed a request: a silent peer is blamed, one that says why it cannot is only left out for a while."""
        if not isinstance(error, Refused):
            self._lose(link, str(error))
            return
        link.is_lost = True
        if error.code is not Code.STALE_EPOCH:
            for_s = math.inf if error.code is Code.UNSUPPORTED else error.retry_after_s or BUSY_FOR_S
            logger.info("not asking %s for %.0f s: %s", link.hop.peer, for_s, error)
            self._declined.add(link.hop.peer, trio.current_time(), for_s)
        self._worry(f"{link.hop}: {error}")

    def _worry(self, reason: str) -> None:
        self._trouble = self._trouble or reason
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    def _index_at(self, start: int) -> int | None:
        return next((i for i, link in enumerate(self.links) if link.hop.span.start == start), None)

    def _link_at(self, start: int) -> Link | None:
        index = self._index_at(start)
        return None if index is None else self.links[index]
