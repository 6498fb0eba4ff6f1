"""Steps that depend on nothing but their number, and runs that end the same however often they were resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmd.client.tuning.dataset import IGNORED, Dataset, DatasetRow
from swarmd.client.tuning.fine_tuning import Tuner, choose_rows, learning_rate, loss_and_gradients
from swarmd.client.tuning.tuning_recipe import TuningRecipe, checkpoints
from swarmd.errors import ConfigError
from tests import checkpoints as models


def row(n: int) -> DatasetRow:
    """A row of n tokens, 3, 4, ..., whose loss counts all but the first."""
    ids = tuple(range(3, 3 + n))
    return DatasetRow(ids, (IGNORED, *ids[1:]))


ROWS = tuple(row(n) for n in range(4, 14))
DATA = Dataset(ROWS, "digest")
RECIPE = TuningRecipe("m", steps=6, batch=4, warmup=2)


class Local(torch.nn.Module):
    """A small local model stands for the remote one: a run does not know the difference."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        self.inner = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
        self.inner.lm_head.weight.requires_grad_()

    def forward(self, **kwargs: Any) -> Any:
        return self.inner(**kwargs)

    def save_pretrained(self, folder: Path, save_embedding_layers: bool) -> None:
        (folder / "saved").write_text("yes")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return models.make("llama", tmp_path_factory.mktemp("m"), n_layers=1, tie_word_embeddings=False)


def tuner(folder: Path, out: Path, **changes: Any) -> Tuner:
    from dataclasses import replace

    return Tuner(Local(folder), replace(RECIPE, **changes), DATA, out)


def test_every_pass_over_the_data_takes_each_row_once() -> None:
    taken = [row for step in range(1, 11) for row in choose_rows(RECIPE, len(ROWS), step)]
    assert Counter(taken) == Counter(dict.fromkeys(range(len(ROWS)), 4))
    assert taken[:10] != taken[10:20]
    assert choose_rows(RECIPE, len(ROWS), 7) == choose_rows(RECIPE, len(ROWS), 7)


def test_the_learning_rate_rises_and_falls() -> None:
    recipe = TuningRecipe("m", steps=100, warmup=10, learning_rate=1.0)
    rates = [learning_rate(recipe, step) for step in range(1, 101)]
    assert rates.index(max(rates)) == 9
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)


def test_a_batch_in_parts_has_the_loss_and_gradient_of_the_whole(folder: Path) -> None:
    model = Local(folder)
    parameters = [p for p in model.parameters() if p.requires_grad]
    whole_loss, (whole_gradient,) = loss_and_gradients(model, parameters, ROWS[:5], n_parts=1)
    parts_loss, (parts_gradient,) = loss_and_gradients(model, parameters, ROWS[:5], n_parts=3)
    assert parts_loss == pytest.approx(whole_loss, rel=1e-5)
    assert whole_gradient is not None
    assert parts_gradient is not None
    torch.testing.assert_close(parts_gradient, whole_gradient, rtol=1e-4, atol=1e-6)


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(folder: Path, tmp_path: Path) -> None:
    uninterrupted = tuner(folder, tmp_path / "a")
    uninterrupted.run(2, lambda _: None)
    first = tuner(folder, tmp_path / "b")
    for _ in range(5):  # its last step is lost
        first.step()
        if len(first.losses) % 2 == 0:
            first.save_checkpoint()
    second = tuner(folder, tmp_path / "b")
    assert second.resume() == 4
    second.run(2, lambda _: None)
    assert second.losses == uninterrupted.losses
    for ours, theirs in zip(second.model.parameters(), uninterrupted.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert (tmp_path / "b" / "adapter" / "saved").is_file()
    assert [p.name for p in checkpoints(tmp_path / "b")] == ["checkpoint-6", "checkpoint-4"]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder: Path, tmp_path: Path) -> None:
    run = tuner(folder, tmp_path)
    for _ in range(2):
        run.step()
        run.save_checkpoint()
    (tmp_path / "checkpoint-2" / "state.safetensors").write_bytes(b"half")
    assert tuner(folder, tmp_path).resume() == 1
    for damaged in ("[", "[1]", "{}", '{"recipe": {}, "data": 3, "losses": []}'):
        (tmp_path / "checkpoint-1" / "state.json").write_text(damaged)
        assert tuner(folder, tmp_path).resume() == 0


def test_a_run_is_not_resumed_with_another_recipe_or_other_data(folder: Path, tmp_path: Path) -> None:
    run = tuner(folder, tmp_path)
    run.step()
    run.save_checkpoint()
    with pytest.raises(ConfigError, match=r"learning_rate was 0\.001, is 0\.1"):
        tuner(folder, tmp_path, learning_rate=0.1).resume()
    state = tmp_path / "checkpoint-1" / "state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "data": "other"}))
    with pytest.raises(ConfigError, match="other data"):
        tuner(folder, tmp_path).resume()


@pytest.mark.parametrize(
    "wrong", [{"method": "magic"}, {"steps": 0}, {"batch": -1}, {"learning_rate": 0.0}, {"learning_rate": float("nan")}]
)
def test_a_recipe_that_cannot_be_right_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TuningRecipe("m", **wrong).check()
