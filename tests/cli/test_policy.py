"""Rules as they are typed: what they change in a file that a person wrote, and what cannot be right."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from swarmd_cli.main import app
from swarmd_cli.verbs.policy import parse_duration, set_toml_value
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


def test_a_setting_is_changed_and_the_rest_stays_as_it_was_written() -> None:
    changed = set_toml_value(WRITTEN, "policy", "hours", '"sun"')
    assert changed == WRITTEN.replace('"sat"', '"sun"')
    added = set_toml_value(WRITTEN, "policy", "on_battery", "true")
    assert tomllib.loads(added)["policy"] == {"on_battery": True, "hours": "sat"}
    assert "# keep" in added
    assert tomllib.loads(set_toml_value("", "policy", "hours", '"sat"')) == {"policy": {"hours": "sat"}}


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
    ],
)
def test_rules_that_cannot_be_right_change_nothing(arguments: list[str], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(WRITTEN)
    done = CliRunner().invoke(app, ["--home", str(tmp_path), "policy", "set", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
    assert (tmp_path / "config.toml").read_text() == WRITTEN


def test_a_rule_that_is_set_is_shown_and_explained_without_a_daemon(tmp_path: Path) -> None:
    def swarmd(*arguments: str) -> str:
        return CliRunner().invoke(app, ["--home", str(tmp_path), *arguments], catch_exceptions=False).stdout

    assert "if it were: may serve: no rule of its owner forbids it" in swarmd("policy", "explain")
    assert "the daemon is not running" in swarmd("policy", "set", "hottest_c", "85.5")
    assert "85.5" in swarmd("policy", "show")


def test_the_short_help_and_the_version_are_where_people_look() -> None:
    assert CliRunner().invoke(app, ["pause", "-h"]).stdout.startswith("Usage:")
    assert CliRunner().invoke(app, ["--version"]).stdout == f"swarmd {version('swarmd')}\n"
