"""The training worker computes draws of others on other parameters, and changes nothing of its own work."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from swarmd.compute.runs.gradients import TrainedModel, build
from swarmd.protocol.runs.recipe import AGAIN, Batch, Recipe
from tests import checkpoints
from tests.quantised_files import write_quantised
from tests.real.training import tiny_model

RECIPE = Recipe("run", "0" * 64, "1" * 64, batch=Batch(target=8, micro=4, tokens=12))


def memory(folder: Path, name: str, n_vectors: int, n: int) -> tuple[Path, torch.Tensor]:
    """A file as the daemon shares it, and its vectors [n_vectors, n]."""
    path = folder / name
    path.write_bytes(bytes(4 * n_vectors * n))
    return path, torch.from_file(str(path), shared=True, size=n_vectors * n).view(n_vectors, n)


@pytest.fixture
def trained(tmp_path: Path) -> tuple[TrainedModel, torch.Tensor, int]:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_model(tmp_path / "tiny"))).float()
    made = TrainedModel(model, RECIPE, "cpu")
    n = sum(math.prod(shape) for _, shape in made.layout)
    path, vectors = memory(tmp_path, "own", 3, n)
    made.map(path, init=True)
    return made, vectors, n


def test_draws_of_others_are_computed_on_their_parameters(
    trained: tuple[TrainedModel, torch.Tensor, int], tmp_path: Path
) -> None:
    made, own_sum, n = trained
    rows = torch.randint(0, 1_000, (4, 13))
    loss = made.compute(rows, 0, into=0, is_fresh=True)
    path, other_parameters = memory(tmp_path, "again", len(AGAIN), n)
    other_parameters[0] = own_sum[0]
    assert made.compute_again(rows[:2], 0, path) + made.compute_again(rows[2:], 0, path) == pytest.approx(loss)
    assert torch.allclose(other_parameters[1], own_sum[1], atol=1e-5)  # added up in other pieces

    other_parameters[0] += 0.01
    other_parameters[1] = 0
    made.compute_again(rows, 0, path)
    assert not torch.allclose(other_parameters[1], own_sum[1], atol=1e-3)
    own_parameters = own_sum[1].clone()
    assert made.compute(rows, 0, into=0, is_fresh=True) == loss, "its own parameters are as they were"
    assert torch.equal(own_sum[1], own_parameters)


def test_draws_of_others_leave_what_is_gathered(
    trained: tuple[TrainedModel, torch.Tensor, int], tmp_path: Path
) -> None:
    made, own_sum, n = trained
    rows = torch.randint(0, 1_000, (4, 13))
    made.compute(rows, 0, into=0, is_fresh=True)
    made.compute(rows, 0, into=1, is_fresh=False)
    path, other_parameters = memory(tmp_path, "again", len(AGAIN), n)
    other_parameters[0] = own_sum[0]
    made.compute_again(rows, 0, path)
    assert torch.allclose(own_sum[2], 2 * own_sum[1])
    assert torch.allclose(other_parameters[1], own_sum[1])


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
            assert TrainedModel(model, RECIPE, "cpu").is_repeatable(50) == (dropout == 0), (family, dropout)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe"])
def test_the_loss_that_balances_experts_is_each_rows_own_as_transformers_takes_it(family: str) -> None:
    torch.manual_seed(0)
    small = {
        "vocab_size": 50,
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
        "router_aux_loss_coef": 2.0,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **small)).float()
    made = TrainedModel(model, RECIPE, "cpu")
    rows = torch.randint(0, 50, (3, 13))
    together = made._flat_gradient([rows], seed=0)
    separate = made._flat_gradient([rows[:1], rows[1:]], seed=0)
    for row in rows.split(1):
        model(input_ids=row[:, :-1], labels=row[:, :-1], shift_labels=row[:, 1:]).loss.backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.allclose(together, expected, atol=1e-5)
    assert torch.allclose(separate, expected, atol=1e-5)
    without = TrainedModel(model, RECIPE, "cpu")
    without._balance_factor = 0.0
    model.zero_grad()
    assert (without._flat_gradient([rows], seed=0) - expected).norm() > 0.1 * expected.norm(), "it matters here"


def test_what_a_model_draws_at_random_is_looked_for_in_no_more_tokens_than_rows_have() -> None:
    settings = {"vocab_size": 50, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **settings)).float()
    short = Recipe("run", "0" * 64, "1" * 64, batch=Batch(target=8, micro=4, tokens=8))
    assert not TrainedModel(model, short, "cpu").is_repeatable(50), "it drops out, and has 8 positions"


def test_the_vector_of_the_end_between_two_texts_learns_though_the_model_pads_with_it(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path, n_layers=1, tie_word_embeddings=False)
    model = build(folder, RECIPE)
    made = TrainedModel(model, RECIPE, "cpu")
    made._run_backward(torch.tensor([[5, 6, 0, 7, 8]]), 0)
    gradient = model.get_input_embeddings().weight.grad  # type: ignore[operator]
    assert gradient[0].abs().sum() > 0


def test_a_run_begins_with_what_quantised_weights_mean(tmp_path: Path) -> None:
    plain = checkpoints.make("llama", tmp_path / "plain", n_layers=2)
    expected = build(write_quantised(plain, tmp_path / "quantised", "awq"), RECIPE)
    model = build(tmp_path / "quantised", RECIPE)
    for (name, parameter), (_, other) in zip(model.named_parameters(), expected.named_parameters(), strict=True):
        assert parameter.requires_grad
        assert torch.equal(parameter, other), name
