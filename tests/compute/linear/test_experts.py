"""Experts in few bits: what each family computes with the rounded weights, reading only those that were chosen."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from swarmd.compute.linear.experts import QuantisedExperts, is_set_of_experts
from swarmd.compute.linear.layers import QuantisedLinear
from swarmd.compute.model import skeleton
from swarmd.values import Span
from tests import families

FAMILIES = {
    "qwen3_moe": "two matrices, the usual way",
    "gpt_oss": "with biases, transposed, gate and up by turns",
    "deepseek_v3": "beside an expert that all share",
    "nemotron_h": "without a gate",
    "granitemoe": "one tensor on the disk",
    "deepseek_v4": "a gate of its own",
}


def sets_of(family: str, folder: Path) -> list[Any]:
    model = skeleton.load_whole(families.make_named(family, folder), torch.float32)
    return [module for module in model.modules() if is_set_of_experts(module)]


def rounded(experts: Any, kind: str) -> tuple[QuantisedExperts, Any]:
    """A set in few bits, and the family's own with the numbers that these stand for."""
    plain = copy.deepcopy(experts)
    ours = QuantisedExperts(experts, kind)
    for name, layers in (("gate_up_proj" if plain.has_gate else "up_proj", ours.enter), ("down_proj", ours.leave)):
        for expert, layer in enumerate(layers):
            weight = layer.weight.float()
            getattr(plain, name).data[expert] = weight.T if plain.is_transposed else weight
    return ours, plain


def choice(experts: Any, n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    n_experts, width = len(experts.down_proj), experts.down_proj.shape[2 if experts.is_transposed else 1]
    index = torch.stack([torch.randperm(n_experts, generator=rng)[:k] for _ in range(n)])
    return torch.randn(n, width, generator=rng), index, torch.rand(n, k, generator=rng)


@pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_set_computes_what_its_family_does_with_the_rounded_weights(family: str, kind: str, tmp_path: Path) -> None:
    experts = sets_of(family, tmp_path)[0]
    experts.config._experts_implementation = "eager"
    ours, plain = rounded(experts, kind)
    for n in (1, 7):
        hidden, index, weights = choice(plain, n, 2, seed=n)
        expected = plain(hidden, index, weights)
        assert torch.allclose(ours(hidden, index, weights), expected, atol=0.03 * float(expected.abs().max()))


def test_only_those_that_were_chosen_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = sets_of("qwen3_moe", tmp_path)[0]
    hidden, index, weights = choice(experts, 1, 2, seed=3)
    ours = QuantisedExperts(experts, "int8")
    read: list[nn.Module] = []
    compute = QuantisedLinear.compute

    def watched(layer: QuantisedLinear, rows: torch.Tensor) -> torch.Tensor:
        read.append(layer)
        return compute(layer, rows)

    monkeypatch.setattr(QuantisedLinear, "compute", watched)
    ours(hidden, index, weights)
    chosen = sorted(index[0].tolist())
    assert read == [layers[expert] for expert in chosen for layers in (ours.enter, ours.leave)]


def test_who_is_elsewhere_adds_nothing(tmp_path: Path) -> None:
    experts = sets_of("qwen3_moe", tmp_path)[0]
    hidden, index, weights = choice(experts, 3, 2, seed=4)
    ours = QuantisedExperts(experts, "int8")
    index[0] = len(ours.leave)  # as transformers marks it
    index[1, 1] = len(ours.leave)
    out = ours(hidden, index, weights)
    assert not out[0].any()
    alone = ours(hidden[1:2], index[1:2, :1], weights[1:2, :1])
    assert torch.allclose(out[1:2], alone, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_a_span_with_them_learns_by_its_inputs(tmp_path: Path) -> None:
    """Gradients of hidden states pass through experts in few bits, as fine-tuning through a swarm needs them."""
    folder = families.make_named("qwen3_moe", tmp_path)
    model: Any = skeleton.load(folder, Span(0, 2), torch.float32, "int8")
    assert sum(isinstance(module, QuantisedExperts) for module in model.modules()) == 2
    experts = next(module for module in model.modules() if isinstance(module, QuantisedExperts))
    hidden = torch.randn(4, 32, requires_grad=True)
    index, weights = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3]]), torch.rand(4, 2)
    experts(hidden, index, weights).sum().backward()
    assert hidden.grad is not None
    step = torch.zeros_like(hidden)
    step[1, 5] = 0.5
    with torch.no_grad():
        difference = experts(hidden + step, index, weights).sum() - experts(hidden - step, index, weights).sum()
    assert float(hidden.grad[1, 5]) == pytest.approx(float(difference), rel=0.3, abs=0.05)
