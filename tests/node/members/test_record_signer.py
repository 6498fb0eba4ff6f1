"""What a member signs: everything once, then what is new; and everything anew where beats could not show it."""

from __future__ import annotations

from typing import Any

import pytest
from trio.testing import MockClock

from swarmd.net.exchange import Exchange
from swarmd.node.members.record_signer import Announcement, RecordSigner
from swarmd.protocol.membership.beats import BEATS_KEPT
from swarmd.protocol.membership.catalog import AdmittedMember, Catalog, sign_catalog
from swarmd.protocol.membership.identity import Identity, certify
from swarmd.protocol.membership.invite import SwarmKeys
from swarmd.protocol.membership.records import MAX_LIFETIME_S, RECORD_LIFETIME_S, read_untrusted

FOUNDER, MEMBER = Identity(b"f" * 32), Identity(b"m" * 32)
KEYS = SwarmKeys("sim", FOUNDER.public_key, b"\0" * 32)
EPOCH_S, YEAR_S = 1_700_000_000, 31_536_000
PEER = {"kind": "peer", "addresses": ("/ip4/1.2.3.4/tcp/1",), "free_disk_bytes": 1_000}
SPAN = {"kind": "span", "model": "m", "end": 2, "state": "online"}
BEAT_S = 20


class Member:
    """A signer, its book, and its clock."""

    def __init__(self) -> None:
        self.now = float(EPOCH_S)
        self.exchange = Exchange(KEYS, lambda: self.now)
        certificate = (certify(FOUNDER, MEMBER.public_key, "member", EPOCH_S + YEAR_S),)
        self.signer = RecordSigner(MEMBER, certificate, self.exchange, lambda: self.now)

    def announce(self, *described: dict[str, Any], n_members: int = 3, with_beats: bool = True) -> Announcement:
        announcement = self.signer.renew(described, n_members, with_beats)
        beats = {beat.chain: beat for beat in announcement.beats}
        for raw in announcement.news:
            assert self.exchange.merge_untrusted(raw, is_own=True, beats=beats)
        self.exchange.book.take_beats_untrusted(announcement.beats, self.now)
        self.exchange.view()
        return announcement

    def known(self) -> set[str]:
        return {key.split("/", 1)[1] for key in self.exchange.book.entries}


@pytest.fixture
def member(virtual_time: MockClock) -> Member:
    return Member()


async def test_what_is_signed_once_is_shown_by_beats_for_most_of_an_hour(member: Member) -> None:
    assert len(member.announce(PEER, SPAN).news) == 2
    signed_at = member.now
    while not (announcement := member.announce(PEER, SPAN)).news:
        assert member.now == signed_at or announcement.beats
        assert member.known() == {"peer", "span/m"}
        member.now += member.signer.next_beat_s() or 0
    assert 0.8 * MAX_LIFETIME_S < member.now - signed_at < MAX_LIFETIME_S
    assert len(announcement.news) == 2, "all is signed anew before the last beat"


async def test_only_what_is_new_is_signed_and_counts_at_once(member: Member) -> None:
    member.announce(PEER, SPAN)
    member.now += 10 * BEAT_S
    announcement = member.announce(PEER, SPAN | {"state": "draining"})
    beats = {beat.chain: beat for beat in announcement.beats}
    (raw,) = announcement.news
    record = read_untrusted(raw, FOUNDER.public_key, member.now, beats).record
    assert (record.issued_at, record.begun_at) == (EPOCH_S + 10 * BEAT_S, EPOCH_S)
    assert member.known() == {"peer", "span/m"}
    assert [span.state for span in member.exchange.view().spans] == ["draining"]


async def test_what_is_withdrawn_is_shown_no_more(member: Member) -> None:
    member.announce(PEER, SPAN)
    member.now += BEAT_S
    assert len(member.announce(PEER).news) == 1, "with a chain of its own"
    for _ in range(BEATS_KEPT):
        member.now += BEAT_S
        member.announce(PEER)
    assert member.known() == {"peer"}


async def test_with_members_that_know_no_beats_records_live_for_a_minute(member: Member) -> None:
    member.announce(PEER, SPAN)
    member.now += BEAT_S
    announcement = member.announce(PEER, SPAN, with_beats=False)
    assert len(announcement.news) == 2
    assert not announcement.beats
    assert member.signer.next_beat_s() is None
    records = [read_untrusted(raw, FOUNDER.public_key, member.now).record for raw in announcement.news]
    assert {record.expires_at - record.issued_at for record in records} == {RECORD_LIFETIME_S}
    assert all(not record.chain for record in records)
    member.now += BEAT_S
    assert len(member.announce(PEER, SPAN).news) == 2, "and with beats again"


@pytest.mark.parametrize("set_by_s", [5 * 3_600.0, -400 * 86_400.0])
async def test_a_clock_that_was_set_costs_a_signature(member: Member, set_by_s: float) -> None:
    member.announce(PEER, SPAN)
    for moment in (EPOCH_S + set_by_s, EPOCH_S + 100.0):
        member.now = moment
        assert len(member.announce(PEER, SPAN).news) == 2
        assert member.known() == {"peer", "span/m"}


async def test_more_members_have_another_pace(member: Member) -> None:
    member.announce(PEER)
    assert not member.announce(PEER, n_members=600).news
    (raw,) = member.announce(PEER, n_members=10_000).news
    assert read_untrusted(raw, FOUNDER.public_key, member.now).record.beat_s == 100


async def test_what_the_dht_keeps_can_be_read_by_who_knows_nobody(member: Member) -> None:
    assert len(member.signer.current([PEER, SPAN])[0]) == 2, "before anything was announced"
    member.announce(PEER, SPAN)
    member.now += 30 * BEAT_S
    raws, beats = member.signer.current([PEER])
    assert len(raws) == 2, "what is new comes with the next announcement"
    reader = Exchange(KEYS, lambda: member.now)
    for raw in raws:
        assert not reader.merge_untrusted(raw), "it might be of somebody who is gone"
        assert reader.merge_untrusted(raw, beats={beat.chain: beat for beat in beats})


async def test_a_membership_that_is_shortened_ends_records_that_would_outlive_it(member: Member) -> None:
    announced = member.announce(PEER, SPAN)
    terms = AdmittedMember(ends_at=EPOCH_S + 1_000, invite=b"", may=("serve", "give", "train"))
    catalog = sign_catalog(Catalog(version=2, admitted={MEMBER.public_key: terms}), FOUNDER)
    reader = Exchange(KEYS, lambda: member.now)
    assert all(map(reader.merge_untrusted, announced.news))
    for exchange in (member.exchange, reader):
        assert exchange.merge_catalog_untrusted(catalog)
        assert not exchange.book.entries
    reader = Exchange(KEYS, lambda: member.now)
    assert reader.merge_catalog_untrusted(catalog)
    assert all(map(reader.merge_untrusted, member.announce(PEER, SPAN).news)), "signed anew, and shorter"
    assert {entry.record.expires_at for entry in reader.book.entries.values()} == {EPOCH_S + 1_000}
