"""What other members of a run bring and ask: each message goes to the part that takes it, or is answered here."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import trio

from swarmd.errors import Code, IntegrityError, Refused, RemoteProtocolError
from swarmd.net.rpc import Channel
from swarmd.net.tasks import Tasks
from swarmd.protocol.untrusted import decode
from swarmd.protocol.wire import rounds
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage
from swarmd.protocol.wire.stages import StageForward
from swarmd.train.gradients.gradient_audits import GradientAudits
from swarmd.train.rounds.joining import Joining
from swarmd.train.rounds.receiving import Numbers
from swarmd.train.stages.part import StagePart
from swarmd.train.store import recovery
from swarmd.train.store.member_services import MemberServices
from swarmd.train.store.recovery import StateDonors
from swarmd.values import PeerId


class RunInbox:
    """See the module. ``donors``: for whom this peer's state is kept as it was."""

    def __init__(
        self,
        services: MemberServices,
        joining: Joining,
        audits: GradientAudits,
        tasks: Tasks,
        why_idle: Callable[[], str],
        stage: StagePart | None = None,
    ) -> None:
        self.donors = StateDonors()
        self._chronicle = services.chronicle
        self._members = services.members
        self._mine = services.mine
        self._joining = joining
        self._audits = audits
        self._tasks = tasks
        self._why_idle = why_idle
        self._stage = stage

    def gone(self, peer: PeerId) -> None:
        """Note that a channel to a peer has ended."""
        self._joining.gone(peer)
        if self._stage is not None:
            self._stage.holder.gone(peer)

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> None:
        """Answer what is about this run. Raises Refused or RemoteProtocolError."""
        peer = channel.peer
        self._members.vouch(peer)
        if isinstance(message, StageForward) and (idle := self._why_idle()):
            raise Refused(Code.NO_CAPACITY, idle, 5.0)
        if self._stage is not None and self._stage.holder.take(channel, message):
            return
        if isinstance(message, Numbers):
            await self._joining.participation.take_numbers(channel, message, frame.payload)
        elif isinstance(message, rounds.Beat | rounds.Group | rounds.Check | rounds.Pulse):
            await self._joining.take(peer, message, bytes(frame.payload))
        elif isinstance(message, rounds.Contradict) and message.stage is not None:
            if self._stage is not None:
                self._tasks.start_soon(self._stage.audits.hear, peer, message, bytes(frame.payload))
        elif isinstance(message, rounds.Contradict):
            counts = self._audits.take_untrusted(peer, message, bytes(frame.payload))
            if counts and self._stage is not None:
                self._stage.audits.suspect(PeerId(message.peer))
        elif isinstance(message, rounds.JoinRound):
            idle = self._why_idle()
            if idle:
                raise Refused(Code.NO_CAPACITY, idle, 5.0)
            self._joining.take_join(peer, message)
            await channel.send(rounds.Joined(re=message.id))
        elif isinstance(message, rounds.Prepare | rounds.Propose):
            answer, body = await self._chronicle.be_anchor(peer, message, bytes(frame.payload))
            await channel.answer(answer, body)
        elif isinstance(message, rounds.Commits):
            await self._take_news(peer, frame)
        else:
            await self._answer_query(channel, message)

    async def _answer_query(self, channel: Channel, message: AnyMessage) -> None:
        """Tell what the run is, what its ledger says, or keep the state for somebody to fetch."""
        run = self._chronicle.run
        if isinstance(message, rounds.WantRun):
            payload = msgspec.msgpack.encode((run.raw, self._chronicle.order_raw))
            await channel.answer(rounds.RunIs(re=message.id), payload)
        elif isinstance(message, rounds.WantCommits):
            raws = (s.raw for s in self._chronicle.ledger.sealed[message.after :])
            await recovery.send_commits(channel, run.id, raws, message.id)
        elif isinstance(message, rounds.WantState):
            state, _ = self._mine()
            if state is None:
                raise Refused(Code.NOT_HELD, "this peer has no state", 10.0)
            offer = self.donors.freeze(state, trio.current_time())
            await channel.send(rounds.StateIs(re=message.id, epoch=offer.epoch, state=offer.state))

    async def _take_news(self, peer: PeerId, frame: Frame) -> None:
        """Take what somebody says was committed."""
        try:
            if not await self._chronicle.take_commits(decode(frame.payload, list[bytes], "a list of commits")):
                self._tasks.start_soon(self._chronicle.sync_commits, [peer])
        except IntegrityError as error:
            raise RemoteProtocolError(f"commits that do not count: {error}") from None
