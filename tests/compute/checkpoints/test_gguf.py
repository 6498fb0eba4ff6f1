"""GGUF files are read as the model they were made of, or refused by name (tests/real/test_gateway.py: a real one)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmd.compute.checkpoints import gguf, gguf_settings
from swarmd.compute.llama_cpp.gguf_header import GgufHeader
from swarmd.errors import ConfigError
from tests.gguf_files import N_TOKENS, TOKENS, make_model, settings_of, tensors_of, write
from tests.real.smollm2 import gguf_file

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers, about its own configurations
TOLERANCE = 1e-4  # of the largest logit
BASE = 10_000.0
HEAD_DIM = 16


def convert(path: Path, folder: Path) -> list[str]:
    """Convert in 32 bits; returns what was said."""
    messages: list[str] = []
    folder.mkdir()
    gguf.convert(path, folder, "float32", messages.append)
    return messages


def rotary(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": BASE, **settings}}


def llama3_factors(first_length: int, factor: float) -> list[float]:
    """What llama.cpp's converter writes for Llama 3.1's scaling."""
    factors = []
    for frequency in (1 / BASE ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)).tolist():
        wave = 2 * math.pi / frequency
        smooth = (first_length / wave - 1) / 3
        mixed = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if wave < first_length / 4 else factor if wave > first_length else mixed)
    return factors


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8, "original_max_position_embeddings": 32}
GEMMA3 = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "num_hidden_layers": 6}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MOE = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
Case = tuple[str, str, dict[str, Any], dict[str, Any], dict[str, list[float]]]
RIGHT: dict[str, Case] = {
    "llama": ("llama", "llama", {}, {}, {}),
    "own head": ("llama", "llama", {"tie_word_embeddings": False}, {}, {}),
    "wide heads": ("llama", "llama", {"head_dim": 24}, {}, {}),
    "Llama 3.1": ("llama", "llama", rotary("llama3", **LLAMA3), {}, {"rope_freqs.weight": llama3_factors(64, 8.0)}),
    "linear": (
        *("llama", "llama", rotary("linear", factor=4.0)),
        *({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {}),
    ),
    "a factor alone is linear": (
        *("llama", "llama", rotary("linear", factor=4.0)),
        *({"rope.scaling.factor": 4.0}, {}),
    ),
    "yarn": (
        *("qwen2", "qwen2", rotary("yarn", factor=4.0, original_max_position_embeddings=128)),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
        {},
    ),
    "biases": ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}, {}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}, {}, {}),
    "qwen3moe": ("qwen3_moe", "qwen3moe", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}, MOE, {}),
    "qwen2moe": (
        *("qwen2_moe", "qwen2moe", {**EXPERTS, "shared_expert_intermediate_size": 48}),
        *({**MOE, "expert_shared_feed_forward_length": 48}, {}),
    ),
    "gemma 2": (
        *("gemma2", "gemma2", {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}),
        {"attention.sliding_window": 8, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {},
    ),
    "gemma 3 1B": (
        *("gemma3_text", "gemma3", GEMMA3),
        *({"attention.sliding_window": 8, "rope.freq_base": 1e6}, {}),
    ),
    "gemma 3 4B": (
        *("gemma3_text", "gemma3"),
        {
            **GEMMA3,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": BASE},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
        {
            "attention.sliding_window": 8,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
        {},
    ),
    "phi3": ("phi3", "phi3", {"sliding_window": 8}, {"attention.sliding_window": 8}, {}),
    "phi3 in part": ("phi3", "phi3", rotary("default", partial_rotary_factor=0.75), {"rope.dimension_count": 12}, {}),
    "phi3 long": (
        *("phi3", "phi3", {**rotary("longrope", **LONG), "original_max_position_embeddings": 32}),
        {"rope.scaling.original_context_length": 32},
        {"rope_factors_long.weight": [4.0] * 8, "rope_factors_short.weight": [1.0] * 8},
    ),
    "starcoder2": (
        *("starcoder2", "starcoder2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        *({"rope.freq_base": 1e6}, {}),
    ),
    "stablelm": (
        *("stablelm", "stablelm", {**rotary("default", partial_rotary_factor=0.25), "use_qkv_bias": True}),
        *({"rope.dimension_count": 4}, {}),
    ),
}


@pytest.mark.parametrize("case", sorted(RIGHT))
def test_a_file_is_read_as_the_model_that_it_was_made_of(case: str, tmp_path: Path) -> None:
    family, architecture, changes, settings, extra = RIGHT[case]
    model = make_model(family, **changes)
    tensors = {**tensors_of(model, architecture), **{name: np.array(numbers) for name, numbers in extra.items()}}
    path = write(tmp_path / "model.gguf", architecture, settings_of(model, **settings), tensors)
    convert(path, tmp_path / "made")
    ids = torch.randint(3, N_TOKENS, (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(ids).logits
        actual = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).eval()(ids).logits
    assert float((actual - expected).abs().max() / expected.abs().max()) < TOLERANCE


def test_each_architecture_that_is_read_by_the_older_reader_is_compared() -> None:
    assert {case[1] for case in RIGHT.values()} == gguf_settings.UNDERSTOOD.keys() - set(gguf_settings.ONE_READER)


def plain(tmp_path: Path, **changes: Any) -> Path:
    """A llama, with other settings, tensors beside it or without one, other words, other general settings."""
    model = make_model("llama")
    tensors = {**tensors_of(model, "llama"), **changes.get("beside", {})}
    tensors = {name: numbers for name, numbers in tensors.items() if name not in changes.get("without", ())}
    settings = settings_of(model, **changes.get("settings", {}))
    return write(tmp_path / "model.gguf", "llama", settings, tensors, changes.get("words"), changes.get("general"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"settings": {"expert_count": 4, "expert_used_count": 2}},
            r"llama\.expert_count is 4, which is not understood",
        ),
        ({"settings": {"attention.sliding_window": 16}}, r"llama\.attention\.sliding_window is 16"),
        ({"settings": {"rope.scaling.yarn_log_multiplier": 0.1}}, r"rope\.scaling\.yarn_log_multiplier is 0\.1"),
        ({"settings": {"rope.scaling.type": "su"}}, r"a scaling of rotary angles \(su"),
        ({"settings": {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}}, "original_context_length is missing"),
        ({"settings": {"something.new": 3}}, r"llama\.something\.new is 3, which is not understood"),
        ({"settings": {"rope.dimension_count": 8}}, "8 of a head's 16 numbers rotate"),
        ({"settings": {"attention.value_length": 8}}, "keys of 16 and values of 8"),
        ({"settings": {"attention.head_count_kv": None}}, r"llama\.attention\.head_count_kv is missing"),
        ({"settings": {"attention.head_count_kv": [2, 2]}}, r"llama\.attention\.head_count_kv is a list"),
        (
            {"settings": {"attention.layer_norm_rms_epsilon": None}},
            r"llama\.attention\.layer_norm_rms_epsilon is missing",
        ),
        ({"settings": {"attention.scale": 0.5}}, r"llama\.attention\.scale is 0\.5, which is not understood"),
        ({"settings": {"context_length": 0}}, r"llama\.context_length is 0"),
        ({"settings": {"block_count": 1}}, r"no place for blk\.1\.attn_k\.weight"),
        ({"settings": {"block_count": 3}}, r"lacks tensors for model\.layers\.2"),
        ({"without": ("blk.1.ffn_up.weight",)}, r"lacks tensors for model\.layers\.1\.mlp\.up_proj"),
        ({"without": ("output_norm.weight",)}, r"lacks tensors for model\.norm"),
        ({"beside": {"blk.0.attn_q.bias": np.ones(64)}}, r"lacks tensors for .*bias"),
        ({"beside": {"blk.0.foo.weight": np.ones((4, 4))}}, r"no place for blk\.0\.foo\.weight"),
        ({"beside": {"rope_freqs.weight": np.linspace(1, 7, 8)}}, "of no scaling that is understood"),
        ({"beside": {"rope_factors_long.weight": np.ones(8)}}, "a scaling of rotary angles"),
        ({"beside": {"blk.1.ffn_up.weight": np.ones((3, 64))}}, "has other shapes than its settings say"),
        ({"general": {"split.count": 2, "split.no": 0}}, r"is part 1 of 2: join them first"),
        ({"general": {"split.count": 2, "split.no": 1}}, r"is part 2 of 2: join them first"),
        ({"general": {"general.type": "adapter"}}, "is an adapter .LoRA. in GGUF"),
        ({"words": {"ggml.pre": "some-new-one"}}, r"\(tokenizer\.ggml\.pre\) is 'some-new-one'"),
        ({"words": {"ggml.pre": None}}, r"\(tokenizer\.ggml\.pre\) is None"),
        ({"words": {"ggml.tokens": None}}, "holds no tokenizer"),
        ({"words": {"ggml.eos_token_id": 4_000_000}}, "eos_token_id is 4000000, and there are 260 tokens"),
        ({"words": {"ggml.tokens": [*TOKENS, "more"]}}, "261 tokens, and vectors for 260"),
        ({"words": {"ggml.model": "no_vocab"}}, "cannot be read as GGUF"),
    ],
)
def test_what_would_be_read_wrongly_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        convert(plain(tmp_path, **changes), tmp_path / "made")
    assert "\n" not in str(refused.value)


CHANGE_NUMBERS = {
    **{"attention.scale": 0.5, "logit_scale": 0.5, "residual_scale": 0.5, "embedding_scale": 12.0},
    **{"attn_output_scale": 0.5, "attention.clamp_kqv": 8.0, "attention.max_alibi_bias": 8.0},
    **{"attention.sliding_window_pattern": 4, "attention.key_length_mla": 32, "attention.temperature_scale": 0.1},
    **{"expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2, "expert_shared_count": 1},
    **{"rope.scaling.yarn_log_multiplier": 0.1, "rope.scaling.yarn_beta_fast": 16.0, "rope.scale_linear": 2.0},
    **{"rope.scaling.yarn_ext_factor": 0.5, "interleave_moe_layer_step": 2, "swiglu_clamp_exp": [7.0, 7.0]},
}
"""Settings of llama.cpp's that change what other architectures compute, and mean the same in any."""


