"""Invites and members as their founder names them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from swarmd_cli.context import set_home

from swarmd.errors import ConfigError
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.paths import Home
from tests.cli.typed import swarmd


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    state = Home(tmp_path)
    Founder(state).found("ours")
    yield state
    set_home(None)


def test_an_invite_is_revoked_by_the_id_that_members_ls_shows(home: Home) -> None:
    key = Founder(home).invite((), 600, uses=2).identity.public_key
    assert key.hex()[:8] in swarmd(home, "members", "ls")
    with pytest.raises(ConfigError, match=f"0 invites .* there are: {key.hex()[:8]}"):
        swarmd(home, "invite", "--revoke", key[::-1].hex()[:16])
    assert "Revoked the invite" in swarmd(home, "invite", "--revoke", key.hex()[:8])
    assert MembershipFiles(home).catalog().revoked == (key,)
    assert key.hex()[:8] not in swarmd(home, "members", "ls"), "it is no open one any more"


def test_what_is_neither_an_invite_nor_an_id_is_refused(home: Home) -> None:
    with pytest.raises(ConfigError, match="starts with swarmd1-"):
        swarmd(home, "invite", "--revoke", "nonsense")
