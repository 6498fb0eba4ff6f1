"""The client's model: its layers are all there, and whoever goes through them meets layer 0 only."""

from __future__ import annotations

from pathlib import Path

import torch

from swarmd.compute import skeleton
from swarmd.compute.skeleton import RemoteLayer, Stub
from tests import checkpoints


def test_a_pass_of_the_client_meets_layer_0_only(tmp_path: Path) -> None:
    model = skeleton.load(checkpoints.make("llama", tmp_path, n_layers=4), None, torch.float32)
    layers = skeleton.decoder_layers(model)
    assert [type(layer) for layer in layers] == [type(layer) for layer in layers[:4]] == [RemoteLayer]
    assert [type(layer) for layer in layers.children()] == [RemoteLayer, Stub, Stub, Stub]
    assert len(layers) == 4
    assert type(layers[3]) is Stub