@pytest.mark.parametrize("architecture", sorted(gguf_settings.UNDERSTOOD))
def test_a_setting_that_changes_numbers_and_is_not_read_is_refused(architecture: str) -> None:
    needed = {key: 1 for key in gguf_settings.UNDERSTOOD[architecture] if key in gguf_settings.NEEDED}
    needed |= {"attention.sliding_window": 8} if architecture == "gemma3" else {}

    def check(**more: Any) -> None:
        of_architecture = {f"{architecture}.{key}": value for key, value in {**needed, **more}.items()}
        settings = {"general.architecture": architecture, **of_architecture}
        gguf_settings.check_settings(GgufHeader(Path("model.gguf"), settings, {}, {}))

    check()
    for key, value in CHANGE_NUMBERS.items():
        with pytest.raises(ConfigError, match=rf"{architecture}\.{key} is .* not understood"):
            check(**{key: value})
    for key in list(needed):
        missing = needed.pop(key)
        with pytest.raises(ConfigError, match=rf"{architecture}\.{key} is missing"):
            check()
        needed[key] = missing


def test_an_architecture_that_nobody_has_compared_is_refused_with_those_that_are_read(tmp_path: Path) -> None:
    model = make_model("llama")
    path = write(tmp_path / "model.gguf", "deepseek2", settings_of(model), tensors_of(model, "llama"))
    with pytest.raises(ConfigError, match=r"'deepseek2' is not read; those that are: gemma2, .*qwen3"):
        convert(path, tmp_path / "made")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda raw: b"", "does not begin as one does"),
        (lambda raw: b"GGUF", "does not begin as one does"),
        (lambda raw: b"GGUF" + b"\xff" * 100, "is version"),
        (lambda raw: b"text, and nothing else", "does not begin as one does"),
        (lambda raw: raw[: len(raw) // 2], "cut short: .* ends at byte .* and the file has"),
        (lambda raw: raw[:200], "cut short in front of its tensors"),
        (lambda raw: raw[:8] + b"\xff" * 8 + raw[16:], "it counts"),
    ],
)
def test_what_is_no_whole_file_is_refused_in_one_sentence(
    spoil: Callable[[bytes], bytes], message: str, tmp_path: Path
) -> None:
    path = plain(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ConfigError, match=f"cannot be read as GGUF: .*{message}") as refused:
        convert(path, tmp_path / "made")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("case", "settings", "message"),
    [
        ("gemma 3 4B", {"rope.dimension_count": 8}, "8 of a head's 16 numbers rotate"),
        ("phi3 long", {"rope.scaling.factor": 4.0}, "a scaling of rotary angles"),
        ("Llama 3.1", {"rope.scaling.factor": 4.0}, "at once are not understood"),
    ],
)
def test_rotary_settings_that_do_not_fit_together_are_refused(
    case: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    family, architecture, changes, said, extra = RIGHT[case]
    model = make_model(family, **changes)
    tensors = {**tensors_of(model, architecture), **{name: np.array(numbers) for name, numbers in extra.items()}}
    path = write(tmp_path / "model.gguf", architecture, settings_of(model, **{**said, **settings}), tensors)
    with pytest.raises(ConfigError, match=message):
        convert(path, tmp_path / "made")


def test_what_lies_beside_a_file_is_not_mixed_with_it_and_said(tmp_path: Path) -> None:
    path = plain(tmp_path)
    for name in ("adapter_config.json", "tokenizer.json", "generation_config.json"):
        (tmp_path / name).write_text('{"peft_type": "LORA", "eos_token_id": 77}')
    messages = convert(path, tmp_path / "made")
    assert any(
        "adapter_config.json, generation_config.json, tokenizer.json beside it is not" in line for line in messages
    )
    assert '"eos_token_id": 77' not in (tmp_path / "made" / "generation_config.json").read_text()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "made")) == N_TOKENS


