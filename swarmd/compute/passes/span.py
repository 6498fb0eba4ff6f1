"""A loaded span: hidden states in, hidden states out, through the family's own decoder forward.

Every owned block has a gate in front: the wire tensor enters at the first block of the hop and leaves after its
last, and blocks outside the hop pass their input on. So a hop can be any part of the span, and whatever the family
does around its layers does not matter here.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from swarmd.compute.cache.adapters import LoraUpdates, SpanAdapters
from swarmd.compute.cache.kvcache import UNBOUNDED, SpanCache
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.compiled.build import NotFused, compiled_folder
from swarmd.compute.cuda.availability import prepare, trouble
from swarmd.compute.hardware.matrix_unit import has_matrix_unit
from swarmd.compute.hardware.measurements import Measurements
from swarmd.compute.linear import few_bits, tiled
from swarmd.compute.linear.kernels import NO_MORE, PROMPT_ROWS, ROWS, TIMED_BYTES, choose
from swarmd.compute.linear.layers import has_bfloat16
from swarmd.compute.model import skeleton
from swarmd.compute.passes import precompile
from swarmd.compute.passes.backend import Backends, FusedBackend
from swarmd.compute.passes.backend_selection import BackendSelection, TrialSubject
from swarmd.compute.passes.backend_trial import Trial
from swarmd.compute.passes.fused import FusedShape, describe
from swarmd.compute.passes.ragged import RaggedAttention, can_batch
from swarmd.compute.passes.traced import Pass
from swarmd.errors import ConfigError
from swarmd.values import Decision, Span

NUMBERS_OF_BLOCKS = ("layer_idx", "layer_id", "layer_index", "block_idx", "layer_number")
PROBE_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError)  # of families on probes
SELF_TEST_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
ONE_BY_ONE_TOLERANCE = 1e-5  # on CPUs the same kernels compute the same numbers
USUAL_SESSION_TOKENS = 512  # states that do not grow with a session are counted as so many tokens' share each
NOTHING_REMEMBERED = Measurements(None)


class LoadedSpan:
    """Blocks of one model on one device. Not thread-safe: the worker is single-threaded."""

    def __init__(
        self,
        folder: Path,
        span: Span,
        dtype: torch.dtype,
        device: str = "cpu",
        quantize: str = "none",
        on_progress: Callable[[], None] = lambda: None,
        cache_folder: Path = Path(tempfile.gettempdir()),
        is_quick: bool = True,
        kv_cache: str = "none",
        remembered: Measurements = NOTHING_REMEMBERED,
        on_part: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ) -> None:
        self.span = span
        self.dtype = dtype
        self.quantize = quantize
        self.kv_cache = kv_cache
        self._caches_in: torch.dtype | None = None  # if they are rounded: from what
        self._tolerance = SELF_TEST_TOLERANCE[dtype if quantize == "none" else torch.bfloat16]
        self.device = torch.device(device)
        if self.device.type == "cuda":
            prepare(self.device, cache_folder)
        self.model = skeleton.load(folder, span, dtype, quantize, device, on_part)
        self.config = self.model.config
        self.n_layers = int(skeleton.text_config(self.config).num_hidden_layers)
        self.hidden_size = int(skeleton.text_config(self.config).hidden_size)
        self.on_block = on_progress
        self._decoder = self.model.get_decoder()
        self._layers = skeleton.decoder_layers(self.model)
        self._arguments = _accepted_arguments(self._decoder.forward)
        self._entering: torch.Tensor | None = None
        self._leaving: torch.Tensor | None = None
        self._beside: tuple[Any, ...] = ()  # what the hop's last block returned beside hidden states
        self.adapters = SpanAdapters(self.model, self._layers, span, dtype, self.device, on_progress)
        self.layer_arity = 0  # how many values a block of this family returns; 0 is a bare tensor
        self.goes_on_at_once = True  # may a session that has tokens get several more in one pass?
        self.batching = "not tested yet"  # why sessions are computed together or one at a time
        self.shares_beginnings = False  # may they have the keys and values of a common beginning in one place?
        self._hop = span
        self._cache_folder, self._remembered = cache_folder, remembered
        self._fused_shape: FusedShape | None = None  # if one call may compute these blocks
        self._shapes = [tuple(p.shape) for p in self._layers[span.start].parameters()]
        self.sample = _first_of(span, [sum(p.nbytes for p in self._layers[b].parameters()) for b in span.blocks()])
        self.kernels, self._layers_by = Decision("plain", "no other was looked for"), "plain"
        if is_quick:
            self._choose_kernels(partial(on_part, "reading layers and packing them"))
        self._install_gates()
        self._find_arity()
        self._ragged: RaggedAttention | None = None
        self._quick: Backends | None = None

    def new_cache(
        self, hop: Span | None = None, max_tokens: int = UNBOUNDED, with_gradients: bool = False
    ) -> SpanCache:
        """An empty cache for a session; or one that gradients flow through, which is never rounded."""
        return SpanCache(self.config, hop or self.span, max_tokens, None if with_gradients else self._caches_in)

    @torch.inference_mode()
    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: SpanCache | None = None,
        n_past: int = 0,
        hop: Span | None = None,
        lora: LoraUpdates | None = None,
    ) -> torch.Tensor:
        """Run ``hop`` (or the whole span): hidden [b, t, d], positions [b, t], mask [b, n_past + t] -> [b, t, d]."""
        n_tokens = hidden.shape[1]
        if cache is not None and n_past and n_tokens > 1 and not self.goes_on_at_once:
            outs = []
            for n in range(n_tokens):
                seen, one = None if mask is None else mask[:, : n_past + n + 1], slice(n, n + 1)
                outs.append(self.forward(hidden[:, one], positions[:, one], seen, cache, n_past + n, hop, lora))
            return torch.cat(outs, 1)
        if cache is not None:
            cache.see(n_past)
        with self.adapters.using([(hidden.shape[0] * hidden.shape[1], lora)]):
            return self._decode(hidden, positions, mask, cache.cache if cache else None, hop or self.span)

    def forward_with_grad(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None = None,
        hop: Span | None = None,
        lora: LoraUpdates | None = None,
        cache: SpanCache | None = None,
    ) -> torch.Tensor:
        """As ``forward``, so that gradients flow from what leaves [b, t, d] to what enters, ``lora`` and ``cache``."""
        with self.adapters.using([(hidden.shape[0] * hidden.shape[1], lora)]):
            return self._decode(hidden, positions, mask, cache.cache if cache else None, hop or self.span)

    @torch.inference_mode()
    def forward_ragged(self, pieces: list[SessionTokens], hop: Span | None = None) -> list[torch.Tensor]:
        """Run the new tokens of several sessions as one pass; returns [b, t, d] for each piece."""
        ragged, hop = self._ragged, hop or self.span
        assert ragged is not None, "only a span that can_batch"
        sessions = [(piece.n_tokens, piece.lora) for piece in pieces]
        if self._quick is not None and hop == self.span and all(p.lora is None for p in pieces):
            outs = self._quick.run(pieces, sum(n for n, _ in sessions))
            if outs is not None:
                return outs
        with self.adapters.using(sessions):
            return ragged.run(pieces, lambda h, p: self._decode(h, p, None, ragged.cache, hop))

    def is_quick(self, n_tokens: int, longest: int, hop: Span) -> bool:
        """Is there a quick way to compute so many new tokens, so many of one session?"""
        return self._quick is not None and hop == self.span and self._quick.knows(n_tokens, longest)

    @property
    def n_by_one_call(self) -> int:
        """New tokens up to which one call is the quickest way."""
        return self._quick.n_fused if self._quick is not None else 0

    def is_by_one_call(self, n_tokens: int, hop: Span, cache: SpanCache) -> bool:
        """Does one call compute so many new tokens with this cache? It can be made in the midst of another pass."""
        return self._quick is not None and hop == self.span and self._quick.calls(n_tokens, [cache])

    def _choose_kernels(self, on_layer: Callable[[int, int], None]) -> None:
        """Have weights laid out as what computes them reads them."""
        if self.device.type != "cpu":
            self.kernels = Decision("plain", "the library's own layers: only CPUs are offered others")
            return
        own, why = [self._layers[index] for index in self.span.blocks()], ""
        try:
            self._fused_shape = describe(self._decoder, own, self.dtype, self.kv_cache != "none")
        except NotFused as error:
            why = f"; not one call: {error}"
        folder, more = self._cache_folder, NO_MORE
        if is_compiled := precompile.is_compiled(folder):  # else a worker would wait 20 s for it
            more = {**few_bits.kernels(folder), **tiled.kernels(folder)}
        else:
            why += "; what is compiled was not there yet when it was loaded"
        about = ("kernels", *self._about, self._fused_shape is None, is_compiled, compiled_folder(folder).name)
        known = self._remembered.find(*about)
        fastest = str(known.get("action")) if known is not None else None
        kernels = choose(self.model, PROMPT_ROWS if self._fused_shape else ROWS, more, fastest, on_layer)
        if known is None:
            self._remembered.keep({"action": kernels.action}, *about)
        self.kernels, self._layers_by = Decision(kernels.action, kernels.reason + why), kernels.action

    @property
    def _about(self) -> tuple[object, ...]:
        """What speed depends on, beside the machine."""
        return (self._shapes, type(self.config).__name__, str(self.dtype), self.quantize, self.kv_cache)

    def quickening(self) -> BackendSelection | None:
        """The steps that find quick ways to compute a few new tokens; None where sessions are computed one by one."""
        ragged = self._ragged
        if ragged is None:
            return None
        blocks, computes_in = [self._layers[b] for b in self.span.blocks()], self._computes_in
        subject = TrialSubject(
            self.span,
            blocks,
            self.kinds,
            self.sample,
            self._fused_shape,
            computes_in,
            SELF_TEST_TOLERANCE[computes_in],
            (*self._about, self._layers_by, len(self.sample)),
            self._give_sign,
        )
        if self.device.type == "cuda":
            example = partial(self._examples, 1, 0, self.span)
            record = lambda line: self._recorded(ragged, line, example()[0])  # noqa: E731
            subject = replace(subject, record=record, trouble=trouble(self.device))

        def forward(hidden: torch.Tensor, positions: torch.Tensor, hop: Span) -> torch.Tensor:
            return self._decode(hidden, positions, None, ragged.cache, hop)

        farthest = getattr(skeleton.text_config(self.config), "max_position_embeddings", None)
        trial = Trial(ragged, forward, self._examples, farthest)
        quickening = BackendSelection(subject, ragged, trial, self._cache_folder, self._remembered)
        self._quick = quickening.quick
        return quickening

    def quicken(self) -> None:
        """Find quick ways now, step after step."""
        quickening = self.quickening()
        while quickening is not None and quickening.has_steps:
            quickening.step()

    def explain_kernels(self) -> Decision[str]:
        """What computes layers, and a few tokens, and why."""
        return self._quick.explain(self.kernels) if self._quick is not None else self.kernels

    @property
    def _computes_in(self) -> torch.dtype:
        return torch.bfloat16 if self.is_rounded else self.dtype

    def _give_sign(self) -> None:
        self.on_block()

    def _examples(self, n_sessions: int, at: int, hop: Span) -> list[SessionTokens]:
        rng, made = torch.Generator().manual_seed(0), []
        for n_past in range(2, 2 + n_sessions):
            text = torch.randn(1, n_past + 1, self.hidden_size, generator=rng).to(self.dtype).to(self.device)
            cache, positions = self.new_cache(hop), at + torch.arange(n_past + 1, device=self.device).unsqueeze(0)
            self.forward(text[:, :-1], positions[:, :-1], None, cache, 0, hop)
            made.append(SessionTokens(text[:, -1:], positions[:, -1:], cache, n_past))
        return made

    def _recorded(self, ragged: RaggedAttention, line: Pass, example: SessionTokens) -> FusedBackend:
        from swarmd.compute.passes.graphs import GraphedPass  # late: Triton comes with torch where CUDA does

        return GraphedPass(ragged, line, example, self.on_block)

    @property
    def is_rounded(self) -> bool:
        """Are weights, or keys and values, in 8 or 4 bits?"""
        return self.quantize != "none" or self.kv_cache != "none"

    @property
    def can_batch(self) -> bool:
        return self._ragged is not None

    def _decode(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any,
        hop: Span,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Have the family's own forward run; ``embedded`` is what it takes for the embedding, and must not matter."""
        self._entering, self._hop = hidden, hop
        arguments = {
            "inputs_embeds": hidden if embedded is None else embedded,
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": cache,
            "cache_params": cache,
            "use_cache": cache is not None,
        }
        self._decoder(**{k: v for k, v in arguments.items() if k in self._arguments})
        out, self._entering, self._leaving = self._leaving, None, None
        assert out is not None
        return out

    def numerics(self, model: str) -> str:
        """Name everything that decides the last bits: equal names compute bit-identical results, quick ways aside."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        parts = (
            model,
            str(self.dtype),
            self.quantize,
            self.kv_cache,
            self._layers_by,
            torch.__version__,
            transformers.__version__,
            device,
            f"{torch.backends.cpu.get_cpu_capability()} {has_bfloat16()} {has_matrix_unit()}",
            str(torch.get_num_threads()),
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]

    @property
    def kinds(self) -> list[Span]:
        """Hops of one block of each kind: what is right for it is right for all that are made alike."""
        first: dict[object, Span] = {}
        for block in self.span.blocks():
            first.setdefault(_kind_of(self._layers[block]), Span(block, block + 1))
        return list(first.values())

    def self_test(self) -> None:
        """Refuse a family whose blocks cannot be served by themselves, or fail. Raises ConfigError."""
        try:
            for hop in self.kinds:
                self._test_alone(hop)
        except PROBE_ERRORS as error:
            raise ConfigError(f"{type(self.config).__name__}: a self-test fails: {error}: unsupported family") from None
        self._test_one_by_one()
        self._test_batching()
        if self.kv_cache != "none":
            self._round_caches()

    def _round_caches(self) -> None:
        """Keep keys and values in 8 bits from now on. Raises ConfigError where they are of another kind."""
        self._caches_in = self.dtype
        try:
            is_rounded = self.example_cache(self.span).is_rounded
        except PROBE_ERRORS as error:
            raise ConfigError(f"kv_cache = {self.kv_cache}: a probe fails: {error}: say kv_cache = none") from None
        if not is_rounded:
            family = type(self.config).__name__
            raise ConfigError(f"kv_cache = {self.kv_cache}: no block of a {family} here keeps what all tokens see")

    def _test_alone(self, hop: Span) -> None:
        """Cached passes must equal uncached ones, and nothing but hidden states may matter. Raises ConfigError."""
        hidden, positions = self._probe()
        whole = self.forward(hidden, positions, hop=hop)
        self.goes_on_at_once = self.goes_on_at_once and not self._forgets_states(hidden, positions, hop)
        error = self._cached_error(hidden, positions, whole, hop)
        if not error <= self._tolerance:
            raise ConfigError(
                f"{type(self.config).__name__}: cached passes, with another session's between them, and uncached "
                f"ones differ by {error:.2g} (at most {self._tolerance:g}): this family cannot be served"
            )
        self._test_embedding(hidden, positions, whole, hop)

    @torch.inference_mode()
    def _forgets_states(self, hidden: torch.Tensor, positions: torch.Tensor, hop: Span) -> bool:
        """Does it not matter which states a session has, when several tokens follow? Some families begin anew."""
        outs = []
        for change in (0.0, 1.0):
            cache = self.new_cache(hop)
            if cache.keeps_tokens_only:
                return False
            self.forward(hidden[:, :3], positions[:, :3], None, cache, 0, hop)
            if not cache.change_states(change):
                return False
            outs.append(self.forward(hidden[:, 3:], positions[:, 3:], None, cache, 3, hop))
        return torch.equal(*outs)

    def _cached_error(self, hidden: torch.Tensor, positions: torch.Tensor, expected: torch.Tensor, hop: Span) -> float:
        """How far a session's passes are from ``expected``, all at once; another session's tokens come between them."""
        cache, other, outs = self.new_cache(hop), self.new_cache(hop), []
        for start, end in ((0, 3), (3, 5), (5, 6)):
            now = slice(start, end)
            outs.append(self.forward(hidden[:, now], positions[:, now], None, cache, start, hop))
            self.forward(-hidden[:, now], positions[:, now], None, other, start, hop)
        return (torch.cat(outs, 1) - expected).abs().max().item() / max(1.0, expected.abs().max().item())

    @torch.inference_mode()
    def _test_embedding(self, hidden: torch.Tensor, positions: torch.Tensor, expected: torch.Tensor, hop: Span) -> None:
        """Refuse a family whose blocks look at the embedding too, which only the first hop has. Raises ConfigError."""
        out = self._decode(hidden, positions, None, None, hop, torch.randn_like(hidden))
        error = (out - expected).abs().max().item() / max(1.0, expected.abs().max().item())
        if not error <= self._tolerance:
            raise ConfigError(
                f"{type(self.config).__name__}: its blocks need the embedding beside hidden states: unsupported family"
            )

    @torch.inference_mode()
    def _test_one_by_one(self) -> None:
        """Blocks at once must equal the same blocks one by one, with hidden states between them. Raises ConfigError.

        A block may hand more to the next one: another value that it returns, or something in what they share. Servers
        send hidden states only, so that a chain of them would be wrong without a word. A block that is alone here is
        asked whether it looks at what the block before it would have returned beside.
        """
        family, (hidden, positions) = type(self.config).__name__, self._probe()
        try:
            at_once = self._decode(hidden, positions, None, None, self.span)
            if len(self.span) == 1:
                apart = self._decode_beside_others(hidden, positions) if self.span.start else at_once
            else:
                apart = hidden
                for block in self.span.blocks():
                    apart = self._decode(apart, positions, None, None, Span(block, block + 1))
        except PROBE_ERRORS as failure:
            raise ConfigError(
                f"{family}: a block fails without the ones before it: {failure}: unsupported family"
            ) from None
        error = (at_once - apart).abs().max().item() / max(1.0, at_once.abs().max().item())
        if not error <= (ONE_BY_ONE_TOLERANCE if self.device.type == "cpu" else self._tolerance):
            text = f"its blocks hand more than hidden states to the next one (without it they differ by {error:.2g})"
            raise ConfigError(f"{family}: {text}: unsupported family")

    def _decode_beside_others(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute the only block, and have the one before it hand on other numbers than None beside hidden states."""
        before: Any = self._layers[self.span.start - 1]
        before.beside = tuple(
            torch.randn_like(value) if torch.is_tensor(value) and value.is_floating_point() else value
            for value in self._beside
        )
        out = self._decode(hidden, positions, None, None, self.span)
        before.beside = ()
        return out

    def _test_batching(self) -> None:
        """Let sessions be computed together if that gives what they give alone; ``batching`` says why (not)."""
        if not can_batch(self.new_cache(), self.config):
            self.batching = "one session at a time: this family's layers keep more than plain keys and values"
            return
        self._ragged = RaggedAttention(self.config, self.on_block)
        worst = 0.0
        for hop in self.kinds:
            try:
                worst = max(worst, self._batching_error(hop))
            except PROBE_ERRORS as error:
                self._ragged, self.batching = None, f"one session at a time: a batched pass fails: {error}"
                return
            if not worst <= self._tolerance:
                self._ragged = None
                self.batching = f"one session at a time: a batched pass differs by {worst:.2g} in the self-test"
                return
        self.shares_beginnings = self._ragged.is_plain and self.device.type == "cpu"
        self.batching = f"all ready sessions together (self-test: batched and single differ by {worst:.1g})"

    def _batching_error(self, hop: Span) -> float:
        """How far sessions computed together are from each alone; what is no number is far."""
        rng = torch.Generator().manual_seed(1)
        alone, together = [], []
        for b, n_past, t in ((1, 5, 1), (2, 3, 1), (1, 4, 3), (1, 0, 2)):
            hidden = torch.randn(b, n_past + t, self.hidden_size, generator=rng).to(self.dtype).to(self.device)
            positions = torch.arange(n_past + t, device=self.device).expand(b, -1)
            caches = self.new_cache(hop), self.new_cache(hop)
            for cache in caches if n_past else ():
                self.forward(hidden[:, :n_past], positions[:, :n_past], None, cache, 0, hop)
            alone.append(self.forward(hidden[:, n_past:], positions[:, n_past:], None, caches[0], n_past, hop))
            together.append(SessionTokens(hidden[:, n_past:], positions[:, n_past:], caches[1], n_past))
        pairs = list(zip(self.forward_ragged(together, hop), alone, strict=True))
        errors = [(x - y).abs().max().item() / max(1.0, y.abs().max().item()) for x, y in pairs]
        return max(error if error == error else math.inf for error in errors)

    def _probe(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Random hidden states [1, 6, d] and their positions."""
        rng = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, 6, self.hidden_size, generator=rng).to(self.dtype).to(self.device)
        return hidden, torch.arange(6, device=self.device).unsqueeze(0)

    def example_cache(self, hop: Span) -> SpanCache:
        """A cache of ``hop`` with one token in it, to compare shapes with."""
        cache = self.new_cache(hop)
        self.forward(*self.example(1), None, cache, 0, hop)
        return cache

    def cache_bytes_per_token(self) -> int:
        """What a token of a session takes, and its share of what every session takes (states that do not grow)."""
        (hidden, positions), cache, after = self.example(16), self.new_cache(), list[int]()
        for start, end in ((0, 8), (8, 16)):
            self.forward(hidden[:, start:end], positions[:, start:end], None, cache, start)
            after.append(cache.n_bytes())
        per_token = max(0, after[1] - after[0]) // 8
        fixed = max(0, after[0] - 8 * per_token)
        return max(1, per_token + fixed // USUAL_SESSION_TOKENS)

    def example(self, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [1, t, d] and positions [1, t]."""
        hidden = torch.zeros(1, n_tokens, self.hidden_size, dtype=self.dtype, device=self.device)
        return hidden, torch.arange(n_tokens, device=self.device).unsqueeze(0)

    def _install_gates(self) -> None:
        for index in range(self.span.start, self.span.end):
            layer = self._layers[index]
            layer.forward = self._gate(index, layer.forward)

    def _gate(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*args: Any, **kwargs: Any) -> Any:
            if not self._hop.start <= index < self._hop.end:
                return self._pass_on(args[0] if args else kwargs["hidden_states"])
            if index == self._hop.start and args:
                args = (self._entering, *args[1:])
            elif index == self._hop.start:
                kwargs["hidden_states"] = self._entering
            out = forward(*args, **kwargs)
            if index == self._hop.end - 1:
                self._leaving = out[0] if isinstance(out, tuple) else out
                self._beside = out[1:] if isinstance(out, tuple) else ()
            self.layer_arity = len(out) if isinstance(out, tuple) else 0
            self.on_block()
            return out

        return gated

    def _pass_on(self, hidden: torch.Tensor) -> Any:
        return (hidden, *(None,) * (self.layer_arity - 1)) if self.layer_arity else hidden

    def _find_arity(self) -> None:
        """Learn by probing whether this family's layers return a tensor or a tuple, and of how many."""
        failure: Exception | None = None
        for arity in range(4):
            for layer in self._layers:
                if isinstance(layer, skeleton.Stub):
                    layer.returns_tuple = arity
            try:
                self.forward(*self.example(2))
            except PROBE_ERRORS as error:
                failure = failure or error
                continue
            if self.layer_arity == arity:
                return
        family = type(self.config).__name__
        raise ConfigError(f"{family}: its blocks fail on hidden states alone ({failure}): unsupported family")


def _accepted_arguments(forward: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(forward).parameters
    names = set(parameters)
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()) and "cache_params" not in names:
        names |= {"inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache"}
    return names


def _kind_of(layer: Any) -> object:
    """What tells blocks of several kinds apart: their parts, shapes and settings, but not their number."""
    parts = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str, type(None))) and not key.endswith(NUMBERS_OF_BLOCKS)
        }
        shapes = [tuple(parameter.shape) for parameter in module.parameters(recurse=False)]
        parts.append((name, type(module).__name__, sorted(settings.items(), key=str), shapes))
    return repr(parts)


def _first_of(span: Span, block_bytes: Sequence[int]) -> Span:
    """So many first blocks that no cache holds them."""
    total = 0
    for n, n_bytes in enumerate(block_bytes, 1):
        total += n_bytes
        if total >= TIMED_BYTES:
            return Span(span.start, span.start + n)
    return span
