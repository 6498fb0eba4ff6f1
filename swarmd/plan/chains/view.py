"""The swarm as one peer knows it: a frozen picture made of verified records, and the book it is made from."""

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
from swarmd.errors import ConfigError, NoRoute
from swarmd.plan.links.dialing import IpNetwork, is_reachable_from
from swarmd.protocol.fields import MAX_STAGES
from swarmd.protocol.membership.catalog import MAX_USES, Catalog, Right
from swarmd.protocol.membership.identity import Membership
from swarmd.protocol.membership.records import AnyRecord, PeerRecord, RunRecord, SpanRecord, VerifiedRecord
from swarmd.protocol.wire.tensors import ITEM_BYTES
from swarmd.values import Decision, ModelId, PeerId, RunId, Span, count, ranges

MAX_RECORDS = 20_000  # 300 bytes each: 6 MB, and a swarm of thousands
MAX_RUNS = 7  # that one daemon takes part in at a time
MAX_RECORDS_OF_A_PEER = 1 + MAX_HOSTED + MAX_RUNS + MAX_STAGES  # itself, what it serves, its runs, stages of one
MAX_PEERS_OF_A_VOUCHER = MAX_USES  # that announce themselves at a time: a larger group takes several invites
MAX_RECORDS_OF_A_VOUCHER = 512  # of all whom one invite, or one member, has brought in
MAX_SENT = 4_096  # records in one exchange; the rest follows in the next
MAX_REPLY_BYTES = 4 * 2**20  # of one exchange


def coverage(
    spans: Iterable[SpanRecord],
    model: ModelId,
    n_blocks: int,
    states: Container[str] = ("online",),
) -> list[int]:
    """Count for each block of a model the servers, in one of ``states``, that hold it."""
    counts = [0] * n_blocks
    for span in spans:
        if span.model == model and span.state in states:
            for block in range(span.start, min(span.end, n_blocks)):
                counts[block] += 1
    return counts


def _join_spans(spans: Iterable[Span]) -> str:
    return ", ".join(map(str, spans))


@dataclass(frozen=True, slots=True)
class SwarmView:
    """All records that count at one moment. Free to read, never changes.

    ``out_of_reach`` is served by members that nobody can connect to from here: it counts for nothing.
    """

    peers: Mapping[PeerId, PeerRecord]
    spans: tuple[SpanRecord, ...]
    catalog: Catalog
    runs: tuple[RunRecord, ...] = ()
    out_of_reach: tuple[SpanRecord, ...] = ()

    def in_run(self, run: RunId) -> list[RunRecord]:
        """Who takes part in a training run, in any of its stages."""
        return [r for r in self.runs if run in (r.run, r.whole)]

    def in_ledger(self, run: RunId) -> list[RunRecord]:
        """Who keeps a ledger: that of a run, or of one of its stages."""
        return [r for r in self.runs if r.run == run]

    def serving(self, model: ModelId) -> list[SpanRecord]:
        """Spans of a model that take new sessions."""
        return [s for s in self.spans if s.model == model and s.state == "online"]

    def listed(self) -> list[SpanRecord]:
        """Spans of the catalog's models: of others anybody could announce as many as he likes."""
        models = {model for model, _ in self.catalog.models.values()}
        return [s for s in self.spans if s.model in models]

    def coverage(self, model: ModelId, n_blocks: int) -> list[int]:
        """Count for each block the servers that hold it."""
        return coverage(self.spans, model, n_blocks)

    def holders(self, model: ModelId, n_blocks: int) -> list[frozenset[str]]:
        """The peers that serve each block."""
        holders_by_block: list[set[str]] = [set() for _ in range(n_blocks)]
        for span in self.serving(model):
            for block in range(span.start, min(span.end, n_blocks)):
                holders_by_block[block].add(span.peer)
        return [frozenset(peers) for peers in holders_by_block]

    def missing(self, model: ModelId, n_blocks: int) -> list[Span]:
        """The blocks that nobody serves."""
        return ranges({block for block, n in enumerate(self.coverage(model, n_blocks)) if n == 0})

    def served_dtype(self, model: ModelId, n_blocks: int, requested: str = "auto") -> str:
        """The dtype in which every block is served: ``requested``, or the first of several. Raises NoRoute."""
        candidates = [*ITEM_BYTES] if requested == "auto" else [requested]
        for dtype in candidates:
            if not self._dtype_gaps(model, n_blocks, dtype):
                return dtype
        if missing := self.missing(model, n_blocks):
            n_hidden = sum(span.model == model for span in self.out_of_reach)
            hidden = f"; {count(n_hidden, 'server')} behind a router cannot be reached" if n_hidden else ""
            raise NoRoute(f"no live server holds blocks {_join_spans(missing)} of {n_blocks}{hidden}", tuple(missing))
        gaps = {dtype: self._dtype_gaps(model, n_blocks, dtype) for dtype in ITEM_BYTES}
        complete = [dtype for dtype in ITEM_BYTES if not gaps[dtype]]
        alternatives = (
            f"can be asked for: {', '.join(complete)}" if complete else "every block is served, but not in one dtype"
        )
        lacking = ", ".join(f"{_join_spans(gaps[dtype])} in {dtype}" for dtype in candidates)
        raise NoRoute(
            f"no live server holds blocks {lacking} of {n_blocks}; {alternatives}", tuple(gaps[candidates[0]])
        )

    def _dtype_gaps(self, model: ModelId, n_blocks: int, dtype: str) -> list[Span]:
        """The blocks that nobody serves in a dtype."""
        counts = coverage((span for span in self.spans if span.dtype == dtype), model, n_blocks)
        return ranges({block for block, n in enumerate(counts) if n == 0})

    def is_given(self, model: ModelId, block: int) -> bool:
        """Can the weights of a block be fetched: from a member that has them, or from the hub?"""
        if model in self.catalog.sources:
            return True
        held_blocks = (record.holds.get(model, ()) for record in self.peers.values())
        return any(start <= block < end for groups in held_blocks for start, end in groups)

    def peer_ending(self, ending: str) -> PeerId:
        """The one peer whose id ends so. Raises ConfigError."""
        matches = [peer for peer in self.peers if peer.endswith(ending)] if ending else []
        if len(matches) != 1:
            raise ConfigError(f"{len(matches)} known peers have an id that ends in {ending!r}: see swarmd peers")
        return matches[0]

    def model_named(self, name: str) -> tuple[ModelId, int] | None:
        """Resolve a name of the catalog, or a hash that it lists, to (hash, number of blocks)."""
        for listed_name, (model, n_blocks) in self.catalog.models.items():
            if name in (listed_name, model):
                return ModelId(model), n_blocks
        return None


