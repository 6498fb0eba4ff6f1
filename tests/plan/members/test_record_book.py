"""Two books become equal by buckets and beats; a record counts for as long as its author shows that it is there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from swarmd.errors import IntegrityError, RemoteProtocolError
from swarmd.plan.members.buckets import MOST_BUCKETS, BucketDigest, count_buckets
from swarmd.plan.members.record_book import RecordBook, short_name
from swarmd.protocol.membership.beats import BEATS_KEPT, ChainBeat, SecretChain
from swarmd.protocol.membership.identity import Membership
from swarmd.protocol.membership.records import PeerRecord, SpanRecord, VerifiedRecord, life_of
from swarmd.values import PeerId

BEAT_S, LIFE_S = 20, 3_600


@dataclass
class Author:
    """Somebody who announces itself and a span."""

    name: str
    begun_at: int = 0

    def __post_init__(self) -> None:
        self.chain = SecretChain(self.name, self.name.encode() * 16, self.begun_at, BEAT_S, 100)

    def records(self, sequence: int = 1) -> list[VerifiedRecord]:
        common = {"peer": self.name, "sequence": sequence, "issued_at": self.begun_at, "certificate": ()}
        life = {"chain": self.chain.end, "begun_at": self.begun_at, "beat_s": BEAT_S, "expires_at": LIFE_S}
        membership = Membership(PeerId(self.name), "member", (self.name.encode(),), LIFE_S)
        made = (PeerRecord(**common, **life), SpanRecord(**common, **life, model="m", end=2))
        return [
            VerifiedRecord(record, membership, repr(record).encode(), life_of(record, self.begun_at)) for record in made
        ]

    def beat(self, number: int) -> ChainBeat:
        return self.chain.beats_at(self.begun_at + number * BEAT_S)[0]


def book_of(*authors: Author, **of_beats: int) -> RecordBook:
    """A book with the records of authors, and of some the beat of this number."""
    book = RecordBook()
    for author in authors:
        for record in author.records():
            assert book.add(record).action
        if author.name in of_beats:
            assert book.take_beats_untrusted([author.beat(of_beats[author.name])], of_beats[author.name] * BEAT_S) == 1
    return book


def test_a_record_counts_for_as_long_as_beats_come() -> None:
    a, b = Author("a"), Author("b")
    book = book_of(a, b, a=5)
    assert not book.expire(BEATS_KEPT * BEAT_S - 1)
    assert book.expire(BEATS_KEPT * BEAT_S) == ["b/peer", "b/span/m"]
    assert book.expire((5 + BEATS_KEPT) * BEAT_S) == ["a/peer", "a/span/m"]
    assert not book.last_beats([a.chain.name]), "what is gone is forgotten"


def test_who_was_given_up_is_not_taken_from_others_who_believe_a_little_longer() -> None:
    a = Author("a")
    book = book_of(a, a=2)
    assert len(book.expire(10 * BEAT_S)) == 2
    for record in a.records():
        assert record.life is not None
        assert not book.add(record).action
        record.life.take_untrusted(2, a.beat(2).value, 10 * BEAT_S)
        assert "has shown nothing since" in book.add(record).reason
        record.life.take_untrusted(9, a.beat(9).value, 10 * BEAT_S)
        assert book.add(record).action


def test_a_newer_record_of_the_same_chain_is_known_to_be_alive() -> None:
    a = Author("a")
    book = book_of(a, a=30)
    for record in a.records(sequence=2):
        assert book.add(record).action
    assert not book.expire(31 * BEAT_S)
    assert book.last_beats([a.chain.name]) == [a.beat(30)]


def test_who_is_soon_given_up_is_told_before_it_is() -> None:
    book = book_of(Author("a"), Author("b"), Author("c"), a=5, b=6)
    assert not book.overdue(2 * BEAT_S)
    assert book.overdue(2 * BEAT_S + 1) == {"c": 3 * BEAT_S}
    assert book.expire(BEATS_KEPT * BEAT_S)
    assert [*book.overdue((6 + BEATS_KEPT) * BEAT_S - 1)] == ["a", "b"]
    book.excuse_silence(3 * BEAT_S)
    assert not book.overdue((6 + BEATS_KEPT) * BEAT_S - 1)


def test_who_beats_on_another_chain_is_not_overdue_for_what_it_withdrew() -> None:
    before, since = Author("a"), Author("a", begun_at=BEAT_S)
    book = book_of(before)
    peer, _ = since.records(2)
    assert book.add(peer).action, "its span was withdrawn"
    assert book.take_beats_untrusted([since.beat(2)], 3 * BEAT_S) == 1
    assert len(book.entries) == 2
    assert not book.overdue(3 * BEAT_S - 1)


def test_only_beats_and_buckets_that_differ_are_told() -> None:
    authors = [Author(f"author {n}") for n in range(40)]
    here = book_of(*authors[:39], **{"author 0": 3, "author 1": 1})
    there = book_of(*authors[:38], authors[39], **{"author 0": 1, "author 1": 2})
    digest = here.bucket_digest()
    assert len(digest.numbers) == count_buckets(78) == 4
    differs = there.compare_buckets(digest)
    named, numbers = there.told_of(differs.n, differs.buckets)
    assert 1 <= len(differs.buckets) <= 2
    assert 2 <= len(named) < 60
    newer_here, newer_there = here.compare_beats(numbers)
    assert {*newer_here, *differs.newer_there} == {authors[0].chain.name}
    assert {*newer_there, *differs.newer_here} == {authors[1].chain.name}
    ours, _ = here.told_of(differs.n, differs.buckets)
    sent, want = here.compare_names(ours, named)
    assert len(sent) == 2, "the records of one author"
    assert len(want) == 2
    assert {record.raw for record in authors[38].records()} == {*sent}
    assert {record.raw for record in authors[39].records()} == {*there.pick({*want}, short_name)}


def test_equal_books_tell_whose_beats_are_newer() -> None:
    a, b, c = Author("a"), Author("b"), Author("c")
    here, there = book_of(a, b, c, a=3, b=1), book_of(a, b, c, a=1, b=2)
    differs = there.compare_buckets(here.bucket_digest())
    assert (differs.newer_here, differs.newer_there, differs.buckets) == ([b.chain.name], [a.chain.name], [])
    assert here.take_beats_untrusted(there.last_beats(differs.newer_here), 0) == 1
    assert there.take_beats_untrusted(here.last_beats(differs.newer_there), 0) == 1
    assert here.bucket_digest() == there.bucket_digest()


def test_a_beat_that_was_made_up_is_forged_and_one_of_nobody_is_nothing() -> None:
    a = Author("a")
    book = book_of(a)
    assert book.take_beats_untrusted([Author("b").beat(1)], 0) == 0
    with pytest.raises(IntegrityError, match="beat 2"):
        book.take_beats_untrusted([ChainBeat(a.chain.name, 2, b"x" * 16)], 0)


@pytest.mark.parametrize("n", [0, 3, 2 * MOST_BUCKETS])
def test_digests_that_cannot_be_are_refused(n: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"a digest of {n} buckets"):
        RecordBook().compare_buckets(BucketDigest(bytes(8 * n), [b""] * n))
    with pytest.raises(RemoteProtocolError, match="with 9 B of hashes"):
        RecordBook().compare_buckets(BucketDigest(bytes(9), [b""]))


def test_a_book_that_is_much_smaller_is_compared_as_a_whole() -> None:
    large = book_of(*(Author(f"author {n}") for n in range(200)))
    differs = large.compare_buckets(RecordBook().bucket_digest())
    names, numbers = large.told_of(differs.n, differs.buckets)
    assert (differs.n, differs.buckets) == (1, [0])
    assert (len(names), len(numbers)) == (400, 200)
    assert not large._buckets, "digests of any size are no work"


@pytest.mark.parametrize("buckets", [[1], [-1], [0, 2**63]])
def test_buckets_that_are_not_there_are_refused(buckets: list[int]) -> None:
    with pytest.raises(RemoteProtocolError, match="of 1"):
        book_of(Author("a")).told_of(1, buckets)
