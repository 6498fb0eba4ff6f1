"""The client's model: its layers are all there, and whoever goes through them meets layer 0 only; heads in 8 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmd.client.ends import Ends
from swarmd.compute import skeleton
from swarmd.compute.quantize import relative_error
from swarmd.compute.skeleton import RemoteLayer, Stub
from swarmd.errors import ConfigError
from tests import checkpoints


def test_a_pass_of_the_client_meets_layer_0_only(tmp_path: Path) -> None:
    model = skeleton.load(checkpoints.make("llama", tmp_path, n_layers=4), None, torch.float32)
    layers = skeleton.decoder_layers(model)
    assert [type(layer) for layer in layers] == [type(layer) for layer in layers[:4]] == [RemoteLayer]
    assert [type(layer) for layer in layers.children()] == [RemoteLayer, Stub, Stub, Stub]
    assert len(layers) == 4
    assert type(layers[3]) is Stub


def test_a_gateways_head_in_8_bits_is_half_a_percent_off(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "model", n_layers=2, hidden_size=256, head_dim=64)
    hidden = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    own, rounded = (Ends(folder, torch.float32, compiled_in).logits(hidden, 0) for compiled_in in (None, tmp_path))
    assert 0 < relative_error(rounded, own) < 0.02


def test_a_head_that_is_not_plain_stays_in_its_bits(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path, n_layers=2, vocab_size=321)
    with pytest.raises(ConfigError, match="of an even size: say head = own"):
        Ends(folder, torch.float32, tmp_path)
