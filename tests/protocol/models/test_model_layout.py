"""How layers become blocks is a part of a configuration, and what makes no sense there is refused."""

from __future__ import annotations

from typing import Any

import pytest

from swarmd.errors import IntegrityError
from swarmd.protocol.models import configuration, manifest
from swarmd.protocol.models.manifest import Entry, Manifest
from swarmd.protocol.models.model_layout import EACH_LAYER, ModelLayout, Sideband, read_layout, write_layout
from swarmd.values import Span

THREE = ModelLayout((0, 1, 5), (Sideband("input_ids", "ids"), Sideband("per_layer_input", "each", 256)))


def test_blocks_of_several_layers_are_counted_and_found() -> None:
    config = write_layout({"model_type": "gemma4_text", "num_hidden_layers": 9}, THREE)
    assert configuration.layout_of(config) == THREE
    assert configuration.count_blocks(configuration.check(config)) == 3
    assert [THREE.layers(Span(block, block + 1), 9) for block in range(3)] == [Span(0, 1), Span(1, 5), Span(5, 9)]
    assert [THREE.block_of(layer) for layer in range(9)] == [0, *[1] * 4, *[2] * 4]
    assert THREE.describe() == "they begin at layers 0, 1, 5; beside hidden states travel input_ids, per_layer_input"


def test_where_each_layer_is_a_block_nothing_is_written() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 4}
    assert write_layout(config, EACH_LAYER) == config == write_layout(write_layout(config, THREE), EACH_LAYER)
    assert configuration.layout_of(config) is EACH_LAYER
    assert (EACH_LAYER.layers(Span(1, 3), 4), EACH_LAYER.block_of(2), EACH_LAYER.describe()) == (Span(1, 3), 2, "")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (3, "swarmd in the configuration: Expected `object`"),
        ({"first_layers": [1, 2]}, r"begin at layers \(1, 2\), expected 0 and rising, of 4 layers"),
        ({"first_layers": [0, 2, 2]}, "expected 0 and rising"),
        ({"first_layers": [0, 4]}, "expected 0 and rising"),
        ({"first_layers": [0, -1]}, "expected 0 and rising"),
        ({"first_layers": ["0"]}, "Expected `int`"),
        ({"sidebands": [{"name": "x", "kind": "code", "size": 1}]}, "Invalid enum value 'code'"),
        ({"sidebands": [{"name": "../x", "kind": "all", "size": 1}]}, "matching regex"),
        ({"sidebands": [{"name": "attention_mask", "kind": "ids"}]}, "attention_mask is no sideband"),
        ({"sidebands": [{"name": "x", "kind": "all"}]}, "ids have no size, and other sidebands have one"),
        ({"sidebands": [{"name": "x", "kind": "ids", "size": 3}]}, "ids have no size"),
        ({"sidebands": [{"name": "x", "kind": "all", "size": 1 << 21}]}, "<= 1048576"),
        ({"sidebands": [{"name": "x", "kind": "each", "size": 1 << 19}]}, "2097152 numbers of a token"),
        ({"sidebands": [{"name": "x", "kind": "all", "size": 1}] * 2}, "a sideband twice"),
        ({"sidebands": [{"name": "x", "kind": "ids"}, {"name": "y", "kind": "ids"}]}, "several sidebands of ids"),
        ({"sidebands": [{"name": f"x{n}", "kind": "ids"} for n in range(9)]}, "length <= 8"),
    ],
)
def test_a_layout_that_makes_no_sense_is_refused(written: Any, message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        read_layout({"swarmd": written}, 4)
    with pytest.raises(IntegrityError, match=message):
        configuration.check({"model_type": "llama", "num_hidden_layers": 4, "swarmd": written})


def test_tensors_belong_to_the_block_that_holds_their_layer() -> None:
    names = sorted([*(f"model.layers.{layer}.mlp.weight" for layer in range(9)), "model.norm.weight"])
    tensors = tuple(Entry(name, "F32", (1,), (bytes(32),)) for name in names)
    config = manifest.canonical_json({"model_type": "gemma4_text", "num_hidden_layers": 9})
    plain = Manifest(manifest.VERSION, 9, config, (), tensors)
    laid_out = manifest.lay_out(plain, THREE)
    manifest.check(laid_out)
    assert laid_out.n_blocks == 3
    assert manifest.entry_groups(plain) == (*range(9), 9)
    assert manifest.entry_groups(laid_out) == (0, *[1] * 4, *[2] * 4, 3)
    assert manifest.lay_out(laid_out, EACH_LAYER) == plain
    assert manifest.model_id(laid_out) != manifest.model_id(plain)
