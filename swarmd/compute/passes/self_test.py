"""The tests that a family has to pass before its blocks are served: results, not names, decide what it can do.

A family is tried on random hidden states, in one block of each kind. What would make a chain of servers wrong without
a word is refused; what only makes it slower (sessions one at a time, tokens one by one) is found out and said.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.passes.backend import RaggedBackend
from swarmd.compute.passes.family import PROBE_ERRORS, FamilyForward, PassInputs
from swarmd.compute.passes.ragged import RaggedAttention, can_batch
from swarmd.errors import ConfigError
from swarmd.values import Decision, Span

ONE_BY_ONE_TOLERANCE = 1e-5  # on CPUs the same kernels compute the same numbers
BATCHED_PROBES = ((1, 5, 1), (2, 3, 1), (1, 4, 3), (1, 0, 2))  # sessions: rows, past tokens, new tokens


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The tests of one family's forward; ``tolerance`` is relative to the largest number."""

    family: FamilyForward
    tolerance: float

    def check_blocks(self) -> None:
        """Refuse a family whose blocks cannot be served by themselves, or fail. Raises ConfigError."""
        try:
            for hop in self.family.kinds:
                self._check_hop(hop)
        except PROBE_ERRORS as error:
            raise ConfigError(f"{self._name}: a self-test fails: {error}: unsupported family") from None
        self._check_one_by_one()

    @property
    def _name(self) -> str:
        return type(self.family.config).__name__

    @torch.inference_mode()
    def _check_hop(self, hop: Span) -> None:
        """Compare cached passes with uncached ones; nothing but hidden states may matter. Raises ConfigError."""
        family = self.family
        hidden, positions = self._probe()
        expected = family.run(PassInputs(hidden, positions), hop)
        family.can_append_chunks = family.can_append_chunks and not self._forgets_states(hidden, positions, hop)
        error = self._cached_error(hidden, positions, expected, hop)
        if not error <= self.tolerance:
            raise ConfigError(
                f"{self._name}: cached passes, with another session's between them, and uncached "
                f"ones differ by {error:.2g} (at most {self.tolerance:g}): this family cannot be served"
            )
        # Some blocks look at the embedding too, which only the first hop has.
        out = family.run(PassInputs(hidden, positions), hop, torch.randn_like(hidden))
        error = _largest_error(out, expected)
        if not error <= self.tolerance:
            raise ConfigError(f"{self._name}: its blocks need the embedding beside hidden states: unsupported family")

    @torch.inference_mode()
    def find_crop_trouble(self) -> str:
        """Say why tokens cannot be taken back, though the library's caches say that they can; empty if they can.

        A cache may take a part of what it keeps back only, and say nothing: so another token takes the place of one
        that was taken back, and has to give what it gives without that.
        """
        for hop in self.family.kinds:
            try:
                error = self._cropped_error(hop)
            except PROBE_ERRORS as failure:
                return f"taking a token back fails: {failure}"
            if not error <= self.tolerance:
                return f"a token that was taken back changes what follows by {error:.2g}"
        return ""

    def _cropped_error(self, hop: Span) -> float:
        """Return how far a token is from what it gives without one before it that was taken back; 0 where none can."""
        plain, cropped = self._recorded_cache(hop, 5), self._recorded_cache(hop, 6)
        if cropped.refuses_crop(1):
            return 0.0
        cropped.crop(1)
        hidden, positions = self._probe(1)
        last = hidden[:, 5:], positions[:, 5:]
        expected, out = (self.family.compute(*last, None, cache, 5, hop) for cache in (plain, cropped))
        return _largest_error(out, expected)

    def _recorded_cache(self, hop: Span, n_tokens: int) -> SpanCache:
        """Make a cache with some tokens, of which those behind the third are recorded to be taken back."""
        hidden, positions = self._probe()
        cache = self._new_cache(hop)
        self.family.compute(hidden[:, :3], positions[:, :3], None, cache, 0, hop)
        cache.record_past()
        self.family.compute(hidden[:, 3:n_tokens], positions[:, 3:n_tokens], None, cache, 3, hop)
        return cache

    @torch.inference_mode()
    def find_crop_refusal(self) -> str:
        """Say why caches refuse to take back a token that was recorded for it; empty if none does."""
        reasons = (self._recorded_cache(hop, 6).refuses_crop(1) for hop in self.family.kinds)
        return next(filter(None, reasons), "")

    def _forgets_states(self, hidden: torch.Tensor, positions: torch.Tensor, hop: Span) -> bool:
        """Does it not matter which states a session has, when several tokens follow? Some families begin anew."""
        outs = []
        for change in (0.0, 1.0):
            cache = self._new_cache(hop)
            if cache.keeps_tokens_only:
                return False
            self.family.compute(hidden[:, :3], positions[:, :3], None, cache, 0, hop)
            if not _change_states(cache, change):
                return False
            outs.append(self.family.compute(hidden[:, 3:], positions[:, 3:], None, cache, 3, hop))
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
        cache = self._new_cache(hop)
        other_session = self._new_cache(hop)
        other_hidden, _ = self._probe(1)
        outs = []
        for start, end in ((0, 3), (3, 5), (5, 6)):
            tokens = slice(start, end)
            outs.append(self.family.compute(hidden[:, tokens], positions[:, tokens], None, cache, start, hop))
            self.family.compute(other_hidden[:, tokens], positions[:, tokens], None, other_session, start, hop)
        return _largest_error(torch.cat(outs, 1), expected)

    @torch.inference_mode()
    def _check_one_by_one(self) -> None:
        """Compare blocks at once with the same blocks one by one, with hidden states between them. Raises ConfigError.

        A block may hand more to the next one: another value that it returns, or something in what they share. Servers
        send hidden states only, so that a chain of them would be wrong without a word. A block that is alone here is
        tested with other values beside hidden states, as the block before it would have returned them.
        """
        span = self.family.span
        hidden, positions = self._probe()
        inputs = PassInputs(hidden, positions)
        try:
            at_once = self.family.run(inputs, span)
            if len(span) > 1:
                one_by_one = hidden
                for block in span.blocks():
                    one_by_one = self.family.run(PassInputs(one_by_one, positions), Span(block, block + 1))
            elif span.start:
                one_by_one = self.family.run_after_another_block(inputs)
            else:
                one_by_one = at_once
        except PROBE_ERRORS as failure:
            raise ConfigError(
                f"{self._name}: a block fails without the ones before it: {failure}: unsupported family"
            ) from None
        error = _largest_error(one_by_one, at_once)
        if not error <= (ONE_BY_ONE_TOLERANCE if hidden.device.type == "cpu" else self.tolerance):
            text = f"its blocks hand more than hidden states to the next one (without it they differ by {error:.2g})"
            raise ConfigError(f"{self._name}: {text}: unsupported family")

    def find_batching(self, on_layer: Callable[[], None]) -> Decision[RaggedAttention | None]:
        """Let sessions be computed together if that gives what they give alone; the reason says why (not)."""
        config = self.family.config
        if not can_batch(self._new_cache(self.family.span), config):
            why = "one session at a time: this family's layers keep more than plain keys and values"
            return Decision(None, why)
        ragged = RaggedAttention(config, on_layer)
        worst = 0.0
        for hop in self.family.kinds:
            try:
                worst = max(worst, self._batching_error(RaggedBackend(self.family, ragged, hop), hop))
            except PROBE_ERRORS as error:
                return Decision(None, f"one session at a time: a batched pass fails: {error}")
            if not worst <= self.tolerance:
                why = f"one session at a time: a batched pass differs by {worst:.2g} in the self-test"
                return Decision(None, why)
        why = f"all ready sessions together (self-test: batched and single differ by {worst:.1g})"
        return Decision(ragged, why)

    @torch.inference_mode()
    def _batching_error(self, ragged: RaggedBackend, hop: Span) -> float:
        """Return how far sessions computed together are from each alone; NaN is infinitely far."""
        family = self.family
        rng = torch.Generator().manual_seed(1)
        expected = []
        pieces = []
        for b, n_past, t in BATCHED_PROBES:
            hidden = family.random_hidden(b, n_past + t, rng)
            positions = torch.arange(n_past + t, device=hidden.device).expand(b, -1)
            caches = self._new_cache(hop), self._new_cache(hop)
            for cache in caches if n_past else ():
                family.compute(hidden[:, :n_past], positions[:, :n_past], None, cache, 0, hop)
            new_hidden = hidden[:, n_past:]
            new_positions = positions[:, n_past:]
            expected.append(family.compute(new_hidden, new_positions, None, caches[0], n_past, hop))
            pieces.append(SessionTokens(new_hidden, new_positions, caches[1], n_past))
        outs = ragged.run(pieces)
        errors = [_largest_error(out, alone) for out, alone in zip(outs, expected, strict=True)]
        return max(error if error == error else math.inf for error in errors)

    def _probe(self, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Make random hidden states [1, 6, d] and their positions."""
        rng = torch.Generator().manual_seed(seed)
        hidden = self.family.random_hidden(1, 6, rng)
        return hidden, torch.arange(6, device=hidden.device).unsqueeze(0)

    def _new_cache(self, hop: Span) -> SpanCache:
        return SpanCache(self.family.config, hop)


def _largest_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error, relative to the largest expected number where that is above 1."""
    error: float = (out - expected).abs().max().item()
    return error / max(1.0, expected.abs().max().item())


def _change_states(cache: SpanCache, added: float) -> bool:
    """Add a number to all recurrent states, to see whether they matter; False where there are none."""
    states = [
        state
        for layer in cache.owned
        if isinstance(layer, LinearAttentionCacheLayerMixin)
        for number, state in layer.recurrent_states.items()
        if layer.is_recurrent_states_initialized[number]
    ]
    for state in states:
        state.add_(added)
    return bool(states)
