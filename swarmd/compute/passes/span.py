"""A loaded span: blocks of one model on one device, and how hidden states pass through any part of them.

Loading has an order. The hollow model reads its own tensors (``skeleton``), layers are laid out for the fastest kernels
(``layer_kernels``), gates are set into blocks (``family``). ``self_test`` then finds out whether the family can be
served, and how. From then on a pass is computed by what the table of its hop says (``backend``).
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from swarmd.compute.cache.adapters import LoraUpdates, SpanAdapters
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cache.span_cache import UNBOUNDED, SpanCache
from swarmd.compute.compiled.build import compiled_folder
from swarmd.compute.cuda.availability import prepare
from swarmd.compute.hardware.matrix_unit import has_matrix_unit
from swarmd.compute.hardware.measurements import Measurements
from swarmd.compute.linear.formats import has_bfloat16
from swarmd.compute.model import skeleton
from swarmd.compute.model.ends import all_look_back
from swarmd.compute.model.slicing import Slicing
from swarmd.compute.passes.backend import BackendTable, FamilyBackend, RaggedBackend
from swarmd.compute.passes.backend_trial import first_blocks
from swarmd.compute.passes.family import PROBE_ERRORS, FamilyForward, PassInputs
from swarmd.compute.passes.layer_kernels import KernelChoice, LayerKernels
from swarmd.compute.passes.ragged import RaggedAttention
from swarmd.compute.passes.self_test import SelfTest
from swarmd.errors import ConfigError
from swarmd.protocol.models.configuration import count_layers, layout_of
from swarmd.protocol.models.manifest import read_config
from swarmd.values import Decision, Span

SELF_TEST_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
USUAL_SESSION_TOKENS = 512  # states that do not grow with a session are counted as so many tokens' share each
NOTHING_REMEMBERED = Measurements(None)
PLAIN_LAYERS = LayerKernels(Decision("plain", "no other was looked for"))
LAYERS_OF_CARDS = LayerKernels(Decision("plain", "the library's own layers: only CPUs are offered others"))


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How blocks are loaded, beside which and in which type."""

    device: str = "cpu"
    quantize: str = "none"
    kv_cache: str = "none"
    is_compiled: bool = True  # may code be compiled for this CPU?
    has_plain_layers: bool = False  # keep layers as the library makes them: a span that computes a few passes only
    slicing: Slicing | None = None  # a member of a team holds slices of the blocks
    cache_folder: Path = Path(tempfile.gettempdir())
    remembered: Measurements = NOTHING_REMEMBERED

    @property
    def is_rounded(self) -> bool:
        """Are weights, or keys and values, in 8 or 4 bits?"""
        return self.quantize != "none" or self.kv_cache != "none"


