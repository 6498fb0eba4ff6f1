"""Heartbeats between the hops of sessions: who is told how far this server is, and which silent neighbour is suspected.

A hop reports to whoever sent it work while work is under way, and watches its successor: only a direct neighbour names
a suspect, and only to the session's client. Hops that nobody uses any more are found here as well.
"""

from __future__ import annotations

import logging

from swarmd.net.rpc import Rpc
from swarmd.node.serving.hops import Hops, Key, SessionHop
from swarmd.node.serving.outbox import Outbox
from swarmd.plan.chains.session import LEASE_S, PROGRESS_INTERVAL_S, SUSPECT_AFTER_S
from swarmd.protocol.wire.messages import Progress, Suspect, framed
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

ABANDONED_LEASE_S = 60.0  # of a session whose client has no channel here
UNUSED_LEASE_S = 60.0  # of a session that took no op: room was promised and is not used


class Heartbeats:
    """See the module. Acts on the hops that its server holds."""

    def __init__(self, rpc: Rpc, hops: Hops[SessionHop], outbox: Outbox) -> None:
        self._rpc = rpc
        self._hops = hops
        self._outbox = outbox

    def on_progress(self, peer: PeerId, progress: Progress, now: float) -> None:
        """A successor says how far it is."""
        hop = self._hops.ending_at(progress.session, progress.start)
        if hop is not None and hop.successor == peer and progress.epoch == hop.state.epoch:
            hop.watch.on_progress(progress.finished, now)

    def look(self, now: float) -> list[Key]:
        """Suspect who is silent and report to senders; returns the hops that nobody uses any more."""
        expired = []
        for key, hop in self._hops.items():
            if hop.push and (reason := hop.watch.suspicion(now, SUSPECT_AFTER_S)) is not None:
                self._suspect(key, hop, reason)
            busy = hop.state.received > hop.state.finished or (hop.state.next_base_part > 0 and not hop.state.received)
            if (busy or hop.told_finished < hop.state.finished) and now - hop.told_at >= PROGRESS_INTERVAL_S:
                self._report(key, hop, now)
            if now - hop.used_at > self._lease_s(hop) and not busy:
                logger.info("session %s expired: no op came for %.0f s", key[0].hex()[:8], now - hop.used_at)
                expired.append(key)
        return expired

    def peer_gone(self, peer: PeerId) -> None:
        """A connection ended: whoever waits for that peer need not wait for silence."""
        for key, hop in self._hops.items():
            if hop.successor == peer and hop.push and hop.watch.is_waiting():
                self._suspect(key, hop, "its connection ended")

    def push_failed(self, peer: PeerId, reason: str) -> None:
        """Frames for a successor were lost."""
        for key, hop in self._hops.items():
            if hop.successor == peer and hop.watch.is_waiting():
                self._suspect(key, hop, reason)

    def _lease_s(self, hop: SessionHop) -> float:
        if not hop.state.received:
            return UNUSED_LEASE_S
        return LEASE_S if self._rpc.existing(hop.state.client) else ABANDONED_LEASE_S

    def _report(self, key: Key, hop: SessionHop, now: float) -> None:
        hop.told_at, hop.told_finished = now, hop.state.finished
        if hop.sender is not None:  # this very peer too: its hop before may be of another worker
            progress = Progress(
                session=key[0],
                start=key[1],
                epoch=hop.state.epoch,
                received=hop.state.received,
                finished=hop.state.finished,
            )
            self._outbox.put(hop.sender, framed(progress))

    def _suspect(self, key: Key, hop: SessionHop, reason: str) -> None:
        if hop.suspected:
            return
        hop.suspected = True
        logger.info("session %s: suspecting %s: %s", key[0].hex()[:8], hop.successor, reason)
        suspicion = Suspect(
            session=key[0], start=hop.span.end, epoch=hop.state.epoch, seq=hop.watch.sent, reason=reason[:500]
        )
        self._outbox.tell(hop.state.client, framed(suspicion))
