"""A client's head on a card beside: the same logits, one wait for each, and the processor where the card fails."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from swarmd.compute.linear import card as card_layers
from swarmd.compute.linear import kernels
from swarmd.compute.linear.card import CardLinear
from swarmd.compute.linear.kernels import choose_fastest, choose_kernel, kernels_beside, quicken_layer
from tests.fake_card import fake_card


def head(n_in: int = 64, n_out: int = 192, bias: bool = False) -> nn.Linear:
    torch.manual_seed(n_in)
    return nn.Linear(n_in, n_out, bias=bias).requires_grad_(False)


@pytest.mark.parametrize("bias", [False, True])
def test_logits_come_back_with_one_wait(bias: bool) -> None:
    plain, hidden = head(bias=bias), torch.randn(3, 64)
    expected = plain(hidden)
    with fake_card() as card:
        layer = CardLinear(plain, card.device)
        assert not card.n_waits
        logits = layer(hidden)
        assert card.n_waits == 1
    assert logits.device.type == "cpu"
    assert torch.equal(logits, expected)


def test_the_fake_card_refuses_tensors_here_and_there() -> None:
    with fake_card() as card, pytest.raises(RuntimeError, match="expected all tensors on the card"):
        torch.randn(3, 64) @ torch.randn(64, 2, device=card.device)


def test_where_a_card_fails_the_processor_computes_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    plain, hidden = head(), torch.randn(3, 64)
    with fake_card() as card:
        layer = CardLinear(plain, card.device)
        card.is_lost = True
        assert torch.equal(layer(hidden), plain(hidden))
        card.is_lost = False
        n_before = card.n_operations
        assert torch.equal(layer(hidden), plain(hidden))
        assert card.n_operations == n_before, "what failed once is not asked again"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "the card is lost" in caplog.text


def test_gradients_go_through_a_head_on_a_card() -> None:
    plain, hidden = head(), torch.randn(3, 64)
    expected = hidden.clone().requires_grad_()
    plain(expected).sum().backward()
    with fake_card() as card:
        layer = CardLinear(plain, card.device)
    given = hidden.clone().requires_grad_()
    with fake_card():
        layer(given).sum().backward()
    torch.testing.assert_close(given.grad, expected.grad)


class TestChosen:
    """By measurement, as other kernels are."""

    @pytest.fixture(autouse=True)
    def last_is_fastest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "TIMED_BYTES", 1)
        monkeypatch.setattr(card_layers, "free_memory_bytes", lambda device: 2**30)

        def choose(seconds: dict[str, list[float]], rows: tuple[int, ...]) -> object:
            return choose_fastest({kind: [3.0 - i] * 3 for i, kind in enumerate(seconds)}, rows)

        monkeypatch.setattr(kernels, "choose_fastest", choose)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_for_a_head_that_others_may_train(self, dtype: torch.dtype) -> None:
        layer, hidden = head().to(dtype), torch.randn(3, 64).to(dtype)
        expected = layer(hidden)
        with fake_card() as card, torch.no_grad():
            assert quicken_layer(layer, card.device).action == "card"
            n_before = card.n_operations
            torch.testing.assert_close(layer(hidden), expected)
            assert card.n_operations > n_before
            layer.weight += 1.0  # as a user does who trains it
            n_before = card.n_operations
            torch.testing.assert_close(layer(hidden), torch.nn.functional.linear(hidden, layer.weight))
            assert card.n_operations == n_before, "the card has the weight that was"

    def test_for_a_gateways_ends(self) -> None:
        model = nn.Sequential(head())
        with fake_card() as card:
            assert choose_kernel(model, kernels=kernels_beside(model[0], card.device)).action == "card"
        assert type(model[0]) is CardLinear

    def test_a_full_card_is_not_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(card_layers, "free_memory_bytes", lambda device: 64 * 192 * 4)
        with fake_card() as card:
            decision = quicken_layer(head(), card.device)
        assert decision.action == "onednn"

    def test_a_machine_without_memory_for_a_copy_may_still_have_a_card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "free_memory_bytes", lambda device: 0)
        assert quicken_layer(head()).reason == "not enough memory for another copy of its weight"
        with fake_card() as card:
            assert quicken_layer(head(), card.device).action == "card"


def test_a_card_that_computes_something_else_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "TIMED_BYTES", 1)
    monkeypatch.setattr(card_layers, "free_memory_bytes", lambda device: 2**30)
    monkeypatch.setattr(CardLinear, "compute", lambda layer, hidden: hidden @ layer.weight.T * 1.01)
    with fake_card() as card:
        decision = quicken_layer(head(), card.device)
    assert "not card: it gives other results here" in decision.reason
