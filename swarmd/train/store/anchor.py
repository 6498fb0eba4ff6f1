"""An anchor of a run: promises and signs, at most one commit after each parent. Metadata only, no tensors.

It signs what most of a round's contributors stand for (protocol.runs.backing), not what somebody says that a round
made; what one stands for alone, only while nobody else computes; and goes back only where nobody has the newest state,
or the run's owner orders it.
"""

from __future__ import annotations

from functools import partial

import trio

from swarmd.errors import Code, ConfigError, IntegrityError, Refused
from swarmd.plan.runs import quorum
from swarmd.plan.runs.ballot import NO_BALLOT, Acceptor
from swarmd.plan.runs.contributions import N_HISTORY, WeighedContributions
from swarmd.plan.runs.history import contribution_radius, latest_contributions
from swarmd.plan.runs.ledger import Ledger
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs import backing
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.backing import BackedCommit, Witness
from swarmd.protocol.runs.commit import Ballot, Commit
from swarmd.protocol.runs.recipe import RunOrder
from swarmd.protocol.wire.rounds import Accepted, Prepare, Promised, Propose
from swarmd.train.store.disk import RunFolder
from swarmd.train.store.presence import RunPresence
from swarmd.train.store.services import OffLoop
from swarmd.values import Decision, PeerId

MOST_ASKED = 10  # times for a promise, by one proposer within the next: a commit takes one, a conflict some more
ASKED_WITHIN_S = 10.0  # s; what is longer ago is forgotten
RETRY_AFTER_S = 1.0  # for a proposer whose commit is not backed: more members may stand for it by then
MOST_AHEAD = 10_000  # of the highest ballot promised: nobody needs more, and nobody may use them up


# What an anchor must not do, no matter who asks, and what crashes in between:
#
# - sign two commits with one parent: the acceptor's promises, on the disk before they are told (plan.runs.ballot);
# - sign what its ledger cannot take next: it asks the proposer for the commits in between first;
# - sign numbers that no round made: most contributors must have signed the same sums (plan.runs.quorum);
# - go back to an old state while somebody has the newest, unless the run's owner orders it.
#
# A proposer may be any member, and may lie. It can make an anchor promise at most MOST_ASKED times in ASKED_WITHIN_S,
# with ballots of its own name, and not far above those that were promised.


