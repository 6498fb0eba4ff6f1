"""What PEFT may do with the weights of remote blocks, which are on servers: nothing that needs their numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from swarmd.client.links import client_parameters
from swarmd.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's and transformers' own
SMALL = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)


class Stub(nn.Module):
    """As skeleton's: it stands for a layer, and passes on what it gets."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["original"] = original

    def forward(
        self,
        hidden: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        return hidden


@pytest.fixture
def remote() -> Any:
    model = LlamaForCausalLM(SMALL).requires_grad_(False)
    model.model.layers = nn.ModuleList([Stub(layer) for layer in model.model.layers])
    client_parameters.expose(model, list(model.model.layers))
    return model


def lora(**changes: Any) -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **changes)


@pytest.mark.parametrize("method", ["pissa", "pissa_niter_4", "olora", "mica"])
def test_matrices_that_start_from_base_weights_are_refused_and_it_is_said_what_needs_none(
    remote: Any, method: str
) -> None:
    with pytest.raises(ConfigError, match=r'weights of remote blocks are on servers.*"gaussian"'):
        get_peft_model(remote, lora(init_lora_weights=method))


def test_dora_which_needs_the_norms_of_base_weights_is_refused(remote: Any) -> None:
    with pytest.raises(ConfigError, match="no DoRA"):
        get_peft_model(remote, lora(use_dora=True))


@pytest.mark.parametrize("method", ["corda", "lora_ga", "loftq", "eva"])
def test_matrices_that_start_from_what_a_base_computes_are_refused_by_name(remote: Any, method: str) -> None:
    """PEFT begins them as plain LoRA where nothing was computed before; and nothing is, in remote blocks."""
    tuned = get_peft_model(remote, lora())
    tuned.peft_config["default"].init_lora_weights = method
    with pytest.raises(ConfigError, match=f'"{method}"'):
        client_parameters.lora_of(remote, list(remote.model.layers))


@pytest.mark.parametrize("method", [True, False, "gaussian", "orthogonal"])
def test_matrices_that_start_from_nothing_but_chance_are_found(remote: Any, method: Any) -> None:
    get_peft_model(remote, lora(init_lora_weights=method))
    matrices = client_parameters.lora_of(remote, list(remote.model.layers))
    assert len(matrices) == 4
    assert all(type(tensor) in (torch.Tensor, nn.Parameter) for _, tensor in matrices.values())


def test_a_remote_weight_has_all_that_needs_no_numbers(remote: Any, tmp_path: Any) -> None:
    weight = remote.model.layers[0].self_attn.q_proj.weight
    assert isinstance(weight, nn.Parameter)
    assert (tuple(weight.shape), weight.dtype, weight.numel()) == ((32, 32), torch.float32, 1024)
    assert weight.untyped_storage().nbytes() == 4
    assert copy.deepcopy(weight).shape == weight.shape
    assert remote.to(torch.bfloat16).model.layers[0].self_attn.q_proj.weight.dtype == torch.bfloat16
    copies = (remote.half().model.layers[0].self_attn.q_proj.weight, weight.clone(), weight.double().contiguous())
    assert [tuple(copied.shape) for copied in copies] == [(32, 32)] * 3
    assert [copied.untyped_storage().nbytes() for copied in copies] == [2, 2, 8], "no memory is taken for any"
    assert torch.equal(torch.arange(4.0).to(weight), torch.arange(4.0))
    assert "RemoteWeight" in repr(weight)
    tuned = get_peft_model(remote.to(torch.float32), lora())
    tuned.save_pretrained(tmp_path, save_embedding_layers=False)
    get_peft_model(remote, PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))


def test_a_saved_adapter_that_starts_from_base_weights_is_not_put_on_a_remote_model(remote: Any, tmp_path: Any) -> None:
    local = get_peft_model(LlamaForCausalLM(SMALL), lora(init_lora_weights="pissa"))
    local.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(ConfigError, match="on servers"):
        PeftModel.from_pretrained(remote, tmp_path)
