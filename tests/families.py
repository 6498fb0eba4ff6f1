"""Tiny random checkpoints of many families, and the proof that spans of each compute what the whole model computes.

tests/compute/test_families.py runs the proof for each family and writes docs/families.md from what it finds.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoConfig, DynamicCache
from transformers.pytorch_utils import Conv1D

from swarmd.client.links.ops import StepInput
from swarmd.client.model.remote_model import remote_model
from swarmd.compute.cache.adapters import LoraUpdates
from swarmd.compute.cache.handover import StateShape, pack_state, unpack_state_untrusted
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.checkpoints.check import check_folder
from swarmd.compute.checkpoints.rehearsal import narrow_settings
from swarmd.compute.model import skeleton
from swarmd.compute.model.ends import Ends
from swarmd.compute.model.rows import RowFormat
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.rates import first_rates
from swarmd.compute.serving.torch_engine import describe
from swarmd.errors import Refused
from swarmd.protocol.models import manifest
from swarmd.protocol.models.model_layout import EACH_LAYER, ModelLayout, write_layout
from swarmd.protocol.wire.worker import Measured
from swarmd.values import Span
from swarmd.wire.history import Budget, History

N_LAYERS = 4
CUT = 2
VOCABULARY = 160
TOLERANCE = 1e-4  # of the largest absolute logit (or gradient)

TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": N_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    **EXPERTS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
INDEXED = {**LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_expand": 2, "mamba_d_ssm": 64}
ALTERNATING = ["linear_attention", "full_attention"] * 2
NO_HEAD_DIM = {"head_dim": None}

_DENSE = """
    apertus arcee beam biogpt bitnet bloom cohere cohere2 cwm diffllama ernie4_5 exaone4 falcon_mamba flint gemma gemma2
    gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese granite granite_swa helium hunyuan_v1_dense
    hyperclovax internlm3 iquestcoder jais2 kolibri1 lfm2 lfm3 llama mamba mellum ministral ministral3 mistral mpt
    nanochat nemotron olmo olmo2 olmo3 opt persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm
    starcoder2 vaultgemma xglm
"""
_EXPERTS = """
    afmoe aria_text cohere2_moe doge dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe gpt_oss granitemoe granitemoe_swa
    granitemoeshared hunyuan_v1_moe hy_v3 inkling_text jetmoe laguna llama4_text mimo_v2_flash minimax_m2 mixtral
    olmo_hybrid olmoe phimoe qwen2_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next solar_open
"""
_LATENT = "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 youtu"
_INDEXED = "axk2 deepseek_v32 glm_moe_dsa"

FAMILIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in _DENSE.split()},
    **dict.fromkeys(_EXPERTS.split(), EXPERTS),
    **dict.fromkeys(_LATENT.split(), LATENT),
    **dict.fromkeys(_INDEXED.split(), INDEXED),
    "bailing_hybrid": {**LATENT, "layer_group_size": 2},
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 4},
    "falcon": NO_HEAD_DIM,
    "falcon_h1": MAMBA,
    "gemma4_unified_text": {},
    "gpt-sw3": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**EXPERTS, **MAMBA, "layer_types": ALTERNATING, "shared_intermediate_size": 32},
    "jamba": {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "kimi_linear": {
        **LATENT,
        "q_lora_rank": None,
        "layer_types": ALTERNATING,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1},
    "minimax_m3_vl_text": EXPERTS,
    "moshi": {},
    "nemotron_h": {
        **EXPERTS,
        "num_hidden_layers": None,  # a kind for each block says how many there are
        "layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "moe_shared_expert_intermediate_size": 32,
    },
    "phi4_multimodal": {"audio_config": {"num_blocks": 2}, "vision_config": {"num_hidden_layers": 2}},
    "mistral4": {**LATENT, "head_dim": None},
    "longcat_flash": {**LATENT, "num_hidden_layers": 2 * N_LAYERS},  # of two attentions each
    "modernbert-decoder": {},
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16},
    "deepseek_v4": {**LATENT, "mlp_layer_types": ["hash_moe", "moe"] * 2},
    "hy_v4": EXPERTS,
    "zaya": {**EXPERTS, "num_experts_per_tok": 1, "router_hidden_size": 16},
}
"""What is served, with what makes its configuration small and valid; None takes a setting away."""

POOLED_STREAMS = {  # GLM 5 Next
    **LATENT,
    "qk_rope_head_dim": 0,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "index_kpool": 2,
}
MIXED_STREAMS = {  # Qwen 4 Exp, without per-layer embeddings
    **EXPERTS,
    "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}


def rope_of_parts(*sizes: int, **more: float) -> dict[str, Any]:
    """Rotary angles of positions of several parts, so many of a head's pairs each."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sizes], **more}}


