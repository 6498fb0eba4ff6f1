"""One peer's ledger of a run: verified, on its disk, shared with the others; and, where the peer is one, its anchor."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import trio

from swarmd.errors import Code, IntegrityError, PeerError, Refused, RemoteProtocolError
from swarmd.net.tasks import Tasks
from swarmd.plan.runs.ballot import Acceptor
from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.fields import Message
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.commit import SealedCommit
from swarmd.protocol.runs.recipe import Run, RunOrder, read_order_untrusted
from swarmd.protocol.wire.rounds import Prepare, Propose
from swarmd.train.store import recovery
from swarmd.train.store.anchor import Anchor
from swarmd.train.store.disk import RunFolder
from swarmd.train.store.members import Members
from swarmd.train.store.presence import OwnRecord, RunPresence
from swarmd.train.store.proposer import Proposer
from swarmd.train.store.services import TrainerServices, Wakeups, tell_peer
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 4.0  # one commit to be signed or read
MOST_ASKED = 4  # peers, for a commit that one of them has
N_COMPARED = 8  # of the newest commits: what many tell at once is verified once


class Chronicle:
    """See the module. ``order`` is the latest of the run's owner, ``presence`` who is there."""

    def __init__(
        self,
        services: TrainerServices,
        run: Run,
        members: Members,
        folder: RunFolder | None,
        news: Wakeups,
        own_record: OwnRecord,
    ) -> None:
        self.run = run
        self.ledger = Ledger(run)
        self.presence = RunPresence(services.rpc, self.ledger, members, own_record, lambda: self.anchors)
        self.order = RunOrder(run.id, 0)
        self.order_raw = b""
        self._services = services
        self._me = services.rpc.network.peer_id
        self._members = members
        self._folder = folder
        self._news = news
        self._anchor: Anchor | None = None
        self._acceptor: Acceptor | None = None
        self._is_ready = False
        self._writing = trio.Lock()

    @property
    def anchors(self) -> tuple[PeerId, ...]:
        """Whose majority signs commits now."""
        return self.order.anchors_of(self.run.recipe)

    async def recall(self) -> None:
        """Read what an earlier life of this peer wrote. Raises ConfigError or IntegrityError when it is damaged."""
        if self._folder is not None:
            raw = self._folder.order()
            if raw:
                self.take_order_untrusted(raw)
            for raw in await self._services.off_loop(list, self._folder.commits()):
                self.ledger.add(commits.read_untrusted(raw, self.order.sets_of(self.run.recipe)))
            self._acceptor = self._folder.acceptor()
        self._is_ready = True
        self._use_order()

    # --- commits -----------------------------------------------------------------------------------------------

    async def take_commits(self, raws: Iterable[bytes]) -> bool:
        """Add what follows the ledger's head; False when something is missing in between. Raises IntegrityError."""
        # Peers bring commits in any order, and several bring the same at once. One task at a time goes through them,
        # and each is checked in this order: known already, signed by a majority, next in turn, on the disk, added.
        async with self._writing:
            for raw in raws:
                if any(raw == known.raw for known in self.ledger.sealed[-N_COMPARED:]):
                    continue
                await trio.lowlevel.checkpoint()
                sealed = commits.read_untrusted(raw, self.order.sets_of(self.run.recipe))
                if sealed.commit.epoch > self.ledger.epoch + 1:
                    return False
                if sealed.commit.epoch == self.ledger.epoch + 1:
                    self.ledger.check_next(sealed.commit)
                    if self._folder is not None:  # on the disk first: an anchor must not forget what follows
                        await self._services.off_loop(self._folder.append_commit, raw)
                if self.ledger.add(sealed):
                    self._note_added(sealed)
        return True

    def _note_added(self, sealed: SealedCommit) -> None:
        """Tell the rest of this peer that the ledger has grown."""
        now = trio.current_time()
        self.presence.note_commit(now)
        contributors = frozenset(c.peer for c in sealed.commit.contributors)
        self._members.note_commit(self.ledger.epoch, sealed.digest, contributors, now)
        self._news.notify()

    async def sync_commits(self, peers: Iterable[PeerId]) -> bool:
        """Ask some at once for what is missing here, until one has some; did one?

        A peer that sends what does not verify loses standing; one that has nothing is believed no longer for a while.
        """
        n_known = self.ledger.epoch

        async def ask_peer(peer: PeerId, scope: trio.CancelScope) -> None:
            try:
                await self.take_commits(
                    await recovery.fetch_commits(
                        self._services.rpc,
                        peer,
                        self.run.id,
                        n_known,
                    )
                )
            except IntegrityError as error:
                self._services.rpc.standing.fault(peer, Fault.FORGED, str(error))
                logger.warning("commits of %s do not count: %s", peer[-8:], error)
            except PeerError as error:
                logger.info("no commits from %s: %s", peer[-8:], error)
            if self.ledger.epoch > n_known:
                scope.cancel()
            else:
                self._members.distrust(peer)

        async with trio.open_nursery() as nursery:
            for peer in [p for p in dict.fromkeys(peers) if p != self._me][:MOST_ASKED]:
                nursery.start_soon(ask_peer, peer, nursery.cancel_scope)
        return self.ledger.epoch > n_known

    async def tell_commits(self, peer: PeerId, raws: list[bytes]) -> None:
        """Bring commits to a peer; one that cannot be reached will ask."""
        await tell_peer(self._services.rpc, peer, lambda channel: recovery.send_commits(channel, self.run.id, raws))

    # --- the owner's orders ------------------------------------------------------------------------------------

    def take_order_untrusted(self, raw: bytes) -> bool:
        """Take what the run's owner says, if it is newer. Raises IntegrityError."""
        order = read_order_untrusted(raw, self.run)
        if order.sequence <= self.order.sequence:
            return False
        self.order = order
        self.order_raw = raw
        self._use_order()
        self._news.notify()
        return True

    def _use_order(self) -> None:
        """Be an anchor if the order says so, once what an earlier life promised is known."""
        if self._anchor is None and self._is_ready and self._me in self.anchors:
            services = self._services
            self._anchor = Anchor(
                self.ledger,
                services.identity,
                self._acceptor,
                self._folder,
                services.off_loop,
                self.presence,
            )
        if self._anchor is not None:
            self._anchor.order = self.order

    async def look_for_orders(self) -> bool:
        """Take the newest order that any member's record carries; was there one?"""
        is_newer = False
        for peer, record in self._members.look(trio.current_time()).items():
            if record.order and record.order != self.order_raw:
                try:
                    is_newer |= self.take_order_untrusted(record.order)
                except IntegrityError as error:
                    logger.warning("an order that %s passes on does not count: %s", peer[-8:], error)
        if is_newer and self._folder is not None:
            await self._services.off_loop(self._folder.keep_order, self.order_raw)
        return is_newer

    # --- anchors -----------------------------------------------------------------------------------------------

    async def be_anchor(
        self,
        peer: PeerId,
        message: Prepare | Propose,
        body: bytes,
    ) -> tuple[Message, bytes]:
        """Answer a proposer. Raises Refused."""
        if self._anchor is None:
            raise Refused(Code.REFUSED, "this peer is no anchor of the run")
        if isinstance(message, Prepare):
            return await self._anchor.prepare(peer, message)
        return await self._anchor.propose(peer, message, body), b""

    def proposer(self) -> Proposer:
        """Make a proposer of a commit after the ledger's head."""
        return Proposer(
            self._me,
            self.ledger,
            self.order,
            self._services.rng,
            self.ask_anchor,
        )

    async def spread_commit(self, tasks: Tasks, raw: bytes, members: Iterable[PeerId]) -> None:
        """Take a commit that a majority has signed, and tell the anchors and others."""
        await self.take_commits([raw])
        for peer in {*members, *self.anchors} - {self._me}:
            tasks.start_soon(self.tell_commits, peer, [raw])

    async def ask_anchor(
        self,
        anchor: PeerId,
        request: Prepare | Propose,
        payload: bytes,
    ) -> tuple[Message, bytes]:
        """Ask one anchor, which may be this peer; one that lacks commits is given them first. Raises PeerError."""
        try:
            return await self._ask_once(anchor, request, payload)
        except Refused as error:
            if error.code is not Code.NOT_HELD:
                raise
        n_known = self.ledger.epoch
        try:
            await self.take_commits(
                await recovery.fetch_commits(
                    self._services.rpc,
                    anchor,
                    self.run.id,
                    n_known,
                )
            )
        except IntegrityError as error:
            self._services.rpc.standing.fault(anchor, Fault.FORGED, str(error))
            raise RemoteProtocolError(f"commits that do not count: {error}") from None
        if self.ledger.epoch > n_known:
            raise Refused(Code.STALE_EPOCH, "the anchor knows more commits")
        record = self._members.look(trio.current_time()).get(anchor)
        first = record.epoch if record is not None and record.epoch < n_known else 0
        await self.tell_commits(anchor, [s.raw for s in self.ledger.sealed[first:]])
        return await self._ask_once(anchor, request, payload)

    async def _ask_once(
        self,
        anchor: PeerId,
        request: Prepare | Propose,
        payload: bytes,
    ) -> tuple[Any, bytes]:
        if anchor == self._me:
            return await self.be_anchor(self._me, request, payload)
        reply, frame = await self._services.rpc.call(
            anchor,
            request,
            payload,
            CALL_TIMEOUT_S,
            "bulk",
        )
        return reply, bytes(frame.payload)
