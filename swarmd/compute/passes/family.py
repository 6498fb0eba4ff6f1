"""The family's own forward for any part of a span: hidden states in, hidden states out.

Every owned block has a gate in front: the wire tensor enters at the first block of the hop and leaves after its
last, and blocks outside the hop pass their input on. So a hop can be any part of the span, and what the family does
around its layers does not matter here.

    the family's forward     embed | layer 0 | ... | layer 4 | layer 5 | layer 6 | layer 7 | ... | norm
    this span, [4, 8)        any     placeholders    gate      gate      gate      gate      placeholders
    a hop, [5, 7)                                    passes on input -> ... -> output  passes on
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.model import skeleton
from swarmd.compute.model.rows import replace_argument
from swarmd.errors import ConfigError
from swarmd.values import Span

PROBE_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError)  # of families on probes
MOST_ARITY = 3  # values that a block of any known family returns
NUMBERS_OF_BLOCKS = ("layer_idx", "layer_id", "layer_index", "block_idx", "layer_number")


class _LayerReached(Exception):
    """Ends a forward at a layer."""


def accepted_arguments(forward: Callable[..., Any]) -> set[str]:
    """Name the arguments that a decoder's forward takes; a decoder that takes any has the usual ones."""
    parameters = inspect.signature(forward).parameters
    names = set(parameters)
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()) and "cache_params" not in names:
        names |= {"inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache"}
    return names


def kind_of(layer: Any) -> object:
    """Return what tells blocks of several kinds apart: their modules, shapes and settings, but not their number."""
    modules = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, type(None))) and not key.endswith(NUMBERS_OF_BLOCKS)
        }
        shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
        modules.append((name, type(module).__name__, sorted(settings.items(), key=str), shapes))
    return repr(modules)


@dataclass(frozen=True, slots=True)
class PassInputs:
    """What a family's forward takes beside its hop: hidden [b, t, d], positions [b, t], mask [b, n_past + t]."""

    hidden: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor | None = None
    cache: Any = None
    """The library's own, of all layers."""


