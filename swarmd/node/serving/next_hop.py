"""Whether a server reaches the next hop of a session or a lane by itself: dials it, and tells the client.

Clients name the next hop, so they could have this machine dial any address, and learn which ports are open there,
behind a router, too. So only addresses that the named peer's own record announces are dialled. Every failure is told in
the same words after the same time, and a peer that could not be reached is not dialled again for a while. Repairs wait
for one case: if a peer's last channel ended a moment ago, the client hears so at once, without a dial.
"""

from __future__ import annotations

from typing import TypeVar

import trio

from swarmd.errors import PeerError
from swarmd.net.api import Purpose
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Rpc
from swarmd.values import Decision, PeerId

PUSH_TIMEOUT_S = 3.0  # to reach a successor: after it outputs go through the client
LOOK_INTERVAL_S = 0.1  # for the record of a successor that is not known here yet
AGAIN_AFTER_S = 20.0  # a successor that could not be reached is tried again: a server that was killed is back by then
LOST_S = 5.0  # a peer whose last channel ended so lately is taken for dead: its client is about to do without it
MAX_REMEMBERED = 1_024  # successors that could not be reached

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


# A client names the next hop of its session, and this server dials it. Anybody who may open a session could scan ports
# so, unless the answer tells nothing:
#
#     reached                      answers at once, "pushes straight"
#     anything else (refused, closed port, wrong key, no record)  answers after PUSH_TIMEOUT_S, in the same words
#     failed within AGAIN_AFTER_S  answers at once, without a dial: the first answer said as much
#     lost within LOST_S           answers at once, without a dial: this server's own last channel to it ended
#
# A channel may run beside libp2p (net/direct.py), and either may be the first whose end is noticed: so what is asked
# about a lost peer is not whether a connection to it lives.
class NextHopDialer:
    """Connects one server with the next hops that its clients name."""

    def __init__(self, rpc: Rpc, exchange: Exchange) -> None:
        self._rpc = rpc
        self._exchange = exchange
        self._failed: dict[PeerId, tuple[float, tuple[str, ...]]] = {}
        self._lost_at: dict[tuple[PeerId, Purpose], float] = {}

    def note_lost(self, peer: PeerId, purpose: Purpose) -> None:
        """Note that the last channel of a purpose to a peer ended."""
        _remember(self._lost_at, (peer, purpose), trio.current_time())

    async def reach(
        self,
        purpose: Purpose,
        client: PeerId,
        successor: PeerId | None,
    ) -> Decision[bool]:
        """Find out whether this server can push to the successor of a hop, and say so."""
        if successor is None or successor == client:
            return Decision(True, "answers the client")
        if successor == self._rpc.network.peer_id:
            return Decision(True, "the next hop is here too")
        if await self.connect(purpose, successor):
            return Decision(True, f"pushes straight to {successor[-8:]}")
        return Decision(False, f"returns to the client: {successor[-8:]} cannot be reached from here")

    async def connect(self, purpose: Purpose, peer: PeerId) -> bool:
        """Have a channel to a peer that a client named; a failure takes ``PUSH_TIMEOUT_S``, whatever it is."""
        if self._rpc.find_channel(peer, purpose) is not None:
            return True
        if self._failed_lately(peer) or self._was_lost_lately(peer, purpose):
            return False
        with trio.move_on_after(PUSH_TIMEOUT_S):
            try:
                await self._learn_announced(peer)
                await self._rpc.channel(peer, purpose)
                self._failed.pop(peer, None)
                return True
            except PeerError:
                await trio.sleep_forever()  # until the time is over: how soon it failed would tell what is there
        until = trio.current_time() + AGAIN_AFTER_S
        _remember(self._failed, peer, (until, self._exchange.addresses_of(peer)))
        return False

    def _failed_lately(self, peer: PeerId) -> bool:
        until, addresses = self._failed.get(peer, (0.0, ()))
        return trio.current_time() < until and addresses == self._exchange.addresses_of(peer)

    def _was_lost_lately(self, peer: PeerId, purpose: Purpose) -> bool:
        lost_at = self._lost_at.get((peer, purpose))
        return lost_at is not None and trio.current_time() - lost_at < LOST_S

    async def _learn_announced(self, peer: PeerId) -> None:
        """Learn the addresses of a peer's own record; a connected peer needs none."""
        while self._rpc.network.way_to(peer) is None:
            if addresses := self._exchange.addresses_of(peer):
                self._rpc.network.learn(peer, addresses)
                return
            await trio.sleep(LOOK_INTERVAL_S)


def _remember(known: dict[KeyT, ValueT], key: KeyT, value: ValueT) -> None:
    """Note something of a peer, and forget what was noted first where it is too much."""
    known.pop(key, None)
    known[key] = value
    if len(known) > MAX_REMEMBERED:
        del known[next(iter(known))]
