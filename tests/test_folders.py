"""The state folder as people name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarmd.errors import ConfigError
from swarmd.folders import MOST_SOCKET_BYTES, SOCKET, default_folder, resolve_folder, rewrite_file


def test_a_tilde_is_the_users_home_however_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--home=~/x`` and SWARMD_HOME='~/x' reach the program as they are written."""
    monkeypatch.setenv("HOME", "/home/alice")
    assert resolve_folder(Path("~/x")) == Path("/home/alice/x")
    monkeypatch.setenv("SWARMD_HOME", "~/y")
    assert default_folder() == Path("/home/alice/y")
    monkeypatch.delenv("SWARMD_HOME")
    assert default_folder() == Path("/home/alice/.local/share/swarmd")


def test_who_has_no_home_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_entry(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SWARMD_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", no_entry)
    with pytest.raises(ConfigError, match=r"no home folder \(HOME is not set\): say which one with --home"):
        default_folder()


def test_a_folder_whose_socket_nobody_could_open_is_refused_at_once() -> None:
    longest = Path("/" + "x" * (MOST_SOCKET_BYTES - len(SOCKET) - 2))
    assert resolve_folder(longest) == longest
    with pytest.raises(ConfigError, match=r"too long for the socket in it: \d+ bytes, at most \d+: choose a shorter"):
        resolve_folder(longest.with_name(longest.name + "x"))


def test_a_file_that_its_owner_may_not_write_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.toml"
    path.write_text("as it was")
    path.chmod(0o444)
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everything
    with pytest.raises(ConfigError, match=r"may not be written \(mode 444\): chmod u\+w .*config\.toml allows it"):
        rewrite_file(path, b"other")
    assert path.read_text() == "as it was"
    assert [*tmp_path.iterdir()] == [path]
