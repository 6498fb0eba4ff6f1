"""The client's model: its layers are all there, and whoever goes through them meets layer 0 only; heads in 8 bits."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmd.client.model import remote_model
from swarmd.client.straight import Straight, write_down
from swarmd.compute import skeleton
from swarmd.compute.balance import leave_out
from swarmd.compute.ends import Ends
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


class Chain:
    """A chain whose blocks halve what they are given."""

    layer_arity = 0
    is_closed = False

    def step(self, edits: Any, hidden: torch.Tensor, *about: Any) -> torch.Tensor:
        return hidden / 2

    def finish(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def client(folder: Path) -> Any:
    return remote_model(folder, lambda *about: Chain(), lanes=None)  # type: ignore[arg-type, return-value]


def test_dropped_caches_are_freed_at_once(tmp_path: Path) -> None:
    """Not when Python next looks for cycles: a server keeps room for them until then."""
    chains: list[Chain] = []

    def open_session(*about: Any) -> Chain:
        chains.append(Chain())
        return chains[-1]

    folder = checkpoints.make("llama", tmp_path, n_layers=2)
    model = remote_model(folder, open_session, lanes=None)  # type: ignore[arg-type]
    gc.disable()
    try:
        logits = model(torch.arange(3, 9).unsqueeze(0)).logits
    finally:
        gc.enable()
    assert logits.shape[1] == 6
    assert [chain.is_closed for chain in chains] == [True]


def test_a_remote_cache_is_not_copied(tmp_path: Path) -> None:
    cache = client(checkpoints.make("llama", tmp_path, n_layers=2)).new_cache()
    with pytest.raises(TypeError, match="is not copied"):
        copy.deepcopy(cache)


class TestSteps:
    """After a prompt, steps are a straight line, where that gives what the family's forward gives."""

    @pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "gemma3_text"])
    def test_they_give_what_the_familys_forward_gives(
        self, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, ids = client(checkpoints.make(family, tmp_path, n_layers=2)), torch.arange(3, 40).unsqueeze(0)
        taken: list[int] = []
        compute = Straight.compute

        def noted(self: Straight, ids: torch.Tensor, *about: Any) -> torch.Tensor:
            taken.append(ids.shape[1])
            return compute(self, ids, *about)

        monkeypatch.setattr(Straight, "compute", noted)
        text = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        has_line = family in ("llama", "qwen3_moe")  # gpt2 looks at values, gemma3's windows move on
        assert taken == ([1] * 7 if has_line else [])
        monkeypatch.setattr(Straight, "holds", False)
        assert torch.equal(text, model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False))
        assert len(taken) == (7 if has_line else 0)

    @pytest.mark.parametrize("what", ["weight", "head", "hook", "training", "moved"])
    def test_a_model_that_was_changed_goes_its_own_way(self, what: str, tmp_path: Path) -> None:
        model = client(checkpoints.make("llama", tmp_path, n_layers=2))
        stubs = list(skeleton.decoder_layers(model).children())
        line = write_down(model, stubs, "past_key_values")
        assert line is not None
        assert line.holds
        with torch.no_grad():
            if what == "weight":
                model.model.norm.weight.mul_(2)
            elif what == "head":
                model.set_output_embeddings(torch.nn.Linear(64, 320, bias=False))
            elif what == "hook":
                model.model.norm.register_forward_hook(lambda *about: None)
            elif what == "training":
                model.train()
            else:
                model.model.norm.weight.data = model.model.norm.weight.data.clone()
        assert not line.holds


def test_a_loss_that_needs_the_routers_of_remote_experts_is_refused(tmp_path: Path) -> None:
    model = client(checkpoints.make("qwen3_moe", tmp_path, n_layers=2, output_router_logits=True))
    ids = torch.arange(3, 9).unsqueeze(0)
    with pytest.raises(ConfigError, match="output_router_logits = False"):
        model(input_ids=ids, labels=ids)
    model(input_ids=ids)
    model.generate(ids, max_new_tokens=2)
    leave_out(model)
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)
    with pytest.raises(ConfigError, match="stay on servers"):
        model(input_ids=ids, output_router_logits=True)
