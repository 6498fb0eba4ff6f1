"""Whoever writes a checkpoint writes its configuration: nothing there loads code, asks a hub or ends in a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmd.client.text.tokenizer import load_tokenizer
from swarmd.compute.checkpoints.check import check_folder
from swarmd.compute.model import skeleton
from swarmd.compute.runs.gradients import build
from swarmd.errors import ConfigError, IntegrityError
from swarmd.protocol.models import configuration, manifest
from swarmd.protocol.runs.recipe import Recipe
from swarmd.values import Span
from tests import checkpoints

LOADERS = [
    "transformers.dynamic_module_utils.get_class_from_dynamic_module",
    "transformers.dynamic_module_utils.get_class_in_module",
    "transformers.dynamic_module_utils.get_cached_module_file",
    "transformers.integrations.hub_kernels.load_and_register_attn_kernel",
    "transformers.integrations.hub_kernels.get_kernel",
    "transformers.modeling_utils.lazy_import_flash_attention",
    "transformers.utils.hub.hf_hub_download",
    "transformers.utils.hub.snapshot_download",
    "huggingface_hub.hf_hub_download",
    "huggingface_hub.snapshot_download",
    "huggingface_hub.file_download.http_get",
    "socket.socket.connect",
    "socket.getaddrinfo",
    "subprocess.Popen.__init__",
    "torch.load",
    "pickle.load",
    "pickle.loads",
]
ELSEWHERE = "evil/kernel"


@pytest.fixture
def trapped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every loader of code and every call to a hub: none is made, and a test sees which was tried."""
    tried: list[str] = []

    def trap(name: str) -> Callable[..., Any]:
        def caught(*_: Any, **__: Any) -> Any:
            tried.append(name)
            raise AssertionError(f"{name} was called")

        return caught

    for name in LOADERS:
        monkeypatch.setattr(name, trap(name))
    return tried


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("model") / "llama", n_layers=2)


def changed(checkpoint: Path, folder: Path, changes: dict[str, Any]) -> Path:
    """The checkpoint with another configuration."""
    shutil.copytree(checkpoint, folder)
    written = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, **changes}))
    return folder


def everything(folder: Path) -> torch.Tensor:
    """All that is ever made of a checkpoint: added, served, used, trained; returns what a block's weights sum to."""
    read = manifest.read_folder(folder)
    check_folder(folder, read)
    server = skeleton.load(folder, Span(0, 1), torch.float32)
    skeleton.load(folder, None, torch.float32)
    recipe = Recipe(name="run", model=manifest.model_id(read), data="0" * 64, anchors=())
    build(folder, recipe)
    return torch.stack([p.sum() for p in server.parameters()]).sum()


