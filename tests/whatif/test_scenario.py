"""Scenarios are checked where they are read, and errors name their place."""

from __future__ import annotations

from pathlib import Path, PurePath

import pytest

from swarmd.errors import ConfigError
from swarmd.whatif.scenario import read_scenario, read_trace, read_traces

EXAMPLE = Path(__file__).parents[2] / "cli" / "swarmd_cli" / "what-if.toml"
TEXT = EXAMPLE.read_text(encoding="utf-8")


def test_the_example_is_a_scenario() -> None:
    scenario = read_scenario(TEXT)
    assert [kind.count for kind in scenario.machines] == [40, 12, 8]
    assert scenario.model_named("llama-3-8b").blocks == 32


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("count = 40", "cout = 40", "unknown field `cout` - at `$.machines[0]`"),
        ("count = 40", "count = -1", r">= 0 - at `$.machines[0].count`"),
        ("count = 40", "count = 40000", "at most|<= 20000"),
        ("count = 40", 'count = "forty"', "at `$.machines[0].count`"),
        ('link = "cable"', 'link = "cabel"', "machine 'gaming PC' names 'cabel'; links has: cable, fibre"),
        ("europe = 0.7", "asia = 0.7", "names 'asia'; places has: europe, america"),
        ('name = "laptop"', 'name = "gaming PC"', "machines has 'gaming PC' twice"),
        ('hours = "16:00-24:00"', 'hours = "16-24"', "habit 'evenings': hours are written as"),
        ("memory_gb_per_s = 360", "memory_gb_per_s = 0", "machine 'gaming PC' needs memory_gb_per_s and tflops"),
        ("stay_h = 72", "shape = 2", "habit 'always on' has away_h without stay_h"),
        ("by_hour = [1, ", "by_hour = [", "by_hour needs 24 numbers"),
        ("hours = 24 ", "hours = 0 ", "> 0"),
        ("[[models]]", "[[models", "line"),
    ],
)
def test_a_mistake_is_named(old: str, new: str, said: str) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError) as raised:
        read_scenario(TEXT.replace(old, new, 1), "club.toml")
    assert any(part in str(raised.value) for part in said.split("|")), str(raised.value)
    assert str(raised.value).startswith("club.toml: ")


@pytest.mark.parametrize(
    "text", ["", "[", "[1, 0]", '{"data": [1, 0]}', '{"metadata": {"gap_seconds": 0}, "data": [1, 0]}']
)
def test_what_is_no_trace_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"spot.json: expected a trace"):
        read_trace(text, "spot.json")


def test_a_trace_lies_beside_the_scenario() -> None:
    text = TEXT.replace('hours = "16:00-24:00"\nstay_h = 3\n', 'trace = "spot.json"\n').replace("away_h = 0.5\n", "", 1)
    asked: list[PurePath] = []

    def read(path: PurePath) -> str:
        asked.append(path)
        return '{"metadata": {"gap_seconds": 300}, "data": [1, 1, 0]}'

    traces = read_traces(read_scenario(text), read, PurePath("folder"))
    assert asked == [PurePath("folder/spot.json")]
    assert traces["evenings"].data == (1, 1, 0)
