"""One peer's way through rounds: under whom it joins, when it leads itself, and what reaches it meanwhile.

A round after a commit is led by the first of those who compute on it, by a rule that all follow; who gives no sign of
life is passed over. Where views differ several begin to lead: all but the first by the rule step down when they hear of
it. Whatever happens, the anchors sign one outcome at most.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

import trio

from swarmd.errors import Code, IntegrityError, PeerError, Refused, RemoteProtocolError, Unreachable
from swarmd.net.api import TaskStatus
from swarmd.net.rpc import Channel
from swarmd.net.tasks import Tasks
from swarmd.plan.runs.arrivals import Arrivals
from swarmd.protocol.fields import Message
from swarmd.protocol.wire.rounds import MAX_NEAR, Beat, Check, Group, JoinRound, Pulse
from swarmd.train.rounds import assents
from swarmd.train.rounds.groups import check_group
from swarmd.train.rounds.heartbeats import strip_for_others
from swarmd.train.rounds.leader import PULSE_INTERVAL_S, Leader, TooEarly
from swarmd.train.rounds.leaders import Leaders, RoundCounters
from swarmd.train.rounds.outcome import Outcome
from swarmd.train.rounds.round import Numbers, Round
from swarmd.train.store.chronicle import Chronicle
from swarmd.train.store.members import Members
from swarmd.train.store.proposer import RoundFailed
from swarmd.train.store.services import TrainerServices, Wakeups, tell_peer
from swarmd.train.vectors.averages import Averages
from swarmd.train.vectors.state import RunState, average_digest
from swarmd.train.vectors.work import GatheredWork
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25  # news wakes sooner; this finds what nobody told
SHORTEST_RETRY_S = 0.2  # after a round that failed; longer each time
LONGEST_RETRY_S = 60.0  # a peer that cannot average computes on, and tries seldom
GROUP_LATE_S = 1.0  # parts of a round may come before the group that they are for
LONGEST_GATHER_S = 30.0  # a leader that has begun nothing for so long is suspected
N_ROUNDS_KNOWN = 16  # latest rounds; older parts are not for anybody

Mine = Callable[[], tuple[RunState | None, GatheredWork]]
"""This peer's state, if it has the model, and what it gives to the round after it."""


