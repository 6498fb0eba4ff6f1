"""One peer's way through rounds: under whom it joins, when it leads itself, and what reaches it meanwhile.

A round after a commit is led by the first of those who compute on it, by a rule that all follow. One that gives no sign
of life is done without until it says something. Whatever happens, the anchors sign one outcome at most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import trio

from swarmd.errors import Code, PeerError, Refused, RemoteProtocolError
from swarmd.net.api import TaskStatus
from swarmd.net.tasks import Tasks
from swarmd.protocol.fields import Message
from swarmd.protocol.wire.rounds import Beat, Check, Group, JoinRound, Pulse
from swarmd.train.rounds.following import Following, Parting
from swarmd.train.rounds.leader import Leader
from swarmd.train.rounds.leaders import Leaders
from swarmd.train.rounds.leadership import LOOK_INTERVAL_S, Leadership
from swarmd.train.rounds.participation import Participation
from swarmd.train.rounds.round import Round
from swarmd.train.rounds.signing import ContributingMember
from swarmd.train.store.member_services import MemberServices
from swarmd.train.store.services import tell_peer
from swarmd.values import PeerId

logger = logging.getLogger(__name__)


class Joining:
    """See the module. ``following``: under whom; ``participation``: in which round; ``leadership``: when it leads."""

    def __init__(self, services: MemberServices) -> None:
        self._services = services
        self._me = services.me
        self._rpc = services.trainer.rpc
        self._chronicle = services.chronicle
        self._members = services.members
        self._news = services.news
        self._tasks = Tasks()
        self._why = ""
        self._is_in = False
        self.leaders = Leaders(self._me, services.members)
        self.following = Following(self._me)
        self.signer = ContributingMember(
            self._chronicle.ledger, services.trainer.identity, services.clip_factor, services.norm_in_stages
        )
        self.participation = Participation(services, self.signer, self._tasks, self._tell_member)
        self.leadership = Leadership(services, self.following, self.leaders, self._tasks, self._tell_member)
        self.counters = self.leadership.counters

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the rounds, and what is told to others, until cancelled."""
        async with self._tasks.open():
            task_status.started()
            await trio.sleep_forever()

    @property
    def round(self) -> Round | None:
        """The round that this peer is in."""
        return self.participation.round

    @property
    def leader(self) -> Leader | None:
        """What leads a round here, if this peer does."""
        return self.leadership.leader

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
        return max(timing.beats.limit_s(), timing.joins.limit_s(), self.following.pulses.limit_s())

    # --- taking part -------------------------------------------------------------------------------------------
    #
    # One peer after a commit, until the next one:
    #
    #     choose the first candidate by the rule (train.rounds.leaders)
    #         it is this peer, or others have joined here ---> lead: gather, average, bring to the anchors
    #         it is another ---> join there and follow (train.rounds.following)
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
            while self._chronicle.ledger.head == parent and not why_idle():
                now = trio.current_time()
                state, _ = self._services.mine()
                if self.following.is_early(now) or state is None or state.head != parent:
                    return
                chosen = self.leaders.choose(parent, self._services.trainer.can_be_dialled(), now)
                if chosen == self._me or self.leader is not None:
                    self.following.follow(self._me, now)
                    why_none = await self.leadership.lead_round(self.participation.make_join(), why_idle)
                    self._why = why_none or self._why
                else:
                    await self.follow(chosen, parent)
        finally:
            self._is_in = False
            self.leave()
            self.counters.last_part_s = trio.current_time() - started_at

    async def follow(self, leader: PeerId, parent: bytes) -> None:
        """Join under another peer; returns when that is over, whatever came of it."""
        self.following.follow(leader, trio.current_time())
        try:
            timeout_s = self.following.pulses.limit_s()
            await self._rpc.call(leader, self.participation.make_join(), timeout_s=timeout_s, purpose="bulk")
        except Refused as error:
            self._why = f"{leader[-8:]} leads and refuses: {error}"
            if error.code is Code.STALE_EPOCH:
                await self._chronicle.sync_commits([leader])
            elif error.code is Code.NO_CAPACITY:
                self.leaders.refused_by = leader
            else:
                self._members.suspect(leader, trio.current_time())
            await self._news.wait(error.retry_after_s or LOOK_INTERVAL_S)
            return
        except PeerError as error:
            logger.info("%s should lead and does not answer: %s", leader[-8:], error)
            self._members.suspect(leader, trio.current_time())
            return
        self.leaders.refused_by = None
        self.following.joined(trio.current_time())
        while self._chronicle.ledger.head == parent and self.following.leader == leader and self.leader is None:
            if await self._part_if_useless(leader, parent):
                return
            await self._news.wait(LOOK_INTERVAL_S)
        now = trio.current_time()
        if self.leader is not None and not self.following.is_leader_alive(now):
            self._members.suspect(leader, now)  # others have given it up, and it is silent here as well

    async def _part_if_useless(self, leader: PeerId, parent: bytes) -> bool:
        """Look whether anything comes of following a leader; True when another must be found."""
        now = trio.current_time()
        first = self.leaders.first(leader, parent, now) if self.round is None else leader
        parting = self.following.decide_parting(self.participation.seen, first, now)
        if parting.action is Parting.NOT_YET:
            return False
        level = logging.INFO if parting.action in (Parting.SUSPECT, Parting.PASS_OVER) else logging.DEBUG
        logger.log(level, "the leader %s %s", leader[-8:], parting.reason)
        if parting.action is Parting.SUSPECT:
            self._members.suspect(leader, now)
        elif parting.action is Parting.PASS_OVER:
            self.leaders.pass_over(leader, parent, now)
            self.leave()
        elif parting.action is Parting.POINT_OUT:
            await self._tell_member(leader, Pulse(run=self._chronicle.run.id, parent=parent, successor=first))
        return True

    # --- what comes from others --------------------------------------------------------------------------------

    def take_join(self, peer: PeerId, message: JoinRound) -> None:
        """Let a member join under this peer. Raises Refused."""
        now = trio.current_time()
        state, _ = self._services.mine()
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
        following = self.following
        if following.is_early(now):
            raise Refused(Code.NO_CAPACITY, "fewer samples were there than forecast", following.retry_at - now)
        is_led = self._is_in and self.leader is None and following.is_led_by_other
        if is_led and (self.round is not None or following.is_leader_alive(now)):
            raise Refused(Code.NO_CAPACITY, f"{following.leader} leads this round", LOOK_INTERVAL_S)
        self.leadership.open().join(peer, message)
        self._news.notify()

    async def take(self, peer: PeerId, message: Message, payload: bytes) -> None:
        """Take a sign of life, or a word of a leader. Raises RemoteProtocolError."""
        is_leaders = peer == self.following.leader
        if isinstance(message, Group):
            if is_leaders and message.parent == self._chronicle.ledger.head:
                await self.participation.take_group(peer, message)
        elif isinstance(message, Check):
            if is_leaders:
                await self.participation.take_check(peer, message, payload)
        elif isinstance(message, Pulse):
            self.take_pulse(peer, message)
        elif isinstance(message, Beat) and self.leader is not None:
            self.leader.take_beat(peer, message)

    def take_pulse(self, peer: PeerId, message: Pulse) -> None:
        """Note that a leader is at it, calls the round off, or leaves it to another."""
        now = trio.current_time()
        if message.retry_ms is None:
            self.leaders.note_sign(PeerId(message.successor) or peer, message.parent, now)
            if self.leader is not None and self.leader.parent == message.parent:
                self.leader.drop_member(peer)  # it leads this round itself, or follows somebody else
            self._news.notify()
        if peer != self.following.leader or message.parent != self._chronicle.ledger.head:
            return
        if message.retry_ms is not None and self.round is not None:
            self.leaders.note_failure(peer, message.parent, now)
        self.following.take_pulse(message, now)
        self._why = f"in a round that {peer[-8:]} leads; it waits for {message.waits_for}"
        self._news.notify()

    def gone(self, peer: PeerId) -> None:
        """Note that a channel to a peer has ended. If it was the last, do without the peer until it says something."""
        if peer in self._rpc.peers():
            return
        self._members.suspect(peer, trio.current_time())
        if self.leader is not None:
            self.leader.drop_member(peer)
        if self.following.leader == peer:
            self.following.leave()
            self._news.notify()

    def leave(self) -> None:
        """Follow nobody any more: what was gathered may change from here on."""
        self.following.leave()
        self.participation.end_round()

    async def _tell_member(self, peer: PeerId, message: Message, payload: bytes = b"") -> None:
        """Bring a message to a member, this peer included; one that cannot be reached is not told."""
        if peer == self._me:
            try:
                await self.take(peer, message, payload)
            except RemoteProtocolError as error:  # nobody will stand for it then, and the round fails
                logger.warning("%s", error)
            return
        await tell_peer(self._rpc, peer, lambda channel: channel.send(message, payload))
