"""A transformers family as a part of itself: its own class at full depth, hollow where layers live elsewhere.

Nothing here knows any family. The class, its configuration, layer indices, rotary buffers, weight renames and
quantisers stay the library's own; layers outside the span become parameter-free stubs, and on servers so does
everything else that owns parameters. tests/real/test_families.py proves five of them.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from swarmd.compute.cuda.availability import trouble
from swarmd.compute.hardware.device import OwnerReserve, free_memory_bytes
from swarmd.compute.linear.experts import QuantisedExperts, is_set_of_experts
from swarmd.compute.linear.layers import is_torchs_linear, quantise_layer, replace_layers
from swarmd.compute.linear.quantize import library_config
from swarmd.compute.model.checkpoint_tensors import CheckpointTensors
from swarmd.compute.model.plain_config import building, read_config
from swarmd.compute.model.rows import RowFormat, argument_of
from swarmd.compute.model.slicing import Slicing
from swarmd.errors import ConfigError
from swarmd.plan.chains.memory import INT8_GROUP, WORKSPACE_BYTES, loaded_bits, tensor_bytes
from swarmd.protocol.models import manifest, shards
from swarmd.protocol.models.model_layout import KEY, ModelLayout, read_layout
from swarmd.values import Span

GENERATION_IDS = ("eos_token_id", "bos_token_id", "pad_token_id")
GENERATION_NUMBERS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
FALLBACK_MAX_TOKENS = 2_048  # of a session, for models that announce no longest context
MAX_IDS = 64  # tokens that end an answer; the most that a family has is a handful
OF_NO_WEIGHTS = ("I64", "BOOL")  # of the few tensors that hold places and masks

_loading = threading.Lock()  # from_pretrained changes torch's defaults for as long as it builds


# What a model consists of, on the three kinds of peers (R: RemoteLayer, S: Stub, P: PassThrough):
#
#     whole model      embedding   block 0   block 1   block 2   norm   head
#     client           embedding     R         S         S       norm   head
#     server of [1,2)      P         S       block 1     S         P      P
#
# The family's own forward runs on each of them unchanged. On the client it ends up in R, which sends hidden states
# to the swarm and comes back with those of the last block. On a server it does the family's work around a block
# (masks, positions, rotary angles) and computes just the blocks that are there.
def hidden_states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the hidden states that a decoder layer is called with."""
    return args[0] if args else kwargs["hidden_states"]  # type: ignore[no-any-return]


