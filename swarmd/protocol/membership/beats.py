"""Beats: proof that a peer is there, without signing its records again.

A record carries the end of a chain of hashes, each of the one before it; a *beat* is an earlier one, which only the
peer knows (Lamport 1981, "Password authentication with insecure communication"). The k-th beat may be shown from
``begun_at + k * beat_s`` on, and its records count for BEATS_KEPT times ``beat_s`` after that moment, as if they had
been issued then; where clocks differ, for about as long after it came. Anybody passes beats on, and checks them with
one hash each.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

HASH_BYTES = 16  # nobody finds what comes before one in 2^128 tries
NAME_BYTES = 8  # of a chain: who wants to have one that is called as another is tries 2^64
BEATS_KEPT = 3  # two may be lost
LEAST_KEPT = 2.5  # after one has come, whatever its author's clock says: it may have been on its way for half of one
MAX_SKEW_S = 120  # volunteers' clocks differ
MOST_BEATS = 250  # of a chain: so many hashes are computed at most to check one
_PERSON = b"swarmd beat 1"

Hash = Annotated[bytes, msgspec.Meta(min_length=HASH_BYTES, max_length=HASH_BYTES)]
ChainName = Annotated[bytes, msgspec.Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]


class ChainBeat(msgspec.Struct, frozen=True, array_like=True):
    """The ``number``-th hash before the end of a chain."""

    chain: ChainName
    number: Annotated[int, msgspec.Meta(ge=1, le=MOST_BEATS)]
    value: Hash


def name_of(peer: str, end: bytes, begun_at: int, beat_s: int) -> bytes:
    """What a peer's chain is called, so that nobody can say anything else of it."""
    told = msgspec.msgpack.encode((peer, end, begun_at, beat_s))
    return hashlib.blake2b(told, digest_size=NAME_BYTES, person=_PERSON).digest()


def follow(value: bytes, n: int) -> bytes:
    """The hash that comes ``n`` after this one."""
    for _ in range(n):
        value = hashlib.blake2b(value, digest_size=HASH_BYTES, person=_PERSON).digest()
    return value


class SecretChain:
    """One's own chain, from ``begun_at`` on, of so many beats."""

    def __init__(self, peer: str, seed: bytes, begun_at: int, beat_s: int, n_beats: int) -> None:
        self.begun_at = begun_at
        self.beat_s = beat_s
        self._values = [seed]
        for _ in range(n_beats):
            self._values.append(follow(self._values[-1], 1))
        self.end = self._values[-1]
        self.name = name_of(peer, self.end, begun_at, beat_s)

    def beats_at(self, now: float) -> list[ChainBeat]:
        """The beat for this moment; none before the first, and the last one for ever."""
        number = min(int(now - self.begun_at) // self.beat_s, len(self._values) - 1)
        return [ChainBeat(self.name, number, self._values[-1 - number])] if number > 0 else []


class Life:
    """What is known of a peer's chain: its last beat that was seen, and when that was by this machine's clock."""

    def __init__(self, peer: str, end: bytes, begun_at: int, beat_s: int, now: float) -> None:
        self.chain = name_of(peer, end, begun_at, beat_s)
        self.number = 0
        self.seen_at = now
        self._value = end
        self._begun_at = begun_at
        self._beat_s = beat_s

    @property
    def is_due_until(self) -> int:
        """When the next beats should have been shown, by its author's clock."""
        return self._begun_at + (self.number + BEATS_KEPT) * self._beat_s

    @property
    def counts_until(self) -> float:
        """Until when records with this chain count, by this machine's clock."""
        least, most = (self.seen_at + kept * self._beat_s for kept in (LEAST_KEPT, BEATS_KEPT))
        return min(max(self.is_due_until, least), most)

    @property
    def beat(self) -> tuple[int, bytes]:
        """The number and hash of the last beat."""
        return self.number, self._value

    def take_untrusted(self, number: int, value: bytes, now: float) -> bool | None:
        """Take a beat that has come now; was it news? None for one that is not of this chain.

        What is shown long before its time is not believed: it would prove for hours that somebody is there.
        """
        if number <= self.number or self._begun_at + number * self._beat_s > now + MAX_SKEW_S:
            return False
        if follow(value, number - self.number) != self._value:
            return None
        self.number, self._value, self.seen_at = number, value, now
        return True
