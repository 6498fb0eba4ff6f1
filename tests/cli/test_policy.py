"""Rules as they are typed: what they change in a file that a person wrote, and what cannot be right."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from swarmd_cli.main import app
from swarmd_cli.verbs.policy import parse_duration
from typer.testing import CliRunner

from swarmd.errors import ConfigError

WRITTEN = """# mine
listen = "/ip4/127.0.0.1/tcp/0"

[policy]  # of this machine
hours = "sat"
# keep
[gateway]
on = false
"""


@pytest.mark.parametrize(("text", "seconds"), [("90m", 5_400), ("2h", 7_200), ("1d", 86_400), ("1h30m", 5_400)])
def test_times_as_people_write_them(text: str, seconds: int) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["2", "h", "2 hours", "0m", "-1h", "1h x", "999d"])
def test_what_is_no_time_says_what_was_expected(text: str) -> None:
    with pytest.raises(ConfigError, match="90m, 2h or 1d"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["colour", "red"], "there is no rule 'colour'; there are: hours"),
        (["hours", "at night"], "mon-fri 22:00-08:00"),
        (["on_battery", "perhaps"], "yes or no"),
        (["idle_minutes", "few"], "a number"),
        (["idle_minutes", "-1"], "cannot be negative"),
        (["idle_minutes", "1e400"], "a number, not '1e400'"),
        (["hottest_c", "nan"], "policy.hottest_c cannot be negative or infinite, got nan"),
        (["hottest_c", "1e400"], "policy.hottest_c cannot be negative or infinite, got inf"),
        (["not_while", "g\udcf6"], "not_while takes text in UTF-8, not 'g\\udcf6'"),
    ],
)
def test_rules_that_cannot_be_right_change_nothing(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(WRITTEN)
    done = CliRunner().invoke(app, ["--home", str(tmp_path), "policy", "set", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
    assert (tmp_path / "config.toml").read_text() == WRITTEN


def set_rule(folder: Path, *words: str) -> None:
    done = CliRunner().invoke(app, ["--home", str(folder), "policy", "set", *words])
    if done.exception is not None:
        raise done.exception


def test_a_file_elsewhere_is_changed_there_and_keeps_its_mode(tmp_path: Path) -> None:
    """Dotfiles are links into a repository: the link stays."""
    kept = tmp_path / "dotfiles" / "swarmd.toml"
    kept.parent.mkdir()
    kept.write_text(WRITTEN)
    kept.chmod(0o640)
    link = tmp_path / "home" / "config.toml"
    link.parent.mkdir()
    link.symlink_to(kept)
    set_rule(link.parent, "hours", "sun")
    assert link.readlink() == kept
    assert kept.read_text() == WRITTEN.replace("sat", "sun")
    assert kept.stat().st_mode & 0o777 == 0o640
    assert [*kept.parent.iterdir()] == [kept]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"hours = ", "config.toml is no TOML: "),
        ("# größer".encode("latin-1"), "config.toml is not UTF-8: line 1 has the byte 0xf6"),
        (WRITTEN.encode("utf-16"), "config.toml: it is UTF-16"),
        (b"policy = 3", "config.toml: policy is a table [policy], not 3"),
        (b"lisen = 3", "config.toml: unknown setting 'lisen'"),
    ],
)
def test_a_file_that_cannot_be_changed_is_named_and_stays(raw: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as refusal:
        set_rule(tmp_path, "hours", "sun")
    assert str(tmp_path / words) in str(refusal.value)
    assert path.read_bytes() == raw


def test_a_link_that_leads_nowhere_is_no_empty_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"config\.toml cannot be read: No such file"):
        set_rule(tmp_path, "hours", "sun")


def test_a_rule_that_is_set_is_shown_and_explained_without_a_daemon(tmp_path: Path) -> None:
    def swarmd(*arguments: str) -> str:
        return CliRunner().invoke(app, ["--home", str(tmp_path), *arguments], catch_exceptions=False).stdout

    assert "if it were: may serve: no rule of its owner forbids it" in swarmd("policy", "explain")
    assert "the daemon is not running" in swarmd("policy", "set", "hottest_c", "85.5")
    assert "85.5" in swarmd("policy", "show")


def test_the_short_help_and_the_version_are_where_people_look() -> None:
    assert CliRunner().invoke(app, ["pause", "-h"]).stdout.startswith("Usage:")
    assert CliRunner().invoke(app, ["--version"]).stdout == f"swarmd {version('swarmd')}\n"
