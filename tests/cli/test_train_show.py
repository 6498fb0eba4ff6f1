"""What of a plan is worth a line."""

from __future__ import annotations

from typing import Any

from swarmd_cli.train_show import _worth_showing


def row(setting: str, rate: float) -> dict[str, Any]:
    return {
        "setting": setting,
        "update_s": 1.0,
        "utilisation": 0.5,
        "excess": 1.0,
        "samples_per_s": rate,
        "bytes_per_sample": 10.0,
    }


def test_a_plan_shows_the_best_codec_of_each_and_every_topology() -> None:
    rates = {"step, none": 1.0, "step, float16": 2.0, "step, int8": 3.0, "delayed, none": 4.0}
    rates |= {"step, none, grid": 1.5, "step, none, ring": 0.5}
    rows = [row(setting, rate) for setting, rate in rates.items()]
    shown = _worth_showing({"setting": "step, none", "settings": rows, "recommended": "delayed, none"})
    assert [r["setting"] for r in shown] == [s for s in rates if s != "step, float16"]
