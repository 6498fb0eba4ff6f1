"""Who may change the catalog, and what counts as newer: the founder, its delegates, nobody else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmd.errors import ConfigError, IntegrityError
from swarmd.home import Home
from swarmd.plan.view import RecordBook
from swarmd.protocol.catalog import Catalog, read_catalog_untrusted, sign_catalog, sign_catalog_as_delegate
from swarmd.protocol.identity import Identity

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
    founder, member = Home(tmp_path / "founder"), Home(tmp_path / "member")
    founder.found("ours")
    member.enter(founder.invite((), 3_600), DELEGATE, founder.catalog_raw())
    add = lambda c: msgspec.structs.replace(c, models={**c.models, "mine": MODEL})  # noqa: E731
    with pytest.raises(ConfigError, match="founder, or a delegate that it names"):
        member.change_catalog(add)
    founder.change_catalog(lambda c: msgspec.structs.replace(c, delegates=(DELEGATE.public_key,)))
    raw = founder.catalog_raw()
    assert raw is not None
    member.save_catalog(raw)
    assert member.may_publish
    assert "mine" in member.change_catalog(add).models
    assert "mine" in member.catalog().models
    founder.save_catalog(member.catalog_raw() or b"")
    assert "mine" in founder.change_catalog(lambda c: c).models, "the founder goes on from what its delegate published"
