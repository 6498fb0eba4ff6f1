"""What of a plan is worth a line."""

from __future__ import annotations

from typing import Any

import pytest
from swarmd_cli.train_show import _choose_settings, show_run

from swarmd.values import count


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
    shown = _choose_settings({"setting": "step, none", "settings": rows, "recommended": "delayed, none"})
    assert [r["setting"] for r in shown] == [s for s in rates if s != "step, float16"]


def test_a_run_at_its_end_says_how_to_take_the_model_home(capsys: pytest.CaptureFixture[str]) -> None:
    audits = {"why_not": "", "checked": 0, "wrong": 0, "trouble": ""}
    names = "left_s last_round failure state_bytes measured_samples_per_s samples_counted samples_wasted catch_ups"
    show_run(
        dict.fromkeys(names.split())
        | {"name": "my run", "run": "r" * 64, "state": "16 updates are done", "role": "train", "why": "rests"}
        | {"update": 16, "updates": 16, "samples": 256, "gathered": 0, "target": 16, "samples_per_s": 1.0}
        | {"predicted_samples_per_s": None, "peers": [], "audits": audits, "shunned": [], "losses": []}
        | {"finished": "16 updates are done"}
    )
    shown = capsys.readouterr().out
    assert "done: 16 updates are done; swarmd train export 'my run' --out FOLDER" in shown
    assert "next round" not in shown


def test_one_thing_is_not_written_as_many() -> None:
    assert [count(n, "anchor") for n in (0, 1, 2)] == ["0 anchors", "1 anchor", "2 anchors"]
