"""A loaded span: hidden states in, hidden states out, through the family's own decoder forward.

Every owned block has a gate in front: the wire tensor enters at the first block of the hop and leaves after its
last, and blocks outside the hop pass their input on. So a hop can be any part of the span, and what the family does
around its layers does not matter here.

    the family's forward     embed | layer 0 | ... | layer 4 | layer 5 | layer 6 | layer 7 | ... | norm
    this span, [4, 8)        any     placeholders    gate      gate      gate      gate      placeholders
    a hop, [5, 7)                                    passes on input -> ... -> output  passes on
"""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable
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
from swarmd.compute.linear.formats import has_bfloat16
from swarmd.compute.linear.kernels import PROMPT_ROWS, ROWS, choose_kernel
from swarmd.compute.model import skeleton
from swarmd.compute.passes import precompile
from swarmd.compute.passes.backend import Backends, FusedBackend
from swarmd.compute.passes.backend_selection import BackendSelection, TrialSubject
from swarmd.compute.passes.backend_trial import Trial, first_blocks
from swarmd.compute.passes.family import accepted_arguments, kind_of
from swarmd.compute.passes.fused import FusedShape, describe
from swarmd.compute.passes.ragged import RaggedAttention, can_batch
from swarmd.compute.passes.traced import Pass
from swarmd.errors import ConfigError
from swarmd.values import Decision, Span

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
        is_compiled: bool = True,
    ) -> None:
        self.span = span
        self.dtype = dtype
        self.quantize = quantize
        self.kv_cache = kv_cache
        self._may_compile = is_compiled
        self._caches_in: torch.dtype | None = None  # the type that rounded caches return; None for plain ones
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
        self._arguments = accepted_arguments(self._decoder.forward)
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None
        self._extra_outputs: tuple[Any, ...] = ()  # what the hop's last block returned beside hidden states
        self.adapters = SpanAdapters(self.model, self._layers, span, dtype, self.device, on_progress)
        self.layer_arity = 0  # how many values a block of this family returns; 0 is a bare tensor
        self.goes_on_at_once = True  # may a session that has tokens get several more in one pass?
        self.batching = "not tested yet"  # why sessions are computed together or one at a time
        self.shares_beginnings = False  # may they have the keys and values of a common beginning in one place?
        self._hop = span
        self._cache_folder = cache_folder
        self._remembered = remembered
        self._fused_shape: FusedShape | None = None  # if a fused kernel may compute these blocks
        self._shapes = [tuple(p.shape) for p in self._layers[span.start].parameters()]
        block_bytes = [sum(p.nbytes for p in self._layers[b].parameters()) for b in span.blocks()]
        self.sample = first_blocks(span, block_bytes)
        self.kernels = Decision("plain", "no other was looked for")
        self._layer_kernel = "plain"
        if is_quick:
            self._choose_kernels(partial(on_part, "reading layers and packing them"))
        self._install_gates()
        self._find_arity()
        self._ragged: RaggedAttention | None = None
        self._quick: Backends | None = None

    def new_cache(
        self, hop: Span | None = None, max_tokens: int = UNBOUNDED, with_gradients: bool = False
    ) -> SpanCache:
        """Make an empty cache for a session; or one that gradients flow through, which is never rounded."""
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
                token = slice(n, n + 1)
                token_mask = None if mask is None else mask[:, : n_past + n + 1]
                out = self.forward(hidden[:, token], positions[:, token], token_mask, cache, n_past + n, hop, lora)
                outs.append(out)
            return torch.cat(outs, 1)
        if cache is not None:
            cache.see(n_past)
        with self.adapters.using([(hidden.shape[0] * n_tokens, lora)]):
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
        """Run as ``forward``, so that gradients flow from the output [b, t, d] to the input, ``lora`` and ``cache``."""
        with self.adapters.using([(hidden.shape[0] * hidden.shape[1], lora)]):
            return self._decode(hidden, positions, mask, cache.cache if cache else None, hop or self.span)

    @torch.inference_mode()
    def forward_ragged(self, pieces: list[SessionTokens], hop: Span | None = None) -> list[torch.Tensor]:
        """Run the new tokens of several sessions as one pass; returns [b, t, d] for each piece."""
        ragged = self._ragged
        hop = hop or self.span
        assert ragged is not None, "only a span that can_batch"
        sessions = [(piece.n_tokens, piece.lora) for piece in pieces]
        if self._quick is not None and hop == self.span and all(p.lora is None for p in pieces):
            outs = self._quick.run(pieces, sum(n for n, _ in sessions))
            if outs is not None:
                return outs
        with self.adapters.using(sessions):
            return ragged.run(pieces, lambda h, p: self._decode(h, p, None, ragged.cache, hop))

    def is_quick(self, n_tokens: int, longest: int, hop: Span) -> bool:
        """Is there a faster backend for so many new tokens, so many of one session?"""
        return self._quick is not None and hop == self.span and self._quick.knows(n_tokens, longest)

    @property
    def n_by_one_call(self) -> int:
        """New tokens up to which the fused kernel is the fastest backend."""
        return self._quick.n_fused if self._quick is not None else 0

    def is_by_one_call(self, n_tokens: int, hop: Span, cache: SpanCache) -> bool:
        """Does the fused kernel compute so many new tokens with this cache? It can run in the midst of another pass."""
        return self._quick is not None and hop == self.span and self._quick.calls(n_tokens, [cache])

    def _choose_kernels(self, on_layer: Callable[[int, int], None]) -> None:
        """Lay weights out as the fastest kernels read them."""
        if self.device.type != "cpu":
            self.kernels = Decision("plain", "the library's own layers: only CPUs are offered others")
            return
        why = ""
        blocks = [self._layers[index] for index in self.span.blocks()]
        if self._may_compile:
            try:
                self._fused_shape = describe(self._decoder, blocks, self.dtype, self.kv_cache != "none")
            except NotFused as error:
                why = f"; not one call: {error}"
        folder = self._cache_folder
        is_compiled = self._may_compile and precompile.is_compiled(folder)
        if not self._may_compile:
            why = "; compiled code is off"
        elif not is_compiled:
            why += "; what is compiled was not there yet when it was loaded"
        key = ("kernels", *self._timing_key, self._fused_shape is None, is_compiled, compiled_folder(folder).name)
        known = self._remembered.find(*key)
        fastest = str(known.get("action")) if known is not None else None
        rows = PROMPT_ROWS if self._fused_shape else ROWS  # where blocks are fused, layers compute prompts only
        compile_folder = folder if is_compiled else None  # else a worker would wait 20 s for it
        kernels = choose_kernel(self.model, rows, compile_folder, fastest, on_layer)
        if known is None:
            self._remembered.keep({"action": kernels.action}, *key)
        self.kernels = Decision(kernels.action, kernels.reason + why)
        self._layer_kernel = kernels.action

    @property
    def _timing_key(self) -> tuple[object, ...]:
        """All that speed depends on, beside the machine."""
        return (self._shapes, type(self.config).__name__, str(self.dtype), self.quantize, self.kv_cache)

    def quickening(self) -> BackendSelection | None:
        """Make the steps that choose backends for a few new tokens; None where sessions are computed one by one."""
        ragged = self._ragged
        if ragged is None:
            return None
        subject = TrialSubject(
            span=self.span,
            blocks=[self._layers[b] for b in self.span.blocks()],
            kinds=self.kinds,
            sample=self.sample,
            shape=self._fused_shape,
            compute_dtype=self._compute_dtype,
            tolerance=SELF_TEST_TOLERANCE[self._compute_dtype],
            timing_key=(*self._timing_key, self._layer_kernel, len(self.sample)),
            on_block=self._notify_block,
        )
        if self.device.type == "cuda":

            def record(traced: Pass) -> FusedBackend:
                return self._record(ragged, traced, self._examples(1, 0, self.span)[0])

            subject = replace(subject, record=record, trouble=trouble(self.device))

        def forward(hidden: torch.Tensor, positions: torch.Tensor, hop: Span) -> torch.Tensor:
            return self._decode(hidden, positions, None, ragged.cache, hop)

        n_positions = getattr(skeleton.text_config(self.config), "max_position_embeddings", None)
        trial = Trial(ragged, forward, self._examples, n_positions)
        selection = BackendSelection(subject, ragged, trial, self._cache_folder, self._remembered)
        self._quick = selection.quick
        return selection

    def quicken(self) -> None:
        """Choose backends now, step after step."""
        selection = self.quickening()
        while selection is not None and selection.has_steps:
            selection.step()

    def explain_kernels(self) -> Decision[str]:
        """Say what computes layers, and a few tokens, and why."""
        return self._quick.explain(self.kernels) if self._quick is not None else self.kernels

    @property
    def _compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_rounded else self.dtype

    def _notify_block(self) -> None:
        self.on_block()  # looked up at each block, so that it can be replaced

    def _examples(self, n_sessions: int, position: int, hop: Span) -> list[SessionTokens]:
        """Make sessions with 2, 3, ... past tokens from a position on, and a new token each; the same each time."""
        rng = torch.Generator().manual_seed(0)
        examples = []
        for n_past in range(2, 2 + n_sessions):
            hidden = self._random_hidden(1, n_past + 1, rng)
            positions = position + torch.arange(n_past + 1, device=self.device).unsqueeze(0)
            cache = self.new_cache(hop)
            self.forward(hidden[:, :-1], positions[:, :-1], None, cache, 0, hop)
            examples.append(SessionTokens(hidden[:, -1:], positions[:, -1:], cache, n_past))
        return examples

    def _record(self, ragged: RaggedAttention, traced: Pass, example: SessionTokens) -> FusedBackend:
        from swarmd.compute.passes.graphs import GraphedPass  # late: Triton comes with torch where CUDA does

        return GraphedPass(ragged, traced, example, self.on_block)

    @property
    def is_rounded(self) -> bool:
        """Are weights, or keys and values, in 8 or 4 bits?"""
        return self.quantize != "none" or self.kv_cache != "none"

    @property
    def can_batch(self) -> bool:
        """May several sessions be computed in one pass?"""
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
        """Run the family's own forward; ``embedded`` is what it takes for the embedding, and must not matter."""
        self._input = hidden
        self._hop = hop
        arguments = {
            "inputs_embeds": hidden if embedded is None else embedded,
            "attention_mask": mask,
            "position_ids": positions,
            "past_key_values": cache,
            "cache_params": cache,
            "use_cache": cache is not None,
        }
        self._decoder(**{k: v for k, v in arguments.items() if k in self._arguments})
        out = self._output
        self._input = None
        self._output = None
        assert out is not None
        return out

    def numerics(self, model: str) -> str:
        """Name everything that decides the last bits: equal names compute bit-identical results, but for backends."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        parts = (
            model,
            str(self.dtype),
            self.quantize,
            self.kv_cache,
            self._layer_kernel,
            torch.__version__,
            transformers.__version__,
            device,
            f"{torch.backends.cpu.get_cpu_capability()} {has_bfloat16()} {has_matrix_unit()}",
            str(torch.get_num_threads()),
            compiled_folder(self._cache_folder).name if self._may_compile else "not compiled",
        )
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]

    @property
    def kinds(self) -> list[Span]:
        """Hops of one block of each kind: a test of it holds for all blocks that are made alike."""
        first_of_kind: dict[object, Span] = {}
        for block in self.span.blocks():
            first_of_kind.setdefault(kind_of(self._layers[block]), Span(block, block + 1))
        return list(first_of_kind.values())

    def self_test(self) -> None:
        """Refuse a family whose blocks cannot be served by themselves, or fail. Raises ConfigError."""
        try:
            for hop in self.kinds:
                self._test_hop(hop)
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

    def _test_hop(self, hop: Span) -> None:
        """Compare cached passes with uncached ones; nothing but hidden states may matter. Raises ConfigError."""
        hidden, positions = self._probe()
        expected = self.forward(hidden, positions, hop=hop)
        self.goes_on_at_once = self.goes_on_at_once and not self._forgets_states(hidden, positions, hop)
        error = self._cached_error(hidden, positions, expected, hop)
        if not error <= self._tolerance:
            raise ConfigError(
                f"{type(self.config).__name__}: cached passes, with another session's between them, and uncached "
                f"ones differ by {error:.2g} (at most {self._tolerance:g}): this family cannot be served"
            )
        self._test_embedding(hidden, positions, expected, hop)

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
        return torch.equal(outs[0], outs[1])

    def _cached_error(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        expected: torch.Tensor,
        hop: Span,
    ) -> float:
        """Return how far a session's passes are from ``expected``, all at once.

        Another session's tokens come between them: a family that keeps a state outside its cache would mix them up.
        """
        cache = self.new_cache(hop)
        other_session = self.new_cache(hop)
        outs = []
        for start, end in ((0, 3), (3, 5), (5, 6)):
            tokens = slice(start, end)
            outs.append(self.forward(hidden[:, tokens], positions[:, tokens], None, cache, start, hop))
            self.forward(-hidden[:, tokens], positions[:, tokens], None, other_session, start, hop)
        return _largest_error(torch.cat(outs, 1), expected)

    @torch.inference_mode()
    def _test_embedding(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        expected: torch.Tensor,
        hop: Span,
    ) -> None:
        """Refuse a family whose blocks look at the embedding too, which only the first hop has. Raises ConfigError."""
        out = self._decode(hidden, positions, None, None, hop, torch.randn_like(hidden))
        error = _largest_error(out, expected)
        if not error <= self._tolerance:
            raise ConfigError(
                f"{type(self.config).__name__}: its blocks need the embedding beside hidden states: unsupported family"
            )

    @torch.inference_mode()
    def _test_one_by_one(self) -> None:
        """Compare blocks at once with the same blocks one by one, with hidden states between them. Raises ConfigError.

        A block may hand more to the next one: another value that it returns, or something in what they share. Servers
        send hidden states only, so that a chain of them would be wrong without a word. A block that is alone here is
        tested with other values beside hidden states, as the block before it would have returned them.
        """
        family = type(self.config).__name__
        hidden, positions = self._probe()
        try:
            at_once = self._decode(hidden, positions, None, None, self.span)
            if len(self.span) > 1:
                one_by_one = hidden
                for block in self.span.blocks():
                    one_by_one = self._decode(one_by_one, positions, None, None, Span(block, block + 1))
            elif self.span.start:
                one_by_one = self._decode_with_extra_inputs(hidden, positions)
            else:
                one_by_one = at_once
        except PROBE_ERRORS as failure:
            raise ConfigError(
                f"{family}: a block fails without the ones before it: {failure}: unsupported family"
            ) from None
        error = _largest_error(one_by_one, at_once)
        if not error <= (ONE_BY_ONE_TOLERANCE if self.device.type == "cpu" else self._tolerance):
            text = f"its blocks hand more than hidden states to the next one (without it they differ by {error:.2g})"
            raise ConfigError(f"{family}: {text}: unsupported family")

    def _decode_with_extra_inputs(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute the only block, and have the one before it hand on other numbers than None beside hidden states."""
        previous_block: Any = self._layers[self.span.start - 1]
        previous_block.beside = tuple(
            torch.randn_like(value) if torch.is_tensor(value) and value.is_floating_point() else value
            for value in self._extra_outputs
        )
        out = self._decode(hidden, positions, None, None, self.span)
        previous_block.beside = ()
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
                self._ragged = None
                self.batching = f"one session at a time: a batched pass fails: {error}"
                return
            if not worst <= self._tolerance:
                self._ragged = None
                self.batching = f"one session at a time: a batched pass differs by {worst:.2g} in the self-test"
                return
        self.shares_beginnings = self._ragged.is_plain and self.device.type == "cpu"
        self.batching = f"all ready sessions together (self-test: batched and single differ by {worst:.1g})"

    def _batching_error(self, hop: Span) -> float:
        """Return how far sessions computed together are from each alone; NaN is infinitely far."""
        rng = torch.Generator().manual_seed(1)
        expected = []
        pieces = []
        for b, n_past, t in ((1, 5, 1), (2, 3, 1), (1, 4, 3), (1, 0, 2)):
            hidden = self._random_hidden(b, n_past + t, rng)
            positions = torch.arange(n_past + t, device=self.device).expand(b, -1)
            caches = self.new_cache(hop), self.new_cache(hop)
            for cache in caches if n_past else ():
                self.forward(hidden[:, :n_past], positions[:, :n_past], None, cache, 0, hop)
            new_hidden = hidden[:, n_past:]
            new_positions = positions[:, n_past:]
            expected.append(self.forward(new_hidden, new_positions, None, caches[0], n_past, hop))
            pieces.append(SessionTokens(new_hidden, new_positions, caches[1], n_past))
        outs = self.forward_ragged(pieces, hop)
        errors = [_largest_error(out, alone) for out, alone in zip(outs, expected, strict=True)]
        return max(error if error == error else math.inf for error in errors)

    def _probe(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Make random hidden states [1, 6, d] and their positions."""
        rng = torch.Generator().manual_seed(0)
        return self._random_hidden(1, 6, rng), torch.arange(6, device=self.device).unsqueeze(0)

    def _random_hidden(self, b: int, t: int, rng: torch.Generator) -> torch.Tensor:
        hidden = torch.randn(b, t, self.hidden_size, generator=rng)
        return hidden.to(self.dtype).to(self.device)

    def example_cache(self, hop: Span, n_tokens: int = 1) -> SpanCache:
        """Make a cache of ``hop`` with one token in it, or some, to compare shapes with."""
        cache = self.new_cache(hop)
        self.forward(*self.example(n_tokens), None, cache, 0, hop)
        return cache

    def cache_bytes_per_token(self) -> int:
        """Measure what a token of a session takes, with its share of the states that do not grow with a session."""
        hidden, positions = self.example(16)
        cache = self.new_cache()
        n_bytes = []
        for start, end in ((0, 8), (8, 16)):
            self.forward(hidden[:, start:end], positions[:, start:end], None, cache, start)
            n_bytes.append(cache.n_bytes())
        per_token = max(0, n_bytes[1] - n_bytes[0]) // 8
        fixed = max(0, n_bytes[0] - 8 * per_token)
        return max(1, per_token + fixed // USUAL_SESSION_TOKENS)

    def example(self, n_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Make hidden states [1, t, d] of zeros and positions [1, t]."""
        hidden = torch.zeros(1, n_tokens, self.hidden_size, dtype=self.dtype, device=self.device)
        return hidden, torch.arange(n_tokens, device=self.device).unsqueeze(0)

    def _install_gates(self) -> None:
        for index in range(self.span.start, self.span.end):
            layer = self._layers[index]
            layer.forward = self._gate(index, layer.forward)

    def _gate(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a block's forward: it takes the hop's input where the hop begins, and keeps its output at the end."""

        def gated(*args: Any, **kwargs: Any) -> Any:
            if not self._hop.start <= index < self._hop.end:
                return self._pass_on(args[0] if args else kwargs["hidden_states"])
            if index == self._hop.start and args:
                args = (self._input, *args[1:])
            elif index == self._hop.start:
                kwargs["hidden_states"] = self._input
            out = forward(*args, **kwargs)
            if index == self._hop.end - 1:
                self._output = out[0] if isinstance(out, tuple) else out
                self._extra_outputs = out[1:] if isinstance(out, tuple) else ()
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


def _largest_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error, relative to the largest expected number where that is above 1."""
    error: float = (out - expected).abs().max().item()
    return error / max(1.0, expected.abs().max().item())
