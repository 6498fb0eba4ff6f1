"""A state folder that was damaged, or left halfway by a kill: one sentence, nothing lost, and trying again mends it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import shutil
import socket
import stat
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swarmd_cli.main import run

from swarmd import config
from swarmd.errors import ConfigError, SwarmError
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.models import ModelFolders
from swarmd.home.paths import Home
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs.recipe import read_toml

FILES = ("swarm.json", "node.key", "founder.key", "catalog.bin", "models.json", "peers.json", "standing.json")
DAMAGES = {
    "empty": lambda raw: b"",
    "cut short": lambda raw: raw[: len(raw) // 2],
    "no UTF-8": lambda raw: b"\xff\xfe" + raw,
    "another type": lambda raw: b"[5]",
    "a number": lambda raw: b"5",
    "null": lambda raw: b"null",
    "too deep": lambda raw: b"[" * 100_000,
    "wrong values": lambda raw: b'{"a": 5, "b": [1]}',
}


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home") / "home"
    home = Home(folder)
    Founder(home).found("ours")
    ModelFolders(home).add(MembershipFiles(home).catalog().models["demo"][0], folder)
    for name in ("peers.json", "standing.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_one_sentence(
    founded: Path,
    tmp_path: Path,
    name: str,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "home"
    shutil.copytree(founded, folder)
    (folder / name).write_bytes(DAMAGES[damage]((folder / name).read_bytes()))
    for command in ("doctor", "invite"):
        monkeypatch.setattr(sys, "argv", ["swarmd", "--home", str(folder), command])
        with pytest.raises(SystemExit) as ended:  # and nothing else
            run()
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert ended.value.code in (0, 1, 2, 3, 4), command
        assert len(said) < 1_000


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_settings_or_one_sentence(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "config.toml"
    for written in (raw, b"cache_tokens = " + raw, b"[[serve]]\nmodel = " + raw, b"[" * 5_000 + raw):
        path.write_bytes(written)
        for read in (lambda: config.load(tmp_path, {}), lambda: read_toml(path)):
            with contextlib.suppress(ConfigError):
                read()


@pytest.mark.parametrize("nth", range(1, 5))
def test_founding_that_was_killed_is_mended_by_trying_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Before each of the four files that it writes; an older founder's key and catalog lie there too."""
    old, home = Home(tmp_path / "old"), Home(tmp_path / "new")
    Founder(old).found("theirs")
    for name in ("founder.key", "catalog.bin"):
        (tmp_path / "new").mkdir(exist_ok=True)
        shutil.copy(tmp_path / "old" / name, tmp_path / "new" / name)
    written: list[str] = []
    write = Home.write

    def killed(self: Home, name: str, content: str | bytes, secret: bool = False) -> None:
        written.append(name)
        if len(written) == nth:
            raise KeyboardInterrupt
        write(self, name, content, secret)

    with monkeypatch.context() as patch:
        patch.setattr(Home, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            Founder(home).found("ours")
    assert not home.has_joined
    keys = Founder(home).found("ours")
    assert "demo" in MembershipFiles(home).catalog().models
    assert Founder(home).is_here
    assert Founder(home).key().public_key == keys.founder_key


def test_the_key_of_another_swarm_makes_nobody_its_founder(tmp_path: Path) -> None:
    old, home, mine = Home(tmp_path / "old"), Home(tmp_path / "new"), Home(tmp_path / "mine")
    Founder(old).found("theirs")
    Founder(mine).found("ours")
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    (tmp_path / "new" / "swarm.json").unlink()  # left, and killed in the middle
    MembershipFiles(home).enter(Founder(mine).invite((), 60), Identity.generate(), None)
    assert not Founder(home).is_here
    assert not MembershipFiles(home).catalog().models
    with pytest.raises(SwarmError, match="only a founder of the swarm"):
        Founder(home).key()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_that_was_made_before_is_closed_to_other_users_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with caplog.at_level(logging.WARNING), Home(folder).lock_for_daemon():
        assert mode_of(folder) == 0o700
        assert mode_of(folder / "lock") == 0o600
    assert f"could open {folder} (mode 755): it is its owner's alone now" in caplog.text
    caplog.clear()
    with Home(folder).lock_for_daemon():
        assert not caplog.text, "said once"


def test_a_lock_that_another_user_holds_keeps_no_daemon_from_starting(tmp_path: Path) -> None:
    """Whoever could open it may hold it for ever."""
    for name in ("lock", "catalog.lock"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o644)
        with (tmp_path / name).open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            home = Home(tmp_path)
            with home.lock_for_daemon() if name == "lock" else home.lock_catalog():
                assert mode_of(tmp_path / name) == 0o600


def test_a_daemon_of_an_older_version_that_runs_keeps_its_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    lock.chmod(0o644)
    with lock.open() as held, socket.socket(socket.AF_UNIX) as control:
        fcntl.flock(held, fcntl.LOCK_EX)
        control.bind(str(Home(tmp_path).socket))
        control.listen()
        with pytest.raises(ConfigError, match="another daemon runs"), Home(tmp_path).lock_for_daemon():
            pass
    with (
        Home(tmp_path).lock_for_daemon(),
        pytest.raises(ConfigError, match="another daemon runs"),
        Home(tmp_path).lock_for_daemon(),
    ):
        pass
