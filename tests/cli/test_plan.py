"""``swarmd plan``: an example that works as it is, tables, JSON, a picture, and what is wrong said in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from swarmd_cli.main import app
from swarmd_cli.verbs.plan import EXAMPLE
from typer.testing import CliRunner

from swarmd.errors import ConfigError

SMALL = """
hours = 1
runs = 1
warm_up_hours = 0.5
[[models]]
name = "toy"
blocks = 4
block_parameters = 1e8
hidden = 1024
cache_numbers = 1024
[[machines]]
name = "card"
count = 2
memory_gb = 8
block_ms = 2
row_ms = 0.1
link = "line"
[[links]]
name = "line"
up_mbit = 100
down_mbit = 100
[[load]]
model = "toy"
sessions_per_hour = 30
"""


def plan(*words: str) -> str:
    done = CliRunner().invoke(app, ["plan", *words])
    if done.exception is not None:
        raise done.exception
    return done.stdout


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return path


def test_the_example_is_printed_as_it_is() -> None:
    assert plan("example") == EXAMPLE.read_text(encoding="utf-8")


def test_an_answer_is_tables_and_sentences(small: Path) -> None:
    text = plan("what-if", str(small))
    assert "toy: can be served 100.00 % of the time" in text
    assert "conversations a day" in text
    assert "One machine more" in text
    assert "0 while all blocks had holders" in text


def test_json_has_all_of_it(small: Path) -> None:
    answer = json.loads(plan("what-if", str(small), "--json", "--no-one-more", "--runs", "2"))
    assert answer["schema"] == 1
    assert answer["n_runs"] == 2
    assert answer["models"][0]["served_share"] == 1.0
    assert answer["one_more"] == []


def test_a_picture_is_drawn(small: Path) -> None:
    picture = small.with_suffix(".png")
    plan("what-if", str(small), "--no-one-more", "--plot", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_scenario_may_begin_with_a_mark_of_its_encoding_and_have_any_name(small: Path) -> None:
    small.write_text(SMALL.replace("hours = 1\n", "hours = 1\nname = 'a$\\frac{x$'\n"), encoding="utf-8-sig")
    plan("what-if", str(small), "--no-one-more", "--plot", str(small.with_suffix(".png")))


def test_what_is_wrong_is_said_before_anything_is_computed(small: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.png"):
        plan("what-if", str(small), "--plot", "hours.jpg")
    with pytest.raises(ConfigError, match="there is no folder"):
        plan("what-if", str(small), "--plot", str(small.parent / "nowhere" / "hours.png"))
    with pytest.raises(ConfigError, match=r"nothere\.toml cannot be read"):
        plan("what-if", str(small.parent / "nothere.toml"))
    small.write_text(SMALL.replace("habit", "").replace('link = "line"', 'link = "wire"'), encoding="utf-8")
    with pytest.raises(ConfigError, match="names 'wire'; links has: line"):
        plan("what-if", str(small))
