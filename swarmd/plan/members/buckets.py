"""A digest by buckets: what two record books have alike is told by one hash, and only what differs is opened.

All records of a peer are in one bucket. Where a bucket's hashes are equal at both sides, so are its chains of beats,
and a number for each, in the order of their names, tells whose beats are newer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

HASH_BYTES = 8  # of a bucket
IN_A_BUCKET = 32  # records: so many are named where one of them differs
MOST_PEERS = 20_000  # whose buckets are remembered: as many as a view has records
MOST_BUCKETS = 4_096  # a digest of them takes 32 KiB before anything is told of beats


class BucketDigest(msgspec.Struct, frozen=True, array_like=True):
    """Hashes of all buckets, one after the other; and of each the numbers of its chains' last beats, a byte each."""

    hashes: bytes
    numbers: list[bytes]


def count_buckets(n_records: int) -> int:
    """How many buckets a digest of so many records has: a power of two, so that members of like views agree."""
    n = 1
    while n * IN_A_BUCKET < n_records and n < MOST_BUCKETS:
        n *= 2
    return n


@lru_cache(maxsize=MOST_PEERS)
def bucket_of(peer: str, n_buckets: int) -> int:
    """The bucket of a peer's records."""
    return int.from_bytes(hashlib.blake2b(peer.encode(), digest_size=4).digest()) % n_buckets


@dataclass(slots=True)
class Bucket:
    """Records by their short names: sequence numbers and chains. What is told of them is made when it is asked for."""

    records: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    _hash: bytes = b""
    _chains: list[bytes] = field(default_factory=list)

    def put(self, name: str, sequence: int, chain: bytes) -> None:
        """Have a record, in place of any of that name."""
        self.records[name] = sequence, chain
        self._hash = b""

    def drop(self, name: str) -> None:
        """Have a record no more."""
        del self.records[name]
        self._hash = b""

    def _tell(self) -> None:
        if not self._hash:
            told = msgspec.msgpack.encode(sorted(self.records.items()))
            self._hash = hashlib.blake2b(told, digest_size=HASH_BYTES).digest()
            self._chains = sorted({chain for _, chain in self.records.values() if chain})

    @property
    def hash(self) -> bytes:
        """What stands for names, sequence numbers and chains."""
        self._tell()
        return self._hash

    @property
    def chains(self) -> list[bytes]:
        """Names of all chains, in order."""
        self._tell()
        return self._chains


@dataclass(frozen=True, slots=True)
class Difference:
    """What a digest shows of two books: chains whose beats are newer here or there, and buckets that are not equal."""

    n: int  # buckets
    newer_here: list[bytes]
    newer_there: list[bytes]
    buckets: list[int]


class Buckets:
    """All records of a book, in so many buckets."""

    def __init__(self, n: int, records: Iterable[tuple[str, str, int, bytes]]) -> None:
        self._buckets = [Bucket() for _ in range(n)]
        for record in records:
            self.put(*record)

    def __len__(self) -> int:
        return len(self._buckets)

    def put(self, peer: str, name: str, sequence: int, chain: bytes) -> None:
        """Have a record of a peer, by its short name."""
        self._buckets[bucket_of(peer, len(self))].put(name, sequence, chain)

    def drop(self, peer: str, name: str) -> None:
        """Have a record no more."""
        self._buckets[bucket_of(peer, len(self))].drop(name)

    def digest(self, numbers: Mapping[bytes, int]) -> BucketDigest:
        """Tell what is here; ``numbers`` are of the last beats of chains."""
        told = [bytes([numbers[chain] for chain in bucket.chains]) for bucket in self._buckets]
        return BucketDigest(b"".join(bucket.hash for bucket in self._buckets), told)

    def compare(self, digest: BucketDigest, numbers: Mapping[bytes, int]) -> Difference:
        """Compare a digest of as many buckets with what is here."""
        newer_here: list[bytes] = []
        newer_there: list[bytes] = []
        differing: list[int] = []
        for index, (bucket, theirs) in enumerate(zip(self._buckets, digest.numbers, strict=True)):
            is_equal = digest.hashes[index * HASH_BYTES : (index + 1) * HASH_BYTES] == bucket.hash
            if not is_equal or len(theirs) != len(bucket.chains):
                differing.append(index)
                continue
            for chain, number in zip(bucket.chains, theirs, strict=True):
                if numbers[chain] > number:
                    newer_here.append(chain)
                elif numbers[chain] < number:
                    newer_there.append(chain)
        return Difference(len(self), newer_here, newer_there, differing)
