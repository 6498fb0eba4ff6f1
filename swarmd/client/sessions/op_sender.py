"""Sends the ops of one session to its hops: each to the first one, and what a hop could not pass on to the next."""

from __future__ import annotations

from contextlib import suppress

import trio

from swarmd.client.links.link import HopLink, SessionServices
from swarmd.client.sessions.chain import Chain
from swarmd.client.sessions.reservations import OPEN_TIMEOUT_S
from swarmd.client.sessions.step_state import OpInFlight, OpsInFlight
from swarmd.errors import PeerError
from swarmd.protocol.wire.messages import Op, Void
from swarmd.wire.history import History
from swarmd.wire.ops import encode_op


class OpSender:
    """See the module. What is sent is kept in ``history``, for repairs."""

    def __init__(self, swarm: SessionServices, chain: Chain, history: History, ops: OpsInFlight) -> None:
        self._swarm = swarm
        self._chain = chain
        self._history = history
        self._ops = ops

    async def send_op(self, op: OpInFlight) -> None:
        """Send an op to the first hop; while the chain is broken it waits in the history for the repair."""
        chain = self._chain
        sent = op.sent
        if self._swarm.audits:
            chain.accounts.note_sent(sent, is_alone=not self._ops)
        self._ops.add(op, trio.current_time())
        chain.position.seq = sent.seq
        chain.statistics.steps += 1
        self._history.add(sent)  # now: a repair may begin while it is sent
        if chain.trouble is None:
            await self.send_frame(0, sent.seq, self._encode(op))
        if not chain.is_under_repair:
            self._history.settle(chain.position.answered)  # while the chain computes

    async def send_aside(self, link: HopLink, message: Void) -> None:
        """Tell a hop something that no answer waits for; one that is gone hears nothing."""
        with suppress(PeerError):
            channel = await self._swarm.rpc.channel(link.hop.peer)
            await channel.send(message)

    def _encode(self, op: OpInFlight) -> bytes:
        chain = self._chain
        header = Op(
            session=chain.key,
            start=chain.terms.start,
            epoch=chain.epoch,
            settled=chain.position.answered,
            want=op.want,
            times=(),
            top=bool(op.vocabulary and op.want),
        )
        return encode_op(header, op.sent, chain.codec.action)

    async def send_frame(self, index: int, seq: int, frame: bytes) -> None:
        """Send op ``seq`` to hop ``index``; that it cannot be reached is the chain's trouble."""
        link = self._chain.links[index]
        link.watch.on_sent(seq, trio.current_time())
        if index == 0:
            self._chain.statistics.frames_sent += 1
        try:
            channel = await self._swarm.rpc.channel(link.hop.peer)
            with trio.fail_after(OPEN_TIMEOUT_S):
                await channel.send_raw(frame)
        except (PeerError, trio.TooSlowError) as error:
            self._chain.note_trouble(f"{link.hop}: {error}")
