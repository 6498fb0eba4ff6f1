"""Who may change the catalog, and what counts as newer: the founder, its delegates, nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmd.errors import ConfigError, IntegrityError
from swarmd.home.founder import Founder
from swarmd.home.paths import Home
from swarmd.plan.members.record_book import RecordBook
from swarmd.protocol.membership.catalog import (
    MAX_CATALOG_BYTES,
    AdmittedMember,
    Catalog,
    InviteTerms,
    read_catalog_untrusted,
    restore_lost_entries,
    sign_catalog,
    sign_catalog_as_delegate,
)
from swarmd.protocol.membership.identity import Identity

FOUNDER, DELEGATE, OTHER = (Identity(bytes([n]) * 32) for n in (1, 2, 3))
KEY = FOUNDER.public_key
MODEL = ("a" * 64, 4)


def root(version: int = 10, **more: Any) -> bytes:
    return sign_catalog(Catalog(version=version, delegates=(DELEGATE.public_key,), **more), FOUNDER)


def changed(raw: bytes, **more: Any) -> Catalog:
    return msgspec.structs.replace(read_catalog_untrusted(raw, KEY), root=0, **more)


def test_a_delegate_adds_a_model_and_another_delegate_builds_on_it() -> None:
    first = sign_catalog_as_delegate(changed(root(), version=11, models={"one": MODEL}), DELEGATE, root(), KEY)
    read = read_catalog_untrusted(first, KEY)
    assert (read.rank, read.models) == ((0, 10, 11), {"one": MODEL})
    models = {**read.models, "two": MODEL}
    second = sign_catalog_as_delegate(changed(first, version=12, models=models), DELEGATE, first, KEY)
    assert set(read_catalog_untrusted(second, KEY).models) == {"one", "two"}


def test_a_delegate_adds_a_draft_that_goes_by_its_name() -> None:
    drafts = {"guess": ("d" * 64, MODEL[0])}
    read = read_catalog_untrusted(
        sign_catalog_as_delegate(changed(root(), version=11, drafts=drafts), DELEGATE, root(), KEY), KEY
    )
    assert read.hash_of("guess") == "d" * 64
    assert "guess" in read.names
    assert read.names_of("d" * 64) == ["guess"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"revoked": (b"x" * 32,)}, "models only"),
        ({"delegates": (OTHER.public_key,)}, "models only"),
        ({"version": 10}, "after the founder"),
    ],
)
def test_a_delegate_changes_nothing_but_models(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(IntegrityError, match=reason):
        sign_catalog_as_delegate(changed(root(), **{"version": 11, **changes}), DELEGATE, root(), KEY)


def test_what_a_delegate_of_an_older_version_does_not_know_is_the_founders_still() -> None:
    known = {b"i" * 32: InviteTerms(10_000, uses=1)}
    current = root(invites=known)
    forgetful = msgspec.structs.replace(changed(current, version=11, models={"one": MODEL}), invites={})
    read = read_catalog_untrusted(sign_catalog_as_delegate(forgetful, DELEGATE, current, KEY), KEY)
    assert (read.models, read.invites) == ({"one": MODEL}, known)


@pytest.mark.parametrize(
    "padded",
    [
        lambda raw: msgspec.msgpack.encode((*msgspec.msgpack.decode(raw), b"", b"", b"more")),
        lambda raw: msgspec.msgpack.encode((*msgspec.msgpack.decode(raw), b"x" * 1_000)),
        lambda raw: raw.replace(b"\xc4\x40", b"\xc5\x00\x40", 1),
    ],
)
def test_a_catalog_carries_nothing_but_what_is_signed(padded: Callable[[bytes], bytes]) -> None:
    """Everybody keeps it and passes it on: who adds to it would fill their disks and their frames."""
    assert read_catalog_untrusted(root(), KEY)
    with pytest.raises(IntegrityError, match="more around it"):
        read_catalog_untrusted(padded(root()), KEY)
    with pytest.raises(IntegrityError, match="the limit is"):
        read_catalog_untrusted(root() + bytes(MAX_CATALOG_BYTES), KEY)


def test_nothing_hides_inside_the_founders_part_of_a_delegates_catalog() -> None:
    good = sign_catalog_as_delegate(changed(root(), version=11, models={"one": MODEL}), DELEGATE, root(), KEY)
    body, signature, signer, inner = msgspec.msgpack.decode(good)
    for more in ((b"", b"x" * 100), (b"x" * 100,)):
        padded = msgspec.msgpack.encode((*msgspec.msgpack.decode(inner), *more))
        with pytest.raises(IntegrityError, match="more around it"):
            read_catalog_untrusted(msgspec.msgpack.encode((body, signature, signer, padded)), KEY)


def test_what_a_founder_said_who_was_let_go_does_not_come_back() -> None:
    thiefs, ours = Catalog(version=5, revoked=(b"a" * 32,)), Catalog(version=6, charters=(b"the next",))
    assert restore_lost_entries(ours, thiefs, 100.0) is None


def test_what_the_later_of_two_founders_did_not_know_comes_back() -> None:
    ends = {"now": 100.0}
    mine = Catalog(
        version=5, revoked=(b"a" * 32,), invites={b"i" * 32: InviteTerms(200, 1), b"o" * 32: InviteTerms(50, 1)}
    )
    theirs = Catalog(version=6, revoked=(b"b" * 32,), admitted={b"m" * 32: AdmittedMember(300)}, models={"one": MODEL})
    both = restore_lost_entries(theirs, mine, **ends)
    assert both is not None
    assert set(both.revoked) == {b"a" * 32, b"b" * 32}
    assert (set(both.invites), both.admitted, both.models) == ({b"i" * 32}, theirs.admitted, theirs.models)
    assert restore_lost_entries(both, mine, **ends) is None
    assert restore_lost_entries(both, theirs, **ends) is None


def test_who_is_no_delegate_is_refused_also_when_the_signature_is_good() -> None:
    with pytest.raises(IntegrityError, match="does not name as a delegate"):
        sign_catalog_as_delegate(changed(root(), version=11), OTHER, root(), KEY)
    with pytest.raises(IntegrityError):
        read_catalog_untrusted(sign_catalog(Catalog(version=99), OTHER), KEY)


def test_the_founders_next_word_counts_whatever_number_a_delegate_chose() -> None:
    book = RecordBook()
    by_delegate = sign_catalog_as_delegate(changed(root(), version=2**53), DELEGATE, root(), KEY)
    later = sign_catalog(Catalog(version=11), FOUNDER)
    for raw, is_news in ((root(), True), (by_delegate, True), (root(), False), (later, True), (by_delegate, False)):
        assert book.add_catalog(read_catalog_untrusted(raw, KEY), raw).action is is_news
    assert book.catalog.delegates == ()


def test_a_home_signs_as_what_it_is(tmp_path: Path) -> None:
    founder = Founder(Home(tmp_path / "founder"))
    founder.found("ours")
    delegate = Founder(Home(tmp_path / "member"))
    member = delegate.membership
    member.enter(founder.invite((), 3_600), DELEGATE, founder.membership.catalog_raw())
    add = lambda c: msgspec.structs.replace(c, models={**c.models, "mine": MODEL})  # noqa: E731
    with pytest.raises(ConfigError, match="founder, or a delegate that it names"):
        delegate.change_catalog(add)
    founder.change_catalog(lambda c: msgspec.structs.replace(c, delegates=(DELEGATE.public_key,)))
    raw = founder.membership.catalog_raw()
    assert raw is not None
    member.save_catalog(raw)
    assert delegate.may_publish
    assert "mine" in delegate.change_catalog(add).models
    assert "mine" in member.catalog().models
    founder.membership.save_catalog(member.catalog_raw() or b"")
    assert "mine" in founder.change_catalog(lambda c: c).models, "the founder goes on from what its delegate published"
