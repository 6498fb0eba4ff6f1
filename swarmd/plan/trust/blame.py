"""How much is held against a peer with which something went wrong, and what follows from that.

Whoever does without a peer says why in one of these words. So the same trouble has the same consequence in sessions,
fine-tuning and probes. What a peer has done is a ``plan.trust.standing.Fault``, whose rule names the blame. What a user
is told is another matter: ``Doubt`` says which tokens may be wrong, whoever is to blame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


# From nothing to a ban. The first two are known to one session or pipeline only, and forgotten with it. The others are
# kept in ``net.standing`` for everything that this process does; the last two survive a restart, and fade.
#
#     UNAVAILABLE  AMBIGUOUS  |  SILENT  FAILING  |  FAULT  OFFENCE
#     one session             |  this process     |  its standing
class Blame(StrEnum):
    """How much is held against a peer; each has one consequence (CONSEQUENCES)."""

    UNAVAILABLE = "unavailable"
    AMBIGUOUS = "ambiguous"
    SILENT = "silent"
    FAILING = "failing"
    FAULT = "fault"
    OFFENCE = "offence"

    @property
    def is_remembered(self) -> bool:
        """Does all of this process do without the peer, and not only the session that met it?"""
        return self not in (Blame.UNAVAILABLE, Blame.AMBIGUOUS)


@dataclass(frozen=True, slots=True)
class Consequence:
    """What follows from a blame (``effect``), and what a peer is blamed for so (``occasion``), in words for people."""

    occasion: str
    effect: str


CONSEQUENCES: Mapping[Blame, Consequence] = {
    Blame.UNAVAILABLE: Consequence(
        "it says itself that it cannot: it is busy, leaves, or lacks something",
        "this session or pipeline asks it again after the time that it named; nothing is held against it",
    ),
    Blame.AMBIGUOUS: Consequence(
        "one of several is wrong, and nobody can tell which",
        "this session or pipeline does without all of them for a while; nothing is held against them",
    ),
    Blame.SILENT: Consequence(
        "it gives no sign of life while something is outstanding",
        "all of this process leaves it out for 20 s, twice as long each time until it does well; "
        "behind a relay it is a last resort at once, by another way",
    ),
    Blame.FAILING: Consequence(
        "it speaks, and gives nothing that can be used",
        "all of this process leaves it out for 20 s, twice as long each time until it does well",
    ),
    Blame.FAULT: Consequence(
        "what only a broken machine or a liar does, perhaps by accident",
        "its weight counts in the peer's standing: above 1 the peer is left out, but as a last resort",
    ),
    Blame.OFFENCE: Consequence(
        "what no honest machine does",
        "as a fault; and above 2 its connections end, and it is banned",
    ),
}