def test_of_several_templates_the_one_that_is_taken_is_said(tmp_path: Path) -> None:
    path = plain(tmp_path, words={"chat_template.tool_use": "{{ tools }}"})
    messages = convert(path, tmp_path / "made")
    assert "it has 2 chat templates: the plain one is taken, tool_use is left out" in messages


@pytest.mark.parametrize(("cut", "n_tokens"), [("gpt-2", 1), ("smollm", 2), ("starcoder", 2), ("llama-bpe", 1)])
def test_digits_are_cut_as_the_file_says(cut: str, n_tokens: int, tmp_path: Path) -> None:
    convert(plain(tmp_path, words={"ggml.pre": cut}), tmp_path / "made")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    assert len(tokenizer("12", add_special_tokens=False).input_ids) == n_tokens
    assert tokenizer.decode(tokenizer("It's the 12th, 日本 12").input_ids) == "It's the 12th, 日本 12"


@pytest.mark.slow
def test_half_a_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(gguf_file().read_bytes()[: gguf_file().stat().st_size // 2])
    with pytest.raises(ConfigError, match="cannot be read as GGUF"):
        gguf.convert(path, tmp_path, "auto", lambda line: None)


def test_the_smallest_dtype_that_loses_nothing_is_taken() -> None:
    exact = torch.tensor([1.0, 0.5, -2.0])
    assert gguf._smallest_dtype({"x": exact}) == "bfloat16"
    assert gguf._smallest_dtype({"x": exact, "y": torch.tensor([1 + 2**-10])}) == "float16"
    assert gguf._smallest_dtype({"x": torch.tensor([0.1])}) == "float16", "none loses nothing"
    assert gguf._smallest_dtype({"x": torch.tensor([0.1, 1e6])}) == "bfloat16", "beyond the range of float16"
    assert gguf._rounding_loss(exact, torch.float16) == 0
    assert 0 < gguf._rounding_loss(torch.tensor([0.1]), torch.float16) < 2**-11
