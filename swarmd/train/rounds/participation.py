"""The round that this peer is in: the group that its leader has formed, the numbers that come for it, what it signs."""

from __future__ import annotations

from collections import deque
from functools import partial

import trio

from swarmd.errors import IntegrityError, RemoteProtocolError, Unreachable
from swarmd.net.rpc import Channel
from swarmd.net.tasks import Tasks
from swarmd.protocol.wire.rounds import MAX_NEAR, Beat, Check, Group, JoinRound
from swarmd.train.rounds.following import RoundSeen
from swarmd.train.rounds.groups import check_group
from swarmd.train.rounds.heartbeats import strip_for_others
from swarmd.train.rounds.receiving import Numbers
from swarmd.train.rounds.round import Round
from swarmd.train.rounds.signing import ContributingMember
from swarmd.train.store.member_services import MemberServices
from swarmd.train.store.services import Tell
from swarmd.train.vectors.scratch import new_in_memory
from swarmd.train.vectors.work import GatheredWork
from swarmd.values import PeerId

GROUP_LATE_S = 1.0  # parts of a round may come before the group that they are for
N_ROUNDS_KNOWN = 16  # latest rounds; older parts are not for anybody


class Participation:
    """This peer's part in one round at a time, under the leader that it follows.

    ``offered``: what it joined with; a micro-batch that ends later is not of this round.
    """

    def __init__(self, services: MemberServices, signer: ContributingMember, tasks: Tasks, tell: Tell) -> None:
        self.round: Round | None = None
        self.offered = GatheredWork()
        self._services = services
        self._me = services.me
        self._signer = signer
        self._tasks = tasks
        self._tell = tell
        self._begun: deque[bytes] = deque(maxlen=N_ROUNDS_KNOWN)  # rounds that this peer is or was in
        self._scope = trio.CancelScope()

    @property
    def seen(self) -> RoundSeen | None:
        """What a follower looks at of the round, to decide whether it comes to anything."""
        return None if self.round is None else RoundSeen(self.round.group, self.round.moved_at)

    def make_join(self) -> JoinRound:
        """Say what this peer joins a round with; it is not in any until the group comes."""
        services = self._services
        trainer = services.trainer
        up, down = trainer.links()
        state, offered = services.mine()
        self.offered = offered
        can_be_dialled = trainer.can_be_dialled()
        members = set(services.members.look(trio.current_time()))
        near = sorted(trainer.near() & members)[:MAX_NEAR]
        return JoinRound(
            run=services.chronicle.run.id,
            parent=state.head if state else services.chronicle.ledger.head,
            state=state.root if state else b"",
            first=offered.first,
            n=offered.n,
            loss=offered.loss,
            n_elements=state.n_averaged if state else 0,
            dtype=state.layout.dtype if state else "float32",
            receives=state is not None and (offered.n > 0 or can_be_dialled),
            can_reduce=can_be_dialled,
            up_bytes_per_s=up,
            down_bytes_per_s=down,
            late=offered.late,
            anew=offered.anew,
            near=tuple(near),
        )

    async def take_group(self, leader: PeerId, group: Group) -> None:
        """Take the group that the followed leader has formed, or changed. Raises RemoteProtocolError."""
        state, _ = self._services.mine()
        offered = self.offered
        run = self._services.chronicle.run
        present = self.round if self.round is not None and self.round.group.round == group.round else None
        previous = present.group if present is not None else None
        check_group(group, previous, state.n_averaged if state else None, run.recipe)
        if present is not None:
            present.change_group(group)
            return
        member = next((m for m in group.members if m.peer == self._me), None)
        if member is None or (member.first, member.n) != (offered.first, offered.n):
            return
        self.end_round()
        root = state.root if state is not None else b""
        self.round = Round(
            self._services.trainer.rpc,
            group,
            run.recipe,
            offered.coded,
            sign=partial(self._signer.share, group.parent, root, offered),
            off_loop=self._services.trainer.off_loop,
            new_vector=state.scratch.new if state is not None else new_in_memory,
        )
        self._begun.append(group.round)
        self._scope = self._tasks.start_soon(self._live_round, self.round, leader)
        self._services.news.notify()

    async def take_numbers(self, channel: Channel, message: Numbers, payload: memoryview) -> None:
        """Take parts of a round. The leader's group may come by another channel: wait a little for it."""
        previous = self.round
        with trio.move_on_after(GROUP_LATE_S) as waiting:
            while message.round not in self._begun and self.round in (None, previous):
                await self._services.news.wait()
        if waiting.cancelled_caught:  # they are sent again, if they still count
            raise Unreachable("numbers of a round that has not begun here")
        current_round = self.round
        if current_round is None or current_round.group.round != message.round:
            return  # of a round that is over, or that came to nothing
        await current_round.take(channel.peer, message, payload)

    async def take_check(self, leader: PeerId, message: Check, payload: bytes) -> None:
        """Stand for what the leader would bring to the anchors. Raises RemoteProtocolError for what nobody can."""
        current_round = self.round
        state, _ = self._services.mine()
        if current_round is None or state is None:
            return
        if (message.round, message.version) != (current_round.group.round, current_round.group.version):
            return
        try:
            if payload:
                generation = self._services.chronicle.order.generation
                signature = self._signer.assent_untrusted(payload, current_round, generation, state.root)
                current_round.give_assent(signature)
            else:
                await current_round.give_share(message.average)
        except IntegrityError as error:
            raise RemoteProtocolError(f"{leader[-8:]} shows what nobody can stand for: {error}") from None

    def end_round(self) -> None:
        """End the round that this peer is in, if any."""
        self._scope.cancel()
        self.round = None

    async def _live_round(self, current_round: Round, leader: PeerId) -> None:
        async def send_beat(message: Beat) -> None:
            average = current_round.progress.average
            if message.result and average is not None:
                self._services.averages.put(current_round.group.parent, message.result, average)
            await self._tell(leader, message if leader == self._me else strip_for_others(message), b"")

        await current_round.run(send_beat)
