"""Makes the state follow the ledger: by the average that this peer has, else by what others give.

Nobody who is up to date reloads: a state is given up only when a commit shows that it is another than the others'.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import msgspec
import trio

from swarmd.errors import SwarmError
from swarmd.net.tasks import Tasks
from swarmd.plan.runs import progress
from swarmd.plan.runs.recovery import DonorOffer, choose_path, restorable_epoch
from swarmd.protocol.runs import backing
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.backing import BackedCommit
from swarmd.protocol.runs.commit import Commit
from swarmd.train.store import recovery
from swarmd.train.store.member_services import MemberServices
from swarmd.train.store.recovery import Get, Vectors
from swarmd.train.vectors.state import RunState, Vector
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

RESTORE_AFTER_S = 120.0  # nobody has the newest state: go on from an older one, of which something is lost
RETRY_S = 0.25  # between two looks for who has what is missing
RETRY_FAILED_S = 1.0  # after everybody said no


class CatchingUp:
    """See the module. ``settle`` is told of each commit that is applied, or of None when work is void.

    ``end_round`` leaves the round that this peer is in; what is told to others goes out in ``tasks``. ``clip_of``: by
    what a stage's update is clipped with all others; None while that is not known. ``computes_nothing``: for as long as
    the state changes.
    """

    def __init__(
        self,
        services: MemberServices,
        state: RunState,
        get: Get,
        tasks: Tasks,
        *,
        end_round: Callable[[], None],
        settle: Callable[[Commit | None], None],
        clip_of: Callable[[Commit], Awaitable[float | None]] | None = None,
        computes_nothing: Callable[[], AbstractAsyncContextManager[object]] = nullcontext,
    ) -> None:
        self.why = ""
        self.n_times = 0
        self.n_snapshots = 0
        self.last_s: float | None = None
        self._rpc = services.trainer.rpc
        self._off_loop = services.trainer.off_loop
        self._me = services.me
        self._chronicle = services.chronicle
        self._ledger = services.chronicle.ledger
        self._members = services.members
        self._averages = services.averages
        self._end_round = end_round
        self._tasks = tasks
        self._state = state
        self._averages_gone: int | None = None  # of which update nobody gave them
        self._get = get
        self._settle = settle
        self._clip_of = clip_of
        self._computes_nothing = computes_nothing
        self._is_mistrusted = False
        self._behind_since: float | None = None

    @property
    def is_due(self) -> bool:
        """Is the state here behind the ledger, or another than that of the others?"""
        return self._state.epoch < self._ledger.epoch or self._is_mistrusted

    async def advance(self) -> None:
        """Take one step towards the ledger's head; say in ``why`` what that waits for."""
        self._end_round()
        if self._is_mistrusted or not await self._apply_next():
            self.n_times += 1
            started_at = trio.current_time()
            try:
                if not await self._catch_up():
                    await trio.sleep(RETRY_S)
            except SwarmError as error:
                self.why = f"cannot catch up yet: {error}"
                logger.info("%s", self.why)
                await trio.sleep(RETRY_FAILED_S)
            self.last_s = trio.current_time() - started_at
        if not self.is_due:
            self._behind_since = None

    async def _apply_next(self) -> bool:
        """Apply the commit after the state's, if its average is here; or go on from where a later one goes back to."""
        missed = [s.commit for s in self._ledger.sealed[self._state.epoch :]]
        restoring = next((c for c in reversed(missed) if c.restores), None)
        if restoring is not None and await self._restore_state(restoring):
            return True
        commit = missed[0]
        if commit.restores:
            return False
        clipped = await self._clip(commit)
        if clipped is None:
            await trio.sleep(RETRY_S)
            return True
        average = self._averages.take(commit.average, self._ledger.head)
        return average is not None and await self._apply_average(clipped, average)

    async def _clip(self, commit: Commit) -> Commit | None:
        """Return a commit with what clips it in all stages; None while others have not committed that update."""
        if self._clip_of is None:
            return commit
        clip = await self._clip_of(commit)
        if clip is None:
            self.why = f"waits for other stages to end update {commit.epoch}"
            return None
        return msgspec.structs.replace(commit, clip=clip)

    async def _apply_average(self, commit: Commit, average: Vector) -> bool:
        """Apply a commit; False when it was made of another state than this one, which is then given up."""
        if commit.state != self._state.root:
            logger.warning("the state here is another than that of update %d: fetching it anew", self._state.epoch)
            self._is_mistrusted = True
            return False
        digest = self._ledger.digest_at(commit.epoch)
        steps = self._ledger.steps_at(commit.epoch)
        await self._change_state(commit, self._state.apply, commit, digest, average, steps)
        return True

    async def _change_state(self, commit: Commit | None, function: Callable[..., None], *arguments: Any) -> None:
        """Change the state in a thread, by a commit that is settled with it; nobody takes a snapshot meanwhile."""
        async with self._computes_nothing():
            self._settle(commit)
            self._state.is_changing = True
            try:
                await self._off_loop(function, *arguments)
            finally:
                self._state.is_changing = False

    async def _restore_state(self, commit: Commit) -> bool:
        """Go back to the state that a commit names, if that is the one here."""
        if (commit.restores, commit.state) != (self._state.head, self._state.root):
            return False
        digest = self._ledger.digest_at(commit.epoch)
        await self._change_state(commit, self._state.stay, commit.epoch, digest, self._state.steps)
        return True

    # Which way a peer that is behind takes, in this order:
    #
    #     the owner orders to go back to the state here        propose it
    #     the averages that were missed cost fewer bytes       fetch and apply them, one by one
    #     else                                                 fetch the newest snapshot that most donors name
    #     nobody has the newest state, for RESTORE_AFTER_S     one of those with the newest one left proposes it
    #
    # Averages are named by signed commits: no donor can forge one. A snapshot is believed because most donors name
    # it, and is checked by the next commit, which names the digest of the state it was made of.

    async def _catch_up(self) -> bool:
        """Fetch what is missing; False while nobody gives it. Raises SwarmUnavailable."""
        state = self._state
        newest = self._ledger.epoch
        records = self._members.look(trio.current_time())
        offers = {}
        for peer, record in records.items():
            if record.state_epoch is not None:
                offers[peer] = DonorOffer(record.state_epoch, record.state, record.n_averages)
        held_epoch = None if self._is_mistrusted else state.epoch
        order = self._chronicle.order
        ordered = (order.back_from, order.back_to)
        if ordered == (self._ledger.head, state.head) and not self._is_mistrusted:
            return await self._go_back("its owner orders it")
        average_bytes = math.inf if self._averages_gone == newest else state.averaged_bytes
        path = choose_path(held_epoch, newest, offers, average_bytes, state.n_bytes)
        self.why = path.reason
        if path.action is None:
            return await self._restore_if_lost()
        self._behind_since = None
        if not path.action.state:
            return await self._replay_averages(path.action.donors, path.action.epoch)
        return await self._fetch_snapshot(held_epoch, path.action.donors)

    async def _fetch_snapshot(self, held_epoch: int | None, donors: tuple[PeerId, ...]) -> bool:
        """Have donors keep their states, and fetch the one that most name; False while they do not agree on any."""
        state = self._state
        newest = self._ledger.epoch
        offers = await recovery.ask_states(self._rpc, donors, self._chronicle.run.id)
        self._leave_out_unreachable(donors)
        eligible = {p: o for p, o in offers.items() if o.epoch <= newest}
        chosen = choose_path(held_epoch, newest, eligible, average_bytes=1, state_bytes=0)
        if chosen.action is None:
            self.why = chosen.reason
            return False
        logger.info("fetching %s", chosen.reason)
        self._settle(None)
        n_elements = state.layout.n_elements
        vectors = await self._fetch_vectors(
            chosen.action.state,
            chosen.action.donors,
            tuple(state.vectors),
            n_elements,
        )
        self.n_snapshots += 1
        await self._change_state(None, self._take_over, vectors, chosen.action.epoch)
        self._is_mistrusted = state.root != chosen.action.state
        return True

    def _take_over(self, vectors: dict[str, Vector], epoch: int) -> None:
        self._state.replace(vectors)
        digest = self._ledger.digest_at(epoch)
        self._state.move_to(epoch, digest, self._ledger.steps_at(epoch))

    async def _replay_averages(self, donors: tuple[PeerId, ...], newest: int) -> bool:
        """Apply the averages that were missed, one after the other."""
        while self._state.epoch < newest:
            commit = self._ledger.sealed[self._state.epoch].commit
            if commit.restores:
                self._is_mistrusted = not await self._restore_state(commit)
            else:
                self._averages_gone = newest  # unless they come: records are older than what they tell
                average = await self._fetch_vectors(commit.average, donors, ("average",), self._state.n_averaged)
                self._averages_gone = None
                clipped = await self._clip(commit)
                if clipped is None:
                    return False
                await self._apply_average(clipped, average["average"])
            if self._is_mistrusted:
                return True
        return True

    async def _fetch_vectors(
        self,
        digest: bytes,
        donors: tuple[PeerId, ...],
        names: tuple[str, ...],
        n: int,
    ) -> Vectors:
        try:
            return await self._get(digest, donors, names, n)
        except SwarmError:
            self._leave_out_unreachable(donors)
            raise

    def _leave_out_unreachable(self, donors: Iterable[PeerId]) -> None:
        """Do without donors that were asked and are still not connected: their records outlive them."""
        for peer in set(recovery.choose_donors(donors)) - self._rpc.peers():
            self._members.suspect(peer, trio.current_time())

    async def _restore_if_lost(self) -> bool:
        """Have the run go on from the newest state that somebody has, where nobody alive has the newest.

        A member that says it has one counts, though it cannot be reached from here: what it has is not lost.
        """
        now = trio.current_time()
        self._behind_since = self._behind_since or now
        states = {**self._members.states(), self._me: self._state.epoch}
        best = restorable_epoch(self._ledger.epoch, list(states.values()))
        if best is None or now - self._behind_since < RESTORE_AFTER_S:
            return False
        holders = [p for p, epoch in states.items() if epoch == best]
        if progress.leader_order(self._ledger.head, holders)[0] != self._me:
            return False
        return await self._go_back(f"nobody has the state of update {self._ledger.epoch}")

    async def stay(self, why: str) -> None:
        """As a stage, end an update to which it has nothing to give: the state that is here goes on."""
        try:
            await self._go_back(why)
        except SwarmError as error:
            self.why = f"cannot go on yet: {error}"
            await trio.sleep(RETRY_FAILED_S)

    async def _go_back(self, why: str) -> bool:
        """Have the run go on from the state that is here."""
        logger.warning("on from the state of update %d: %s", self._state.epoch, why)
        commit = Commit(
            run=self._chronicle.run.genesis,
            epoch=self._ledger.epoch + 1,
            parent=self._ledger.head,
            generation=self._chronicle.order.generation,
            contributors=(),
            average=b"",
            state=self._state.root,
            learning_rate=0.0,
            restores=self._state.head,
        )
        self._behind_since = None
        proposed = backing.encode(BackedCommit(commits.encode(commit)))
        raw = await self._chronicle.proposer().settle(proposed)
        members = self._members.look(trio.current_time())
        await self._chronicle.spread_commit(self._tasks, raw, members)
        return True