class Joining:
    """See the module."""

    def __init__(
        self,
        services: TrainerServices,
        chronicle: Chronicle,
        members: Members,
        averages: Averages,
        news: Wakeups,
        mine: Mine,
    ) -> None:
        self.counters = RoundCounters()
        self.pulses = Arrivals(least_s=2.0, first_s=3.0)
        self.retry_at = 0.0
        self._why = ""
        self._is_in = False
        self.round: Round | None = None
        self.leader: Leader | None = None
        self._services = services
        self._me = services.rpc.network.peer_id
        self._chronicle = chronicle
        self._members = members
        self._averages = averages
        self.signer = assents.ContributingMember(chronicle.ledger, services.identity, self._clip_factor)
        self._news = news
        self._mine = mine
        self._begun: deque[bytes] = deque(maxlen=N_ROUNDS_KNOWN)  # rounds that this peer is or was in
        self._followed: PeerId | None = None
        self._leaders = Leaders(self._me, members)
        self._offered = GatheredWork()  # what this peer joined with; a micro-batch that ends later is not of this round
        self._pulsed_at = 0.0
        self._awaited_at = 0.0
        self._scope = trio.CancelScope()
        self._pulsing = trio.CancelScope()
        self._tasks = Tasks()

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the rounds, and what is told to others, until cancelled."""
        async with self._tasks.open():
            task_status.started()
            await trio.sleep_forever()

    @property
    def is_called(self) -> bool:
        """Have others begun a round that this peer is to lead?"""
        return self.leader is not None and self.leader.parent == self._chronicle.ledger.head

    @property
    def doing(self) -> str:
        """What this peer does in a round, for people; "" when it is in none."""
        if not self._is_in:
            return ""
        if self.leader is not None:
            return f"leads a round; it waits for {self.leader.waits_for}"
        return self._why if self.round is None else f"averages: {self.round.share_here:.0%} is here"

    @property
    def longest_wait_s(self) -> float:
        """What a death costs at most: how long a member, or a leader's silence, is waited for here."""
        timing = self.counters.timing
        return max(timing.beats.limit_s(), timing.joins.limit_s(), self.pulses.limit_s())

    # --- taking part -------------------------------------------------------------------------------------------
    #
    # One peer after a commit, until the next one:
    #
    #     choose the first candidate by the rule (train.rounds.leaders)
    #         it is this peer, or others have joined here ---> lead: gather, average, bring to the anchors
    #         it is another ---> join there and follow
    #               refused, silent, passed over, or another comes first ---> choose again
    #               a pulse names a time to retry ---> leave, and compute on until then
    #
    # No view of the members is shared, so that two may lead at once. That costs time, and never a second commit: the
    # anchors' majority signs one. Any leader may lie about all of it, and is left when nothing comes of its rounds.

    async def take_part(self, parent: bytes, why_idle: Callable[[], str]) -> None:
        """Join the round after ``parent``, under one leader after the other, until it is committed or called off."""
        started_at = trio.current_time()
        self._is_in = True
        self._why = "joins a round"
        try:
            while self._chronicle.ledger.head == parent and trio.current_time() >= self.retry_at and not why_idle():
                state, _ = self._mine()
                if state is None or state.head != parent:
                    return
                chosen = self._leaders.choose(parent, self._services.can_be_dialled())
                if chosen == self._me or self.leader is not None:
                    await self._lead_round(why_idle)
                else:
                    await self.follow(chosen, parent)
        finally:
            self._is_in = False
            self.leave()
            self.counters.last_part_s = trio.current_time() - started_at

    async def follow(self, leader: PeerId, parent: bytes) -> None:
        """Join under another peer; returns when that is over, whatever came of it."""
        self._followed = leader
        self._pulsed_at = trio.current_time()
        try:
            await self._services.rpc.call(
                leader,
                self._make_join(),
                timeout_s=self.pulses.limit_s(),
                purpose="bulk",
            )
        except Refused as error:
            self._why = f"{leader[-8:]} leads and refuses: {error}"
            if error.code is Code.STALE_EPOCH:
                await self._chronicle.sync_commits([leader])
            elif error.code is Code.NO_CAPACITY:
                self._leaders.refused_by = leader
            else:
                self._members.suspect(leader, trio.current_time())
            await self._news.wait(error.retry_after_s or LOOK_INTERVAL_S)
            return
        except PeerError as error:
            logger.info("%s should lead and does not answer: %s", leader[-8:], error)
            self._members.suspect(leader, trio.current_time())
            return
        self._leaders.refused_by = None
        joined_at = trio.current_time()
        while self._chronicle.ledger.head == parent and self._followed == leader and self.leader is None:
            if await self._abandon_if_useless(leader, parent, joined_at):
                return
            await self._news.wait(LOOK_INTERVAL_S)
        now = trio.current_time()
        if self.leader is not None and not self._is_followed_alive(now):
            self._members.suspect(leader, now)  # others have given it up, and it is silent here as well

    async def _abandon_if_useless(self, leader: PeerId, parent: bytes, joined_at: float) -> bool:
        """Look whether anything comes of following a leader; True when another must be found."""
        now = trio.current_time()
        if self.round is None and now - joined_at > LONGEST_GATHER_S:
            logger.info("the leader %s has begun nothing for %.0f s", leader[-8:], now - joined_at)
            self._members.pass_over(leader, parent, now)
            return True
        why = self._leaders.why_not(self.round)
        if why:
            logger.info("%s leads no longer here: %s", leader[-8:], why)
            self._members.pass_over(leader, parent, now)
            self.leave()
            return True
        if now - self._pulsed_at > self.pulses.limit_s():
            logger.info("the leader %s gives no sign of life for %.1f s", leader[-8:], now - self._pulsed_at)
            self._members.suspect(leader, now)
            return True
        if now < self.retry_at:
            return True
        if self.round is None and self._awaited_at > joined_at + PULSE_INTERVAL_S:
            return True  # what this peer had joined was given up, and it was not told
        if self.round is not None:
            return False
        first = self._leaders.first(leader, parent)
        if first == leader:
            return False
        await self._tell_member(
            leader,
            Pulse(
                run=self._chronicle.run.id,
                parent=parent,
                successor=first,
            ),
        )
        return True

    def _is_followed_alive(self, now: float) -> bool:
        return now - self._pulsed_at < self.pulses.limit_s() / 2

    def _make_join(self) -> JoinRound:
        up, down = self._services.links()
        state, self._offered = self._mine()
        can_be_dialled = self._services.can_be_dialled()
        members = set(self._members.look(trio.current_time()))
        near = sorted(self._services.near() & members)[:MAX_NEAR]
        return JoinRound(
            run=self._chronicle.run.id,
            parent=state.head if state else self._chronicle.ledger.head,
            state=state.root if state else b"",
            first=self._offered.first,
            n=self._offered.n,
            loss=self._offered.loss,
            n_elements=state.n_averaged if state else 0,
            dtype=state.layout.dtype if state else "float32",
            receives=state is not None and (self._offered.n > 0 or can_be_dialled),
            can_reduce=can_be_dialled,
            up_bytes_per_s=up,
            down_bytes_per_s=down,
            late=self._offered.late,
            anew=self._offered.anew,
            near=tuple(near),
        )

    # --- leading -----------------------------------------------------------------------------------------------

    def _clip_factor(self, average: bytes) -> float:
        return self._averages.clip_factor(average, self._chronicle.run.recipe.clip_norm)

    def _open_leader(self) -> Leader:
        """Lead the round after the newest commit; its members hear from this peer from now on."""
        if self.leader is None or self.leader.parent != self._chronicle.ledger.head:
            self._pulsing.cancel()
            chronicle = self._chronicle
            self.leader = Leader(
                self._me,
                chronicle.ledger,
                chronicle.order,
                self.counters.timing,
                tell=self._tell_member,
                expected=lambda: self._members.participants(chronicle.ledger.head, trio.current_time()),
                proposer=chronicle.proposer(),
                clip=self._clip_factor,
                why_not_alone=chronicle.why_not_alone,
            )
            self._pulsing = self._tasks.start_soon(self.leader.send_pulses)
        return self.leader

    async def _lead_round(self, why_idle: Callable[[], str]) -> None:
        """Lead the round to its end. Members are told what came of it."""
        leader = self._open_leader()
        self._followed = self._me
        try:
            leader.join(self._me, self._make_join())
            outcome = await self._lead_on(leader, why_idle)
        except* Refused as group:
            self.close_leader(leader)  # who joins from here on joins the next
            self._why = f"the anchors know more: {group.exceptions[0]}"
            members = self._members.look(trio.current_time())
            if not await self._chronicle.sync_commits([*self._chronicle.anchors, *members]):
                await self._news.wait(LOOK_INTERVAL_S)
        except* TooEarly as group:
            early = group.exceptions[0]
            self._why = str(early)
            self._call_off_round(leader, early.wait_s if isinstance(early, TooEarly) else None)
        except* RoundFailed as group:
            self.counters.failed += 1
            logger.warning("this round failed: %s", group.exceptions[0])
            leader.missing = []
            self._members.look_again()
            self.close_leader(leader)
            self._begin_again(leader, SHORTEST_RETRY_S)
            await self._news.wait(LOOK_INTERVAL_S)
        else:
            if outcome is not None:
                self.counters.led += 1
                self.counters.last = outcome.times or self.counters.last
                await self._spread_commit(outcome.raw, set(leader.joined))
        finally:
            for peer in leader.missing:  # it was expected, and did not come: do without it until it says something
                self._members.suspect(peer, trio.current_time())
            self._members.record_faults(leader.faulty)
            self.close_leader(leader)

    async def _lead_on(self, leader: Leader, why_idle: Callable[[], str]) -> Outcome | None:
        """Lead until it is done, or of no use: committed or led by others, other anchors, stopped, paused."""
        outcome: Outcome | None = None
        order = self._chronicle.order
        parent = leader.parent

        async def lead_to_end() -> None:
            nonlocal outcome
            outcome = await leader.lead()
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lead_to_end)
            while self._chronicle.ledger.head == parent and self._chronicle.order is order and not why_idle():
                first = self._me if leader.has_begun else self._leaders.first(self._me, parent)
                if first != self._me:
                    self._step_down(leader, first)
                    break
                await self._news.wait(LOOK_INTERVAL_S)
            nursery.cancel_scope.cancel()
        return outcome

    def _call_off_round(self, leader: Leader, wait_s: float | None) -> None:
        """Have all compute on for as long as the lacking samples take: fewer are here than were forecast."""
        now = trio.current_time()
        rate = sum(m.samples_per_s for m in self._members.progress(now)) or 1.0
        if wait_s is None:
            n_joined = sum(j.n for j in leader.joined.values())
            wait_s = (self._chronicle.run.recipe.batch.target - n_joined) / rate
        wait_s = min(LONGEST_RETRY_S / 2, max(SHORTEST_RETRY_S, wait_s))
        self.retry_at = now + wait_s
        self._begin_again(leader, wait_s)

    def _begin_again(self, leader: Leader, wait_s: float) -> None:
        """Have members that joined here join anew."""
        pulse = Pulse(
            run=self._chronicle.run.id,
            parent=leader.parent,
            retry_ms=int(1000 * wait_s),
        )
        for peer in leader.joined.keys() - {self._me}:
            self._tasks.start_soon(self._tell_member, peer, pulse)

    def _step_down(self, leader: Leader, successor: PeerId) -> None:
        """Tell members that joined here who leads instead."""
        logger.info("%s leads this round, and comes first", successor[-8:])
        pulse = Pulse(
            run=self._chronicle.run.id,
            parent=leader.parent,
            successor=successor,
        )
        for peer in set(leader.joined) - {self._me, successor}:
            self._tasks.start_soon(self._tell_member, peer, pulse)

    async def _spread_commit(self, raw: bytes, joined: set[PeerId]) -> None:
        """Tell everybody of a commit that a majority has signed."""
        members = set(self._members.look(trio.current_time()))
        await self._chronicle.spread_commit(self._tasks, raw, joined | members)

    # --- what comes from others --------------------------------------------------------------------------------

    def take_join(self, peer: PeerId, message: JoinRound) -> None:
        """Let a member join under this peer. Raises Refused."""
        state, _ = self._mine()
        ledger = self._chronicle.ledger
        if state is None or state.head != ledger.head:
            raise Refused(Code.NO_CAPACITY, "this peer is not up to date itself", LOOK_INTERVAL_S)
        if message.parent != ledger.head:
            if ledger.knows(message.parent):
                raise Refused(Code.STALE_EPOCH, f"commit {ledger.epoch} is known here: ask for it")
            self._tasks.start_soon(self._chronicle.sync_commits, [peer])
            raise Refused(Code.NOT_HELD, "that commit is not known here", LOOK_INTERVAL_S)
        if self._members.standing.is_shunned(peer):
            raise Refused(Code.REFUSED, "fault was found with your numbers more than once: you sit out for a while")
        left_s = self.retry_at - trio.current_time()
        if left_s > 0:
            raise Refused(Code.NO_CAPACITY, "fewer samples were there than forecast", left_s)
        is_led = self._is_in and self.leader is None and self._followed not in (None, self._me)
        if is_led and (self.round is not None or self._is_followed_alive(trio.current_time())):
            raise Refused(Code.NO_CAPACITY, f"{self._followed} leads this round", LOOK_INTERVAL_S)
        self._open_leader().join(peer, message)
        self._news.notify()

    async def take(self, peer: PeerId, message: Message, payload: bytes) -> None:
        """Take a sign of life, or a word of a leader. Raises RemoteProtocolError."""
        if isinstance(message, Group):
            await self.take_group(peer, message)
        elif isinstance(message, Check):
            await self.take_check(peer, message, payload)
        elif isinstance(message, Pulse):
            self.take_pulse(peer, message)
        elif isinstance(message, Beat) and self.leader is not None:
            self.leader.take_beat(peer, message)

    def take_pulse(self, peer: PeerId, message: Pulse) -> None:
        """Note that a leader is at it, calls the round off, or leaves it to another."""
        now = trio.current_time()
        if message.retry_ms is None:
            self._members.note_leader(PeerId(message.successor) or peer, message.parent, now)
            if self.leader is not None and self.leader.parent == message.parent:
                self.leader.drop_member(peer)  # it leads this round itself, or follows somebody else
            self._news.notify()
        if peer != self._followed or message.parent != self._chronicle.ledger.head:
            return
        self.pulses.add(now - self._pulsed_at)
        self._pulsed_at = now
        if message.is_awaited:
            self._awaited_at = now
        if message.retry_ms is not None:
            if self.round is not None:
                self._leaders.note_failure(peer, message.parent)
            self.retry_at = now + min(LONGEST_RETRY_S, message.retry_ms / 1000)
        self._why = f"in a round that {peer[-8:]} leads; it waits for {message.waits_for}"
        self._news.notify()

    async def take_group(self, peer: PeerId, group: Group) -> None:
        """Take the group that the followed leader has formed, or changed."""
        if peer != self._followed or group.parent != self._chronicle.ledger.head:
            return
        state, _ = self._mine()
        offered = self._offered
        recipe = self._chronicle.run.recipe
        is_known = self.round is not None and self.round.group.round == group.round
        previous = self.round.group if self.round is not None and is_known else None
        check_group(group, previous, state.n_averaged if state else None, recipe)
        if self.round is not None and previous is not None:
            self.round.change_group(group)
            return
        member = next((m for m in group.members if m.peer == self._me), None)
        if member is None or (member.first, member.n) != (offered.first, offered.n):
            return
        self.end_round()
        root = state.root if state is not None else b""
        self.round = Round(
            self._services.rpc,
            group,
            recipe,
            offered.coded,
            digest=partial(average_digest, self._chronicle.run.id, group.parent),
            sign=partial(self.signer.share, group.parent, root, offered),
            off_loop=self._services.off_loop,
        )
        self._begun.append(group.round)
        self._scope = self._tasks.start_soon(self._live_round, self.round, peer)
        self._news.notify()

    async def take_numbers(self, channel: Channel, message: Numbers, payload: memoryview) -> None:
        """Take parts of a round. The leader's group may come by another channel: wait a little for it."""
        previous = self.round
        with trio.move_on_after(GROUP_LATE_S) as waiting:
            while message.round not in self._begun and self.round in (None, previous):
                await self._news.wait()
        if waiting.cancelled_caught:  # they are sent again, if they still count
            raise Unreachable("numbers of a round that has not begun here")
        current_round = self.round
        if current_round is None or current_round.group.round != message.round:
            return  # of a round that is over, or that came to nothing
        await current_round.take(channel.peer, message, payload)

    async def take_check(self, peer: PeerId, message: Check, payload: bytes) -> None:
        """Stand for what the leader would bring to the anchors. Raises RemoteProtocolError for what nobody can."""
        current_round = self.round
        state, _ = self._mine()
        if peer != self._followed or current_round is None or state is None:
            return
        if (message.round, message.version) != (current_round.group.round, current_round.group.version):
            return
        try:
            if payload:
                generation = self._chronicle.order.generation
                current_round.give_assent(self.signer.assent_untrusted(payload, current_round, generation, state.root))
            else:
                await current_round.give_share(message.average)
        except IntegrityError as error:
            raise RemoteProtocolError(f"{peer[-8:]} shows what nobody can stand for: {error}") from None

    def gone(self, peer: PeerId) -> None:
        """Note that a channel to a peer has ended. If it was the last, do without the peer until it says something."""
        if peer in self._services.rpc.peers():
            return
        self._members.suspect(peer, trio.current_time())
        if self.leader is not None:
            self.leader.drop_member(peer)
        if self._followed == peer:
            self._followed = None
            self._news.notify()

    def close_leader(self, given_up: Leader | None = None) -> None:
        """Stop leading, or leading this at least; members that joined will notice, and follow the next."""
        if given_up in (None, self.leader):
            self._pulsing.cancel()
            self.leader = None

    def leave(self) -> None:
        """Follow nobody any more: what was gathered may change from here on."""
        self._followed = None
        self.end_round()

    def end_round(self) -> None:
        """End the round that this peer is in, if any."""
        self._scope.cancel()
        self.round = None

    # --- inside ------------------------------------------------------------------------------------------------

    async def _live_round(self, current_round: Round, leader: PeerId) -> None:
        async def send_beat(message: Beat) -> None:
            if message.result and current_round.average is not None:
                self._averages.put(current_round.group.parent, message.result, current_round.average)
            await self._tell_member(leader, message if leader == self._me else strip_for_others(message))

        await current_round.run(send_beat)

    async def _tell_member(self, peer: PeerId, message: Message, payload: bytes = b"") -> None:
        """Bring a message to a member, this peer included; one that cannot be reached is not told."""
        if peer == self._me:
            try:
                await self.take(peer, message, payload)
            except RemoteProtocolError as error:  # nobody will stand for it then, and the round fails
                logger.warning("%s", error)
            return
        await tell_peer(self._services.rpc, peer, lambda channel: channel.send(message, payload))
