"""What a server answers its clients once it knows: whether a hop reaches its successor, and what the worker said."""

from __future__ import annotations

from swarmd.net.rpc import Channel
from swarmd.node.serving.hops import SessionHop
from swarmd.node.serving.next_hop import NextHopDialer
from swarmd.node.serving.outbox import Outbox
from swarmd.node.worker.worker_link import WorkerLink, WorkerReply
from swarmd.plan.chains.lane_table import LaneHop
from swarmd.protocol.wire.messages import Opened, OpenSession, Replay, Replayed, Reroute, Rerouted, encode_frame
from swarmd.protocol.wire.tuning import OpenLane, TunedHeld
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