class Stub(nn.Module):
    """Stands in for a decoder layer that lives elsewhere: returns its input in the shape the family expects."""

    returns_tuple = 0  # how many values this family's layers return; 0 is a bare tensor
    beside: tuple[Any, ...] = ()  # values that it hands on beside hidden states; others are None

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.__dict__["_original"] = [original]  # outside the module tree; some families read layers' attributes

    @property
    def original(self) -> nn.Module:
        """The layer that this stands for, without weights."""
        return self.__dict__["_original"][0]  # type: ignore[no-any-return]

    def _apply(
        self,
        fn: Callable[..., Any],
        recurse: bool = True,
    ) -> Stub:
        """Stay as it is when a model moves: what PEFT puts into a client's stub lives on the CPU, where frames do."""
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            return getattr(self.__dict__["_original"][0], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states that come in."""
        return self.wrap(hidden_states_of(args, kwargs))

    def wrap(self, hidden: torch.Tensor) -> Any:
        """Return hidden states in the form in which this family's layers return theirs."""
        if not self.returns_tuple:
            return hidden
        n_missing = self.returns_tuple - 1 - len(self.beside)
        return (hidden, *self.beside, *(None,) * n_missing)


class _Collected(threading.local):
    """What layers were given so far in the current thread's pass: a client's model may be used by several."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Any]] = []


class RemoteLayer(Stub):
    """The client's layer that hands the embedded tokens to the swarm and returns what the last block gave.

    Of families with several streams of hidden states these travel side by side: [b, t, s, d] as [b, t, s * d]. What
    layers take beside them travels with them (``rows``).
    """

    call: Callable[[torch.Tensor], torch.Tensor]

    def __init__(self, original: nn.Module, config: PretrainedConfig | None = None) -> None:
        super().__init__(original)
        self.bands = layout_of(config).sidebands if config is not None else ()
        self._config = config
        self._format: RowFormat | None = None  # known once hidden states have come in
        self._names = argument_names(original)
        self.collects = any(band.kind == "each" for band in self.bands)
        self._collected = _Collected()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the swarm computes of the hidden states that come in."""
        hidden = hidden_states_of(args, kwargs)
        rows = hidden.flatten(2)
        if self._config is not None and self.bands:
            self._format = self._format or row_format(self._config, rows.shape[2])
            self.collect(args, kwargs, is_first=not self.collects)
            given, self._collected.layers = self._collected.layers, []
            rows = self._format.pack(rows, given)
        out = self.call(rows)[..., : hidden.shape[2:].numel()]
        return self.wrap(out.reshape(*out.shape[:2], *hidden.shape[2:]))

    def collect(self, args: tuple[Any, ...], kwargs: dict[str, Any], is_first: bool = False) -> None:
        """Note what one layer is given; with the first one a pass begins."""
        if is_first:
            self._collected.layers = []  # the pass before may have ended half-way
        self._collected.layers.append(
            {band.name: argument_of(self._names, args, kwargs, band.name) for band in self.bands}
        )


class CollectingLayer(Stub):
    """A client's layer before the ``RemoteLayer`` of a family whose layers are each given something of their own."""

    def __init__(self, original: nn.Module, remote: RemoteLayer, is_first: bool) -> None:
        super().__init__(original)
        self.__dict__["_remote"] = remote
        self._is_first = is_first

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden states that come in."""
        remote: RemoteLayer = self.__dict__["_remote"]
        remote.collect(args, kwargs, self._is_first)
        return super().forward(*args, **kwargs)


class RemoteLayers(nn.ModuleList):
    """The client's list of layers: a loop over it sees layer 0 only. ``children()`` are all of them.

    The others pass on what they are given; thirty of them, and a copy of the list, take a quarter of a millisecond.
    """

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((super().__getitem__(0),))

    def __getitem__(self, index: int | slice) -> Any:
        return [*self][index] if isinstance(index, slice) else super().__getitem__(index)


class PassThrough(Stub):
    """Stands in for an embedding, norm or head on a server: what it gives is thrown away, only shapes matter."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return hidden states as they are or as wide as it makes them, and for anything else one number."""
        value = next(filter(torch.is_tensor, (*args, *kwargs.values())), None)
        if value is None or not value.is_floating_point() or value.ndim < 3:
            return torch.zeros(1, 1, 1, device=None if value is None else value.device)
        if isinstance(self.original, nn.Linear) and self.original.out_features != value.shape[-1]:
            return value.new_zeros(*value.shape[:-1], self.original.out_features)
        return value


class OtherTower(Stub):
    """Stands in, on the client, for what reads pictures or sound in a model that takes them beside text."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse. Raises ConfigError."""
        raise ConfigError(f"only texts are served, and not what {type(self.original).__name__} reads: leave it out")


def read_generation(folder: Path) -> dict[str, Any]:
    """Read how a checkpoint's author wants it used: where answers end, and numbers for sampling. No code is named.

    Raises ConfigError for a value of the wrong kind.
    """
    path = folder / "generation_config.json"
    written = manifest.read_json(path) if path.is_file() else {}
    if not isinstance(written, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    names = (*GENERATION_IDS, *GENERATION_NUMBERS)
    settings = {name: written[name] for name in names if written.get(name) is not None}
    for name, value in settings.items():
        is_id = name in GENERATION_IDS
        values = value if isinstance(value, list) and is_id else [value]
        kinds = (int,) if is_id else (int, float)
        is_valid = all(isinstance(v, kinds) and -1e6 < v < 1e9 for v in values)
        if not is_valid or len(values) > MAX_IDS:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{path}: {name} is {repr(value)[:64]}, expected {expected}")
    return settings


def text_config(config: PretrainedConfig) -> Any:
    """Return the part of a configuration that describes the decoder of texts."""
    return config.get_text_config(decoder=True)


def is_composite(config: PretrainedConfig) -> bool:
    """Whether a model has more parts than its decoder of texts: towers for pictures or sound."""
    return text_config(config) is not config


def layout_of(config: PretrainedConfig) -> ModelLayout:
    """Return how the layers of a model become blocks. Raises IntegrityError."""
    return read_layout({KEY: getattr(config, KEY, None)}, count_layers(config))


def row_format(config: PretrainedConfig, hidden: int) -> RowFormat:
    """Return what travels of a token that has so many numbers of hidden states."""
    return RowFormat(layout_of(config), hidden, count_layers(config), int(text_config(config).vocab_size))


def argument_names(layer: nn.Module) -> list[str]:
    """Return the names of the arguments of a layer's forward, in their order."""
    return list(inspect.signature(type(layer).forward).parameters)[1:]


def remote_layer_of(model: PreTrainedModel) -> RemoteLayer:
    """Return the layer of a client's part that hands tokens to the swarm."""
    return next(layer for layer in decoder_layers(model).children() if isinstance(layer, RemoteLayer))


def longest_context(config: PretrainedConfig) -> int:
    """Return how many tokens a session of a model may have."""
    n_positions = getattr(text_config(config), "max_position_embeddings", None)
    return int(n_positions or FALLBACK_MAX_TOKENS)


def count_layers(config: PretrainedConfig) -> int:
    """Return how many layers a decoder has; each may have several caches (LongCat's have two attentions)."""
    text = text_config(config)
    is_derived = isinstance(vars(type(text)).get("num_hidden_layers"), property)
    n_layers = getattr(text, "num_layers", None) if is_derived else None
    return int(n_layers or text.num_hidden_layers)


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the decoder of texts."""
    decoder = model.get_decoder()
    return decoder if isinstance(decoder, PreTrainedModel) else model.base_model  # ModernBERT calls its head so


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """Find the decoder's own list of layers: the shallowest ModuleList of the configured length."""
    n = count_layers(model.config)
    candidates = [
        (name.count("."), module)
        for name, module in decoder_of(model).named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == n
    ]
    if not candidates:
        raise ConfigError(f"{type(model).__name__} has no list of {n} decoder layers: unsupported family")
    return min(candidates, key=lambda pair: pair[0])[1]


def family_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the library's own class for a configuration; of a composite, with all its parts. Raises ConfigError."""
    # Of a composite the checkpoint has the names of the whole. Its class among causal models, where it has one, may be
    # that of the text part alone (Qwen 3.5, Llama 4). Some plain families are listed among the others only (Mistral 4).
    kinds: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM]
    for kind in reversed(kinds) if is_composite(config) else kinds:
        base = kind._model_mapping.get(type(config), None)
        if base is not None:
            return base[0] if isinstance(base, tuple) else base  # type: ignore[no-any-return]
    raise ConfigError(f"{type(config).__name__} has no causal language model in transformers: unsupported family")


def hollow_class(config: PretrainedConfig, span: Span | None, slicing: Slicing | None = None) -> type[PreTrainedModel]:
    """Derive the family's class with only these layers, or slices of them; None is the client's: all but layers."""
    base = family_class(config)

    def __init__(self: Any, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        layers = decoder_layers(self)
        if span is None:
            _put_remote_layer(layers, config)
            _keep_all_tokens(decoder_of(self))
            if is_composite(config):
                _remove_towers(self, {decoder_of(self), self.get_output_embeddings()})
            return
        for index, layer in enumerate(list(layers)):
            if not span.start <= index < span.end:
                layers[index] = Stub(layer)
        _hollow_out(self, layers)
        self.all_tied_weights_keys = {}
        if slicing is not None:
            name = next(name for name, module in self.named_modules() if module is layers)
            slicing.narrow({f"{name}.{index}": layers[index] for index in span.blocks()}, text_config(config))

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__init__": __init__}
    return type(base.__name__, (base,), names)


def load(
    folder: Path,
    span: Span | None,
    dtype: torch.dtype,
    quantize: str = "none",
    device: str = "cpu",
    on_part: Callable[[str, int, int], None] = lambda stage, done, total: None,
    slicing: Slicing | None = None,
) -> PreTrainedModel:
    """Build the hollow model and read just its own tensors, lazily, from the shards that hold them.

    Raises ConfigError when a tensor is missing, when something would be left uninitialised, or when it would not fit
    into the device's memory. ``on_part`` is told what is done, and how many of how many parts of it are. With
    ``slicing`` only a member's slices of the layers are read.
    """
    if span is not None and quantize in ("int8", "int4"):
        return _load_quantised(folder, span, dtype, quantize, device, on_part, slicing)
    config = read_config(folder)
    return _load_model(folder, config, hollow_class(config, span, slicing), dtype, quantize, device, slicing)


def load_whole(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Build the family's own model with all of its layers, on the CPU. Raises ConfigError as ``load`` does."""
    config = read_config(folder)
    return _load_model(folder, config, family_class(config), dtype)


def _load_model(
    folder: Path,
    config: PretrainedConfig,
    cls: type[PreTrainedModel],
    dtype: torch.dtype,
    quantize: str = "none",
    device: str = "cpu",
    slicing: Slicing | None = None,
) -> PreTrainedModel:
    tensors = CheckpointTensors(folder)
    state = {}
    with building(f"{folder}: {type(config).__name__} cannot be loaded"):
        for key, target in needed_targets(cls, config, list(tensors.plain)).items():
            state[key] = tensors.open(key, dtype)
            if slicing is not None:
                state[key] = slicing.part_of(target, key, state[key])
            kind = state[key].get_dtype()
            if kind not in shards.PLAIN_KINDS + OF_NO_WEIGHTS:
                raise ConfigError(f"{folder}: {key} is of kind {kind}: quantised weights would be read as plain ones")
        shapes = {key: tuple(tensor.get_shape()) for key, tensor in state.items()}
        dtype_name = str(dtype).removeprefix("torch.")
        kept = {key: loaded_bits(key, shape, quantize, str(config.model_type)) for key, shape in shapes.items()}
        _check_memory(folder, sum(tensor_bytes(shapes[key], dtype_name, kept[key]) for key in shapes), device)
        bits = library_config(quantize)
        quantisation: dict[str, Any] = {}
        if bits:
            quantisation = {"quantization_config": bits, "device_map": {"": device}}
        with _loading:
            model, info = cls.from_pretrained(
                None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, **quantisation
            )
    missing = sorted(info["missing_keys"])
    missing += sorted(str(key) for key in info.get("mismatched_keys", ()))
    missing += [name for name, tensor in model.named_parameters() if tensor.is_meta]
    if missing:
        raise ConfigError(f"{folder}: tensors missing or of another shape than configured: {', '.join(missing[:5])}")
    if not bits:  # else the library has put it there
        model = model.to(device)
    return model.eval().requires_grad_(False)


def _load_quantised(
    folder: Path,
    span: Span,
    dtype: torch.dtype,
    kind: str,
    device: str,
    on_part: Callable[[str, int, int], None],
    slicing: Slicing | None,
) -> PreTrainedModel:
    """Load and round block by block, so that only one of them takes more than its bits. Raises ConfigError."""
    target = torch.device(device)
    if target.type not in ("cpu", "cuda"):
        raise ConfigError(f"quantize = {kind} is for CPUs and CUDA, not for {device}: say none")
    if target.type == "cuda" and (why := trouble(target)):
        raise ConfigError(f"quantize = {kind} on {device}: {why}: say none or nf4")
    model: PreTrainedModel | None = None
    for n, block in enumerate(span.blocks()):
        on_part(f"reading blocks and rounding them to {kind}", n, len(span))
        part = load(
            folder,
            Span(block, block + 1),
            dtype,
            device=device,
            slicing=slicing,
        )
        replace_layers(part, partial(quantise_layer, kind=kind), _can_quantise)
        if target.type == "cpu":  # where which experts are chosen need not be known before a pass begins
            replace_layers(part, partial(QuantisedExperts, kind=kind), is_set_of_experts)
        if model is None:
            model = part
            continue
        layer = decoder_layers(part)[block]
        decoder_layers(model)[block] = layer
        _share_config(layer, text_config(part.config), text_config(model.config))
    assert model is not None
    return model


def _can_quantise(module: nn.Module) -> bool:
    """Is it a matrix that kernels of few bits take?"""
    return is_torchs_linear(module) and int(module.in_features) % INT8_GROUP == 0  # type: ignore[arg-type]


def _share_config(module: nn.Module, old: Any, new: Any) -> None:
    """Have a block look where its new neighbours do, so that what is set there counts for all."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if value is old:
                setattr(part, name, new)


def _check_memory(folder: Path, needed: int, device: str) -> None:
    """Refuse weights of so many bytes that do not fit into what is free. Raises ConfigError."""
    free = free_memory_bytes(device)
    if needed + WORKSPACE_BYTES <= free:
        return
    reserve = f" ({OwnerReserve.n_bytes / 2**30:.2f} GiB are left to its owner)" if OwnerReserve.n_bytes else ""
    raise ConfigError(
        f"{folder}: {needed / 2**30:.2f} GiB of weights and {WORKSPACE_BYTES >> 20} MiB to work in do not fit the "
        f"{free / 2**30:.2f} GiB that are free on {device}{reserve}: "
        "serve fewer blocks, or use bfloat16 or quantize"
    )


def needed_targets(
    cls: type[PreTrainedModel],
    config: PretrainedConfig,
    keys: list[str],
) -> dict[str, str]:
    """Choose the checkpoint keys that a hollow class uses, and what they become there, by the library's own renames."""
    with torch.device("meta"):
        hollow = cls(config)
    targets = target_names(hollow, keys)
    state = hollow.state_dict()
    return {key: targets[key] for key in keys if targets[key] in state}


def target_names(hollow: PreTrainedModel, keys: Iterable[str]) -> dict[str, str]:
    """Map checkpoint keys to the names that the library gives them in this model."""
    state = hollow.state_dict()
    conversions = get_model_conversion_mapping(hollow)
    renames = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    prefix = hollow.base_model_prefix

    def target(key: str) -> str:
        if key in state:
            return key
        return str(rename_source_key(key, renames, converters, prefix, state)[0])

    return {key: target(key) for key in keys}


def _keep_all_tokens(decoder: Any) -> None:
    """Have a client's decoder pass on every token: some leave out those whose logits are not wanted, half-way."""
    forward = decoder.forward
    if "logits_to_keep" not in inspect.signature(forward).parameters:
        return

    @functools.wraps(forward)
    def forward_all(*args: Any, logits_to_keep: Any = 0, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    decoder.forward = forward_all


def _put_remote_layer(layers: nn.ModuleList, config: PretrainedConfig) -> None:
    """Replace all layers of a client's model."""
    originals = list(layers)
    if any(band.kind == "each" for band in layout_of(config).sidebands):
        remote = RemoteLayer(originals[-1], config)
        stubs = [CollectingLayer(layer, remote, index == 0) for index, layer in enumerate(originals[:-1])]
        substitutes = [*stubs, remote]
    else:
        substitutes = [RemoteLayer(originals[0], config), *map(Stub, originals[1:])]
        layers.__class__ = RemoteLayers
    for index, substitute in enumerate(substitutes):
        layers[index] = substitute


def _remove_towers(module: nn.Module, kept: set[nn.Module | None]) -> None:
    """Replace what owns parameters and is neither kept nor around it; parameters beside what is kept are not read."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        delattr(module, name)
        module.register_buffer(name, torch.zeros_like(parameter), persistent=False)
    for name, child in list(module.named_children()):
        if child in kept:
            continue
        if not kept.isdisjoint(child.modules()):
            _remove_towers(child, kept)
        elif next(child.parameters(), None) is not None:
            setattr(module, name, OtherTower(child))


def _hollow_out(module: nn.Module, layers: nn.ModuleList) -> None:
    """Replace everything around the blocks that owns parameters."""
    for name, child in list(module.named_children()):
        if child is layers:
            continue
        if isinstance(child, nn.ModuleList) or any(m is layers for m in child.modules()):
            _hollow_out(child, layers)
        elif next(child.parameters(), None) is not None:
            setattr(module, name, PassThrough(child))
