"""Can the blocks of this configuration be computed apart? Tried on a small model of it, before anything is published.

A worker finds out when it has loaded a span: too late for who publishes a model of 100 GB. So a model of the same
family and the same settings, but narrow (heads, widths, experts and vocabulary are divided), gets random numbers, and
what a worker does when it starts is done with its blocks. Whether the narrow model means anything is seen from itself:
whole, it must give finite numbers, else another width is tried, and where none does, the worker decides as before.
What blocks are given beside hidden states is watched in the whole model: what changes with the tokens cannot be had by
a peer in the middle of a chain, and is named.

Source of the idea: a control experiment.
"""

from __future__ import annotations

import inspect
import itertools
import logging
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from swarmd.compute.model import skeleton
from swarmd.compute.model.plain_config import building
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.errors import ConfigError
from swarmd.values import Span

logger = logging.getLogger(__name__)

BlockTrace = list[tuple[dict[str, Any], torch.Tensor]]
"""Of each block: what it was given, by name, and what it gave as its hidden states."""
HEADS = re.compile(r"(heads|n_head|head_kv)$")
"""Settings that count heads: all are divided by one number."""
WIDTHS = re.compile(
    r"(hidden|intermediate|ffn|embed|inner|mlp)\w*_(size|dim)$|^(n_embd|d_model|d_ff|n_inner|lru_width|mamba_d_ssm)$"
)
"""Settings that are as wide as all heads of a block together."""
WIDTHS_OF_A_HEAD = re.compile(r"(head_dim|_rank|lowrank|rotary_dim|d_head|kv_channels|per_layer_input)$")
MODEL_WIDTHS = ("hidden_size", "n_embd", "d_model")
COUNTS_OF_HEADS = ("num_attention_heads", "n_head", "n_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MOST_EXPERTS = 16  # in the small model; the largest count of experts for each token is 12, of few
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
SMALL_VOCABULARY = 512  # tokens of the small model: a table of them is small beside blocks
N_TOKENS = 6  # of the texts that blocks are watched with
DIVISORS = (16, 8, 4, 2, 1)  # of a head's width: the narrowest model that works is taken
LEAST_WIDTH = 8  # of a head: families cut it in halves and quarters
MOST_PARAMETERS = 64_000_000  # of a small model: a quarter of a GiB, and a second or two
N_TRIALS = 2  # so many small models have to fail before a family is refused: one may be unlucky
PLAIN = LoadOptions(has_plain_layers=True)  # few passes: the search for fast kernels would take longer
TOLERANCE = 1e-3  # between blocks one by one and all of them, relative to the largest number


# The experiment, for one configuration:
#
#     narrow it -> build a small model -> compute a text, whole          -> finite? else narrow it in another way
#                                      -> compute it block by block, as a chain of peers would
#                                      -> the same numbers: the family can be served
#
# What fails small might work large: a family is refused only if all of ``N_TRIALS`` models that are sound as a whole
# fail in parts, or as soon as the reason is seen (a block is given something that changes with the tokens). Where no
# small model is sound nothing is refused: the worker that loads the real one decides.
def rehearse(folder: Path, config: PretrainedConfig) -> None:
    """Refuse a family whose blocks need more than peers hand on. Raises ConfigError."""
    text = skeleton.text_config(config)
    has_own_class = type(text) in AutoModelForCausalLM._model_mapping
    failures: list[str] = []
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these matrices are so small that several wait for each other
    try:
        for model in itertools.islice(_small_models(text if has_own_class else config), N_TRIALS):
            failure, is_seen = _try_apart(model)
            if not failure:
                return
            failures.append(failure)
            if is_seen:
                break
    finally:
        torch.set_num_threads(n_threads)
    if failures:
        raise ConfigError(f"{folder}: {failures[0]}: this family cannot be served")


def _small_models(config: PretrainedConfig) -> Iterator[PreTrainedModel]:
    """Yield models of the narrowest widths that give finite numbers, drawn anew each time."""
    settings = config.to_dict()
    text = skeleton.text_config(config).to_dict()
    head_width = _narrowest_head(text)
    least_width = min(LEAST_WIDTH, head_width)
    width_divisors = [d for d in DIVISORS if head_width % d == 0 and head_width // d >= least_width]
    common_heads = _common_heads(text)
    heads_divisors = sorted({common_heads, max(1, common_heads // 4), 1}, reverse=True)
    for heads_divisor, width_divisor in itertools.product(heads_divisors, width_divisors):
        narrow = narrow_settings(settings, width_divisor, heads_divisor)
        for seed in itertools.count():
            model = _build_small(type(config), narrow, seed)
            if model is None:
                break
            yield model


def _build_small(
    kind: type[PretrainedConfig],
    settings: dict[str, Any],
    seed: int,
) -> PreTrainedModel | None:
    """Build a model with random numbers; None if it cannot be built, is not small, or does not work."""
    try:
        with building("no small model"), torch.random.fork_rng():  # a family draws numbers, too
            config = kind.from_dict(settings)
            cls = skeleton.family_class(config)
            with torch.device("meta"):
                n_parameters = sum(parameter.numel() for parameter in cls(config).parameters())
            if n_parameters > MOST_PARAMETERS:
                return None
            model = cls(config).float().eval()
            _draw_parameters(model, torch.Generator().manual_seed(seed))
            trace = _trace_blocks(model, skeleton.decoder_layers(model), 0)
    except ConfigError as error:
        logger.debug("%s", error)
        return None  # these widths do not fit together, or nothing can be said of the family
    return model if all(torch.isfinite(out).all() for _, out in trace) else None


def _try_apart(model: PreTrainedModel) -> tuple[str, bool]:
    """Do what a worker does with the blocks: why that fails, "" if it does not, and whether the reason was seen."""
    family = str(model.config.model_type)
    trace = _trace_blocks(model, skeleton.decoder_layers(model), 0)
    needed = _needed_inputs(model, trace)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            with building("a trial fails"):
                _compare_blocks(Path(folder), trace)
        except ConfigError as error:
            if needed:
                listed = " and ".join(needed)
                return f"blocks of {family} need {listed}, and peers hand on hidden states only", True
            words = str(error).replace(folder, "").removesuffix(": this family cannot be served")
            reason = " ".join(words.removesuffix(": unsupported family").split())[:300]
            return f"blocks of {family} cannot be computed one by one ({reason})", False
    return "", False


def _compare_blocks(folder: Path, trace: BlockTrace) -> None:
    """Do a worker's own tests, and compare the blocks one by one with all of them.

    Raises ConfigError, or what a family raises.
    """
    every = Span(0, len(trace))
    span = LoadedSpan(folder, every, torch.float32, PLAIN)
    span.self_test()
    hidden = trace[0][0]["hidden_states"].flatten(2)
    expected = trace[-1][1].flatten(2)
    positions = torch.arange(N_TOKENS).unsqueeze(0)
    for block in every.blocks():
        hidden = span.forward(hidden, positions, hop=Span(block, block + 1))
    largest = expected.abs().max().clamp(min=1e-9)
    error = float((hidden - expected).abs().max() / largest)
    if not error <= TOLERANCE:
        raise ConfigError(f"one by one and all at once they differ by {error:.2g}")
    if len(every) > 1:
        second_half = Span(len(every) // 2, len(every))
        LoadedSpan(folder, second_half, torch.float32, PLAIN).self_test()


def _needed_inputs(model: PreTrainedModel, trace: BlockTrace) -> list[str]:
    """Name what blocks are given that peers do not hand on.

    That is what changes with the tokens, beside hidden states.
    """
    other_trace = _trace_blocks(model, skeleton.decoder_layers(model), 1)
    names: list[str] = []
    for (inputs, _), (other_inputs, _) in zip(trace, other_trace, strict=True):
        for name in inputs:
            if name == "hidden_states" or name in names:
                continue
            if not _is_same(inputs[name], other_inputs.get(name)):
                names.append(name)
    return names


@torch.no_grad()
def _trace_blocks(model: PreTrainedModel, layers: nn.ModuleList, seed: int) -> BlockTrace:
    """Compute one text, and note what each block is given and gives."""
    trace: BlockTrace = []
    layer_inputs: list[dict[str, Any]] = []

    def enter(
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        names = list(inspect.signature(type(layer).forward).parameters)[1:]
        by_name = {**dict(zip(names, args, strict=False)), **kwargs}
        first = next(iter(by_name)) if "hidden_states" not in by_name else "hidden_states"
        by_name = {"hidden_states": by_name.pop(first), **by_name}
        layer_inputs.append({name: _copy_value(value) for name, value in by_name.items()})

    def leave(
        layer: nn.Module,
        args: tuple[Any, ...],
        out: Any,
    ) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        trace.append((layer_inputs[-1], hidden.clone()))

    hooks = [layer.register_forward_pre_hook(enter, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(leave) for layer in layers]
    top = min(SMALL_VOCABULARY, int(skeleton.text_config(model.config).vocab_size))
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, top, (1, N_TOKENS), generator=rng)
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return trace


def _copy_value(value: Any) -> Any:
    """Copy a value as it is now: what blocks share is changed in place."""
    if torch.is_tensor(value):
        return value.clone()
    if isinstance(value, Mapping):
        return {key: _copy_value(item) for key, item in value.items()}
    return [_copy_value(item) for item in value] if isinstance(value, list | tuple) else None


def _is_same(first: Any, second: Any) -> bool:
    if torch.is_tensor(first) and torch.is_tensor(second):
        return first.shape == second.shape and torch.equal(first, second)
    if isinstance(first, dict) and isinstance(second, dict):
        if first.keys() != second.keys():
            return False
        return all(_is_same(first[key], second[key]) for key in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_is_same, first, second))
    return first is None and second is None


def _draw_parameters(model: nn.Module, rng: torch.Generator) -> None:
    """Fill a model with random numbers, large enough for each part to matter."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.8 / math.sqrt(parameter.shape[-1]), generator=rng)
            elif parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=rng)
                parameter.add_(noise.to(parameter.dtype) * 0.05)


def narrow_settings(
    settings: Mapping[str, Any],
    width_divisor: int,
    heads_divisor: int,
) -> dict[str, Any]:
    """Return the settings with heads, widths, experts and vocabulary of a small model, at whatever depth."""
    narrow: dict[str, Any] = {}
    for name, value in settings.items():
        divisor = _find_divisor(str(name), width_divisor, heads_divisor)
        if isinstance(value, dict):
            narrow[name] = narrow_settings(value, width_divisor, heads_divisor)
        elif _is_count(value) and divisor > 1:
            narrow[name] = max(1, value // divisor)
        elif isinstance(value, list) and value and all(map(_is_count, value)) and divisor > 1:
            narrow[name] = [max(1, number // divisor) for number in value]
        elif name in EXPERTS and _is_count(value):
            narrow[name] = min(value, MOST_EXPERTS)
        elif name in VOCABULARIES and _is_count(value):
            narrow[name] = min(value, SMALL_VOCABULARY)
        elif str(name).endswith("token_id") and isinstance(value, int | list):
            narrow[name] = 0
        else:
            narrow[name] = value
    return narrow


def _find_divisor(name: str, width_divisor: int, heads_divisor: int) -> int:
    """Return what a setting of this name is divided by."""
    if WIDTHS_OF_A_HEAD.search(name):
        return width_divisor
    if HEADS.search(name):
        return heads_divisor
    return width_divisor * heads_divisor if WIDTHS.search(name) else 1


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _common_heads(text: Mapping[str, Any]) -> int:
    """Return what all counts of heads, but one head for all, can be divided by, with two of the most left."""
    named = [value for name, value in text.items() if HEADS.search(str(name))]
    counts = [value for value in named if _is_count(value) and value > 1]
    common = math.gcd(*counts) if counts else 1
    while common > 1 and max(counts) // common < 2:
        common //= 2
    return max(1, common)


def _narrowest_head(text: Mapping[str, Any]) -> int:
    """Return the least width of a head, written or implied."""
    named = [value for name, value in text.items() if str(name).endswith("head_dim")]
    widths = [value for value in named if _is_count(value)]
    width = _first_count(text, MODEL_WIDTHS)
    n_heads = _first_count(text, COUNTS_OF_HEADS)
    implied = width // n_heads if 0 < n_heads <= width else LEAST_WIDTH * DIVISORS[0]
    return min(widths, default=implied)


def _first_count(text: Mapping[str, Any], names: tuple[str, ...]) -> int:
    counts = [text[name] for name in names if _is_count(text.get(name))]
    return counts[0] if counts else 0
