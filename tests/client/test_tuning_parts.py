"""A batch that goes in parts has the loss and the gradients of one backward of plain torch, whatever is tuned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from swarmd.client.tuning.dataset import IGNORED, DatasetRow
from swarmd.client.tuning.fine_tuning import loss_and_gradients, pad_batch, with_peft
from swarmd.client.tuning.tuning_recipe import METHODS, TuningRecipe
from tests import checkpoints

TARGETS = {"llama": ("q_proj", "down_proj"), "gpt2": ("c_attn",), "bloom": ("query_key_value",)}


@cache
def tuned(family: str, method: str) -> Any:
    """A small model in double precision, whose tuned parameters are not as they began."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        checkpoints.make(family, Path(folder), n_layers=1)
        base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    recipe = TuningRecipe("m", method=method, rank=2, virtual_tokens=3, targets=TARGETS[family])
    model = with_peft(base, recipe).to(torch.float64)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def one_backward(
    model: Any, parameters: Sequence[torch.nn.Parameter], rows: Sequence[DatasetRow]
) -> tuple[float, tuple[torch.Tensor, ...]]:
    ids, mask, labels = pad_batch(rows)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    return loss.item(), torch.autograd.grad(loss, list(parameters))


@st.composite
def batches(draw: st.DrawFn) -> list[DatasetRow]:
    """Rows of unequal length; of each the loss counts some, among them always one behind the first."""
    rows = []
    for n in draw(st.lists(st.integers(2, 12), min_size=1, max_size=6)):
        ids = draw(st.lists(st.integers(3, 319), min_size=n, max_size=n))
        n_prompt = draw(st.integers(0, n - 1))
        rows.append(DatasetRow(tuple(ids), (*[IGNORED] * n_prompt, *ids[n_prompt:])))
    return rows


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", TARGETS)
@settings(max_examples=15)
@given(rows=batches(), n_parts=st.integers(1, 6))
def test_parts_have_the_loss_and_gradients_of_one_backward(
    family: str, method: str, rows: list[DatasetRow], n_parts: int
) -> None:
    model = tuned(family, method)
    parameters = [p for p in model.parameters() if p.requires_grad]
    expected_loss, expected = one_backward(model, parameters, rows)
    loss, gradients = loss_and_gradients(model, parameters, rows, n_parts)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert all(g is not None for g in gradients)
    got, reference = (torch.cat([g.flatten() for g in tensors if g is not None]) for tensors in (gradients, expected))
    assert (got - reference).norm() <= 1e-5 * reference.norm()  # transformers' losses are taken in float32