class FamilyForward:
    """The forward of one hollow model, in whose blocks it sets gates. ``on_block`` is called after each block."""

    def __init__(
        self,
        model: PreTrainedModel,
        span: Span,
        dtype: torch.dtype,
        device: torch.device,
        on_block: Callable[[], None],
    ) -> None:
        self.config = model.config
        self.span = span
        self.dtype = dtype
        self.device = device
        self.layout = skeleton.layout_of(self.config)
        self.n_layers = skeleton.count_layers(self.config)
        self.embedding_size = int(skeleton.text_config(self.config).hidden_size)
        self.layer_arity = 0  # how many values a block of this family returns; 0 is a bare tensor
        self.can_append_chunks = True  # may a session that has tokens get several more in one pass?
        self._on_block = on_block
        self._decoder = skeleton.decoder_of(model)
        self._layers = skeleton.decoder_layers(model)
        self._arguments = accepted_arguments(self._decoder.forward)
        self._hop = self.layers_of(span)
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._extra_outputs: tuple[Any, ...] = ()  # what the hop's last block returned beside hidden states
        for index in self._hop.blocks():
            layer = self._layers[index]
            layer.forward = self._gate(index, layer.forward, skeleton.argument_names(layer))
        self.format = skeleton.row_format(self.config, self._find_width())
        self.hidden_size = self.format.width  # of all that travels of a token
        self._find_arity()

    @property
    def kinds(self) -> list[Span]:
        """Hops of one block of each kind: a test of it holds for all blocks that are made alike."""
        first_of_kind: dict[object, Span] = {}
        for block in self.span.blocks():
            hop = Span(block, block + 1)
            kinds = tuple(kind_of(self._layers[index]) for index in self.layers_of(hop).blocks())
            first_of_kind.setdefault(kinds, hop)
        return list(first_of_kind.values())

    def layers_of(self, hop: Span) -> Span:
        """The layers of some blocks."""
        return self.layout.layers(hop, self.n_layers)

    def compute(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: SpanCache | None,
        n_past: int,
        hop: Span,
    ) -> torch.Tensor:
        """Compute tokens behind the ``n_past`` of a cache: hidden [b, t, d], mask [b, n_past + t] -> [b, t, d]."""
        n_tokens = hidden.shape[1]
        if cache is not None and n_past and n_tokens > 1 and not self.can_append_chunks:
            outs = []
            for n in range(n_tokens):
                token = slice(n, n + 1)
                token_mask = None if mask is None else mask[:, : n_past + n + 1]
                outs.append(self.compute(hidden[:, token], positions[:, token], token_mask, cache, n_past + n, hop))
            return torch.cat(outs, 1)
        if cache is not None:
            cache.see(n_past)
        return self.run(PassInputs(hidden, positions, mask, cache.cache if cache else None), hop)

    def run(
        self,
        inputs: PassInputs,
        hop: Span,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the family's own forward; ``embedded`` is what it takes for the embedding, and must not matter."""
        self._input = inputs.hidden
        self._hop = self.layers_of(hop)
        arguments = {
            **self._unused_bands(*inputs.hidden.shape[:2]),
            "inputs_embeds": (inputs.hidden if embedded is None else embedded)[..., : self.embedding_size],
            "attention_mask": inputs.mask,
            "position_ids": inputs.positions,
            "past_key_values": inputs.cache,
            "cache_params": inputs.cache,
            "use_cache": inputs.cache is not None,
        }
        self._decoder(**{k: v for k, v in arguments.items() if k in self._arguments})
        out = self._output
        self._input = None
        self._output = None
        if out is None:
            raise RuntimeError("its decoder passes over a block")
        return out

    def run_after_another_block(self, inputs: PassInputs) -> torch.Tensor:
        """Compute the only block, and have the one before it hand on other numbers than None beside hidden states."""
        previous_block: Any = self._layers[self.layers_of(self.span).start - 1]
        previous_block.beside = tuple(
            torch.randn_like(value) if torch.is_tensor(value) and value.is_floating_point() else value
            for value in self._extra_outputs
        )
        out = self.run(inputs, self.span)
        previous_block.beside = ()
        return out

    def example(self, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make hidden states [1, t, d] of zeros and positions [1, t]."""
        hidden = torch.zeros(1, n_tokens, self.hidden_size, dtype=self.dtype, device=self.device)
        return hidden, torch.arange(n_tokens, device=self.device).unsqueeze(0)

    def random_hidden(self, b: int, t: int, rng: torch.Generator) -> torch.Tensor:
        """Make hidden states [b, t, d], with sidebands, the same for equal generators."""
        rows = self.format.fill_ids(torch.randn(b, t, self.hidden_size, generator=rng), rng)
        return rows.to(self.dtype).to(self.device)

    def _gate(self, index: int, forward: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
        """Wrap a layer's forward: it takes the hop's input where the hop begins, and keeps its output at the end."""

        def gated(*args: Any, **kwargs: Any) -> Any:
            if not self._hop.start <= index < self._hop.end:
                return self._pass_on(skeleton.hidden_states_of(args, kwargs))
            rows = self._input
            assert rows is not None
            if index == self._hop.start:
                streams = skeleton.hidden_states_of(args, kwargs).shape[2:]
                entering = self.format.hidden_of(rows).reshape(*rows.shape[:2], *streams)
                args = (entering, *args[1:]) if args else args
                kwargs = kwargs if args else {**kwargs, "hidden_states": entering}
            for band in self.layout.sidebands:
                if band.kind != "next" or 0 < index == self._hop.start:
                    value = self.format.band_of(rows, band, index)
                    args, kwargs = replace_argument(names, args, kwargs, band.name, value)
            out = forward(*args, **kwargs)
            if index == self._hop.end - 1:
                self._extra_outputs = out[1:] if isinstance(out, tuple) else ()
                hidden = (out[0] if isinstance(out, tuple) else out).flatten(2)
                self._output = self.format.pass_on(rows, hidden, self._extra_outputs)
            self.layer_arity = len(out) if isinstance(out, tuple) else 0
            self._on_block()
            return out

        return gated

    def _unused_bands(self, b: int, t: int) -> dict[str, torch.Tensor]:
        """Give the decoder zeros for sidebands that it makes itself otherwise: its layers are given the true ones."""
        zeros: dict[str, torch.Tensor] = {}
        for band in self.layout.sidebands:
            name = band.name if band.name in self._arguments else f"{band.name}s"
            if name == "input_ids" or name not in self._arguments:  # ids are never given beside inputs_embeds
                continue
            of_layers = (self.n_layers,) if band.kind == "each" else ()
            shape = (b, t) if band.kind == "ids" else (b, t, *of_layers, band.size)
            dtype = torch.long if band.kind == "ids" else self.dtype
            zeros[name] = torch.zeros(shape, dtype=dtype, device=self.device)
        return zeros

    def _pass_on(self, hidden: torch.Tensor) -> Any:
        return (hidden, *(None,) * (self.layer_arity - 1)) if self.layer_arity else hidden

    @torch.inference_mode()
    def _find_width(self) -> int:
        """Learn by probing how many numbers of each token enter a block: the family's own forward tells it layer 0."""
        widths: list[int] = []

        def enter(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            widths.append(math.prod(skeleton.hidden_states_of(args, kwargs).shape[2:]))
            raise _LayerReached

        hidden = torch.zeros(1, 2, self.embedding_size, dtype=self.dtype, device=self.device)
        hook = self._layers[0].register_forward_pre_hook(enter, with_kwargs=True)
        try:
            self.run(PassInputs(hidden, torch.arange(2, device=self.device).unsqueeze(0)), self.span)
        except _LayerReached:
            return widths[0]
        except PROBE_ERRORS as error:
            family = type(self.config).__name__
            raise ConfigError(
                f"{family}: its forward fails before the first block ({error}): unsupported family"
            ) from None
        finally:
            hook.remove()
        raise ConfigError(f"{type(self.config).__name__}: its decoder passes over the first block: unsupported family")

    @torch.inference_mode()
    def _find_arity(self) -> None:
        """Learn by probing whether this family's layers return a tensor or a tuple, and of how many."""
        failure: Exception | None = None
        for arity in range(MOST_ARITY + 1):
            for layer in self._layers:
                if isinstance(layer, skeleton.Stub):
                    layer.returns_tuple = arity
            try:
                self.run(PassInputs(*self.example(2)), self.span)
            except PROBE_ERRORS as error:
                failure = failure or error
                continue
            if self.layer_arity == arity:
                return
        family = type(self.config).__name__
        dtype = str(self.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{family}: its blocks fail on hidden states alone, in {dtype} ({failure}): unsupported family"
        )
