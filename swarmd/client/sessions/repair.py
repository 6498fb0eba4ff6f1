"""Makes a session's chain whole again: replaces what was lost, moves what leaves, brings every hop up to date.

The hop before a lost one replays what its replacement lacks: nothing already answered is computed for the client
again, and nothing starts from the prompt while a predecessor lives. docs/protocol.md, "Repair".
"""

from __future__ import annotations

import itertools
import logging
from contextlib import suppress

import trio

from swarmd.client.links.link import HopLink, Repair, ReplayGap, merge_neighbours, plan_replay
from swarmd.client.sessions.chain import PATIENCE_S, Chain
from swarmd.errors import NoRoute, PeerError, PeerTimeout, SwarmUnavailable
from swarmd.plan.chains.routing import Hop
from swarmd.plan.chains.session import Watch
from swarmd.plan.trust.blame import Blame
from swarmd.protocol.fields import Request
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Inherited, Op, Replayed, Rerouted
from swarmd.values import PeerId, Span
from swarmd.wire.history import History
from swarmd.wire.ops import replay_frames

logger = logging.getLogger(__name__)

REROUTE_TIMEOUT_S = 5.0  # for a survivor to say how far it has come
HAND_OVER_TIMEOUT_S = 10.0  # for caches to move; after it they are replayed
REPLAY_TIMEOUT_S = 120.0  # a long prompt is prefilled anew
RETRY_INTERVAL_S = 0.05  # between two looks for another way


