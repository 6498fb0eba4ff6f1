"""What members say who tried to connect to this machine: they are asked until enough have, and again after a while."""

from __future__ import annotations

import logging
import random

import trio

from swarmd.errors import PeerError
from swarmd.net.api import NatTraversal
from swarmd.net.rpc import Rpc
from swarmd.node.members.directory import Directory
from swarmd.plan.links.reachability import ReachabilityReport, versions_to_try
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 600.0  # routers and their leases change seldom
UNANSWERED_S = 45.0  # who did not answer is asked again sooner: the link may just have come up

Target = tuple[PeerId, int]
"""A member, and over which version of IP it is to connect."""


class DialBackSurvey:
    """See the module. ``own_hosts``: this machine's addresses when it was asked last."""

    def __init__(self, ways: NatTraversal, rpc: Rpc, directory: Directory, rng: random.Random) -> None:
        self._ways = ways
        self._rpc = rpc
        self._directory = directory
        self._rng = rng
        self._answers: dict[Target, tuple[ReachabilityReport, float]] = {}
        self._asked_at: dict[Target, float] = {}
        self.own_hosts: set[str] = set()

    def begin_anew(self) -> None:
        """Drop all answers: they are of another network, or of other ports."""
        self._answers = {}
        self._asked_at = {}

    def reports(self) -> list[ReachabilityReport]:
        """Give what was said lately."""
        oldest = trio.current_time() - 2 * ASK_AGAIN_S
        self._answers = {target: answer for target, answer in self._answers.items() if answer[1] > oldest}
        return [report for report, _ in self._answers.values()]

    async def ask_next(self) -> None:
        """Have one more member try, if there are not enough from outside yet."""
        now = trio.current_time()
        own_hosts = set(self._ways.own_hosts())
        if own_hosts != self.own_hosts:
            self.own_hosts = own_hosts
            self.begin_anew()
        target = self._choose_target(now)
        if target is None:
            return
        self._asked_at[target] = now
        peer, version = target
        try:
            self._rpc.network.learn(peer, self._directory.exchange.addresses_of(peer))
            self._answers[target] = (await self._ways.ask_dial_back(peer, version), now)
        except PeerError as error:
            self._asked_at[target] = now - ASK_AGAIN_S + UNANSWERED_S
            logger.debug("%s does not say whether it can connect here over IPv%d: %s", peer, version, error)

    def _choose_target(self, now: float) -> Target | None:
        fresh = [report for report, answered_at in self._answers.values() if now - answered_at < ASK_AGAIN_S]
        versions = () if self._ways.listening_port() is None else versions_to_try(fresh, self.own_hosts)
        others = sorted(self._directory.view().peers.keys() - {self._rpc.network.peer_id})
        for version in versions:
            due = [peer for peer in others if now - self._asked_at.get((peer, version), -ASK_AGAIN_S) >= ASK_AGAIN_S]
            if due:
                return self._rng.choice(due), version
        return None
