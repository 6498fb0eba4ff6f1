"""What an older version wrote, this one reads: two homes, of a swarm that never was, as 0.1 of 2026-11-20 left them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from swarmd.config import load
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.paths import Home
from swarmd.net.exchange import Exchange
from swarmd.protocol.membership.identity import verify_certificate_untrusted
from swarmd.values import PeerId

THEN = 1_795_199_510  # seconds since 1970: then, the certificates of these homes hold
HOMES = Path(__file__).parent / "state_0_1"
MEMBER = PeerId("12D3KooWDXHjgmTsJ3MYFtdiFpT5nzhTtBYwmxKgVJLeDQuD7eBu")


@pytest.fixture(params=["founder", "member"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    shutil.copytree(HOMES / request.param, tmp_path / "home")
    return Home(tmp_path / "home")


def test_keys_membership_and_catalog_are_still_read(home: Home) -> None:
    swarm = MembershipFiles(home).swarm()
    identity = MembershipFiles(home).identity()
    assert swarm.keys.name == "ours"
    assert home.has_joined
    assert identity.peer_id == MEMBER or Founder(home).is_here
    verify_certificate_untrusted(swarm.certificate, swarm.keys.founder_key, identity.peer_id, THEN)
    exchange = Exchange(swarm.keys, lambda: float(THEN))
    raw = MembershipFiles(home).catalog_raw()
    assert raw is not None
    assert exchange.merge_catalog_untrusted(raw)
    assert list(exchange.view().catalog.models) == ["demo"]


def test_a_founder_still_lets_others_in_and_changes_the_catalog(tmp_path: Path) -> None:
    shutil.copytree(HOMES / "founder", tmp_path / "home")
    home = Home(tmp_path / "home")
    assert Founder(home).invite(("/ip4/192.0.2.7/tcp/4117",), 3_600)
    Founder(home).change_catalog(lambda catalog: catalog)
    assert MembershipFiles(home).catalog().version > 0


def test_settings_by_their_old_names_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.toml").write_text('training = "off"\ntraining_mib = 7\n')
    settings = load(tmp_path, {})
    assert (settings.training_runs, settings.tuning_mib) == ("off", 7)
    assert "is called tuning_mib now" in caplog.text