# A repair repeats these steps until all of them succeed, each time in a new epoch, so that what was sent in an older
# one is dropped:
#
#   1. hops that leave hand their caches to an heir; where that fails they count as lost;
#   2. the cheapest live hops take the places of lost ones;
#   3. new hops are opened, survivors hear who their neighbours are now, and say how far they have come;
#   4. from the last pair to the first, each sender replays what its receiver lacks (``plan_replay``).
#
# The invariant: a hop's history holds all that its successor may lack. Any hop may die in any step, which is noticed as
# trouble, and the steps begin again. PATIENCE_S bounds the whole, because peers could die or refuse for ever.
class Repairs:
    """The repairs of one chain. ``history`` is the client's own, for a first hop that is replaced."""

    def __init__(self, chain: Chain, history: History) -> None:
        self._chain = chain
        self._position = chain.position
        self._history = history
        self._inherited: dict[int, int] = {}  # by first block: the op that caches which moved there have come to
        self._n_ops = self._n_tokens = 0  # replayed in the present repair

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
        chain = self._chain
        started_at = trio.current_time()
        reason = chain.trouble or ""
        names_before = chain.names
        lost = list[str]()
        moved = list[str]()
        self._n_ops = self._n_tokens = 0
        while True:
            chain.trouble = None
            chain.epoch += 1
            moved += await self._move_leaving()
            lost_links = [link for link in chain.links if link.is_lost]
            lost += [str(link.hop) for link in lost_links if str(link.hop) not in lost]
            chain.on_lost(lost_links)
            try:
                self._replace_lost()
            except NoRoute:
                if trio.current_time() - started_at > PATIENCE_S:
                    raise
                chain.trouble = reason
                await chain.wait_for_records()
                continue
            is_told = await self._tell_neighbours()
            if is_told and is_stuck:
                is_stuck = is_told = False
                self._exclude_stuck_hop()
            if is_told and await self._catch_up():
                break
            if trio.current_time() - started_at > PATIENCE_S:
                raise SwarmUnavailable(f"no repair within {PATIENCE_S:.0f} s: {chain.trouble or reason}")
            chain.trouble = reason
            await trio.sleep(RETRY_INTERVAL_S)
        repair = Repair(
            lost=tuple(lost),
            chain_before=names_before,
            chain_after=chain.names,
            replayed_ops=self._n_ops,
            replayed_tokens=self._n_tokens,
            from_client=bool(lost) and names_before[0] in lost,
            stall_s=trio.current_time() - started_at,
            reason=reason,
            handed_over=tuple(moved),
        )
        chain.statistics.repairs.append(repair)
        await chain.give_back_strays()
        logger.info("chain repaired in %.2f s: %s -> %s (%s)", repair.stall_s, names_before, chain, reason)

    def _exclude_stuck_hop(self) -> None:
        """Lose the last hop that says it has everything: the next one has not, or it is the one that should answer."""
        got_all = [link for link in self._chain.links if link.received == self._position.seq]
        link = got_all[-1] if got_all else self._chain.links[0]
        self._chain.exclude(link, Blame.FAILING, "it goes on and on, and gives nothing")

    def _replace_lost(self) -> None:
        """Put the cheapest live hops where lost ones were; neighbouring lost hops are replaced together."""
        links: list[HopLink] = []
        for is_lost, group in itertools.groupby(self._chain.links, key=lambda link: link.is_lost):
            neighbours = list(group)
            if not is_lost:
                links += neighbours
                continue
            gap = Span(neighbours[0].hop.span.start, neighbours[-1].hop.span.end)
            previous = links[-1].hop.peer if links else None
            links += [HopLink(hop) for hop in self._chain.route(gap, previous).hops]
        self._chain.links = merge_neighbours(links)

    async def _move_leaving(self) -> list[str]:
        """Have hops that stop serving hand their caches to other holders; where that fails they count as lost."""
        moved = []
        for index, link in enumerate(self._chain.links):
            if not link.is_leaving or link.is_lost:
                continue
            try:
                await self._hand_over(index, link)
                moved.append(str(link.hop))
            except (PeerError, NoRoute) as error:
                logger.info("%s cannot hand over: %s", link.hop, error)
                self._chain.trouble = None
                self._chain.links[index] = link
                link.is_lost = True
        return moved

    async def _hand_over(self, index: int, link: HopLink) -> None:
        """Open the hop at another holder of its blocks and have the caches sent there. Raises PeerError or NoRoute."""
        chain = self._chain
        hop = link.hop
        start = hop.span.start
        candidate = chain.route(hop.span, is_single_hop=True).hops[0]
        heir = HopLink(Hop(candidate.peer, hop.span, candidate.numerics), is_heir=True)
        chain.links[index] = heir
        failures: dict[int, PeerError] = {}
        self._inherited.pop(start, None)
        await chain.open_hop(index, failures, inherit=hop.peer)
        if failures:
            raise failures[index]
        request = chain.requests.hand_over(link, chain.epoch, heir.hop.peer)
        await chain.swarm.rpc.call(hop.peer, request, timeout_s=HAND_OVER_TIMEOUT_S)
        with trio.move_on_after(HAND_OVER_TIMEOUT_S):
            while start not in self._inherited and not heir.is_lost:
                await chain.changed.wait()
        if heir.is_lost or start not in self._inherited:
            raise PeerTimeout(f"{heir.hop} did not take the caches over")
        heir.received = self._inherited.pop(start)
        with suppress(PeerError):  # of an older version, or gone: its heir is not checked
            await chain.ask_receipt(link)
        chain.accounts.pass_on((hop.peer, start), (heir.hop.peer, start))

    async def _tell_neighbours(self) -> bool:
        """Open new hops and give surviving ones their neighbours; False when more was lost on the way."""
        for link in self._chain.links:
            link.watch = Watch()
        fresh = [i for i, link in enumerate(self._chain.links) if link.received is None]
        failures: dict[int, PeerError] = {}
        async with trio.open_nursery() as nursery:
            for index, link in enumerate(self._chain.links):
                if link.received is not None:
                    nursery.start_soon(self._reroute_hop, index, failures)
            failures.update(await self._chain.open_hops(fresh))
        of_new = {index: error for index, error in failures.items() if index in fresh}
        self._chain.raise_if_hopeless(of_new)
        for index, error in failures.items():
            self._chain.fail_hop(self._chain.links[index], error)
        return not failures

    async def _reroute_hop(self, index: int, failures: dict[int, PeerError]) -> None:
        """Tell a survivor its neighbours, and hear how far it has come; notes why it failed."""
        chain = self._chain
        link = chain.links[index]
        request = chain.requests.reroute(chain.links, index, chain.epoch, self._position.answered)
        try:
            reply, _ = await chain.swarm.rpc.call(link.hop.peer, request, timeout_s=REROUTE_TIMEOUT_S)
        except PeerError as error:
            failures[index] = error
            return
        link.received = reply.received if isinstance(reply, Rerouted) else 0
        if self._position.answered and not link.received:  # a new hop whose replay was lost needs all of it
            await chain.open_hop(index, failures)

    async def _catch_up(self) -> bool:
        """Have every sender give its receiver what that lacks, the last pair first; False when one of them failed."""
        for index in range(len(self._chain.links), -1, -1):
            plan = plan_replay(
                self._chain.links,
                index,
                self._position.seq,
                self._position.answered,
                self._chain.terms.n_blocks,
            )
            if plan is None:
                continue
            try:
                if index == 0:
                    ops, tokens = await self._replay_history(plan)
                else:
                    ops, tokens = await self._ask_replay(index - 1, plan)
            except PeerError as error:
                if self._chain.trouble is None:
                    self._chain.fail_hop(self._chain.links[max(0, index - 1)], error)
                return False
            self._n_ops += ops
            self._n_tokens += tokens if plan.have is None else 0
        for link in self._chain.links:
            link.received = self._position.answered if link.received is None else link.received
        return True

    async def _replay_history(self, gap: ReplayGap) -> tuple[int, int]:
        """Replay to the first hop what it lacks, from the client's own history; returns how many ops and tokens."""
        chain = self._chain
        marks = Op(silent_through=gap.silent_through, replay_end=gap.end)
        address = (chain.key, chain.terms.start, chain.epoch)
        n_ops = 0
        for frame in replay_frames(self._history, address, gap.have, marks, chain.codec.action):
            n_ops += 1
            channel = await chain.swarm.rpc.channel(chain.links[0].hop.peer)
            await channel.send_raw(frame)
        chain.links[0].watch.on_sent(self._position.seq, trio.current_time())
        return n_ops, self._history.n_tokens

    async def _ask_replay(self, index: int, gap: ReplayGap) -> tuple[int, int]:
        """Have hop ``index`` replay to its successor what that lacks; returns how many ops and tokens."""
        link = self._chain.links[index]
        request = self._chain.requests.replay(link, self._chain.epoch, gap)
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
                result.append(await self._chain.swarm.rpc.call(peer, request, timeout_s=REPLAY_TIMEOUT_S))
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
