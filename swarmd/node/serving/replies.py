"""What a server passes on: outputs of its worker to the next hop, and answers to its clients once it knows them."""

from __future__ import annotations

import trio

from swarmd.net.rpc import Channel, Rpc
from swarmd.node.serving.hops import SessionTable, key_of
from swarmd.node.serving.migration import Migrations
from swarmd.node.serving.next_hop import NextHopDialer
from swarmd.node.serving.outbox import Outbox
from swarmd.node.serving.receipts import Receipts
from swarmd.node.serving.recompute import Recompute
from swarmd.node.worker.worker_link import Handlers, WorkerLink, WorkerReply
from swarmd.plan.chains.hop import SessionHop
from swarmd.plan.chains.lane_table import LaneHop
from swarmd.protocol.wire.alternatives import count_alternative_tokens
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import (
    CachePart,
    Inherited,
    Op,
    Opened,
    OpenSession,
    Refusal,
    Replay,
    Replayed,
    Reroute,
    Rerouted,
    encode_frame,
)
from swarmd.protocol.wire.tuning import OpenLane, TunedHeld
from swarmd.protocol.wire.worker import Done
from swarmd.values import PeerId


class Replies:
    """Those of one server. ``outbox`` reaches its clients."""

    def __init__(self, onward: NextHopDialer, worker: WorkerLink, outbox: Outbox) -> None:
        self._onward = onward
        self._worker = worker
        self._outbox = outbox

    async def reply_opened(self, channel: Channel, opening: OpenSession, hop: SessionHop) -> None:
        """Tell a client that its hop is open, and whether this server pushes to the next one."""
        loaded = self._worker.loaded
        await self._connect_onward(hop)
        reply = Opened(
            re=opening.id,
            push=hop.push,
            why=hop.why[:500],
            numerics=loaded.numerics if loaded else "",
            layer_arity=loaded.layer_arity if loaded else 0,
        )
        self._outbox.tell(channel.peer, encode_frame(reply))

    async def reply_rerouted(self, channel: Channel, message: Reroute, hop: SessionHop) -> None:
        """Tell a client that its hop has other neighbours now, and what it has received."""
        await self._connect_onward(hop)
        reply = Rerouted(
            re=message.id,
            received=hop.state.received,
            push=hop.push,
            why=hop.why[:500],
        )
        self._outbox.tell(channel.peer, encode_frame(reply))

    async def reply_replayed(self, peer: PeerId, message: Replay, answer: WorkerReply) -> None:
        """Tell a client how much its hop sent again, once the worker says so."""

        def make_reply(reply: Replayed) -> Replayed:
            return Replayed(re=message.id, ops=reply.ops, tokens=reply.tokens)

        self._outbox.tell(peer, encode_frame(await answer.reply(message.id, make_reply)))

    async def reply_lane_opened(self, channel: Channel, opening: OpenLane, lane: LaneHop) -> None:
        """Tell a client that its lane's hop is open, and whether this server pushes to the next one."""
        decision = await self._onward.reach("training", lane.client, lane.successor)
        lane.push = decision.action
        lane.why = decision.reason
        loaded = self._worker.loaded
        reply = Opened(
            re=opening.id,
            push=lane.push,
            why=lane.why[:500],
            layer_arity=loaded.layer_arity if loaded else 0,
        )
        self._outbox.tell(channel.peer, encode_frame(reply))

    async def reply_parameters_held(self, peer: PeerId, call_id: int, answer: WorkerReply) -> None:
        """Tell a client that its parameters are here, once the worker says so."""
        self._outbox.tell(peer, encode_frame(await answer.reply(call_id, lambda _: TunedHeld(re=call_id))))

    async def _connect_onward(self, hop: SessionHop) -> None:
        """Find out whether this server can push to its successor; ``hop.why`` says so.

        That takes seconds where it cannot: meanwhile the hop may have got another successor, and that one's answer.
        """
        successor = hop.successor
        decision = await self._onward.reach("interactive", hop.state.client, successor)
        if hop.successor == successor:
            hop.push = decision.action
            hop.why = decision.reason


# A frame of the worker names the block where its hop ends (outputs), or starts (all else). What the worker says before
# it has opened a hop is of a session of the same name that was here before. What it says of an earlier epoch was
# computed for a chain that is no more; the client asks for it again. Sessions of this server itself (``recompute``)
# have no hop.
class WorkerOutputs:
    """What one server's worker says by itself of sessions. ``outbox`` reaches other peers."""

    def __init__(
        self,
        rpc: Rpc,
        sessions: SessionTable,
        recompute: Recompute,
        receipts: Receipts,
        migrations: Migrations,
        outbox: Outbox,
    ) -> None:
        self._rpc = rpc
        self._sessions = sessions
        self._recompute = recompute
        self._receipts = receipts
        self._migrations = migrations
        self._outbox = outbox

    def handlers(self) -> Handlers:
        """Who takes what the worker says by itself, but for refusals, which may be of lanes as well.

        With ``has_more``, outputs of one read leave in one write.
        """
        return {
            Op: self._on_output,
            Done: self._on_done,
            CachePart: self._on_cache_part,
            Inherited: self._on_inherited,
        }

    async def _on_output(self, op: Op, frame: Frame, has_more: bool) -> None:
        hop = self._sessions.hops.ending_at(op.session, op.start)
        if hop is None:
            self._recompute.take(op, frame)
            return
        key = (op.session, hop.span.start)
        if self._sessions.is_opening(key):
            return
        if op.base is None or op.base[0] + 1 == op.base[1]:
            hop.finish(op.seq)
        n_alternative = count_alternative_tokens(op.alternatives)
        self._receipts.note_output(key, hop, op.seq, op.tensor, frame.payload, n_alternative)
        if op.epoch != hop.state.epoch:
            return
        if op.times:
            hop.passes.append(op.times)
        receiver = hop.successor if hop.push else None
        if receiver is not None:
            hop.watch.on_sent(op.seq, trio.current_time())
        elif self._rpc.find_channel(hop.state.client) is not None:
            receiver = hop.state.client
        if receiver is not None and has_more:
            self._outbox.put(receiver, frame.raw)
        elif receiver is not None:
            await self._outbox.send(receiver, frame.raw)

    async def _on_done(self, message: Done, frame: Frame, has_more: bool) -> None:
        key = key_of(message)
        if not message.seq:
            self._sessions.note_opened(key)
            return
        hop = self._sessions.hops.get(key)
        if hop is not None and not self._sessions.is_opening(key):
            hop.finish(message.seq)
            self._receipts.note_output(key, hop, message.seq, None, frame.payload)

    async def _on_cache_part(self, message: CachePart, frame: Frame, has_more: bool) -> None:
        self._migrations.put(key_of(message), frame.raw)

    async def _on_inherited(self, message: Inherited, frame: Frame, has_more: bool) -> None:
        hop = self._sessions.hops.get(key_of(message))
        if hop is None or self._sessions.is_opening(key_of(message)):
            return
        if hop.inherit(message):
            self._outbox.tell(hop.state.client, encode_frame(message))

    def take_refusal(self, refusal: Refusal) -> None:
        """The worker cannot do what a session asked for: its client must know."""
        if self._recompute.take(refusal, None):
            return
        self._sessions.refused[refusal.code] += 1
        key = (refusal.session or b"", refusal.start)
        hop = self._sessions.hops.get(key)
        if hop is not None:
            if hop.trail is not None and refusal.seq and not self._sessions.is_opening(key):
                hop.trail.refuse()
            self._outbox.tell(hop.state.client, encode_frame(refusal))
