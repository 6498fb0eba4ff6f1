"""A client's head on a card beside: the same logits, one wait for each, and the processor where the card fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from swarmd.client.model.remote_model import remote_model
from swarmd.compute.linear import card as card_layers
from swarmd.compute.linear import kernels
from swarmd.compute.linear.card import CardLinear
from swarmd.compute.linear.kernels import choose_fastest, quicken_layer
from swarmd.compute.model.ends import Ends
from swarmd.values import Decision
from tests import checkpoints
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


def test_long_inputs_go_there_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_layers, "MOST_ROWS", 2)
    plain, hidden = head(bias=True), torch.randn(2, 3, 64)
    with fake_card() as card:
        torch.testing.assert_close(CardLinear(plain, card.device)(hidden), plain(hidden))
        assert card.n_waits == 3


def test_the_fake_card_refuses_tensors_here_and_there() -> None:
    with fake_card() as card, pytest.raises(RuntimeError, match="expected all tensors on the card"):
        torch.randn(3, 64) @ torch.randn(64, 2, device=card.device)


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

    @pytest.mark.parametrize("is_lost", [False, True])
    def test_where_a_card_fails_the_processor_computes(self, is_lost: bool, caplog: pytest.LogCaptureFixture) -> None:
        layer, hidden = head(), torch.randn(3, 64)
        expected = layer(hidden)
        with fake_card() as card, torch.no_grad():
            assert quicken_layer(layer, card.device).action == "card"
            card.failure = torch.AcceleratorError("it is lost") if is_lost else torch.OutOfMemoryError("it is full")
            for _ in range(kernels.MOST_FAILED if not is_lost else 1):
                torch.testing.assert_close(layer(hidden), expected)
                assert str(card.failure) in caplog.text
            assert "torch's own computes from now on" in caplog.text
            card.failure = None
            n_before = card.n_operations
            torch.testing.assert_close(layer(hidden), expected)
            assert card.n_operations == n_before, "it is not asked any more"

    def test_a_wrong_width_is_the_callers_mistake(self) -> None:
        layer = head()
        with fake_card() as card, torch.no_grad():
            assert quicken_layer(layer, card.device).action == "card"
            with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
                layer(torch.randn(2, 63))
            n_before = card.n_operations
            layer(torch.randn(2, 64))
            assert card.n_operations > n_before

    def test_threads_go_on_where_a_card_fails(self) -> None:
        layer, hidden = head(), torch.randn(3, 64)
        expected = layer(hidden)

        def compute(_: int) -> torch.Tensor:
            with torch.no_grad():
                return layer(hidden)

        with fake_card() as card:
            quicken_layer(layer, card.device)
        with ThreadPoolExecutor(4) as threads:  # which have no such card
            for logits in threads.map(compute, range(16)):
                torch.testing.assert_close(logits, expected)

    def test_what_is_too_large_as_a_whole_stays_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        make = CardLinear.__init__

        def fill(layer: CardLinear, linear: nn.Linear, card: torch.device) -> None:
            if len(linear.weight) == 192:
                raise torch.OutOfMemoryError("full")
            make(layer, linear, card)

        monkeypatch.setattr(CardLinear, "__init__", fill)
        with fake_card() as card:
            assert quicken_layer(head(), card.device) == Decision("plain", "not card: full")

    def test_for_the_ends_of_a_gateway_and_the_model_of_a_program(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tracing = "swarmd.client.model.remote_model.trace_model"
        monkeypatch.setattr(tracing, lambda *_: None)  # a tracer follows no fake card
        folder = checkpoints.make("llama", tmp_path)
        hidden = torch.randn(3, 64)
        expected = Ends(folder, torch.float32).logits(hidden, 0)
        with fake_card() as card:
            ends = Ends(folder, torch.float32, card=card.device)
            n_before = card.n_operations
            torch.testing.assert_close(ends.logits(hidden, 0), expected)
            assert card.n_operations > n_before
            for is_exact in (False, True):
                options = {"is_exact": is_exact, "card": card.device}
                model = remote_model(folder, lambda *_: None, None, **options)  # type: ignore[arg-type, return-value]
                n_before = card.n_operations
                with torch.no_grad():
                    torch.testing.assert_close(model.get_output_embeddings()(model.model.norm(hidden)), expected)
                assert (card.n_operations > n_before) != is_exact, "what is measured decides nothing in the exact grade"

    def test_a_card_that_nobody_can_use_is_done_without(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(device: str) -> int:
            raise torch.AcceleratorError("CUDA error: out of memory")

        monkeypatch.setattr(card_layers, "free_memory_bytes", fail)
        with fake_card() as card:
            assert quicken_layer(head(), card.device).action == "onednn"

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
