"""What a peer sees of a run beside its ledger: who computes on a commit, who answers, who has which state.

A leader asks it whether anchors would sign, an anchor whether it may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import trio

from swarmd.errors import ConfigError, PeerError
from swarmd.net.rpc import Rpc
from swarmd.plan.runs import quorum
from swarmd.plan.runs.ledger import Ledger
from swarmd.train.store import recovery
from swarmd.train.store.members import Members
from swarmd.values import PeerId

MOST_ASKED = 4  # peers, whether any of them lives
ANSWER_S = 2.0  # for a peer that lives to say so, while a proposer waits for its anchor
SOON_S = 1.0  # until others whose speed is not known have computed something; looking again costs next to nothing
N_INTERVALS = 8  # between the latest commits: what is usual

OwnRecord = Callable[[], Mapping[str, Any]]
"""What this peer's own record says."""


class RunPresence:
    """Who of a run is there, this peer included. ``intervals_s``: between the latest commits."""

    def __init__(
        self,
        rpc: Rpc,
        ledger: Ledger,
        members: Members,
        own_record: OwnRecord,
        anchors: Callable[[], Sequence[PeerId]],
    ) -> None:
        self.intervals_s: deque[float] = deque(maxlen=N_INTERVALS)
        self._rpc = rpc
        self._me = rpc.network.peer_id
        self._ledger = ledger
        self._members = members
        self._own_record = own_record
        self._anchors = anchors
        self._head_at = trio.current_time()

    def note_commit(self, now: float) -> None:
        """Note that the ledger has grown."""
        self.intervals_s.append(now - self._head_at)
        self._head_at = now

    def known_for_s(self, now: float) -> float:
        """Return for how long the newest commit is known here."""
        return now - self._head_at

    def computing_on(self, head: bytes) -> set[PeerId]:
        """Return who computes on a commit, this peer included."""
        record = self._own_record()
        computing = {self._me} if record["samples_per_s"] > 0 and record["head"] == head else set()
        return computing | set(self._members.computing(head, trio.current_time()))

    def are_stages_past(self) -> bool:
        """Has another stage of the run ended a later update than this one?"""
        return self._members.are_stages_past(self._ledger.epoch, self._anchors())

    async def why_not_alone(self, contributor: PeerId) -> tuple[str, float]:
        """Why anchors would not sign what one contributor stands for, as far as is seen from here; "" when they would.

        Who is slow is no stranger to them, though it did not come in time here. With it the time until the first of
        the others may have a sample to give.
        """
        now = trio.current_time()
        speeds = {
            p.peer: p.samples_per_s
            for p in self._members.progress(now, with_suspects=True)
            if p.head == self._ledger.head and p.samples_per_s and p.peer != contributor
        }
        wait = quorum.may_be_alone(self.known_for_s(now), self.intervals_s)
        other_members = {*speeds, *self.computing_on(self._ledger.head)} - {contributor}
        if not wait.action or not other_members or not await self.does_any_answer(other_members):
            return "", 0.0
        first_sample_s = [1 / speed for speed in speeds.values()]
        return wait.reason, min([wait.action, SOON_S, *first_sample_s])

    def known_states(self) -> list[int]:
        """List the updates of which somebody has the state."""
        own_epoch = self._own_record()["state_epoch"]
        states = list(self._members.states().values())
        return states if own_epoch is None else [*states, own_epoch]

    async def does_any_answer(self, peers: set[PeerId]) -> bool:
        """Does any of them answer now?"""
        has_answered = self._me in peers

        async def ask_peer(peer: PeerId, scope: trio.CancelScope) -> None:
            nonlocal has_answered
            try:
                await recovery.fetch_commits(self._rpc, peer, self._ledger.run.id, self._ledger.epoch)
            except PeerError:
                return
            has_answered = True
            scope.cancel()

        with trio.move_on_after(ANSWER_S):
            async with trio.open_nursery() as nursery:
                for peer in [] if has_answered else sorted(peers)[:MOST_ASKED]:
                    nursery.start_soon(ask_peer, peer, nursery.cancel_scope)
        return has_answered

    def find_earlier_state(self) -> bytes:
        """Find the newest commit before the last whose state somebody has. Raises ConfigError."""
        earlier = [epoch for epoch in self.known_states() if epoch < self._ledger.epoch]
        if not earlier:
            raise ConfigError(f"nobody has an earlier state than that of update {self._ledger.epoch}")
        return self._ledger.digest_at(max(earlier))
