"""A recipe is held against the model's outline before anybody signs it, and told what to write instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarmd.compute.runs.gradients import build
from swarmd.compute.runs.outline import read_outline
from swarmd.errors import ConfigError
from swarmd.protocol.runs.recipe import Batch, LoraSettings, Recipe, read_toml
from tests import checkpoints
from tests.real.training import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's and transformers' own


def recipe(**changes: Any) -> Recipe:
    return Recipe("run", "0" * 64, "1" * 64, **{"batch": Batch(target=8, micro=4, tokens=48), **changes})


def lora(*targets: str) -> Recipe:
    return recipe(train="lora", lora=LoraSettings(rank=4, targets=targets))


def test_rows_longer_than_the_models_positions_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path, max_position_embeddings=32)
    with pytest.raises(ConfigError, match=r"batch\.tokens is 48: the model has 32 positions"):
        read_outline(model, recipe())
    read_outline(model, recipe(batch=Batch(target=8, micro=4, tokens=32)))


@pytest.mark.parametrize("targets", [("q_prj",), ("q_proj", "q_prj")])
def test_a_target_that_no_module_is_called_is_refused_though_another_is(
    tmp_path: Path, targets: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError, match=r"lora\.targets: no module .* called 'q_prj'; expected some of down_proj, "):
        read_outline(tiny_model(tmp_path), lora(*targets))


def test_all_linear_stands_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stands alone"):
        read_outline(tiny_model(tmp_path), lora("all-linear", "q_proj"))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_all_linear_is_written_out_as_the_modules_that_peft_means(family: str, tmp_path: Path) -> None:
    folder = checkpoints.make(family, tmp_path / "model", n_layers=2)
    written = read_outline(folder, lora("all-linear")).targets
    assert "all-linear" not in written
    assert "lm_head" not in written
    expected, named = (
        [name for name, p in build(folder, one).named_parameters() if p.requires_grad]
        for one in (lora("all-linear"), lora(*written))
    )
    assert expected == named


def test_all_linear_may_be_written_as_in_peft(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('name = "x"\nmodel = "m"\ndata = "d"\ntrain = "lora"\n[lora]\ntargets = "all-linear"\n')
    assert read_toml(path).lora.targets == ("all-linear",)


def test_the_model_says_how_many_tokens_it_knows_not_its_tokenizer(tmp_path: Path) -> None:
    assert read_outline(tiny_model(tmp_path, vocab_size=512), recipe()).vocabulary == 512


def test_balanced_experts_whose_share_of_the_loss_nobody_says_are_refused(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "output_router_logits": True}))
    with pytest.raises(ConfigError, match="set output_router_logits to false"):
        read_outline(model, recipe())
