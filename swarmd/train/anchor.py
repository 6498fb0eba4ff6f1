"""An anchor of a run: promises and signs, at most one commit after each parent. Metadata only, no tensors."""

from __future__ import annotations

import trio

from swarmd.errors import Code, ConfigError, IntegrityError, Refused
from swarmd.plan.ballot import NO_BALLOT, Acceptor
from swarmd.plan.ledger import Ledger
from swarmd.protocol import commit as commits
from swarmd.protocol.commit import Ballot
from swarmd.protocol.identity import Identity
from swarmd.protocol.recipe import RunOrder
from swarmd.protocol.rounds import Accepted, Prepare, Promised, Propose
from swarmd.train.disk import RunFolder
from swarmd.train.world import OffLoop
from swarmd.values import PeerId

MOST_AHEAD = 10_000  # of the highest ballot promised: nobody needs more, and nobody may use them up


class Anchor:
    """See the module. ``acceptor`` is what an earlier life of this anchor promised."""

    def __init__(
        self,
        ledger: Ledger,
        identity: Identity,
        acceptor: Acceptor | None,
        folder: RunFolder | None,
        off_loop: OffLoop[object],
    ) -> None:
        self.order = RunOrder(ledger.run.id, 0)
        self._ledger = ledger
        self._identity = identity
        self._acceptor = acceptor or Acceptor(ledger.head)
        self._folder = folder
        self._off_loop = off_loop
        self._lock = trio.Lock()

    async def prepare(self, peer: PeerId, message: Prepare) -> tuple[Promised, bytes]:
        """Promise, if nothing speaks against it. Raises Refused."""
        async with self._lock:
            acceptor = self._for(message.parent)
            _check_ballot(peer, message.ballot, acceptor)
            promised = acceptor.prepare(message.ballot).action
            if promised is None:
                return Promised(re=message.id, promised=acceptor.promised), b""
            await self._keep(promised)
            return Promised(re=message.id, promised=message.ballot, accepted=acceptor.accepted), acceptor.body

    async def propose(self, peer: PeerId, message: Propose, body: bytes) -> Accepted:
        """Sign a commit that may follow, if nothing speaks against it. Raises Refused."""
        try:
            commit = commits.read_body_untrusted(body)
        except IntegrityError as error:
            raise Refused(Code.MALFORMED, str(error)) from None
        async with self._lock:
            acceptor = self._for(commit.parent)
            _check_ballot(peer, message.ballot, acceptor)
            if commit.generation != self.order.generation:
                raise Refused(Code.REFUSED, f"the anchors are those of generation {self.order.generation}")
            try:
                self._ledger.check_next(commit)
            except IntegrityError as error:
                raise Refused(Code.MALFORMED, str(error)) from None
            accepted = acceptor.accept(message.ballot, body).action
            if accepted is None:
                return Accepted(re=message.id, promised=acceptor.promised)
            await self._keep(accepted)
            return Accepted(
                re=message.id, promised=message.ballot, signature=commits.sign(body, message.ballot, self._identity)
            )

    def _for(self, parent: bytes) -> Acceptor:
        """What was promised after a parent. Raises Refused unless that is the newest commit known here."""
        if self.order.state == "stopped":
            raise Refused(Code.REFUSED, "the run's owner has stopped it", 10.0)
        if parent != self._ledger.head:
            if self._ledger.knows(parent):
                raise Refused(Code.STALE_EPOCH, f"commit {self._ledger.epoch} is known here: ask for it")
            raise Refused(Code.NOT_HELD, f"the parent is not known here, only {self._ledger.epoch} commits are")
        kept = self._acceptor
        if kept.parent == parent:
            is_old = kept.body and commits.read_body_untrusted(kept.body).generation != self.order.generation
            return Acceptor(parent, kept.promised) if is_old else kept
        if kept.accepted > NO_BALLOT and not self._ledger.knows(kept.parent):  # the disk lost what came between
            raise Refused(Code.NOT_HELD, "this anchor has promised more than its ledger knows")
        return Acceptor(parent)

    async def _keep(self, acceptor: Acceptor) -> None:
        if self._folder is not None:
            try:
                await self._off_loop(self._folder.keep_acceptor, acceptor)
            except ConfigError as error:  # what is not on the disk is not promised
                raise Refused(Code.NO_CAPACITY, str(error), 5.0) from None
        self._acceptor = acceptor


def _check_ballot(peer: PeerId, ballot: Ballot, acceptor: Acceptor) -> None:
    """A ballot is its proposer's own, and not out of everybody's reach. Raises Refused."""
    if ballot[1].split("/")[0] != peer or ballot[0] > acceptor.promised[0] + MOST_AHEAD:
        raise Refused(Code.MALFORMED, f"ballot {ballot[0]} of {ballot[1][:64]!r} is none of this proposer's")