class Anchor:
    """See the module. ``acceptor`` is what an earlier life of this anchor promised."""

    def __init__(
        self,
        ledger: Ledger,
        identity: Identity,
        acceptor: Acceptor | None,
        folder: RunFolder | None,
        off_loop: OffLoop[object],
        presence: RunPresence,
    ) -> None:
        self.order = RunOrder(ledger.run.id, 0)
        self._ledger = ledger
        self._identity = identity
        self._acceptor = acceptor or Acceptor(ledger.head)
        self._folder = folder
        self._off_loop = off_loop
        self._presence = presence
        self._lock = trio.Lock()
        self._asked: dict[PeerId, list[float]] = {}

    async def prepare(self, peer: PeerId, message: Prepare) -> tuple[Promised, bytes]:
        """Promise, if nothing speaks against it. Raises Refused."""
        async with self._lock:
            acceptor = self._acceptor_for(message.parent)
            _check_ballot(peer, message.ballot, acceptor)
            self._check_pace(peer)
            promised = acceptor.prepare(message.ballot).action
            if promised is None:
                return Promised(re=message.id, promised=acceptor.promised), b""
            await self._keep_promise(promised)
            signature = b""
            if acceptor.body:
                signature = commits.sign(_body_of(acceptor), acceptor.accepted, self._identity)
            accepted = acceptor.accepted
            return Promised(message.id, message.ballot, accepted, signature), acceptor.body

    async def propose(self, peer: PeerId, message: Propose, proposed: bytes) -> Accepted:
        """Sign a commit that may follow and is backed, if nothing speaks against it. Raises Refused."""
        try:
            commit, backed = backing.read_untrusted(proposed)
        except IntegrityError as error:
            raise Refused(Code.MALFORMED, str(error)) from None
        await self._check_backing(commit, backed)
        async with self._lock:
            acceptor = self._acceptor_for(commit.parent)
            _check_ballot(peer, message.ballot, acceptor)
            if commit.generation != self.order.generation:
                raise Refused(Code.REFUSED, f"the anchors are those of generation {self.order.generation}")
            try:
                self._ledger.check_next(commit)
            except IntegrityError as error:
                raise Refused(Code.MALFORMED, str(error)) from None
            accepted = acceptor.accept(message.ballot, proposed).action
            if accepted is None:
                return Accepted(re=message.id, promised=acceptor.promised)
            await self._keep_promise(accepted)
            signature = commits.sign(backed.body, message.ballot, self._identity)
            return Accepted(re=message.id, promised=message.ballot, signature=signature)

    def _check_pace(self, peer: PeerId) -> None:
        """Check that a peer does not take back others' promises all the time. Raises Refused."""
        now = trio.current_time()
        requests = self._asked.items()
        self._asked = {p: times for p, times in requests if now - times[-1] < ASKED_WITHIN_S}
        times = [asked_at for asked_at in self._asked.get(peer, []) if now - asked_at < ASKED_WITHIN_S]
        if len(times) >= MOST_ASKED:
            raise Refused(Code.NO_CAPACITY, "this proposer has had its promises, and made nothing of them", 1.0)
        self._asked[peer] = [*times, now]

    async def _check_backing(self, commit: Commit, backed: BackedCommit) -> None:
        """Check that a round made this, as far as can be seen from here. Raises Refused."""
        if commit.parent != self._ledger.head:
            return  # _acceptor_for says what is wrong with it
        if backed.witness is not None and self._is_witnessed(backed, backed.witness):
            return  # it saw the same, and a proposer that is bound to it must be free to go on
        if commit.restores:
            if commit.restores == commit.parent and self._presence.are_stages_past():
                return  # a stage that has nothing to give stays as it is, and the run goes on
            ordered = (self.order.back_from, self.order.back_to)
            if ordered != (commit.parent, commit.restores):
                known_for_s = self._presence.known_for_s(trio.current_time())
                _require_decision(quorum.may_go_back(self._ledger.epoch, self._presence.known_states(), known_for_s))
            return
        contributors = {}
        for counted in commit.contributors:
            contributors[PeerId(counted.peer)] = WeighedContributions(counted.n, counted.norm)
        assenting = {PeerId(commit.contributors[place].peer) for place, _ in backed.assents}
        history = latest_contributions(self._ledger, N_HISTORY)
        radius_of = partial(contribution_radius, self._ledger)
        _require_decision(quorum.may_count(contributors, assenting, history, radius_of))
        other_members = self._presence.computing_on(commit.parent) - contributors.keys()
        if len(contributors) == 1 and other_members and await self._presence.does_any_answer(other_members):
            wait = quorum.may_be_alone(self._presence.known_for_s(trio.current_time()), self._presence.intervals_s)
            if wait.action:
                raise Refused(Code.REFUSED, wait.reason, wait.action)

    def _acceptor_for(self, parent: bytes) -> Acceptor:
        """Return what was promised after a parent. Raises Refused unless that is the newest commit known here."""
        if self.order.state == "stopped":
            raise Refused(Code.REFUSED, "the run's owner has stopped it", 10.0)
        if parent != self._ledger.head:
            if self._ledger.knows(parent):
                raise Refused(Code.STALE_EPOCH, f"commit {self._ledger.epoch} is known here: ask for it")
            raise Refused(Code.NOT_HELD, f"the parent is not known here, only {self._ledger.epoch} commits are")
        acceptor = self._acceptor
        if acceptor.parent == parent:
            if not acceptor.body:
                return acceptor
            accepted = commits.read_body_untrusted(_body_of(acceptor))
            is_old = accepted.generation != self.order.generation
            return Acceptor(parent, acceptor.promised) if is_old else acceptor
        if acceptor.accepted > NO_BALLOT and not self._ledger.knows(acceptor.parent):
            # The disk lost what came in between.
            raise Refused(Code.NOT_HELD, "this anchor has promised more than its ledger knows")
        return Acceptor(parent)

    async def _keep_promise(self, acceptor: Acceptor) -> None:
        if self._folder is not None:
            try:
                await self._off_loop(self._folder.keep_acceptor, acceptor)
            except ConfigError as error:  # what is not on the disk is not promised
                raise Refused(Code.NO_CAPACITY, str(error), 5.0) from None
        self._acceptor = acceptor

    def _is_witnessed(self, backed: BackedCommit, witness: Witness) -> bool:
        """Has another anchor accepted this commit?"""
        anchors = self.order.anchors_of(self._ledger.run.recipe)
        try:
            commits.verify_signature_untrusted(backed.body, witness.ballot, anchors[witness.place], witness.signature)
        except (IntegrityError, IndexError):
            return False
        return True


def _require_decision(decision: Decision[bool]) -> None:
    if not decision.action:
        raise Refused(Code.REFUSED, decision.reason, RETRY_AFTER_S)


def _body_of(acceptor: Acceptor) -> bytes:
    """Return what this anchor accepted. Raises Refused for what an older version wrote: others anchor such runs."""
    try:
        return backing.body_of(acceptor.body)
    except IntegrityError as error:
        raise Refused(Code.REFUSED, f"what this anchor accepted last is of another version: {error}") from None


def _check_ballot(peer: PeerId, ballot: Ballot, acceptor: Acceptor) -> None:
    """Check that a ballot is its proposer's own, and not out of everybody's reach. Raises Refused."""
    number, name = ballot
    if name.split("/")[0] != peer or number > acceptor.promised[0] + MOST_AHEAD:
        raise Refused(Code.MALFORMED, f"ballot {ballot[0]} of {ballot[1][:64]!r} is none of this proposer's")
