"""What an invite is to a machine that is a member already, and invites that lead nowhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from swarmd_cli.context import set_home
from swarmd_cli.main import app
from typer.testing import CliRunner

from swarmd.errors import ConfigError
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.paths import Home
from swarmd.net import interfaces
from swarmd.protocol.membership import invite as invites
from swarmd.protocol.membership.identity import Identity
from tests.cli.typed import swarmd

OTHER = Identity(bytes(31) + b"o").peer_id
MOVED = f"/ip4/5.0.1.9/tcp/4117/p2p/{OTHER}"


@pytest.fixture
def founder(tmp_path: Path) -> Iterator[Home]:
    state = Home(tmp_path / "founder")
    Founder(state).found("ours")
    yield state
    set_home(None)


@pytest.fixture
def member(tmp_path: Path, founder: Home) -> Home:
    """A member of the founder's swarm, which knows an old address of another."""
    state = Home(tmp_path / "member")
    files = MembershipFiles(state)
    files.enter(Founder(founder).invite((), 600), Identity.generate(), MembershipFiles(founder).catalog_raw())
    state.write("peers.json", f'{{"{OTHER}": ["/ip4/5.0.1.2/tcp/1/p2p/{OTHER}"]}}')
    return state


def warnings_of(home: Home, *words: str) -> str:
    return CliRunner().invoke(app, ["--home", str(home.folder), *words]).stderr


def files_of(home: Home, *without: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in home.folder.iterdir() if path.name not in without}


@pytest.mark.parametrize("kind", ["a fresh invite", "an address"])
def test_a_member_takes_new_ways_to_others_and_nothing_else_changes(founder: Home, member: Home, kind: str) -> None:
    text = invites.encode(Founder(founder).invite((MOVED,), 600)) if kind == "a fresh invite" else MOVED
    before = files_of(member, "peers.json")
    said = swarmd(member, "join", text)
    assert "is a member of 'ours' already: it takes 1 way to others, and tries them when its daemon starts" in said
    assert files_of(member, "peers.json") == before
    assert MembershipFiles(member).bootstrap()[OTHER] == (MOVED, f"/ip4/5.0.1.2/tcp/1/p2p/{OTHER}")


def test_a_founder_takes_them_too_and_keeps_its_key(founder: Home) -> None:
    assert "it takes 1 way to others" in swarmd(founder, "join", MOVED)
    assert Founder(founder).is_here
    assert MembershipFiles(founder).bootstrap() == {OTHER: (MOVED,)}


def test_what_cannot_be_kept_is_not_said_to_be(founder: Home) -> None:
    founder.peers_file.mkdir()  # root may write anything else
    with pytest.raises(ConfigError, match=r"peers.json cannot be written: the addresses are not kept"):
        swarmd(founder, "join", MOVED)


def test_what_names_nobody_else_changes_nothing(founder: Home) -> None:
    before = files_of(founder)
    own = f"/ip4/5.0.1.2/tcp/1/p2p/{MembershipFiles(founder).identity().peer_id}"
    assert "names no other member: nothing was changed" in swarmd(founder, "join", own)
    assert files_of(founder) == before


def test_an_invite_of_another_swarm_is_refused_as_before(tmp_path: Path, member: Home) -> None:
    elsewhere = Founder(Home(tmp_path / "elsewhere"))
    elsewhere.found("theirs")
    before = files_of(member)
    with pytest.raises(ConfigError, match="is a member of 'ours' already: swarmd leave first"):
        swarmd(member, "join", invites.encode(elsewhere.invite((MOVED,), 600)))
    assert files_of(member) == before


def test_an_address_alone_lets_nobody_in_and_one_that_names_no_member_is_refused(tmp_path: Path, member: Home) -> None:
    with pytest.raises(ConfigError, match="expected an invite"):
        swarmd(Home(tmp_path / "nobody"), "join", MOVED)
    with pytest.raises(
        ConfigError, match=r"expected an address from a member's swarmd status .* got '/ip4/5\.0\.1\.9/tcp/1'"
    ):
        swarmd(member, "join", "/ip4/5.0.1.9/tcp/1")


@pytest.mark.parametrize(
    ("hosts", "is_told"), [([], True), (["192.168.1.2"], False)], ids=["without a network", "with one"]
)
def test_an_invite_that_leads_to_nobody_else_is_told(
    founder: Home, monkeypatch: pytest.MonkeyPatch, hosts: list[str], is_told: bool
) -> None:
    found = [interfaces.ipaddress.ip_address(host) for host in hosts]
    monkeypatch.setattr(interfaces, "_interface_hosts", lambda: found)
    warning = (
        "nobody on another machine can join by this invite: it names this machine's loopback only (127.0.0.1, ::1)"
    )
    assert (warning in warnings_of(founder, "invite")) is is_told


@pytest.mark.parametrize(
    ("listen", "says"), [("/ip4/127.0.0.1/tcp/4117", "loopback only (127.0.0.1)"), ("", "nowhere")]
)
def test_so_is_one_of_a_machine_that_listens_for_nobody_else(founder: Home, listen: str, says: str) -> None:
    founder.write("config.toml", f'listen = "{listen}"')
    assert says in warnings_of(founder, "invite")