CODE_AND_PLACES: list[dict[str, Any]] = [
    {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": f"{ELSEWHERE}--evil.Model"}},
    {"custom_pipelines": {"text-generation": {"impl": "evil.Pipeline"}}},
    {"quantization_config": {"quant_method": "gptq", "bits": 4, "dataset": ELSEWHERE, "auto_map": ELSEWHERE}},
    {"attn_implementation": ELSEWHERE},
    {"_attn_implementation": ELSEWHERE},
    {"_attn_implementation_internal": ELSEWHERE},
    {"_attn_implementation_autoset": True, "attn_implementation": {"": ELSEWHERE}},
    {"attn_implementation": f"paged|{ELSEWHERE}"},
    {"attn_implementation": "flash_attention_2"},
    {"experts_implementation": ELSEWHERE, "_experts_implementation": ELSEWHERE},
    {"use_kernels": True, "kernel_config": {"kernel_mapping": {"RMSNorm": ELSEWHERE}}},
    {"_name_or_path": ELSEWHERE, "name_or_path": ELSEWHERE},
    {"tokenizer_class": f"{ELSEWHERE}--Tokenizer", "processor_class": ELSEWHERE},
    {"trust_remote_code": True, "code_revision": "main"},
    {"task_specific_params": {"text-generation": {"assistant_model": ELSEWHERE}}},
    {"id2label": {"0": "__import__('os')"}, "label2id": {"x": 0}},
    {"get_text_config": "x", "to_dict": 5, "from_dict": [], "__class__": "x", "validate": None},
    {"rope_scaling": None, "note": "see https://example.org"},
]


@pytest.mark.parametrize("changes", CODE_AND_PLACES, ids=lambda changes: "+".join(changes))
def test_names_of_code_and_places_are_not_there(
    checkpoint: Path, tmp_path: Path, trapped: list[str], changes: dict[str, Any]
) -> None:
    plain = everything(checkpoint)
    assert torch.equal(everything(changed(checkpoint, tmp_path / "changed", changes)), plain)
    assert not trapped


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": ELSEWHERE}}, "quantised already (quantization_config: evil/kernel)"),
        ({"quantization_config": ELSEWHERE}, "quantization_config is no JSON object"),
        ({"rope_scaling": {"quantization_config": {"quant_method": "awq"}}}, "quantization_config inside another"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "without their zeros (sparsity_config)"),
        ({"model_type": ELSEWHERE}, "transformers knows no 'evil/kernel'"),
        ({"hidden_size": "128"}, "hidden_size is 128, expected a whole number"),
        ({"hidden_size": 1e300}, "hidden_size is 1e+300, expected a whole number"),
        ({"vocab_size": True}, "expected a whole number"),
        ({"num_attention_heads": [4] * 2_000}, "expected a whole number"),
        ({"num_hidden_layers": None}, "names no number of layers"),
        ({"intermediate_size": [128]}, "llama"),
        ({"rms_norm_eps": "small"}, "llama"),
        ({"hidden_act": "os.system"}, "cannot be built"),
        ({"layer_types": ["full_attention"]}, "llama"),
        ({"rope_parameters": {"rope_type": "no-such"}}, ""),
        ({"hidden_act": "no word"}, "hidden_act is 'no word', expected numbers, flags, and words"),
        ({"rope_scaling": [[[[[[[[[[[1]]]]]]]]]]]}, "more than 8 levels"),
        ({"note": [0] * 200_000}, "more than 8 levels or 100000 values"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_what_makes_no_sense_is_said_in_one_sentence(
    checkpoint: Path, tmp_path: Path, trapped: list[str], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        everything(changed(checkpoint, tmp_path / "changed", changes))
    assert words.lower() in str(refusal.value).lower()
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 700
    assert not trapped


def test_the_traps_catch_what_transformers_does_with_a_configuration_as_it_is(
    checkpoint: Path, tmp_path: Path, trapped: list[str]
) -> None:
    folder = changed(checkpoint, tmp_path / "changed", {"attn_implementation": ELSEWHERE})
    with pytest.raises(Exception):  # noqa: B017 - whatever it makes of a trap
        AutoModelForCausalLM.from_pretrained(folder)
    assert trapped


def test_a_tokenizer_brings_no_code(checkpoint: Path, tmp_path: Path, trapped: list[str]) -> None:
    folder = changed(checkpoint, tmp_path / "changed", {})
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": [f"{ELSEWHERE}--evil.Tokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match="cannot be used"):
        load_tokenizer(folder)
    assert not trapped


def test_a_pattern_of_kinds_of_blocks_is_kept() -> None:
    assert configuration.rebuild_plain({"hybrid_override_pattern": "M-M*" * 30}) == {
        "hybrid_override_pattern": "M-M*" * 30
    }


def test_infinite_numbers_are_kept_however_they_are_written() -> None:
    written = {"time_step_limit": [0.0, {"__float__": "Infinity"}], "low": {"__float__": "-Infinity"}, "x": 1e999}
    infinite = float("inf")
    assert configuration.rebuild_plain(written) == {"time_step_limit": [0.0, infinite], "low": -infinite, "x": infinite}


@pytest.mark.parametrize(
    "config",
    [{"model_type": configuration.ADAPTER, "adapter": {"r": 4}}, {"model_type": configuration.STATE, "update": 3}],
)
def test_what_has_no_blocks_is_no_model_and_says_so(config: dict[str, Any]) -> None:
    assert configuration.count_blocks(configuration.check({**config, "num_hidden_layers": 0})) == 0
    with pytest.raises(IntegrityError, match="no blocks"):
        configuration.check({**config, "num_hidden_layers": 2})
