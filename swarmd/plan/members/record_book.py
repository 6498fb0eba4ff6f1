"""The records that one member knows: which are taken, until when they count, and what two members tell each other."""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

import msgspec

from swarmd.config import MAX_HOSTED
from swarmd.errors import IntegrityError, RemoteProtocolError
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.links.dialing import IpNetwork, is_reachable_from
from swarmd.plan.members.buckets import (
    HASH_BYTES,
    MOST_BUCKETS,
    BucketDigest,
    Buckets,
    Difference,
    bucket_of,
    count_buckets,
)
from swarmd.protocol.fields import MAX_STAGES
from swarmd.protocol.membership.beats import ChainBeat, Life
from swarmd.protocol.membership.catalog import MAX_USES, Catalog, Right
from swarmd.protocol.membership.identity import Membership
from swarmd.protocol.membership.records import AnyRecord, PeerRecord, RunRecord, SpanRecord, VerifiedRecord
from swarmd.values import Decision, PeerId

MAX_RECORDS = 20_000  # 300 bytes each: 6 MB, and a swarm of thousands
MAX_RUNS = 7  # that one daemon takes part in at a time
MAX_RECORDS_OF_A_PEER = 1 + MAX_HOSTED + MAX_RUNS + MAX_STAGES  # itself, what it serves, its runs, stages of one
MAX_PEERS_OF_A_VOUCHER = MAX_USES  # that announce themselves at a time: a larger group takes several invites
MAX_RECORDS_OF_A_VOUCHER = 512  # of all whom one invite, or one member, has brought in
MAX_SENT = 4_096  # records in one exchange; the rest follows in the next
MAX_REPLY_BYTES = 4 * 2**20  # of one exchange

T = TypeVar("T")
Exchanged = tuple[list[bytes], list[str]]
"""Records that another member lacks, and names of those that it has and this one lacks."""
Shown = tuple[bytes, int]
"""A chain, and the number of its last beat."""


def _count_down(counter: Counter[T], key: T) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


def _in_bucket(verified: VerifiedRecord) -> tuple[str, str, int, bytes]:
    """What buckets keep of a record."""
    record = verified.record
    return record.peer, short_name(verified.key), record.sequence, verified.life.chain if verified.life else b""


def _limit_record(record: AnyRecord, may: Container[Right]) -> AnyRecord | None:
    """What counts of a record of somebody who may do so much."""
    if isinstance(record, PeerRecord):
        return record if "give" in may else msgspec.structs.replace(record, holds={}, relays=False)
    right: Right = "serve" if isinstance(record, SpanRecord) else "train"
    return record if right in may else None


Naming = Callable[[str], str]
"""What stands for a record's key in a digest."""