T = TypeVar("T")


def _count_down(counter: Counter[T], key: T) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]


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
    """Every record that was verified and has not expired. The only mutable thing here; owned by one task."""

    entries: dict[str, VerifiedRecord] = field(default_factory=dict)
    catalog: Catalog = field(default_factory=Catalog)
    catalog_raw: bytes | None = None
    talked_with: Container[str] = ()
    _n_of_peer: Counter[str] = field(default_factory=Counter)
    _n_of_voucher: Counter[bytes] = field(default_factory=Counter)
    _peers_of_voucher: Counter[bytes] = field(default_factory=Counter)
    _next_expiry: float = math.inf

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
        if verified.key in self.entries:
            self._drop_records([verified.key])
        elif len(self.entries) >= MAX_RECORDS and not self._make_room(vouchers):
            return Decision(False, f"{MAX_RECORDS} records are known already")
        for voucher in vouchers:
            self._n_of_voucher[voucher] += 1
            self._peers_of_voucher[voucher] += not self._n_of_peer[peer]
        self._n_of_peer[peer] += 1
        self.entries[verified.key] = verified
        self._next_expiry = min(self._next_expiry, verified.record.expires_at)
        return decision

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

    def keep_members(self, counts: Callable[[Membership], bool]) -> None:
        """Drop the records of everybody whose membership does not count any more."""
        self._drop_records([k for k, v in self.entries.items() if not counts(v.membership)])

    def expire(self, now: float) -> list[str]:
        """Drop what has expired; returns the keys."""
        if now < self._next_expiry:
            return []
        expired = [k for k, v in self.entries.items() if v.record.expires_at <= now]
        self._drop_records(expired)
        self._next_expiry = min((v.record.expires_at for v in self.entries.values()), default=math.inf)
        return expired

    def _drop_records(self, keys: list[str]) -> None:
        for key in keys:
            dropped = self.entries.pop(key)
            peer = dropped.record.peer
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
    ) -> tuple[list[bytes], list[str]]:
        """Return (records that the other lacks, names of records that it has and this book lacks)."""
        # Anti-entropy: both sides compare one number for each key, and only what differs travels. A reply that is cut
        # short is no fault: what is missing still differs the next time.
        send: list[bytes] = []
        size = 0
        own_sequences = self.digest(naming)
        for key, entry in self.entries.items():
            is_newer = sequences.get(naming(key), -1) < entry.record.sequence
            if is_newer and size < MAX_REPLY_BYTES:
                send.append(entry.raw)
                size += len(entry.raw)
        want = [name for name, sequence in sequences.items() if sequence > own_sequences.get(name, -1)]
        return send[:MAX_SENT], want[:MAX_SENT]

    def pick(self, names: set[str], naming: Naming = str) -> list[bytes]:
        """The records under ``names`` that are known, as many as fit one frame."""
        picked: list[bytes] = []
        size = 0
        for key in sorted(key for key in self.entries if naming(key) in names):
            entry = self.entries[key]
            if size < MAX_REPLY_BYTES and len(picked) < MAX_SENT:
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