_TOWERS = """
    aria aya_vision cohere2_vision cosmos3_omni deepseek_vl deepseek_vl_hybrid exaone4_5 gemma3 got_ocr2
    granite_docling granite_speech hyperclovax_vision_v2 idefics2 idefics3 inkling_mm_model internvl lfm2_vl lfm3_vl
    lighton_ocr llama4 llava llava_next llava_onevision minicpmv4_6 minimax_m3_vl mistral3 muse_glimmer nemotron_h_omni
    ovis2 qianfan_ocr qwen2_audio qwen3_5 qwen3_5_moe qwen3_asr qwen3_omni_moe_thinker qwen3_vl smolvlm video_llama_3
    vipllava voxtral
"""
_ROPE_OF_PARTS = "cosmos3_edge glm46v glm4v glm_ocr paddleocr_vl qwen2_5_omni_thinker qwen2_5_vl qwen2_vl"

SHARED_KEYS = {  # Gemma 4 of the E2B kind: an embedding for each layer, and layers that reuse another's keys
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
}

COMPOSITES: dict[str, dict[str, Any]] = {
    **{name: {} for name in _TOWERS.split()},
    **{name: {"text_config": rope_of_parts(1, 1, 2)} for name in _ROPE_OF_PARTS.split()},
    "gemma4": {"text_config": SHARED_KEYS},
    "gemma4_unified": {"image_token_id": 150, "audio_token_id": 151, "video_token_id": 152},
    "ernie4_5_vl_moe": {"text_config": {**EXPERTS, "moe_intermediate_size": [32, 32], **rope_of_parts(1, 1, 2)}},
    "glm5_next": {"text_config": POOLED_STREAMS},
    "qwen4_exp": {"text_config": MIXED_STREAMS},
    "glm4v_moe": {"text_config": {**EXPERTS, **rope_of_parts(1, 1, 0, partial_rotary_factor=0.5)}},
    "hunyuan_vl": {"text_config": rope_of_parts(1, 1, 1, 1)},
    "kimi_k25": {"vision_config": {"hidden_size": 32, "num_attention_heads": 2}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "qwen3_vl_moe": {"text_config": EXPERTS},
    "step3p7": {"text_config": {**EXPERTS, "sliding_window": 16}},
}
"""What reads pictures or sound beside text, and whose text part is served; with what makes it small and valid."""

REFUSED_COMPOSITES: dict[str, dict[str, Any]] = {
    "inkling2": {"text_config": EXPERTS, "vision_config": {"text_hidden_size": 32}},
    "mllama": {},
    "paligemma": {},
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_text with experts": (
        "gemma4_text",
        {**EXPERTS, "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 0},
    ),
    "gemma4_text with shared keys": ("gemma4_text", SHARED_KEYS),
    "glm_moe_dsa with shared indexers": (
        "glm_moe_dsa",
        {
            **INDEXED,
            "num_hidden_layers": 6,
            "indexer_types": ["full", "shared", "shared", "full", "shared", "full"],
        },
    ),
    "qwen4_exp with per-layer embeddings": (
        "qwen4_exp",
        {
            "text_config": {
                **MIXED_STREAMS,
                "ple_layer_ids": [1, 3],
                "ple_embed_dim": 128,
                "ngram_vocab_size_base": 64,
            }
        },
    ),
}
"""Other models of some of these families, whose blocks take more."""
SERVED = FAMILIES | COMPOSITES
DEPTHS_OF_TOWERS = ("num_hidden_layers", "depth", "num_layers", "encoder_layers", "num_global_layers", "n_layers")

_ENCODERS = """
    bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert data2vec-text electra ernie
    git marian mbart megatron-bert mvp pegasus rembert roberta roberta-prelayernorm roc_bert roformer trocr xlm
    xlm-roberta xlm-roberta-xl xmod
"""

REFUSED: dict[str, dict[str, Any]] = {
    **{name: {} for name in _ENCODERS.split()},  # or made like one, or one half of a translator
    "recurrent_gemma": {},
    "cpmant": {},
    "ctrl": {},
    "hrm_text": {},
    "inkling2_text": EXPERTS,
    "minimax": EXPERTS,
    "rwkv": {},
    "openai-gpt": {},
    "xlstm": {"num_blocks": 4, "num_heads": 4},
    "zamba2": {
        "num_hidden_layers": 6,
        "layer_types": ["linear_attention", "hybrid"] * 3,
        "hybrid_layer_ids": [1, 3, 5],
    },
}
"""What is refused when a model is added or loaded, each with its own reason."""


@dataclass(frozen=True)
class Proof:
    """Largest differences between two spans and the whole model, relative to the largest value."""

    full: float
    cached: float
    padded: float
    gradient: float
    lora: float
    operations: float  # appending, taking back, reordering and handing over, in each span
    ends: float  # a gateway's embedding, norm and head around the spans
    can_crop: bool
    can_hand_over: bool  # what sessions keep, to another server
    batching: str
    travels: str  # of a token
    cuts: str  # where it can be cut

    @property
    def worst(self) -> float:
        return max(self.full, self.cached, self.padded, self.gradient, self.lora, self.operations, self.ends)


class LocalSession:
    """Two spans in this process, behind the interface that the client's model uses."""

    can_fly = False

    def __init__(self, spans: list[LoadedSpan], max_tokens: int) -> None:
        self.layer_arity = spans[0].layer_arity
        self._spans = spans
        self._caches = [span.new_cache(max_tokens=max_tokens) for span in spans]
        self._n_tokens = 0
        self._mask: torch.Tensor | None = None

    def step(self, step: StepInput) -> torch.Tensor | None:
        hidden = step.hidden
        assert hidden is not None
        assert step.positions is not None
        if step.mask is not None or self._mask is not None:
            b, t, _ = hidden.shape
            past = torch.ones(b, self._n_tokens) if self._mask is None else self._mask
            mask = torch.ones(b, t) if step.mask is None else step.mask
            self._mask = torch.cat([past, mask], 1).long()
        for span, cache in zip(self._spans, self._caches, strict=True):
            hidden = span.forward(hidden, step.positions.long(), self._mask, cache, self._n_tokens)
        self._n_tokens += hidden.shape[1]
        return hidden

    def close(self) -> None: ...


def make_named(name: str, folder: Path) -> Path:
    """Write a random checkpoint of a family or of one of its variants."""
    family, changes = VARIANTS.get(name) or (name, SERVED[name])
    return make(family, folder, changes)


def make(model_type: str, folder: Path, changes: dict[str, Any]) -> Path:
    """Write a random checkpoint; weights are large enough for differences to show."""
    torch.manual_seed(0)
    if model_type in (*COMPOSITES, *REFUSED_COMPOSITES):
        config = _composite(model_type, changes)
    else:
        config = AutoConfig.for_model(model_type, **_present({**TINY, **changes}))
    model = skeleton.family_class(config)(config).float()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    return folder


def _present(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


def _composite(model_type: str, changes: dict[str, Any]) -> Any:
    """A small configuration of towers and a decoder: its own settings, narrowed."""
    kind: Any = CONFIG_MAPPING[model_type]
    whole = kind()
    settings: dict[str, Any] = {}
    for name, section in whole.to_dict().items():
        if isinstance(section, dict) and name.endswith("_config") and name != "text_config":
            settings[name] = {**_cut_depth(narrow_settings(section, 8, 4)), **changes.get(name, {})}
    text = skeleton.text_config(whole).model_type
    of_text = {**TINY, **FAMILIES.get(text, REFUSED.get(text, {})), **changes.get("text_config", {})}
    others = {name: value for name, value in changes.items() if not name.endswith("_config")}
    return kind(**settings, **others, text_config={"model_type": text, **_present(of_text)})


def _cut_depth(section: dict[str, Any]) -> dict[str, Any]:
    """Leave two layers of a tower, and of lists with one value for each of them two values."""
    depths = [value for name, value in section.items() if name in DEPTHS_OF_TOWERS and isinstance(value, int)]
    cut: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, dict):
            cut[name] = _cut_depth(value)
        elif name in DEPTHS_OF_TOWERS and isinstance(value, int):
            cut[name] = min(value, 2)
        else:
            cut[name] = value[:2] if isinstance(value, list) and len(value) in depths else value
    return cut


def lay_out(folder: Path) -> ModelLayout:
    """Do what adding does: check a checkpoint, and have its configuration say how it is cut. Raises ConfigError."""
    layout = check_folder(folder, manifest.read_folder(folder))
    path = folder / "config.json"
    path.write_text(json.dumps(write_layout(json.loads(path.read_text()), layout)))
    return layout


def prove(folder: Path) -> Proof:
    """Compare two spans and a client with the whole model. Raises ConfigError when the family is refused."""
    layout = lay_out(folder)
    whole = skeleton.load_whole(folder, torch.float32)
    n = layout.n_blocks(skeleton.count_layers(whole.config))
    bounds = (0, CUT, n) if layout == EACH_LAYER else range(n + 1)  # else at each border that there is
    spans = [LoadedSpan(folder, Span(*pair), torch.float32) for pair in pairwise(bounds)]
    for span in spans:  # as a worker does
        span.self_test()
        first_rates(span, span.sample, 0.01)
        assert describe(span, "m", Measured()).cache_bytes_per_token > 0
    lanes: Any = None  # nothing is trained through this client
    model = remote_model(folder, lambda batch, tokens, own: LocalSession(spans, tokens), lanes, torch.float32)
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = _error(model(ids, use_cache=False).logits, whole(ids, use_cache=False).logits)
        cached = _error(_decode(model, ids[:1], None), _decode(whole, ids[:1], None))
        mask = torch.ones_like(ids)
        mask[0, :4] = 0
        padded = _error(_decode(model, ids, mask), _decode(whole, ids, mask))
    gradient, lora = _gradient_errors(whole, spans, ids, Ends(folder, torch.float32).embed(ids.tolist(), [0, 0]))
    operations = [operations_error(span) for span in spans]
    ends = _ends_error(folder, whole, spans, ids[:1])
    return Proof(
        full=full,
        cached=cached,
        padded=padded,
        gradient=gradient,
        lora=lora,
        operations=max(each.error for each in operations),
        ends=ends,
        can_crop=all(each.can_crop for each in operations),
        can_hand_over=all(each.can_hand_over for each in operations),
        batching=spans[0].batching.split(":")[0],
        travels=_describe_row(spans[0].family.format, whole.config),
        cuts="anywhere" if not layout.first_layers else f"before {', '.join(map(str, layout.first_layers[1:]))} of {n}",
    )


def _describe_row(rows: RowFormat, config: Any) -> str:
    """What travels of a token, by the width d of hidden states."""
    n_streams = rows.hidden // int(skeleton.text_config(config).hidden_size)
    bands = [f"{band.name} {'of each layer' if band.kind == 'each' else ''}".strip() for band in rows.layout.sidebands]
    return " + ".join([f"{n_streams} d" if n_streams > 1 else "d", *bands])


def _ends_error(folder: Path, whole: Any, spans: list[LoadedSpan], ids: torch.Tensor) -> float:
    ends = Ends(folder, torch.float32)
    (hidden,) = ends.embed(ids.tolist(), [0])
    for span in spans:
        hidden = span.forward(hidden, torch.arange(ids.shape[1]).unsqueeze(0))
    with torch.no_grad():
        return _error(ends.logits(hidden[0], spans[0].layer_arity), whole(ids, use_cache=False).logits[0])


def _decode(model: Any, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Logits of the last token of a prompt and of three more, one after the other, from a cache."""
    cache = model.new_cache(32) if hasattr(model, "new_cache") else DynamicCache(config=model.config)
    name = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
    logits, n = [], ids.shape[1] - 3
    for start, end in ((0, n), (n, n + 1), (n + 1, n + 2), (n + 2, n + 3)):
        seen = None if mask is None else mask[:, :end]
        positions = torch.arange(start, end)[None] if mask is None else (mask.cumsum(1) - 1).clamp(0)[:, start:end]
        out = model(ids[:, start:end], attention_mask=seen, position_ids=positions, use_cache=True, **{name: cache})
        logits.append(out.logits[:, -1])
    return torch.stack(logits)


class Operations(NamedTuple):
    """How far a session's operations are from the same tokens at once, and which of them there are."""

    error: float
    can_crop: bool
    can_hand_over: bool


def operations_error(span: LoadedSpan) -> Operations:
    """Compare a session's operations with the same tokens at once.

    Six tokens of two rows, two more of which one is taken back and another one follows, rows that change places, and a
    cache that another worker goes on with.
    """
    rng = torch.Generator().manual_seed(2)
    hidden = span.family.random_hidden(2, 9, rng)
    positions = torch.arange(9, device=span.device).expand(2, -1)

    def append(cache: SpanCache, start: int, end: int, rows: Sequence[int] = (0, 1)) -> torch.Tensor:
        return span.forward(hidden[list(rows), start:end], positions[:, start:end], None, cache, start)

    expected, cache = span.forward(hidden, positions), span.new_cache()
    outs = [append(cache, 0, 6)]
    cache.record_past()
    outs.append(append(cache, 6, 8))
    can_crop = not cache.refuses_crop(1)
    if can_crop:
        cache.crop(1)
        append(cache, 7, 8)
    heirs = [cache]
    with suppress(Refused):  # such a session is replayed
        state = pack_state(cache, History(False, Budget()), None, 8)
        shape = StateShape(2, 16, span.hidden_size, span.dtype, 0)
        heirs.append(span.new_cache())
        unpack_state_untrusted(state, heirs[1], History(False, Budget()), span.example_cache(span.span), shape)
    for each in heirs:
        each.reorder(torch.tensor([1, 0], device=span.device))
        outs.append(append(each, 8, 9, (1, 0))[[1, 0]])
    whole = torch.cat([expected, *[expected[:, 8:]] * (len(heirs) - 1)], 1)
    return Operations(_error(torch.cat(outs, 1), whole), can_crop, len(heirs) > 1)


def _gradient_errors(
    whole: Any, spans: list[LoadedSpan], ids: torch.Tensor, rows: list[torch.Tensor]
) -> tuple[float, float]:
    """Differences of gradients with respect to what enters the first block, and to a LoRA of one of its matrices."""
    layers, seen = skeleton.decoder_layers(whole), {}
    name, matrix = first_matrix(whole, layers[0], ids)
    rng = torch.Generator().manual_seed(1)
    is_conv = isinstance(matrix, Conv1D)  # GPT-2's linear layers
    n_in, n_out = (matrix.nx, matrix.nf) if is_conv else (matrix.in_features, matrix.out_features)
    a = torch.randn(2, n_in, generator=rng).requires_grad_()
    b = torch.randn(n_out, 2, generator=rng).requires_grad_()
    lora = LoraUpdates({name: (a, b, 1.0)})

    def enter(module: Any, args: Any, kwargs: Any) -> Any:
        hidden = (args[0] if args else kwargs["hidden_states"]).detach().requires_grad_()
        seen["in"] = hidden
        return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

    def leave(module: Any, args: Any, out: Any) -> None:
        seen["out"] = out[0] if isinstance(out, tuple) else out

    hooks = [
        layers[0].register_forward_pre_hook(enter, with_kwargs=True),
        layers[-1].register_forward_hook(leave),
        matrix.register_forward_hook(lambda _, args, out: out + args[0] @ a.T @ b.T),
    ]
    whole(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    leaving = seen["out"].flatten(2)
    weights = torch.randn(leaving.shape, generator=rng)
    of_input, *of_lora = torch.autograd.grad((leaving * weights).sum(), (seen["in"], a, b))
    expected = (of_input.flatten(2), *of_lora)
    entered = torch.cat(rows).clone().requires_grad_()
    hidden_of = spans[0].family.format.hidden_of
    positions = torch.arange(ids.shape[1]).expand(ids.shape[0], -1)
    out = entered
    for span in spans:
        if span.adapters.block_of(name) is not None:
            span.adapters.hook(lora)
        for block in span.span.blocks():  # as fine-tuning computes them
            own = lora if span.adapters.block_of(name) == block else None
            out = span.forward_with_grad(out, positions, None, Span(block, block + 1), own)
    of_rows, *of_ours = torch.autograd.grad((hidden_of(out) * weights).sum(), (entered, a, b))
    got = (hidden_of(of_rows), *of_ours)
    errors = [_error(ours, theirs) for ours, theirs in zip(got, expected, strict=True)]
    return errors[0], max(errors[1:])


def first_matrix(whole: Any, layer: Any, ids: torch.Tensor) -> tuple[str, Any]:
    """The first linear layer of a block that its forward calls, with its name in the model."""
    called: list[Any] = []
    hooks = [m.register_forward_hook(lambda module, *_: called.append(module)) for m in layer.modules()]
    with torch.no_grad():
        whole(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    matrix = next(module for module in called if isinstance(module, torch.nn.Linear | Conv1D))
    return next(name for name, module in whole.named_modules() if module is matrix), matrix


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    error = (got - expected).abs().max() / expected.abs().max().clamp(min=1e-9)
    return float(error) if torch.isfinite(error) else float("inf")
