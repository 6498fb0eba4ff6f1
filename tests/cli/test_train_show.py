"""What of a plan is worth a line."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarmd_cli.train_show import _choose_settings, show_run, write_plot

from swarmd.run_status import PlanAnswer, PlanSettingRow, RunRow
from swarmd.values import count
from tests.cli.answers import filled


def row(setting: str, rate: float) -> PlanSettingRow:
    return filled(PlanSettingRow, setting=setting, excess=1.0, samples_per_s=rate)


def test_a_plan_shows_the_best_codec_of_each_and_every_topology() -> None:
    rates = {"step, none": 1.0, "step, float16": 2.0, "step, int8": 3.0, "delayed, none": 4.0}
    rates |= {"step, none, grid": 1.5, "step, none, ring": 0.5}
    rows = [row(setting, rate) for setting, rate in rates.items()]
    plan = filled(PlanAnswer, setting="step, none", settings=tuple(rows), recommended="delayed, none")
    assert [chosen.setting for chosen in _choose_settings(plan)] == [s for s in rates if s != "step, float16"]


def test_a_run_at_its_end_says_how_to_take_the_model_home(capsys: pytest.CaptureFixture[str]) -> None:
    show_run(filled(RunRow, name="my run", run="r" * 64, update=16, updates=16, finished="16 updates are done"), {})
    shown = capsys.readouterr().out
    assert "done: 16 updates are done; swarmd train export 'my run' --out FOLDER" in shown
    assert "next round" not in shown


def test_one_thing_is_not_written_as_many() -> None:
    assert [count(n, "anchor") for n in (0, 1, 2)] == ["0 anchors", "1 anchor", "2 anchors"]


def test_a_runs_name_is_no_formula_of_its_picture(tmp_path: Path) -> None:
    row = filled(RunRow, name=r"$\frac[/x]$ \x1b", losses=(3.0, 2.0))
    write_plot([row], tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size
