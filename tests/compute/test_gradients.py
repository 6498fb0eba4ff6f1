"""The training worker computes draws of others on other parameters, and changes nothing of its own work."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarmd.compute.gradients import Trained
from swarmd.protocol.recipe import AGAIN, Batch, Recipe
from tests.real.training import tiny_model

RECIPE = Recipe("run", "0" * 64, "1" * 64, batch=Batch(target=8, micro=4, tokens=12))


def memory(folder: Path, name: str, n_vectors: int, n: int) -> tuple[Path, torch.Tensor]:
    """A file as the daemon shares it, and its vectors [n_vectors, n]."""
    path = folder / name
    path.write_bytes(bytes(4 * n_vectors * n))
    return path, torch.from_file(str(path), shared=True, size=n_vectors * n).view(n_vectors, n)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[Trained, torch.Tensor, int]:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model(tmp_path / "tiny"))).float()
    made = Trained(model, RECIPE, "cpu")
    n = sum(math.prod(shape) for _, shape in made.layout)
    path, vectors = memory(tmp_path, "own", 3, n)
    made.map(path, init=True)
    return made, vectors, n


def test_draws_of_others_are_computed_on_their_parameters(
    trained: tuple[Trained, torch.Tensor, int], tmp_path: Path
) -> None:
    made, own, n = trained
    rows = torch.randint(0, 1_000, (4, 13))
    loss = made.compute(rows, 0, into=0, is_fresh=True)
    path, other = memory(tmp_path, "again", len(AGAIN), n)
    other[0] = own[0]
    assert made.compute_again(rows[:2], 0, path) + made.compute_again(rows[2:], 0, path) == pytest.approx(loss)
    assert torch.allclose(other[1], own[1], atol=1e-5)  # added up in other pieces

    other[0] += 0.01
    other[1] = 0
    made.compute_again(rows, 0, path)
    assert not torch.allclose(other[1], own[1], atol=1e-3)
    before = own[1].clone()
    assert made.compute(rows, 0, into=0, is_fresh=True) == loss, "its own parameters are as they were"
    assert torch.equal(own[1], before)


def test_draws_of_others_leave_what_is_gathered(trained: tuple[Trained, torch.Tensor, int], tmp_path: Path) -> None:
    made, own, n = trained
    rows = torch.randint(0, 1_000, (4, 13))
    made.compute(rows, 0, into=0, is_fresh=True)
    made.compute(rows, 0, into=1, is_fresh=False)
    path, other = memory(tmp_path, "again", len(AGAIN), n)
    other[0] = own[0]
    made.compute_again(rows, 0, path)
    assert torch.allclose(own[2], 2 * own[1])
    assert torch.allclose(other[1], own[1])


def test_what_is_random_in_training_is_noticed_in_every_family() -> None:
    none = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout"), 0.0)
    small = {
        "vocab_size": 50,
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        **none,
    }
    for family, key in (("gpt2", "attn_pdrop"), ("qwen3", "attention_dropout"), ("gpt_neox", "hidden_dropout")):
        for dropout in (0.0, 0.1):
            settings = {**small, "intermediate_size": 32, key: dropout}
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).float()
            assert Trained(model, RECIPE, "cpu").is_repeatable(50) == (dropout == 0), (family, dropout)
