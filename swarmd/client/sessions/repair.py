"""Carries out the repairs of a session's chain, step by step as ``repair_plan`` says.

The hop before a lost one replays what its replacement lacks: nothing already answered is computed for the client
again, and nothing starts from the prompt while a predecessor lives. docs/protocol.md, "Repair".
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import trio

from swarmd.client.links.link import HopLink, SessionServices
from swarmd.client.sessions.chain import Chain
from swarmd.client.sessions.receipt_exchange import ReceiptExchange
from swarmd.client.sessions.repair_plan import (
    PATIENCE_S,
    CacheMove,
    HistoryReplay,
    HopReplacement,
    NeighbourUpdate,
    RepairEnd,
    RepairPlan,
    RepairStep,
    ReplayGap,
    StuckHopRemoval,
    fill_gaps,
)
from swarmd.client.sessions.requests import Requests
from swarmd.client.sessions.reservations import Reservations
from swarmd.errors import NoRoute, PeerError, PeerTimeout, SwarmError, SwarmUnavailable
from swarmd.plan.chains.watch import Watch
from swarmd.plan.trust.blame import Blame
from swarmd.protocol.fields import Request
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Inherited, Op, Replayed, Rerouted
from swarmd.values import PeerId
from swarmd.wire.history import History
from swarmd.wire.ops import replay_frames

logger = logging.getLogger(__name__)

REROUTE_TIMEOUT_S = 5.0  # for a survivor to say how far it has come
HAND_OVER_TIMEOUT_S = 10.0  # for caches to move; after it they are replayed
REPLAY_TIMEOUT_S = 120.0  # a long prompt is prefilled anew
RETRY_INTERVAL_S = 0.05  # between two looks for another way


class Repairs:
    """The repairs of one chain. ``history`` is the client's own, for a first hop that is replaced."""

    def __init__(
        self,
        swarm: SessionServices,
        chain: Chain,
        reservations: Reservations,
        requests: Requests,
        receipts: ReceiptExchange,
        history: History,
    ) -> None:
        self._swarm = swarm
        self._chain = chain
        self._reservations = reservations
        self._requests = requests
        self._receipts = receipts
        self._position = chain.position
        self._history = history
        self._inherited: dict[int, int] = {}  # by first block: the op that caches which moved there have come to

    def on_inherited(self, peer: PeerId, message: Inherited) -> None:
        """An heir has all the caches of its hop."""
        link = self._chain.link_at(message.start)
        if link is not None and link.hop.peer == peer and message.epoch == self._chain.epoch:
            self._inherited[message.start] = message.seq
            self._chain.notify()

    async def run(self, is_stuck: bool = False) -> None:
        """Make the chain whole again and bring every hop up to date. Raises NoRoute after PATIENCE_S.

        With ``is_stuck`` all hops show signs of life, and no answer comes: the hop that got all and passed nothing on
        is lost.
        """
        self._chain.is_under_repair = True
        try:
            await self._repair(is_stuck)
        finally:
            self._chain.is_under_repair = False
            self._chain.notify()

    async def _repair(self, is_stuck: bool) -> None:
        chain = self._chain
        plan = RepairPlan(chain.names, chain.trouble or "", is_stuck, trio.current_time())
        while True:
            missing: NoRoute | None = None
            try:
                if await self._attempt(plan):
                    break
            except NoRoute as error:
                missing = error
            if plan.is_overdue(trio.current_time()):
                failure = f"no repair within {PATIENCE_S:.0f} s: {chain.trouble or plan.reason}"
                if missing is not None:
                    raise NoRoute(f"{missing}, and there was {failure}", missing.missing)
                raise SwarmUnavailable(failure)
            chain.trouble = plan.reason
            if missing is not None:
                await self._reservations.wait_for_records()
            else:
                await trio.sleep(RETRY_INTERVAL_S)
        repair = plan.summarise(chain.names, trio.current_time())
        chain.statistics.repairs.append(repair)
        await self._reservations.give_back_strays()
        before = repair.chain_before
        logger.info("chain repaired in %.2f s: %s -> %s (%s)", repair.stall_s, before, chain, repair.reason)

    async def _attempt(self, plan: RepairPlan) -> bool:
        """Carry out the plan's steps in a new epoch; False when one failed. Raises NoRoute for blocks nobody serves."""
        chain = self._chain
        chain.trouble = None
        chain.epoch += 1
        plan.begin_attempt()
        while True:
            decision = plan.next_step(chain.links, self._position, chain.terms.n_blocks)
            logger.debug("%s: %s", chain, decision.reason)
            step = decision.action
            if isinstance(step, RepairEnd):
                self._mark_up_to_date()
                return True
            if not await self._carry_out(step, plan):
                return False

    async def _carry_out(self, step: RepairStep, plan: RepairPlan) -> bool:
        """Do one step; False when the chain has to be looked at anew."""
        if isinstance(step, CacheMove):
            if await self._move_caches(step.link):
                plan.on_moved(step.link)
        elif isinstance(step, HopReplacement):
            plan.on_lost(step.lost)
            self._replace_hops(step)
        elif isinstance(step, NeighbourUpdate):
            if not await self._tell_neighbours(step):
                return False
            plan.on_neighbours_known(self._chain.links)
        elif isinstance(step, StuckHopRemoval):
            self._chain.exclude(step.link, Blame.FAILING, "it goes on and on, and gives nothing")
            plan.on_stuck_removed()
            return False
        elif isinstance(step, HistoryReplay):
            return await self._replay(step, plan)
        return True

    def _mark_up_to_date(self) -> None:
        for link in self._chain.links:
            link.received = self._position.answered if link.received is None else link.received

    def _replace_hops(self, step: HopReplacement) -> None:
        """Put the cheapest live hops where lost ones were. Raises NoRoute."""
        chain = self._chain
        chain.on_lost(list(step.lost))
        routes = [chain.routes.choose_route(gap.span, gap.previous).hops for gap in step.gaps]
        chain.links = fill_gaps(chain.links, routes)

    async def _move_caches(self, link: HopLink) -> bool:
        """Have a hop that stops serving hand its caches to another holder; where that fails it counts as lost."""
        index = self._chain.links.index(link)
        try:
            await self._hand_over(index, link)
        except (PeerError, NoRoute) as error:
            logger.info("%s cannot hand over: %s", link.hop, error)
            self._chain.trouble = None
            self._chain.links[index] = link
            link.is_lost = True
            return False
        return True

    async def _hand_over(self, index: int, link: HopLink) -> None:
        """Open the hop at another holder of its blocks and have the caches sent there. Raises PeerError or NoRoute."""
        chain = self._chain
        hop = link.hop
        start = hop.span.start
        candidate = chain.routes.choose_route(hop.span, is_single_hop=True).hops[0]
        heir = HopLink(replace(candidate, span=hop.span), is_heir=True)
        chain.links[index] = heir
        failures: dict[int, PeerError] = {}
        self._inherited.pop(start, None)
        await self._reservations.open_hop(index, failures, inherit=hop.peer)
        if failures:
            raise failures[index]
        request = self._requests.hand_over(link, heir.hop.peer)
        await self._swarm.rpc.call(hop.peer, request, timeout_s=HAND_OVER_TIMEOUT_S)
        with trio.move_on_after(HAND_OVER_TIMEOUT_S):
            while start not in self._inherited and not heir.is_lost:
                await chain.changed.wait()
        if heir.is_lost or start not in self._inherited:
            raise PeerTimeout(f"{heir.hop} did not take the caches over")
        heir.received = self._inherited.pop(start)
        with suppress(PeerError):  # of an older version, or gone: its heir is not checked
            await self._receipts.ask_receipt(link)
        chain.accounts.pass_on((hop.peer, start), (heir.hop.peer, start))

    async def _tell_neighbours(self, step: NeighbourUpdate) -> bool:
        """Open new hops and give surviving ones their neighbours; False when more was lost on the way."""
        for link in self._chain.links:
            link.watch = Watch()
        failures: dict[int, PeerError] = {}
        async with trio.open_nursery() as nursery:
            for index in step.surviving:
                nursery.start_soon(self._reroute_hop, index, failures)
            failures.update(await self._reservations.open_hops(step.new))
        of_new = {index: error for index, error in failures.items() if index in step.new}
        self._reservations.raise_if_hopeless(of_new)
        for index, error in failures.items():
            self._chain.fail_hop(self._chain.links[index], error)
        return not failures

    async def _reroute_hop(self, index: int, failures: dict[int, PeerError]) -> None:
        """Tell a survivor its neighbours, and hear how far it has come; notes why it failed."""
        chain = self._chain
        link = chain.links[index]
        request = self._requests.reroute(index)
        try:
            reply, _ = await self._swarm.rpc.call(link.hop.peer, request, timeout_s=REROUTE_TIMEOUT_S)
        except PeerError as error:
            failures[index] = error
            return
        link.received = reply.received if isinstance(reply, Rerouted) else 0
        if self._position.answered and not link.received:  # a new hop whose replay was lost needs all of it
            await self._reservations.open_hop(index, failures)

    async def _replay(self, step: HistoryReplay, plan: RepairPlan) -> bool:
        """Have a receiver get what it lacks; False when that failed."""
        try:
            if step.receiver == 0:
                n_ops, n_tokens = await self._replay_history(step.gap)
            else:
                n_ops, n_tokens = await self._ask_replay(step.receiver - 1, step.gap)
        except PeerError as error:
            if self._chain.trouble is None:
                self._chain.fail_hop(self._chain.links[max(0, step.receiver - 1)], error)
            return False
        plan.on_replayed(step, n_ops, n_tokens)
        return True

    async def _replay_history(self, gap: ReplayGap) -> tuple[int, int]:
        """Replay to the first hop what it lacks, from the client's own history; returns how many ops and tokens."""
        chain = self._chain
        header = Op(
            session=chain.key,
            start=chain.terms.start,
            epoch=chain.epoch,
            silent_through=gap.silent_through,
            replay_end=gap.end,
        )
        n_ops = 0
        for frame in replay_frames(self._history, header, gap.have, chain.codec.action):
            n_ops += 1
            channel = await self._swarm.rpc.channel(chain.links[0].hop.peer)
            await channel.send_raw(frame)
        chain.links[0].watch.on_sent(self._position.seq, trio.current_time())
        return n_ops, self._history.n_tokens

    async def _ask_replay(self, index: int, gap: ReplayGap) -> tuple[int, int]:
        """Have hop ``index`` replay to its successor what that lacks; returns how many ops and tokens."""
        link = self._chain.links[index]
        request = self._requests.replay(link, gap)
        # the sender answers once its worker has reached the request; the neighbours' watches run meanwhile
        reply, _ = await self._call_while_sound(link.hop.peer, request)
        return (reply.ops, reply.tokens) if isinstance(reply, Replayed) else (0, 0)

    async def _call_while_sound(
        self,
        peer: PeerId,
        request: Request,
    ) -> tuple[AnyMessage, Frame]:
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
            while self._chain.trouble is None:
                await self._chain.changed.wait()
            nursery.cancel_scope.cancel()
        if failure:
            raise failure[0]
        if not result:
            raise PeerTimeout(self._chain.trouble or f"{peer} did not finish its replay")
        return result[0]


class PauseRepair:
    """The repair between two steps, one at a time. The next step waits for it, and tries again if it failed."""

    def __init__(
        self,
        chain: Chain,
        repairs: Repairs,
        is_pausing: Callable[[], bool],
    ) -> None:
        self._chain = chain
        self._repairs = repairs
        self._is_pausing = is_pausing
        self._done: trio.Event | None = None
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Repair the chain, unless a step does so by now, or the session is closed."""
        if self._done is not None or not self._is_pausing():
            return
        self._done = trio.Event()
        try:
            with trio.CancelScope() as self._scope:
                await self._repairs.run()
        except SwarmError as error:
            self._chain.note_trouble(str(error))
        finally:
            self._done.set()
            self._done = None

    async def wait(self) -> None:
        """Wait until no repair is under way."""
        while self._done is not None:
            await self._done.wait()

    async def cancel(self) -> None:
        """End a repair that is under way, and wait until it has ended."""
        self._scope.cancel()
        await self.wait()
