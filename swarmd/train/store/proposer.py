"""Brings one commit to the anchors of a run: ballots, promises, signatures (Paxos for the one value after a parent).

Leaders of rounds use it, and peers that have the run go back to an earlier state: what counts is what a majority of
anchors signs, not who asked for it. docs/training.md; Lamport 2001, "Paxos Made Simple".
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Awaitable, Callable

import msgspec
import trio

from swarmd.errors import Code, IntegrityError, PeerError, Refused, SwarmUnavailable
from swarmd.plan.runs.ballot import NO_BALLOT, find_bound_commit, is_majority
from swarmd.plan.runs.ledger import Ledger
from swarmd.protocol.fields import Message
from swarmd.protocol.runs import backing
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.backing import Witness
from swarmd.protocol.runs.commit import Ballot
from swarmd.protocol.runs.recipe import RunOrder
from swarmd.protocol.wire.rounds import Accepted, Prepare, Promised, Propose
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

FIRST_BACK_OFF_S = 0.1  # doubles with each attempt: another proposer may be at it
LONGEST_BACK_OFF_S = 4.0  # between ballots of proposers that block each other

AnchorAnswer = tuple[Message, bytes]
AskAnchor = Callable[[PeerId, Prepare | Propose, bytes], Awaitable[AnchorAnswer]]
"""Asks one anchor, which may be this peer; returns its answer with the payload. Raises PeerError."""


class RoundFailed(SwarmUnavailable):
    """This attempt came to nothing; what was gathered is still there."""


class Proposer:
    """One attempt to have something committed after a ledger's head. ``waits_for`` says what it lacks, for people."""

    def __init__(
        self,
        me: PeerId,
        ledger: Ledger,
        order: RunOrder,
        rng: random.Random,
        ask_anchor: AskAnchor,
    ) -> None:
        self.waits_for = ""
        self._ledger = ledger
        self._parent = ledger.head
        self._run = ledger.run.id
        self._order = order
        self._anchors = order.anchors_of(ledger.run.recipe)
        self._rng = rng
        self._ask_anchor = ask_anchor
        self._ballot: Ballot = NO_BALLOT
        self._highest = 0
        self._name = f"{me}/{os.urandom(8).hex()}"  # an earlier life of this peer must not have used it

    async def settle(self, proposed: bytes) -> bytes:
        """Have a commit signed, or the one that the anchors are bound to already; returns what they signed.

        ``proposed`` is a commit with its backing (protocol.runs.backing), as is what the others here take and return.
        """
        return await self.seal(await self.collect_promises() or proposed)

    async def collect_promises(self) -> bytes:
        """Have a majority promise; returns the commit that it binds to, or b"". Waits for as long as it takes."""
        attempt = 0
        while True:
            self._ballot = (self._highest + 1, self._name)
            request = Prepare(run=self._run, parent=self._parent, ballot=self._ballot)
            answers = await self._ask_anchors(request, b"")
            yes = []
            for place, message, body in answers:
                if isinstance(message, Promised) and message.promised == self._ballot:
                    yes.append((message.accepted, self._add_witness(place, message, body)))
            if is_majority(len(yes), len(self._anchors)):
                self.waits_for = ""
                # An anchor that accepted something it cannot prove binds nobody: it would stop the run by a lie.
                return find_bound_commit([(ballot, body) for ballot, body in yes if ballot == NO_BALLOT or body])
            await self._back_off("a majority of the anchors", len(yes), attempt)
            attempt += 1

    async def seal(self, proposed: bytes) -> bytes:
        """Have a majority sign one commit, or the one that they are bound to by now. Waits for as long as it takes."""
        attempt = 0
        while True:
            body = backing.body_of(proposed)
            request = Propose(run=self._run, ballot=self._ballot)
            signatures: dict[int, bytes] = {}
            for place, message, _ in await self._ask_anchors(request, proposed):
                if not isinstance(message, Accepted) or not message.signature:
                    continue
                anchor = self._anchors[place]
                try:
                    commits.verify_signature_untrusted(body, self._ballot, anchor, message.signature)
                    signatures[place] = message.signature
                except IntegrityError as error:
                    logger.warning("an anchor's signature does not count: %s", error)
            if is_majority(len(signatures), len(self._anchors)):
                self.waits_for = ""
                return commits.seal(body, self._ballot, signatures)
            await self._back_off("a majority of the anchors to sign", len(signatures), attempt)
            attempt += 1
            proposed = await self.collect_promises() or proposed

    def _add_witness(self, place: int, promised: Promised, accepted: bytes) -> bytes:
        """Add an anchor's word to the commit that it says it has accepted; b"" if that could not be signed at all."""
        if promised.accepted == NO_BALLOT or not accepted:
            return b""
        try:
            commit, backed = backing.read_untrusted(accepted)
            self._ledger.check_next(commit)
            anchor = self._anchors[place]
            signature = promised.signature
            commits.verify_signature_untrusted(backed.body, promised.accepted, anchor, signature)
        except IntegrityError as error:
            logger.warning("an anchor names a commit that cannot follow: %s", error)
            return b""
        if commit.generation != self._order.generation:
            return b""
        witness = Witness(place, promised.accepted, signature)
        return backing.encode(msgspec.structs.replace(backed, witness=witness))

    async def _back_off(self, lacking: str, n: int, attempt: int) -> None:
        """Let another proposer finish, longer after each attempt."""
        self.waits_for = f"{lacking}: {n} of {len(self._anchors)} answer"
        longest_s = min(LONGEST_BACK_OFF_S, FIRST_BACK_OFF_S * 2**attempt)
        await trio.sleep(self._rng.uniform(0.0, longest_s))

    # All anchors are asked at once, and a majority's word is enough: slow ones cost nothing. Asking ends early, too,
    # where a majority can no longer be reached, or this ledger has a commit after the parent by now. An anchor may say
    # that it knows one (STALE_EPOCH). Its word alone does not stop the others: one that lies could hold up the run for
    # ever. Going on is safe: a majority that promises names what a majority accepted, and binds this proposal to it.

    async def _ask_anchors(
        self,
        request: Prepare | Propose,
        payload: bytes,
    ) -> list[tuple[int, Message, bytes]]:
        """Ask all anchors at once; returns as soon as a majority has said yes, or can no longer say it."""
        answers: list[tuple[int, Message, bytes]] = []
        said_yes: set[int] = set()
        answered: set[int] = set()
        newer: list[Refused] = []
        final: list[Refused] = []
        n = len(self._anchors)

        async def ask_one(place: int, anchor: PeerId, scope: trio.CancelScope) -> None:
            try:
                message, body = await self._ask_anchor(anchor, request, payload)
                answers.append((place, message, body))
                if isinstance(message, Promised | Accepted):
                    self._highest = max(self._highest, message.promised[0])
                    if message.promised == self._ballot:
                        said_yes.add(place)
            except Refused as error:
                if error.code is Code.STALE_EPOCH:
                    newer.append(error)
                elif error.code in (Code.MALFORMED, Code.REFUSED):
                    final.append(error)
                logger.info("the anchor %s: %s", anchor[-8:], error)
            except PeerError as error:
                logger.info("the anchor %s: %s", anchor[-8:], error)
            answered.add(place)
            can_be = is_majority(n - len(answered - said_yes), n)
            if is_majority(len(said_yes), n) or not can_be or self._ledger.head != self._parent:
                scope.cancel()

        async with trio.open_nursery() as nursery:
            for place, anchor in enumerate(self._anchors):
                nursery.start_soon(ask_one, place, anchor, nursery.cancel_scope)
        if self._ledger.head != self._parent:
            raise Refused(Code.STALE_EPOCH, "a commit after this parent is known here by now")
        if newer and not is_majority(len(said_yes), n):
            raise newer[0]
        if is_majority(len(final), len(self._anchors)):
            raise RoundFailed(f"the anchors do not take this commit: {final[0]}")
        return answers
