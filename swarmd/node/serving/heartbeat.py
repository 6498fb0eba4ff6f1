"""Heartbeats between the hops of sessions: report progress to senders, and suspect successors that fall silent.

A hop reports to the peer that sends it work while work is under way, and watches its successor. Only a direct neighbour
names a suspect, and only to the session's client. Hops that nobody uses any more are found here as well.
"""

from __future__ import annotations

import logging

from swarmd.net.rpc import Rpc
from swarmd.node.serving.hops import Hops, Key, SessionHop
from swarmd.node.serving.outbox import Outbox
from swarmd.plan.chains.session import LEASE_S, PROGRESS_INTERVAL_S, SUSPECT_AFTER_S
from swarmd.protocol.wire.messages import Progress, Suspect, encode_frame
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

ABANDONED_LEASE_S = 60.0  # of a session whose client has no channel here
UNUSED_LEASE_S = 60.0  # of a session that took no op: room was promised and is not used


# Who tells whom, in a chain client -> A -> B -> C -> client:
#
#     A --ops--> B --ops--> C        while B has ops that it has not finished,
#     A <-progress- B <-progress- C  it says every PROGRESS_INTERVAL_S how far it is.
#
# B has sent ops to C and hears nothing for SUSPECT_AFTER_S: it tells the client, and only the client, that it suspects
# C. The client decides what to do. Nobody believes a suspicion about a peer that is not the speaker's neighbour, so one
# liar can slow its own client's chains down and nothing else. Without ops under way nobody speaks and nobody is missed.
class Heartbeats:
    """See the module. Acts on the hops that its server holds."""

    def __init__(self, rpc: Rpc, hops: Hops, outbox: Outbox) -> None:
        self._rpc = rpc
        self._hops = hops
        self._outbox = outbox

    def on_progress(self, peer: PeerId, progress: Progress, now: float) -> None:
        """Note how far a successor is, as it says."""
        hop = self._hops.ending_at(progress.session, progress.start)
        if hop is not None and hop.successor == peer and progress.epoch == hop.state.epoch:
            hop.watch.on_progress(progress.finished, now)

    def check_hops(self, now: float) -> list[Key]:
        """Suspect silent successors and report to senders; returns the hops that nobody uses any more."""
        expired = []
        for key, hop in self._hops.items():
            reason = hop.watch.suspicion(now, SUSPECT_AFTER_S) if hop.push else None
            if reason is not None:
                self._suspect(key, hop, reason)
            is_base_coming = hop.state.next_base_part > 0 and not hop.state.received
            is_busy = hop.state.received > hop.state.finished or is_base_coming
            has_news = is_busy or hop.told_finished < hop.state.finished
            if has_news and now - hop.told_at >= PROGRESS_INTERVAL_S:
                self._report(key, hop, now)
            unused_s = now - hop.used_at
            if unused_s > self._lease_s(hop) and not is_busy:
                logger.info("session %s expired: no op came for %.0f s", key[0].hex()[:8], unused_s)
                expired.append(key)
        return expired

    def on_peer_gone(self, peer: PeerId) -> None:
        """Suspect a peer whose connection ended at once: hops that wait for it need not wait for silence."""
        for key, hop in self._hops.items():
            if hop.successor == peer and hop.push and hop.watch.is_waiting():
                self._suspect(key, hop, "its connection ended")

    def on_push_failed(self, peer: PeerId, reason: str) -> None:
        """Suspect a successor whose frames were lost."""
        for key, hop in self._hops.items():
            if hop.successor == peer and hop.watch.is_waiting():
                self._suspect(key, hop, reason)

    def _lease_s(self, hop: SessionHop) -> float:
        if not hop.state.received:
            return UNUSED_LEASE_S
        return LEASE_S if self._rpc.find_channel(hop.state.client) else ABANDONED_LEASE_S

    def _report(self, key: Key, hop: SessionHop, now: float) -> None:
        hop.told_at = now
        hop.told_finished = hop.state.finished
        if hop.sender is not None:  # this very peer too: its hop before may be of another worker
            progress = Progress(
                session=key[0],
                start=key[1],
                epoch=hop.state.epoch,
                received=hop.state.received,
                finished=hop.state.finished,
            )
            self._outbox.put(hop.sender, encode_frame(progress))

    def _suspect(self, key: Key, hop: SessionHop, reason: str) -> None:
        if hop.suspected:
            return
        hop.suspected = True
        logger.info("session %s: suspecting %s: %s", key[0].hex()[:8], hop.successor, reason)
        suspicion = Suspect(
            session=key[0],
            start=hop.span.end,
            epoch=hop.state.epoch,
            seq=hop.watch.sent,
            reason=reason[:500],
        )
        self._outbox.tell(hop.state.client, encode_frame(suspicion))
