"""A pass that was written down, in fewer operators: the same numbers, for whatever writes the same things."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from swarmd.compute.passes.simplify import simplify

Function = Callable[..., torch.Tensor]


def simplified(function: Function, *inputs: torch.Tensor) -> tuple[fx.GraphModule, int]:
    """The function written down and simplified, and how many operators went."""
    with torch.no_grad():
        module = make_fx(function)(*inputs)
    before = n_operators(module)
    simplify(module)
    module.recompile()
    torch.testing.assert_close(module(*inputs), function(*inputs), rtol=1e-5, atol=1e-6)
    return module, before - n_operators(module)


def n_operators(module: fx.GraphModule) -> int:
    return sum(node.op == "call_function" for node in module.graph.nodes)


def names(module: fx.GraphModule) -> str:
    return " ".join(str(node.target) for node in module.graph.nodes)


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def test_a_norm_loses_its_mean_and_its_weight_takes_the_factor_in() -> None:
    weight = nn.Parameter(torch.rand(64))
    module, _ = simplified(lambda x: weight * norm(x), torch.randn(1, 3, 64))
    assert "mean" not in names(module)
    assert "rsqrt" not in names(module)
    assert n_operators(module) == 5  # of which one is computed from weights alone


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e12])
def test_a_norm_of_nothing_and_of_much_is_what_it_was(scale: float) -> None:
    module, _ = simplified(norm, torch.randn(1, 3, 64))
    x = scale * torch.randn(1, 3, 64)
    torch.testing.assert_close(module(x), norm(x), rtol=1e-5, atol=1e-12)


def test_what_only_looks_like_a_norm_is_left_alone() -> None:
    def over_another_dimension(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-5)

    def of_something_else(x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    def cubed(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + 1e-5)

    def whose_mean_is_used_again(x: torch.Tensor) -> torch.Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + 1e-5) + mean

    for function in (over_another_dimension, of_something_else, cubed, whose_mean_is_used_again):
        assert "mean" in names(simplified(function, torch.randn(1, 3, 64))[0])


def test_rotary_positions_are_a_roll_with_a_sine_that_all_share() -> None:
    def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return torch.cat([q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin], 1)

    inputs = [torch.randn(1, n, 3, 16) for n in (4, 2)] + [torch.randn(1, 1, 3, 16) for _ in range(2)]
    module, gone = simplified(rotary, *inputs)
    assert "neg" not in names(module)
    assert gone == 5  # slice, neg, cat and mul twice less a sine


@pytest.mark.parametrize("cut", [4, 12])
def test_parts_that_are_no_halves_are_left_alone(cut: int) -> None:
    def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        turned = torch.cat((-x[..., cut:], x[..., :cut]), -1)
        return x * cos + turned * sin

    module, _ = simplified(rotary, *(torch.randn(1, 2, 3, 16) for _ in range(3)))
    assert "neg" in names(module)


def test_what_is_computed_twice_is_computed_once_and_views_are_one() -> None:
    def layers(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 8).view(2, 4, -1).bfloat16() + x.view(-1, 8).view(2, 4, -1).bfloat16()

    module, gone = simplified(layers, torch.randn(1, 4, 8))
    assert gone == 4
    assert n_operators(module) == 3


def test_chance_and_what_changes_tensors_is_left_alone() -> None:
    def random(x: torch.Tensor) -> torch.Tensor:
        return torch.bernoulli(x) - torch.bernoulli(x)

    module = make_fx(random)(torch.rand(8))
    before = n_operators(module)
    simplify(module)
    assert n_operators(module) == before

    def in_place(x: torch.Tensor) -> torch.Tensor:
        first = x + 1
        first.mul_(2)
        return first + (x + 1)

    assert simplified(in_place, torch.randn(8))[1] == 0
