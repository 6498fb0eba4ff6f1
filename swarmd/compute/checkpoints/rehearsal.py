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

import itertools
import json
import logging
import math
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from swarmd.compute.model import skeleton
from swarmd.compute.model.plain_config import building
from swarmd.compute.passes.family import MOST_ARITY, PROBE_ERRORS
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.errors import ConfigError
from swarmd.protocol.models.configuration import layout_of
from swarmd.protocol.models.manifest import read_config
from swarmd.protocol.models.model_layout import EACH_LAYER, ModelLayout, Sideband, write_layout
from swarmd.values import Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """What a layer was given, by name, and what it gave: hidden states, and what comes behind them."""

    inputs: dict[str, Any]
    hidden: torch.Tensor
    returned: tuple[Any, ...]


Trace = list[TracedLayer]
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
VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input", "ngram_vocab_size_base")
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
#                                      -> compute it layer by layer, as a chain of peers would
#                                      -> the same numbers: each layer is a block
#                                      -> others: what are layers given beside hidden states (sidebands)?
#                                      -> cut in two at each border, with these: where are the numbers the same?
#                                      -> what lies between such borders is a block; block by block once more
#
# What fails small might work large: a family is refused only if all of ``N_TRIALS`` models that are sound as a whole
# fail in parts, or as soon as the reason is seen (a block is given something that changes with the tokens). Where no
# small model is sound nothing is refused: the worker that loads the real one decides.
def rehearse(folder: Path, config: PretrainedConfig) -> ModelLayout:
    """Find out what blocks of a model are, and what travels between them. Raises ConfigError for what cannot be."""
    text = skeleton.text_config(config)
    has_own_class = type(text) in AutoModelForCausalLM._model_mapping
    failures: list[str] = []
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # these matrices are so small that several wait for each other
    try:
        for model in itertools.islice(_small_models(text if has_own_class else config), N_TRIALS):
            tried = _try_apart(model)
            if not tried.failure:
                return _at_full_width(tried.layout, skeleton.text_config(model.config), text)
            failures.append(tried.failure)
            if tried.is_seen:
                break
    finally:
        torch.set_num_threads(n_threads)
    if failures:
        raise ConfigError(f"{folder}: {failures[0]}: this family cannot be served")
    return EACH_LAYER


def _at_full_width(layout: ModelLayout, small: PretrainedConfig, full: PretrainedConfig) -> ModelLayout:
    """Return what was found of a small model for the true one. Raises ConfigError."""
    bands = tuple(_widen(band, small.to_dict(), full.to_dict()) for band in layout.sidebands)
    return msgspec.structs.replace(layout, sidebands=bands)


def _widen(band: Sideband, small: Mapping[str, Any], full: Mapping[str, Any]) -> Sideband:
    """Make a sideband as wide as the setting says whose value it has in the small model. Raises ConfigError."""
    if band.kind == "ids":
        return band
    same = [name for name, value in small.items() if _is_count(value) and value == band.size]
    if not same:
        raise ConfigError(f"no setting says how wide {band.name} is: this family cannot be served")
    words = set(band.name.split("_"))
    name = max(same, key=lambda name: (len(words & set(name.split("_"))), -len(name)))
    return msgspec.structs.replace(band, size=full[name])


