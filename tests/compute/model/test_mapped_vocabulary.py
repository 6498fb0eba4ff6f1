"""A vocabulary that stays on the disk gives the same numbers, whatever dtype it lies there in."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import swarmd.compute.model.mapped_vocabulary as mapped_module
from swarmd.compute.model import skeleton
from swarmd.compute.model.mapped_vocabulary import PART_ROWS, MappedEmbedding, MappedHead, map_vocabulary
from swarmd.errors import ConfigError
from tests import checkpoints

IDS = torch.tensor([[3, 0, 319, 7]])


def both(folder: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """A client's model in memory, and one whose vocabulary is mapped."""
    inside, mapped = (skeleton.load(folder, None, dtype) for _ in range(2))
    map_vocabulary(mapped, folder)
    return inside, mapped


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_products_are_those_of_the_matrix(is_tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path, n_layers=2, tie_word_embeddings=is_tied)
    inside, mapped = both(folder, dtype)
    embedding = mapped.get_input_embeddings()
    head = mapped.get_output_embeddings()
    assert isinstance(embedding, MappedEmbedding)
    assert isinstance(head, MappedHead)
    assert torch.equal(embedding(IDS), inside.get_input_embeddings()(IDS))
    hidden = torch.randn(2, 3, 64).to(dtype)
    torch.testing.assert_close(head(hidden), inside.get_output_embeddings()(hidden))
    assert torch.equal(head.weight, inside.get_output_embeddings().weight)
    assert head.out_features == inside.get_output_embeddings().out_features
    assert not [*embedding.parameters(), *head.parameters()]


def test_a_head_of_several_parts_is_whole(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path, n_layers=2, vocab_size=2 * PART_ROWS + 7)
    inside, mapped = both(folder, torch.float32)
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(mapped.get_output_embeddings()(hidden), inside.get_output_embeddings()(hidden))


@pytest.mark.parametrize("family", sorted(checkpoints.FAMILIES))
def test_a_client_of_any_family_embeds_as_before(family: str, tmp_path: Path) -> None:
    inside, mapped = both(checkpoints.make(family, tmp_path, n_layers=2), torch.float32)
    assert torch.equal(mapped.get_input_embeddings()(IDS), inside.get_input_embeddings()(IDS))


def test_what_the_file_holds_in_another_form_stays_in_memory(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path, n_layers=2)
    _, model = (skeleton.load(folder, None, torch.float32) for _ in range(2))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.embed_tokens.weight"
    save_file({**tensors, name: 2 * tensors[name]}, path, metadata={"format": "pt"})
    map_vocabulary(model, folder)
    assert type(model.get_input_embeddings()) is nn.Embedding


def test_where_only_the_head_is_plain_it_is_mapped(tmp_path: Path) -> None:
    _, mapped = both(checkpoints.make("gemma3_text", tmp_path, n_layers=2, tie_word_embeddings=False), torch.float32)
    assert not isinstance(mapped.get_input_embeddings(), MappedEmbedding), "it scales what it gives"
    assert isinstance(mapped.get_output_embeddings(), MappedHead)


def test_nobody_trains_it_or_changes_it(tmp_path: Path) -> None:
    _, model = both(checkpoints.make("llama", tmp_path, n_layers=2), torch.float32)
    head = model.get_output_embeddings()
    hidden = torch.randn(1, 64)
    logits = head(hidden)
    with torch.no_grad():
        head.weight.mul_(-1)
    assert torch.equal(head(hidden), logits)
    with pytest.raises(ConfigError, match="take the model with head='own'"):
        copy.deepcopy(head).requires_grad_(True)
    head.requires_grad_(False)


def test_a_head_that_is_asked_for_again_and_again_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = both(checkpoints.make("llama", tmp_path, n_layers=2), torch.bfloat16)
    head = model.get_output_embeddings()
    hidden = torch.randn(2, 64).bfloat16()
    now = 0.0
    monkeypatch.setattr(mapped_module, "time", SimpleNamespace(monotonic=lambda: now))
    first = head(hidden)
    for _ in range(3 * mapped_module.OFTEN):  # as checks are
        now += 1.0
        head(hidden)
    assert not head._in_memory
    for _ in range(mapped_module.OFTEN):
        now += 0.01
        assert torch.equal(head(hidden), first)
    assert head._in_memory
