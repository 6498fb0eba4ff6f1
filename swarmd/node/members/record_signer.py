"""Signs this peer's own records, each time with a higher number, so that a newer one always counts.

Where all members know beats, a record is signed again only when it says something else; beats show that the peer is
there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from swarmd.net.exchange import Exchange
from swarmd.plan.members.news import is_news
from swarmd.plan.members.pacing import BEAT_S, beat_s, rarely_s
from swarmd.protocol.membership import records
from swarmd.protocol.membership.beats import MOST_BEATS, ChainBeat, SecretChain
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.records import MAX_LIFETIME_S, AnyRecord, PeerRecord, RunRecord, SpanRecord

RECORD_TYPES: dict[str, type[AnyRecord]] = {"peer": PeerRecord, "span": SpanRecord, "run": RunRecord}
USED = 0.9  # of a chain: then all is signed anew, so that nobody has to wait for the last beat
OTHER_PACE = 1.5  # times as many seconds between beats, or as few: members have become more, or fewer

Description = dict[str, Any]
"""A record without what all records share; "kind" says which it is."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """Records of this peer that say something new, and the beat that is due."""

    news: list[bytes]
    beats: list[ChainBeat]


@dataclass(frozen=True, slots=True)
class _Signed:
    description: Description
    raw: bytes
    key: str
    at: float


@dataclass(slots=True)
class _Generation:
    """Records with one chain of beats. ``ends_at``: when all is signed anew."""

    chain: SecretChain
    expires_at: int
    ends_at: float
    signed: dict[tuple[Any, ...], _Signed] = field(default_factory=dict)


class RecordSigner:
    """See the module. Records end with this member's right to be here, at the latest."""

    def __init__(
        self,
        identity: Identity,
        certificate: tuple[bytes, ...],
        exchange: Exchange,
        wall_clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._certificate = certificate
        self._exchange = exchange
        self._wall_clock = wall_clock
        self._sequence = 0
        self._generation: _Generation | None = None

    def renew(self, descriptions: Iterable[Description], n_members: int, with_beats: bool) -> Announcement:
        """Sign what is to be announced now, in a swarm of so many members."""
        described = {_key_of(description): description for description in descriptions}
        if not with_beats:
            self._generation = None
            return Announcement(self._sign_for_a_minute(described.values()), [])
        now = self._wall_clock()
        generation = self._generation
        if generation is None or self._is_over(generation, described.keys(), n_members):
            generation = self._generation = self._begin(int(now), beat_s(n_members))
        news = []
        for key, description in described.items():
            signed = generation.signed.get(key)
            if signed and not is_news(signed.description, description, now - signed.at, rarely_s(n_members)):
                continue
            (raw,) = self._sign([description], self._life_of(generation))
            generation.signed[key] = _Signed(description, raw, records.read_claim(raw).key, now)
            news.append(raw)
        return Announcement(news, generation.chain.beats_at(now))

    def current(self, descriptions: Iterable[Description]) -> tuple[list[bytes], list[ChainBeat]]:
        """All records that count now, and the beat that proves them; what is new is left to ``renew``."""
        if self._generation is None:
            return self._sign_for_a_minute(descriptions), []
        raws = [signed.raw for signed in self._generation.signed.values()]
        return raws, self._generation.chain.beats_at(self._wall_clock())

    def next_beat_s(self) -> float | None:
        """Seconds until the next beat is due; None where records have none."""
        if self._generation is None:
            return None
        chain = self._generation.chain
        return chain.beat_s - (self._wall_clock() - chain.begun_at) % chain.beat_s

    def _is_over(self, generation: _Generation, keys: Iterable[tuple[Any, ...]], n_members: int) -> bool:
        """Is all to be signed anew? Also where a record is to be believed no more, and after this clock was set."""
        chain = generation.chain
        pace = beat_s(n_members) / chain.beat_s
        is_withdrawn = not generation.signed.keys() <= {*keys}
        known = self._exchange.book.entries
        is_lost = not all(signed.key in known for signed in generation.signed.values())
        is_too_long = generation.expires_at > self._exchange.roster.pass_of(self._certificate).ends_at
        is_used_up = not chain.begun_at <= self._wall_clock() < generation.ends_at
        return is_used_up or is_withdrawn or is_lost or is_too_long or not 1 / OTHER_PACE < pace < OTHER_PACE

    def _begin(self, now: int, seconds: int) -> _Generation:
        # while members are few as long as those who know no beats believe in any record
        expires_at = self._expiry(MAX_LIFETIME_S if seconds == BEAT_S else MOST_BEATS * seconds)
        n_beats = max(1, (expires_at - now) // seconds)
        chain = SecretChain(self._identity.peer_id, os.urandom(16), now, seconds, n_beats)
        ends_at = now + USED * (expires_at - now)
        return _Generation(chain, expires_at, ends_at)

    def _sign_for_a_minute(self, descriptions: Iterable[Description]) -> list[bytes]:
        """Sign records that no beats prove."""
        return self._sign(descriptions, {"expires_at": self._expiry(records.RECORD_LIFETIME_S)})

    def _life_of(self, generation: _Generation) -> dict[str, Any]:
        chain = generation.chain
        return {
            "expires_at": generation.expires_at,
            "chain": chain.end,
            "begun_at": chain.begun_at,
            "beat_s": chain.beat_s,
        }

    def _expiry(self, lifetime_s: int) -> int:
        ends_at = self._exchange.roster.pass_of(self._certificate).ends_at
        return records.expiry_of(int(self._wall_clock()), ends_at, lifetime_s)

    def _sign(self, descriptions: Iterable[Description], life: dict[str, Any]) -> list[bytes]:
        self._sequence = max(self._sequence + 1, int(self._wall_clock() * 1000))
        common: dict[str, Any] = {
            "peer": self._identity.peer_id,
            "sequence": self._sequence,
            "issued_at": int(self._wall_clock()),
            "certificate": self._certificate,
            **life,
        }
        signed = []
        for description in descriptions:
            fields = {name: value for name, value in description.items() if name != "kind"}
            record = RECORD_TYPES[description["kind"]](**common, **fields)
            signed.append(records.sign(record, self._identity))
        return signed


def _key_of(description: Description) -> tuple[Any, ...]:
    """What tells records of one peer apart."""
    return tuple(description.get(name) for name in ("kind", "model", "slot", "run"))