class LoadedSpan:
    """Blocks of one model on one device. Not thread-safe: the worker is single-threaded."""

    def __init__(
        self,
        folder: Path,
        span: Span,
        dtype: torch.dtype,
        options: LoadOptions = LoadOptions(),
        on_block: Callable[[], None] = lambda: None,
        on_part: Callable[[str, int, int], None] = lambda stage, done, total: None,
    ) -> None:
        self.span = span
        self.dtype = dtype
        self.options = options
        self.device = torch.device(options.device)
        self.on_block = on_block
        if self.device.type == "cuda":
            prepare(self.device, options.cache_folder)
        written = read_config(folder)
        layout = layout_of(written)
        n_layers = count_layers(written)
        self.n_blocks = layout.n_blocks(n_layers)  # of the whole model
        here = layout.layers(span, n_layers)
        self.model = skeleton.load(folder, here, dtype, options.quantize, options.device, on_part, options.slicing)
        layers = skeleton.decoder_layers(self.model)
        self.blocks = [layers[index] for index in here.blocks()]
        blocks = {layers[index]: layout.block_of(index) for index in here.blocks()}
        self.adapters = self.make_adapters(self.model, layers, blocks, dtype, self.device, on_block)
        block_bytes = Counter[int]()
        for layer, block in blocks.items():
            block_bytes[block] += sum(p.nbytes for p in layer.parameters())
        self.sample = first_blocks(span, [block_bytes[block] for block in span.blocks()])
        shapes = [tuple(p.shape) for p in self.blocks[0].parameters()]
        family_name = type(self.model.config).__name__
        self.timing_key = (shapes, family_name, str(dtype), options.quantize, options.kv_cache)
        self.layers = PLAIN_LAYERS
        if self.device.type != "cpu" and not options.has_plain_layers:
            self.layers = LAYERS_OF_CARDS
        elif not options.has_plain_layers:
            choice = KernelChoice(
                dtype=dtype,
                keeps_8_bits=options.kv_cache != "none",
                may_compile=options.is_compiled,
                cache_folder=options.cache_folder,
                timing_key=self.timing_key,
                remembered=options.remembered,
            )
            self.layers = choice.run(self.model, self.blocks, partial(on_part, "reading layers and packing them"))
        self.family = FamilyForward(self.model, span, dtype, self.device, self._notify_block)
        self.hidden_size = self.family.hidden_size
        self.layer_arity = self.family.layer_arity  # how many values a block returns; 0 is a bare tensor
        self.ragged: RaggedAttention | None = None
        self.batching = "not tested yet"  # why sessions are computed together or one at a time
        self.shares_prefixes = False  # may sessions have the keys and values of a common prefix in one place?
        self._tables: dict[Span, BackendTable] = {}
        self._crop_trouble = ""  # why no tokens can be taken back, whatever a cache says
        self._caches_in: torch.dtype | None = None  # the type that rounded caches return; None for plain ones

    def make_adapters(self, *place: Any) -> SpanAdapters:
        """Make what holds adapters; ``place`` as it takes it."""
        return SpanAdapters(*place)

    def _notify_block(self) -> None:
        self.on_block()  # looked up at each block, so that it can be replaced

    @property
    def can_batch(self) -> bool:
        """May several sessions be computed in one pass?"""
        return self.ragged is not None

    # --- passes ------------------------------------------------------------------------------------------------------

    def new_cache(
        self,
        hop: Span | None = None,
        max_tokens: int = UNBOUNDED,
        is_exact: bool = False,
        with_gradients: bool = False,
    ) -> SpanCache:
        """Make an empty cache for a session; or one that gradients flow through, which is never rounded.

        Each session has memory of its own, an exact one as any other.
        """
        config = self.model.config
        rounded = None if with_gradients else self._caches_in
        return self.make_cache(config, hop or self.span, max_tokens, rounded, self._crop_trouble)

    def make_cache(self, *settings: Any) -> SpanCache:
        """Make a cache, as these blocks need it; ``settings`` as it takes them."""
        return SpanCache(*settings)

    @torch.inference_mode()
    def run(
        self,
        pieces: Sequence[SessionTokens],
        hop: Span | None = None,
    ) -> list[torch.Tensor]:
        """Compute the new tokens of some sessions, by what is the fastest for them; returns [b, t, d] for each."""
        return self.table(hop or self.span).choose(pieces).run(pieces)

    @torch.inference_mode()
    def forward(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: SpanCache | None = None,
        n_past: int = 0,
        hop: Span | None = None,
    ) -> torch.Tensor:
        """Run the family's own forward: hidden [b, t, d], positions [b, t], mask [b, n_past + t] -> [b, t, d]."""
        return self.family.compute(hidden, positions, mask, cache, n_past, hop or self.span)

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
        inputs = PassInputs(hidden, positions, mask, cache.cache if cache else None)
        with self.adapters.using([(hidden.shape[0] * hidden.shape[1], lora)]):
            return self.family.run(inputs, hop or self.span)

    def count_heads(self, block: int, n_here: int) -> int:
        """How many heads of keys a block has, of which ``n_here`` are computed here: all of them."""
        return n_here

    def refuses_rows(self, rows: torch.Tensor) -> str:
        """Say what is wrong with what a peer sent of some tokens [b, t, d]; empty if nothing is."""
        return self.family.format.refuses(rows)

    def table(self, hop: Span) -> BackendTable:
        """Return the backends of a hop."""
        table = self._tables.get(hop)
        if table is None:
            family = FamilyBackend(self.family, self.adapters, hop)
            ragged = None if self.ragged is None else RaggedBackend(self.family, self.ragged, hop, self.adapters)
            table = BackendTable(family, ragged)
            self._tables[hop] = table
        return table

    def forget_backends(self) -> None:
        """Go back to the backends that are always there."""
        self._tables = {}

    @property
    def interleaved_tokens(self) -> int:
        """New tokens that can be computed in the midst of another pass; 0 where none can."""
        return self.table(self.span).interleaved_tokens

    def can_interleave(self, n_tokens: int, hop: Span, cache: SpanCache) -> bool:
        """Can so many new tokens with this cache be computed in the midst of another pass?"""
        return self.table(hop).can_interleave(n_tokens, cache)

    def explain_kernels(self) -> Decision[str]:
        """Say what computes layers, and a few tokens, and why."""
        return self.table(self.span).explain(self.layers.kernels)

    # --- what is found out by trying ---------------------------------------------------------------------------------

    def self_test(self) -> None:
        """Refuse a family whose blocks cannot be served by themselves, or fail; find out how sessions are computed.

        Raises ConfigError.
        """
        dtype = self.dtype if self.options.quantize == "none" else torch.bfloat16
        test = SelfTest(self.family, SELF_TEST_TOLERANCE[dtype])
        test.check_blocks()
        self._crop_trouble = test.find_crop_trouble()
        if self._crop_trouble and all_look_back(skeleton.text_config(self.model.config)):  # so clients believe
            family = type(self.model.config).__name__
            raise ConfigError(f"{family}: {self._crop_trouble}, and its clients try tokens ahead: unsupported family")
        self._crop_trouble = self._crop_trouble or test.find_crop_refusal()
        batching = test.find_batching(self.on_block)
        self.ragged = batching.action
        self.batching = batching.reason
        self.shares_prefixes = self.ragged is not None and self.ragged.is_plain and self.device.type == "cpu"
        self.forget_backends()
        if self.options.kv_cache != "none":
            self._round_caches()

    def _round_caches(self) -> None:
        """Keep keys and values in 8 bits from now on. Raises ConfigError where they are of another kind."""
        kind = self.options.kv_cache
        self._caches_in = self.dtype
        try:
            is_rounded = self.example_cache(self.span).is_rounded
        except PROBE_ERRORS as error:
            raise ConfigError(f"kv_cache = {kind}: a probe fails: {error}: say kv_cache = none") from None
        if not is_rounded:
            family = type(self.model.config).__name__
            raise ConfigError(f"kv_cache = {kind}: no block of a {family} here keeps what all tokens see")

    def example_cache(self, hop: Span, n_tokens: int = 1) -> SpanCache:
        """Make a cache of ``hop`` with one token in it, or some, to compare shapes with."""
        cache = self.new_cache(hop)
        self.forward(*self.family.example(n_tokens), None, cache, 0, hop)
        return cache