@lru_cache(maxsize=2 * MAX_RECORDS)
def short_name(key: str) -> str:
    """11 letters for a key of about 90: who wants two keys to have the same name tries 2^64."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


@dataclass(slots=True)
class RecordBook:
    """Every record that was verified and has not expired, and the beats of its chain. Owned by one task."""

    entries: dict[str, VerifiedRecord] = field(default_factory=dict)
    catalog: Catalog = field(default_factory=Catalog)
    catalog_raw: bytes | None = None
    talked_with: Container[str] = ()
    _n_of_peer: Counter[str] = field(default_factory=Counter)
    _n_of_voucher: Counter[bytes] = field(default_factory=Counter)
    _peers_of_voucher: Counter[bytes] = field(default_factory=Counter)
    _next_expiry: float = math.inf
    _lives: dict[bytes, Life] = field(default_factory=dict)  # by the names of their chains
    _n_of_chain: Counter[bytes] = field(default_factory=Counter)  # records that have it
    _last_numbers: dict[bytes, int] = field(default_factory=dict)  # of beats of chains that were given up
    _buckets: dict[int, Buckets] = field(default_factory=dict)  # by how many they are

    def wants(
        self,
        key: str,
        sequence: int,
        peer: str,
        vouchers: Iterable[bytes],
    ) -> Decision[bool]:
        """Would such a record be taken? What is said here need not be true: it is cheap to ask, and checked later."""
        known_entry = self.entries.get(key)
        if known_entry is not None:
            is_newer = sequence > known_entry.record.sequence
            return Decision(is_newer, f"sequence {sequence} after {known_entry.record.sequence}")
        if self._n_of_peer[peer] >= MAX_RECORDS_OF_A_PEER:
            return Decision(False, f"{MAX_RECORDS_OF_A_PEER} records of {peer} are known already")
        # Keys cost nothing, so a member could invent a thousand peers. Each of them needs a certificate that leads to
        # the voucher that brought it in, so whatever is counted here is counted for each voucher.
        is_new = not self._n_of_peer[peer]
        for voucher in vouchers:
            n_peers = self._peers_of_voucher[voucher]
            n_records = self._n_of_voucher[voucher]
            has_too_many_peers = is_new and n_peers >= MAX_PEERS_OF_A_VOUCHER
            if has_too_many_peers or n_records >= MAX_RECORDS_OF_A_VOUCHER:
                counts = f"{n_peers} peers with {n_records} records"
                return Decision(False, f"whoever brought in {peer} has brought in {counts} that are here now")
        return Decision(True, "new")

    def add(self, verified: VerifiedRecord) -> Decision[bool]:
        """Take a record if it is newer than what is known under its key, and its voucher has not too many here."""
        peer = verified.record.peer
        vouchers = verified.membership.vouchers
        decision = self.wants(verified.key, verified.record.sequence, peer, vouchers)
        if not decision.action:
            return decision
        life = verified.life
        if life is not None and life.number <= self._last_numbers.get(life.chain, -1):
            return Decision(False, f"{peer} was given up, and has shown nothing since")  # others give it up later
        if life is not None and (known := self._lives.get(life.chain)):
            life.take_untrusted(*known.beat, known.seen_at)  # for when the record goes that it was known of
        if verified.key in self.entries:
            self._drop_records([verified.key])
        elif len(self.entries) >= MAX_RECORDS and not self._make_room(vouchers):
            return Decision(False, f"{MAX_RECORDS} records are known already")
        for voucher in vouchers:
            self._n_of_voucher[voucher] += 1
            self._peers_of_voucher[voucher] += not self._n_of_peer[peer]
        self._n_of_peer[peer] += 1
        self.entries[verified.key] = verified
        self._note_life(verified)
        self._next_expiry = min(self._next_expiry, self._ends_at(verified))
        for buckets in self._buckets.values():
            buckets.put(*_in_bucket(verified))
        return decision

    def _note_life(self, verified: VerifiedRecord) -> None:
        if verified.life is not None:
            self._n_of_chain[verified.life.chain] += 1
            known = self._lives.setdefault(verified.life.chain, verified.life)
            known.take_untrusted(*verified.life.beat, verified.life.seen_at)

    def _ends_at(self, verified: VerifiedRecord) -> float:
        """When a record counts no more, unless there is another beat."""
        if verified.life is None:
            return verified.record.expires_at
        return min(verified.record.expires_at, self._lives[verified.life.chain].counts_until)

    def take_beats_untrusted(self, beats: Iterable[ChainBeat], now: float) -> int:
        """Take beats of chains that are known; returns how many were news. Raises IntegrityError for a forged one."""
        n_new = 0
        for beat in beats:
            life = self._lives.get(beat.chain)
            if life is None:
                continue
            is_news = life.take_untrusted(beat.number, beat.value, now)
            if is_news is None:
                raise IntegrityError(f"beat {beat.number} of a chain that has no such")
            n_new += is_news
        return n_new

    def overdue(self, now: float) -> dict[PeerId, float]:
        """Peers that will count no more within one of their beats, if none is heard of, and until when they do.

        The first come first. Of a peer with several chains the one that was beaten last counts.
        """
        ends: dict[PeerId, tuple[float, int]] = {}
        for entry in self.entries.values():
            if entry.life is not None:
                peer = PeerId(entry.record.peer)
                end = self._lives[entry.life.chain].counts_until, entry.record.beat_s
                ends[peer] = max(end, ends.get(peer, end))
        soon = sorted((end_s, peer) for peer, (end_s, beat_s) in ends.items() if end_s - now < beat_s)
        return {peer: end_s for end_s, peer in soon}

    def excuse_silence(self, deaf_s: float) -> None:
        """Count on everybody's beats as if so many seconds had not passed; a clock that was set back passed fewer."""
        for life in self._lives.values():
            life.seen_at += deaf_s
        self._next_expiry = -math.inf

    def last_beats(self, chains: Iterable[bytes]) -> list[ChainBeat]:
        """The last beats of chains, where any are known."""
        lives = ((chain, self._lives[chain].beat) for chain in dict.fromkeys(chains) if chain in self._lives)
        return [ChainBeat(chain, *beat) for chain, beat in lives if beat[0]]

    def beats_for(self, raws: Iterable[bytes]) -> list[ChainBeat]:
        """What proves that the authors of records from here are there."""
        sent = {*raws}
        if not sent:
            return []
        return self.last_beats(entry.life.chain for entry in self.entries.values() if entry.life and entry.raw in sent)

    def _make_room(self, vouchers: tuple[bytes, ...]) -> bool:
        """Drop a record of the voucher that has brought in most, but none of a peer that this one has talked with."""
        # A full book gives up a record of the voucher with the most, the newest first: so a crowd can only push out
        # its own records, and peers that this one has talked with stay.
        crowd, n = next(iter(self._n_of_voucher.most_common(1)), (b"", 0))
        if n <= 1 + max((self._n_of_voucher[v] for v in vouchers), default=0):
            return False
        for key in reversed(self.entries):
            entry = self.entries[key]
            if crowd in entry.membership.vouchers and entry.record.peer not in self.talked_with:
                self._drop_records([key])
                return True
        return False

    def add_catalog(self, catalog: Catalog, raw: bytes) -> Decision[bool]:
        """Take a verified catalog if it is newer than the one that is known; ``raw`` is what others are sent."""
        if self.catalog_raw is not None and catalog.rank <= self.catalog.rank:
            return Decision(False, f"version {catalog.rank} is not newer than {self.catalog.rank}")
        self.catalog = catalog
        self.catalog_raw = raw
        return Decision(True, f"version {catalog.version}")

    def keep_members(self, ends_at: Callable[[Membership], float]) -> None:
        """Drop the records of everybody whose membership does not count any more, or ends before they do."""
        self._drop_records([k for k, v in self.entries.items() if v.record.expires_at > ends_at(v.membership)])

    def is_for_all(self, raw: bytes) -> bool:
        """May a record of one's own be sent to members that know no beats? They would take a long life for forged."""
        return any(entry.is_for_all for entry in self.entries.values() if entry.raw == raw)

    def expire(self, now: float) -> list[str]:
        """Drop what has expired; returns the keys."""
        if now < self._next_expiry:
            return []
        expired = [k for k, v in self.entries.items() if self._ends_at(v) <= now]
        lives = (self.entries[key].life for key in expired)
        self._last_numbers |= {life.chain: self._lives[life.chain].number for life in lives if life}
        while len(self._last_numbers) > MAX_RECORDS:
            del self._last_numbers[next(iter(self._last_numbers))]
        self._drop_records(expired)
        self._next_expiry = min(map(self._ends_at, self.entries.values()), default=math.inf)
        return expired

    def _drop_records(self, keys: list[str]) -> None:
        for key in keys:
            dropped = self.entries.pop(key)
            peer = dropped.record.peer
            for buckets in self._buckets.values():
                buckets.drop(peer, short_name(key))
            if dropped.life is not None:
                _count_down(self._n_of_chain, dropped.life.chain)
                if dropped.life.chain not in self._n_of_chain:
                    del self._lives[dropped.life.chain]
            _count_down(self._n_of_peer, peer)
            for voucher in dropped.membership.vouchers:
                _count_down(self._n_of_voucher, voucher)
                if peer not in self._n_of_peer:
                    _count_down(self._peers_of_voucher, voucher)

    def digest(self, naming: Naming = str) -> dict[str, int]:
        """Sequence numbers by key, or by what stands for it."""
        return {naming(key): v.record.sequence for key, v in self.entries.items()}

    def compare(
        self,
        sequences: Mapping[str, int],
        naming: Naming = str,
        knows_beats: bool = True,
    ) -> Exchanged:
        """Compare what another member has with what is here; one that ``knows_beats`` gets what these prove."""
        # Anti-entropy: both sides compare one number for each key, and only what differs travels. A reply that is cut
        # short is no fault: what is missing still differs the next time.
        send: list[bytes] = []
        size = 0
        own_sequences = self.digest(naming)
        for key, entry in self.entries.items():
            is_newer = sequences.get(naming(key), -1) < entry.record.sequence
            if is_newer and (knows_beats or entry.is_for_all) and size < MAX_REPLY_BYTES:
                send.append(entry.raw)
                size += len(entry.raw)
        want = [name for name, sequence in sequences.items() if sequence > own_sequences.get(name, -1)]
        return send[:MAX_SENT], want[:MAX_SENT]

    def bucket_digest(self) -> BucketDigest:
        """What is here, as another member compares it with what it has."""
        return self._in_buckets(count_buckets(len(self.entries))).digest(self._numbers())

    def compare_buckets(self, digest: BucketDigest) -> Difference:
        """Compare another member's digest with what is here; all of a book that is much smaller or larger differs.

        Raises RemoteProtocolError for one that cannot be.
        """
        n, own = len(digest.numbers), count_buckets(len(self.entries))
        if len(digest.hashes) != HASH_BYTES * n or not 1 <= n <= MOST_BUCKETS or n & (n - 1):
            raise RemoteProtocolError(f"a digest of {n} buckets with {len(digest.hashes)} B of hashes")
        if not own <= 2 * n <= 4 * own:
            return Difference(n, [], [], [*range(n)])
        return self._in_buckets(n).compare(digest, self._numbers())

    def told_of(self, n: int, buckets: Iterable[int]) -> tuple[dict[str, int], list[Shown]]:
        """What is in some of ``n`` buckets: sequence numbers by short names, and the last beats of chains, by numbers.

        Raises RemoteProtocolError for buckets that are not among so many.
        """
        asked = {*buckets}
        if not all(0 <= index < n for index in asked):
            raise RemoteProtocolError(f"buckets {sorted(asked)[:3]} of {n}")
        if not asked:  # mostly: books are equal but for beats
            return {}, []
        held = [v for v in self.entries.values() if bucket_of(v.record.peer, n) in asked]
        chains = dict.fromkeys(verified.life.chain for verified in held if verified.life is not None)
        names = {short_name(verified.key): verified.record.sequence for verified in held}
        return names, [(chain, self._lives[chain].number) for chain in chains]

    def compare_names(self, ours: Mapping[str, int], theirs: Mapping[str, int]) -> Exchanged:
        """Compare sequence numbers by short names of some buckets, here and at another member."""
        newer = {name for name, sequence in ours.items() if theirs.get(name, -1) < sequence}
        want = [name for name, sequence in theirs.items() if sequence > ours.get(name, -1)]
        return self.pick(newer, short_name), want[:MAX_SENT]

    def compare_beats(self, shown: Iterable[Shown]) -> tuple[list[bytes], list[bytes]]:
        """Chains whose last beats are newer here, and there; of those that both know."""
        numbers = self._numbers()
        known = [(chain, number, numbers[chain]) for chain, number in shown if chain in numbers]
        newer_here = [chain for chain, number, ours in known if ours > number]
        return newer_here, [chain for chain, number, ours in known if ours < number]

    def _in_buckets(self, n: int) -> Buckets:
        """All records in so many buckets; kept for members whose books are about as large."""
        buckets = self._buckets.get(n)
        if buckets is None:
            own = count_buckets(len(self.entries))
            self._buckets = {size: each for size, each in self._buckets.items() if own <= 2 * size <= 4 * own}
            buckets = self._buckets[n] = Buckets(n, map(_in_bucket, self.entries.values()))
        return buckets

    def _numbers(self) -> dict[bytes, int]:
        return {chain: life.number for chain, life in self._lives.items()}

    def pick(self, names: set[str], naming: Naming = str, knows_beats: bool = True) -> list[bytes]:
        """The records under ``names`` that are known, as many as fit one frame; for ``knows_beats`` see ``compare``."""
        picked: list[bytes] = []
        size = 0
        if not names:
            return picked
        for key in sorted(key for key in self.entries if naming(key) in names):
            entry = self.entries[key]
            if (knows_beats or entry.is_for_all) and size < MAX_REPLY_BYTES and len(picked) < MAX_SENT:
                picked.append(entry.raw)
                size += len(entry.raw)
        return picked

    def view(
        self,
        networks: Callable[[], Iterable[IpNetwork]] = tuple,
        may: Callable[[Membership], Container[Right]] | None = None,
    ) -> SwarmView:
        """The picture for a machine on these networks. What somebody ``may`` not do counts as not said."""
        records: list[AnyRecord] = [v.record for v in self.entries.values()]
        if may is not None:
            allowed = (_limit_record(v.record, may(v.membership)) for v in self.entries.values())
            records = [record for record in allowed if record is not None]
        peers = {PeerId(r.peer): r for r in records if isinstance(r, PeerRecord)}
        sizes = dict(self.catalog.models.values())
        all_spans = (record for record in records if isinstance(record, SpanRecord))
        possible = [span for span in all_spans if span.end <= sizes.get(span.model, span.end)]
        spans = tuple(sorted(possible, key=lambda span: (span.start, span.peer)))
        # A member that nobody can dial is no server for this machine, unless it is a neighbour or has a relay.
        closed = {peer: record for peer, record in peers.items() if record.reach == "closed"}
        own_networks = tuple(networks()) if closed else ()
        hidden = {peer for peer, record in closed.items() if not is_reachable_from(record.addresses, own_networks)}
        out_of_reach = tuple(span for span in spans if span.peer in hidden)
        if out_of_reach:
            spans = tuple(span for span in spans if span.peer not in hidden)
        runs = [record for record in records if isinstance(record, RunRecord)]
        runs.sort(key=lambda run: (run.run, run.peer))
        return SwarmView(MappingProxyType(peers), spans, self.catalog, tuple(runs), out_of_reach)