def _small_models(config: PretrainedConfig) -> Iterator[PreTrainedModel]:
    """Yield models of the narrowest widths that give finite numbers, drawn anew each time."""
    settings = write_layout(config.to_dict(), EACH_LAYER)
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
    return model if all(torch.isfinite(layer.hidden).all() for layer in trace) else None


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What came of a small model: its layout, or why it has none, and whether the reason was seen."""

    layout: ModelLayout = EACH_LAYER
    failure: str = ""
    is_seen: bool = False


def _try_apart(model: PreTrainedModel) -> Rehearsal:
    """Do what a worker does with the blocks, first of one layer each and nothing but hidden states between them."""
    family = str(model.config.model_type)
    trace = _trace_blocks(model, skeleton.decoder_layers(model), 0)
    needed = _needed_inputs(model, trace)
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        first = _try_layout(model, folder, trace, EACH_LAYER)
        if not first.failure:
            return first
        bands = tuple(filter(None, (_find_sideband(name, trace) for name in needed)))
        layout = ModelLayout(sidebands=bands)
        try:
            _save(model, folder, layout)
            layout = msgspec.structs.replace(layout, first_layers=_find_first_layers(folder, trace))
        except (*PROBE_ERRORS, ConfigError) as error:
            logger.debug("%s: no borders: %s", family, error)
        second = _try_layout(model, folder, trace, layout) if layout != EACH_LAYER else first
    if not second.failure:
        return second
    if _share_weights(skeleton.decoder_layers(model)):
        return Rehearsal(
            failure=f"layers of {family} share weights, and each server would need those of all", is_seen=True
        )
    if needed:
        listed = " and ".join(needed)
        return Rehearsal(
            failure=f"blocks of {family} need {listed}, and peers hand on hidden states only", is_seen=True
        )
    return Rehearsal(failure=f"blocks of {family} cannot be computed one by one ({first.failure})")


def _try_layout(model: PreTrainedModel, folder: Path, trace: Trace, layout: ModelLayout) -> Rehearsal:
    _save(model, folder, layout)
    try:
        with building("a trial fails"):
            _compare_blocks(folder, trace)
    except ConfigError as error:
        words = str(error).replace(str(folder), "").removesuffix(": this family cannot be served")
        reason = " ".join(words.removesuffix(": unsupported family").split())[:300]
        logger.debug("%s: %s: %s", model.config.model_type, layout, reason)
        return Rehearsal(failure=reason)
    return Rehearsal(layout)


def _share_weights(layers: nn.ModuleList) -> bool:
    """Is a weight a part of several layers?"""
    holders = Counter(id(weight) for layer in layers for weight in set(layer.parameters()))
    return max(holders.values()) > 1


def _save(model: PreTrainedModel, folder: Path, layout: ModelLayout) -> None:
    """Write a small model as a checkpoint whose configuration says this layout."""
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(write_layout(config, layout)), encoding="utf-8")


def _compare_blocks(folder: Path, trace: Trace) -> None:
    """Do a worker's own tests, and compare the blocks one by one with all of them.

    Raises ConfigError, or what a family raises.
    """
    every = Span(0, layout_of(read_config(folder)).n_blocks(len(trace)))
    span = LoadedSpan(folder, every, torch.float32, PLAIN)
    span.self_test()
    rows, positions = _entering_rows(span, trace), torch.arange(N_TOKENS).unsqueeze(0)
    for block in every.blocks():
        rows = span.forward(rows, positions, hop=Span(block, block + 1))
    error = _error_of(span, rows, trace)
    if not error <= TOLERANCE:
        raise ConfigError(f"one by one and all at once they differ by {error:.2g}")
    if len(every) > 1:
        second_half = Span(len(every) // 2, len(every))
        LoadedSpan(folder, second_half, torch.float32, PLAIN).self_test()


def _find_first_layers(folder: Path, trace: Trace) -> tuple[int, ...]:
    """Find the layers before which the model can be cut in two; empty where it can be before any."""
    n_layers = len(trace)
    every = Span(0, n_layers)
    span = LoadedSpan(folder, every, torch.float32, PLAIN)
    entering = _entering_rows(span, trace)
    positions = torch.arange(N_TOKENS).unsqueeze(0)
    first_layers = [0]
    for border in range(1, n_layers):
        hops = Span(0, border), Span(border, n_layers)
        try:
            rows = _compute_in_passes(span, entering, positions, hops, (0, N_TOKENS))
            passes = _compute_in_passes(span, entering, positions, hops, (0, N_TOKENS - 2, N_TOKENS))
        except PROBE_ERRORS as error:
            logger.debug("no cut before layer %d: %s", border, error)
            continue
        if max(_error_of(span, rows, trace), _error_of(span, passes, trace)) <= TOLERANCE:
            first_layers.append(border)
    return () if len(first_layers) == n_layers else tuple(first_layers)


def _compute_in_passes(
    span: LoadedSpan, rows: torch.Tensor, positions: torch.Tensor, hops: Sequence[Span], bounds: Sequence[int]
) -> torch.Tensor:
    """Compute a text by a chain of hops, pass after pass, each hop with a cache of its own."""
    caches = [span.new_cache(hop) for hop in hops]
    passes = []
    for start, end in itertools.pairwise(bounds):
        out = rows[:, start:end]
        for hop, cache in zip(hops, caches, strict=True):
            out = span.forward(out, positions[:, start:end], None, cache, start, hop)
        passes.append(out)
    return torch.cat(passes, 1)


def _entering_rows(span: LoadedSpan, trace: Trace) -> torch.Tensor:
    """What a client sends of the text that was traced."""
    given = [layer.inputs for layer in trace]
    return span.family.format.pack(given[0]["hidden_states"].flatten(2), given)


def _error_of(span: LoadedSpan, rows: torch.Tensor, trace: Trace) -> float:
    """Return how far rows that leave the last block are from what the whole gave there."""
    expected = trace[-1].hidden.flatten(2)
    error = (span.family.format.hidden_of(rows) - expected).abs().max() / expected.abs().max().clamp(min=1e-9)
    return float(error) if torch.isfinite(error) else math.inf


def _find_sideband(name: str, trace: Trace) -> Sideband | None:
    """Say how what layers are given by this name could travel; None where it cannot."""
    given: list[Any] = [layer.inputs.get(name) for layer in trace]
    behind = given[1:] or given
    if not all(torch.is_tensor(value) and value.shape[:2] == (1, N_TOKENS) for value in behind):
        return None
    first = behind[0]
    is_the_same = all(_is_same(value, first) for value in given)
    if not first.is_floating_point():
        return Sideband(name, "ids") if is_the_same and first.ndim == 2 else None
    if not all(value.ndim == 3 and value.shape == first.shape for value in behind):
        return None
    size = int(first.shape[2])
    if is_the_same:
        return Sideband(name, "all", size)
    for place in range(MOST_ARITY - 1):
        returned = [layer.returned[place] if place < len(layer.returned) else None for layer in trace[:-1]]
        if returned and all(map(_is_same, returned, behind)):
            return Sideband(name, "next", size, place)
    return Sideband(name, "each", size) if torch.is_tensor(given[0]) else None


def _needed_inputs(model: PreTrainedModel, trace: Trace) -> list[str]:
    """Name what layers are given that changes with the tokens, beside hidden states."""
    other_trace = _trace_blocks(model, skeleton.decoder_layers(model), 1)
    names: list[str] = []
    for layer, other in zip(trace, other_trace, strict=True):
        for name in layer.inputs:
            if name == "hidden_states" or name in names:
                continue
            if not _is_same(layer.inputs[name], other.inputs.get(name)):
                names.append(name)
    return names


@torch.no_grad()
def _trace_blocks(model: PreTrainedModel, layers: nn.ModuleList, seed: int) -> Trace:
    """Compute one text, and note what each layer is given and gives."""
    trace: Trace = []
    layer_inputs: list[dict[str, Any]] = []

    def enter(
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        by_name = {**dict(zip(skeleton.argument_names(layer), args, strict=False)), **kwargs}
        first = next(iter(by_name)) if "hidden_states" not in by_name else "hidden_states"
        by_name = {"hidden_states": by_name.pop(first), **by_name}
        layer_inputs.append({name: _copy_value(value) for name, value in by_name.items()})

    def leave(
        layer: nn.Module,
        args: tuple[Any, ...],
        out: Any,
    ) -> None:
        hidden, *returned = out if isinstance(out, tuple) else (out,)
        trace.append(TracedLayer(layer_inputs[-1], hidden.clone(), tuple(map(_copy_value, returned))))

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
