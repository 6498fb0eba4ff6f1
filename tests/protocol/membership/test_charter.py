"""Who may change who founds a swarm: so many of the founders of now together, and nobody else."""

from __future__ import annotations

import msgspec
import pytest

from swarmd.errors import ConfigError, IntegrityError
from swarmd.net.exchange import Exchange
from swarmd.protocol.membership import charter, lines
from swarmd.protocol.membership.catalog import Catalog, read_catalog_untrusted, sign_catalog
from swarmd.protocol.membership.charter import (
    Charter,
    SignedCharter,
    count_missing_signatures,
    draft_charter,
    founders_untrusted,
    sign,
)
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.invite import SwarmKeys

A, B, C, THIEF = (Identity(bytes([n]) * 32) for n in (1, 2, 3, 4))
FIRST = founders_untrusted(A.public_key).charter
KEYS = (A.public_key, B.public_key, C.public_key)


def encoded(*drafts: SignedCharter) -> tuple[bytes, ...]:
    return tuple(msgspec.msgpack.encode(draft) for draft in drafts)


def two_of_three() -> SignedCharter:
    return sign(draft_charter(FIRST, KEYS, 2, ()), A)


def test_one_founder_makes_three_of_whom_two_change_who_they_are() -> None:
    first = two_of_three()
    found = founders_untrusted(A.public_key, encoded(first))
    assert (found.charter.keys, found.charter.needed) == (KEYS, 2)
    without_a = draft_charter(found.charter, KEYS[1:], 2, (A.public_key,))
    assert count_missing_signatures(without_a, found.charter) == 2
    by_one = sign(without_a, B)
    with pytest.raises(IntegrityError, match="lacks 1 of 2"):
        founders_untrusted(A.public_key, encoded(first, by_one))
    after = founders_untrusted(A.public_key, encoded(first, sign(by_one, C)))
    assert after.charter.keys == KEYS[1:]
    assert set(after.ever) == set(KEYS)


@pytest.mark.parametrize("signer", [A, THIEF])
def test_nobody_signs_twice_or_without_being_a_founder(signer: Identity) -> None:
    first = two_of_three()
    now = founders_untrusted(A.public_key, encoded(first)).charter
    draft = sign(sign(draft_charter(now, (THIEF.public_key,), 1, ()), signer), signer)
    with pytest.raises(IntegrityError, match=r"lacks 1 of 2|none of the founders"):
        founders_untrusted(A.public_key, encoded(first, draft))
    doubled = SignedCharter(draft.body, draft.signatures * 2)
    with pytest.raises(IntegrityError, match=r"lacks 1 of 2|none of the founders"):
        founders_untrusted(A.public_key, encoded(first, doubled))


def test_a_charter_follows_only_the_one_that_it_names() -> None:
    first, other = two_of_three(), sign(draft_charter(FIRST, KEYS[:2], 1, ()), A)
    after_first = sign(sign(draft_charter(first.charter, KEYS, 1, ()), A), B)
    with pytest.raises(IntegrityError, match="follows another charter"):
        founders_untrusted(A.public_key, encoded(other, after_first))
    with pytest.raises(IntegrityError, match="follows another charter"):
        founders_untrusted(A.public_key, encoded(first, first))


def test_a_forged_charter_and_one_that_nobody_could_change_are_refused() -> None:
    signed = two_of_three()
    forged = SignedCharter(signed.body.replace(B.public_key, THIEF.public_key), signed.signatures)
    with pytest.raises(IntegrityError, match="does not match"):
        founders_untrusted(A.public_key, encoded(forged))
    stuck = msgspec.msgpack.encode(Charter(KEYS[:1], 2, (), FIRST.digest))
    with pytest.raises(IntegrityError, match="1 founders that asks for 2"):
        founders_untrusted(A.public_key, encoded(sign(SignedCharter(stuck), A)))
    for keys, needed in (((), 1), (KEYS, 4), ((*KEYS, KEYS[0]), 1)):
        with pytest.raises(ConfigError):
            draft_charter(FIRST, keys, needed, ())


def test_a_catalog_counts_when_any_founder_of_now_signed_it_and_no_other() -> None:
    kept = Catalog(version=5, charters=encoded(two_of_three()))
    for founder in (A, B, C):
        assert read_catalog_untrusted(sign_catalog(kept, founder), A.public_key).rank == (1, 5, 5)
    with pytest.raises(IntegrityError, match="does not match a founder's key"):
        read_catalog_untrusted(sign_catalog(kept, THIEF), A.public_key)
    with pytest.raises(IntegrityError, match="does not match a founder's key"):
        read_catalog_untrusted(sign_catalog(Catalog(version=6), B), A.public_key)


def test_a_thief_with_an_old_founders_key_cannot_outbid_the_charter_after_it() -> None:
    replaced = sign(draft_charter(FIRST, (B.public_key,), 1, ()), A)
    now = read_catalog_untrusted(sign_catalog(Catalog(version=5, charters=encoded(replaced)), B), A.public_key)
    thiefs = read_catalog_untrusted(sign_catalog(Catalog(version=2**53), A), A.public_key)
    assert now.rank > thiefs.rank


async def test_charters_that_leave_the_known_ones_count_for_nothing_however_many_they_are() -> None:
    """The first founder, long let go, begins again from the first key, three times over: nobody follows."""
    exchange = Exchange(SwarmKeys("ours", A.public_key, bytes(32)), lambda: 100.0)
    replaced = sign(draft_charter(FIRST, (B.public_key, C.public_key), 2, ()), A)
    assert exchange.merge_catalog_untrusted(sign_catalog(Catalog(version=5, charters=encoded(replaced)), B))
    chain = [sign(draft_charter(FIRST, (THIEF.public_key,), 1, ()), A)]
    while len(chain) < 3:
        chain.append(sign(draft_charter(chain[-1].charter, (THIEF.public_key,), 1, (bytes([len(chain)]) * 32,)), THIEF))
    thiefs = sign_catalog(Catalog(version=9, charters=encoded(*chain)), THIEF)
    assert read_catalog_untrusted(thiefs, A.public_key).rank[0] == 3, "by itself it is in order"
    assert not exchange.merge_catalog_untrusted(thiefs)
    assert not exchange.merge_catalog_untrusted(sign_catalog(Catalog(version=50), A))
    assert exchange.roster.admission.founders.charter.keys == (B.public_key, C.public_key)
    assert not exchange.merge_catalog_untrusted(sign_catalog(Catalog(version=2**53, charters=encoded(replaced)), B))
    late = Exchange(SwarmKeys("ours", A.public_key, bytes(32), encoded(replaced)), lambda: 100.0)
    assert not late.merge_catalog_untrusted(sign_catalog(Catalog(version=50), A)), "an invite says who founds, too"


def test_a_founders_key_is_a_line_that_proves_itself() -> None:
    line = charter.encode_key(B)
    assert charter.decode_key_untrusted(line) == B.public_key
    stolen = lines.encode("founder1", msgspec.msgpack.encode((C.public_key, B.sign(b"x", C.public_key))))
    for broken in (line[:-4], stolen, B.public_key.hex(), charter.encode(two_of_three())):
        with pytest.raises(ConfigError):
            charter.decode_key_untrusted(broken)


def test_a_draft_is_a_line_that_says_when_it_was_cut() -> None:
    line = charter.encode(two_of_three())
    assert charter.decode_line_untrusted(f" {line}\n") == two_of_three()
    for broken in (line[:-3], line.replace("charter1", "charter2"), "hello", ""):
        with pytest.raises(ConfigError):
            charter.decode_line_untrusted(broken)
