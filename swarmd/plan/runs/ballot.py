"""No two commits with one parent: single-decree Paxos for each parent (Lamport 2001, "Paxos Made Simple", section 2).

Anchors are the acceptors. A proposer first asks for promises under a ballot of its own; a majority's promises tell
what may have been accepted already, and the one of the highest ballot is what it must propose then. Messages, clocks
and disks are train.store.anchor's and train.rounds.leader's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from swarmd.protocol.runs.commit import Ballot
from swarmd.values import Decision

NO_BALLOT: Ballot = (0, "")

# Why Paxos, and not a vote of the members: members come and go, and a leader may die between any two messages. Two
# leaders may then propose different commits with the same parent, and both must never count.
#
#     proposer                     anchors (2n + 1)
#        | -- prepare(ballot) -------> |   promise to take nothing lower; tell what was accepted
#        | <-- promise, accepted ----- |   from a majority
#        | -- accept(ballot, body) --> |   the body of the highest ballot that was told, else the proposer's own
#        | <-- signature ------------- |   from a majority: the commit counts
#
# Two majorities share an anchor. So a later proposer hears of every body that may have won, and proposes that one.
# A lying proposer can waste a ballot, no more. A lying anchor could sign two bodies: the run's owner chooses anchors.


@dataclass(frozen=True, slots=True)
class Acceptor:
    """What one anchor has promised and accepted for one parent. Written to disk before it is told to anybody."""

    parent: bytes
    promised: Ballot = NO_BALLOT
    accepted: Ballot = NO_BALLOT
    body: bytes = b""

    def prepare(self, ballot: Ballot) -> Decision[Acceptor | None]:
        """Promise to take nothing under a lower ballot; None when this or a higher one was promised."""
        if ballot <= self.promised:
            return Decision(None, f"ballot {self.promised[0]} of {self.promised[1][-8:]} was promised")
        return Decision(Acceptor(self.parent, ballot, self.accepted, self.body), "promised")

    def accept(self, ballot: Ballot, body: bytes) -> Decision[Acceptor | None]:
        """Take a commit under a ballot, unless a higher one was promised; never two under the same."""
        if ballot < self.promised:
            return Decision(None, f"ballot {self.promised[0]} of {self.promised[1][-8:]} was promised")
        if ballot == self.accepted and body != self.body:
            return Decision(None, "another commit was accepted in the same ballot")
        return Decision(Acceptor(self.parent, ballot, ballot, body), "accepted")


def is_majority(n: int, n_anchors: int) -> bool:
    """Are so many anchors more than half of all?"""
    return 2 * n > n_anchors


def find_bound_commit(promises: Iterable[tuple[Ballot, bytes]]) -> bytes:
    """Find the commit that a proposer must adopt after a majority's promises; b"" if it is free."""
    ballot, body = max(promises, default=(NO_BALLOT, b""), key=lambda pair: pair[0])
    return body if ballot > NO_BALLOT else b""
