"""LoRA adapters on spans equal PEFT's own local results, alone and together with others in one pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.passes.backend_selection import select_backends
from swarmd.compute.passes.span import LoadedSpan
from swarmd.errors import ConfigError
from swarmd.protocol.models import adapter
from swarmd.values import ModelId, Span
from tests import checkpoints

BASE = ModelId("b" * 64)
TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"], "qwen3_moe": ["q_proj", "o_proj"]}


def load(span: LoadedSpan, name: str, folder: Path) -> Any:
    config = adapter.lora_of(adapter.read_folder(folder, BASE))
    span.adapters.load(name, [folder / adapter.WEIGHTS_FILE], msgspec.json.encode(config))
    return span.adapters.get(name)


def blocks_of(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What enters the first block and what leaves the last but one, in the whole model."""
    hidden = model(ids, output_hidden_states=True).hidden_states
    return hidden[0], hidden[3]


@pytest.mark.filterwarnings("ignore")  # of PEFT about targets
@pytest.mark.parametrize("family", sorted(TARGETS))
def test_two_adapters_and_the_base_in_one_pass_equal_peft(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    base = checkpoints.make(family, tmp_path / "base", n_layers=4)
    options: dict[str, Any] = {"use_rslora": True} if family == "llama" else {}
    first = checkpoints.make_adapter(base, tmp_path / "one", TARGETS[family], 1)
    second = checkpoints.make_adapter(base, tmp_path / "two", TARGETS[family], 2, **options)
    span = LoadedSpan(base, Span(0, 3), torch.float32)
    span.self_test()
    loras = [load(span, "one", tmp_path / "one"), load(span, "two", tmp_path / "two"), None]
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    pieces = []
    expected = []
    for seed, (model, lora) in enumerate(zip((first, second, plain), loras, strict=True)):
        ids = torch.randint(3, 300, (1, 5 + 2 * seed), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            inputs, outputs = blocks_of(model, ids)
        positions = torch.arange(ids.shape[1])[None]
        [alone] = span.run([SessionTokens(inputs, positions, span.new_cache(), 0, lora, is_exact=True)])
        torch.testing.assert_close(alone, outputs, rtol=1e-4, atol=1e-4)
        pieces.append(SessionTokens(inputs, positions, span.new_cache(), 0, lora))
        expected.append(outputs)
    assert not torch.allclose(span.forward(pieces[0].hidden, pieces[0].positions), expected[0], atol=1e-2)
    for actual, reference in zip(span.run(pieces), expected, strict=True):
        torch.testing.assert_close(actual, reference, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_and_captured_passes_do_not_mix(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    base = checkpoints.make("llama", tmp_path / "base", n_layers=4)
    checkpoints.make_adapter(base, tmp_path / "one", TARGETS["llama"], 1)
    span = LoadedSpan(base, Span(0, 3), torch.float32)
    span.self_test()
    lora = load(span, "one", tmp_path / "one")
    select_backends(span)
    assert span.table(Span(0, 3)).rows
    hidden = torch.randn(1, 1, 64)
    positions = torch.zeros(1, 1, dtype=torch.long)
    for used in (lora, None):
        [alone] = span.run([SessionTokens(hidden, positions, span.new_cache(), 0, used, is_exact=True)])
        (actual,) = span.run([SessionTokens(hidden, positions, span.new_cache(), 0, used)])
        torch.testing.assert_close(actual, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "PREFIX_TUNING"}, "only LoRA"),
        ({"r": -1}, "configuration is wrong"),
        ({"rank_pattern": {"(a+)+$": 2}}, "no plain name"),
    ],
)
def test_what_is_not_plain_lora_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    base = checkpoints.make("llama", tmp_path / "base", n_layers=2)
    checkpoints.make_adapter(base, tmp_path / "one", ["q_proj"], 1)
    path = tmp_path / "one" / adapter.CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError, match=reason):
        adapter.read_folder(tmp_path / "one", BASE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("made_for", "targets", "reason"),
    [
        ({"hidden_size": 32}, ["q_proj"], "matrices for .* are"),
        ({"n_layers": 3}, ["lm_head"], "unsupported adapter"),
    ],
)
def test_an_adapter_of_another_model_is_refused(
    tmp_path: Path, made_for: dict[str, Any], targets: list[str], reason: str
) -> None:
    other_model = checkpoints.make("llama", tmp_path / "other", **{"n_layers": 3, **made_for})
    checkpoints.make_adapter(other_model, tmp_path / "one", targets, 1)
    span = LoadedSpan(checkpoints.make("llama", tmp_path / "base", n_layers=3), Span(0, 2), torch.float32)
    with pytest.raises(ConfigError, match=reason):
        load(span, "one", tmp_path / "one")
