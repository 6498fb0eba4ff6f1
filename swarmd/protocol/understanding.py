"""What a version of swarmd understands, as its records announce it: others use nothing else with it.

So a codec, need or message can be rolled out while old and new versions share a swarm: it is used between those that
announce it, and the others are asked for what they know. docs/protocol.md, "Versions".
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmd.protocol.membership.records import PeerRecord
from swarmd.protocol.wire.messages import KNOWN_NEEDS
from swarmd.protocol.wire.tensors import CODECS

MINOR = 9  # grows with each message, codec or need that is added

CHARTERS = 5  # the minor from which on catalogs may be signed by other founders than the first
RECEIPTS = 6  # the minor from which on servers sign what passes through them, and what that goes on from
VOIDS = 7  # the minor from which on ops can be void
BEATS = 9  # the minor from which on records may live by beats, and digests may be by buckets
SHORT_DIGESTS = 2  # the minor from which on digests may name records shortly


@dataclass(frozen=True, slots=True)
class Understanding:
    """Codecs and needs that a version knows; ``minor`` counts versions of the protocol's messages."""

    minor: int
    codecs: tuple[str, ...]
    needs: frozenset[str]

    def knows(self, codec: str, needs: frozenset[str]) -> bool:
        """Can a session that uses these be opened there? "auto" leaves the codec open."""
        return (codec == "auto" or codec in self.codecs) and needs <= self.needs


OURS = Understanding(MINOR, tuple(CODECS), KNOWN_NEEDS)


def understanding_of(record: PeerRecord | None) -> Understanding:
    """What a peer announces; of one whose record is not here yet the best is assumed, and it refuses what it must."""
    if record is None:
        return OURS
    return Understanding(record.minor, record.codecs, frozenset(record.needs))
