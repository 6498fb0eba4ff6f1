"""The client's part of a GGUF model at its own bits, for the library and for the gateway."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from swarmd.compute.llama_cpp.ends import LlamaHead, PackedEmbedding
from swarmd.compute.llama_cpp.gguf_header import read_header
from swarmd.compute.llama_cpp.packed import PackedFolder, pack_file
from swarmd.compute.model.client_part import load_client_part
from swarmd.compute.model.ends import Ends
from swarmd.errors import ConfigError
from tests.compute.llama_cpp.random_gguf import N_BLOCKS, VOCABULARY, WIDTH, make_random_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_random_gguf("granite", tmp_path / "whole.gguf")
    pack_file(read_header(tmp_path / "whole.gguf"), tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5], "bos_token_id": 1}))
    return tmp_path


def test_ends_of_rows_are_those_of_the_library(folder: Path) -> None:
    here = PackedFolder(folder)
    ends = Ends(folder, torch.float32)
    assert (ends.vocabulary, ends.width, ends.max_tokens, ends.can_crop) == (VOCABULARY, WIDTH, 512, True)
    assert ends.eos == {3, 5}
    rows = PackedEmbedding(here.packed.whole, here.reader()).rows([7, 8, 9])
    (one,), (many,) = ends.embed([[7]], [4]), ends.embed([[7, 8, 9]], [0])
    assert np.array_equal(one[0].numpy(), rows[:1])
    assert np.array_equal(many[0].numpy(), rows)
    hidden = torch.randn(70, WIDTH, generator=torch.Generator().manual_seed(0))
    expected = LlamaHead(here.packed.whole, here.reader(), 1).logits(hidden.numpy())
    assert np.array_equal(ends.logits(hidden, 0).numpy(), expected)


def test_a_model_has_stubs_in_place_of_layers_and_a_loss(folder: Path) -> None:
    model = load_client_part(folder, torch.float32)
    assert len(list(model.model.layers.children())) == model.config.num_hidden_layers == 4 < N_BLOCKS
    model.model.layers[0].call = lambda hidden: hidden
    ids = torch.tensor([[1, 2, 3]])
    output = model(ids, labels=ids)
    assert output.logits.shape == (1, 3, VOCABULARY)
    assert float(output.loss) > 0
    assert torch.allclose(model(ids, logits_to_keep=1).logits, output.logits[:, -1:], atol=1e-5)
    assert model(ids[:, :0]).logits.shape == (1, 0, VOCABULARY)
    with pytest.raises(ConfigError, match=f"token {VOCABULARY} is asked for, and this model has {VOCABULARY}"):
        model(torch.tensor([[VOCABULARY]]))
    with pytest.raises(ConfigError, match="keeps its bits is not fine-tuned"):
        model(inputs_embeds=torch.zeros(1, 1, WIDTH, requires_grad=True))


def test_a_hybrid_says_that_its_states_cannot_go_back(tmp_path: Path) -> None:
    make_random_gguf("lfm2", tmp_path / "whole.gguf")
    pack_file(read_header(tmp_path / "whole.gguf"), tmp_path)
    assert not Ends(tmp_path, torch.float32).can_crop


def test_a_head_in_8_bits_is_refused_in_a_sentence(folder: Path) -> None:
    with pytest.raises(ConfigError, match="head = int8 is for plain linear heads, not HeadOfBytes: say head = own"):
        Ends(folder, torch.float32, int8_head=folder)