def cache_bytes_per_token(span: LoadedSpan) -> int:
    """Measure what a token of a session takes, with its share of the states that do not grow with a session."""
    hidden, positions = span.family.example(16)
    cache = span.new_cache()
    n_bytes = []
    for start, end in ((0, 8), (8, 16)):
        span.forward(hidden[:, start:end], positions[:, start:end], None, cache, start)
        n_bytes.append(cache.n_bytes())
    per_token = max(0, n_bytes[1] - n_bytes[0]) // 8
    fixed = max(0, n_bytes[0] - 8 * per_token)
    return max(1, per_token + fixed // USUAL_SESSION_TOKENS)


def numerics(span: LoadedSpan, model: str) -> str:
    """Name everything that decides the last bits: equal names compute bit-identical results, but for backends."""
    options = span.options
    device = torch.cuda.get_device_name(span.device) if span.device.type == "cuda" else span.device.type
    parts = (
        model,
        str(span.dtype),
        options.quantize,
        options.kv_cache,
        span.layers.kernels.action,
        torch.__version__,
        transformers.__version__,
        device,
        f"{torch.backends.cpu.get_cpu_capability()} {has_bfloat16()} {has_matrix_unit()}",
        str(torch.get_num_threads()),
        compiled_folder(options.cache_folder).name if options.is_compiled else "not compiled",
        *([f"slices {options.slicing.weights}"] if options.slicing else []),
    )
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
