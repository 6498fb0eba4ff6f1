"""The span of a team's leader: its own slices, and followers that do what it does, each with its own.

An op is computed by all members at once: the leader sends it out, computes its part, and waits at each sum. So sessions
and the scheduler see one engine, whose caches hold the leader's share of keys and values.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from swarmd.compute.cache.adapters import LoraUpdates
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cache.session_cache import Tensors
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.teams.followers import Followers
from swarmd.compute.teams.numbering import Numbering
from swarmd.compute.teams.orders import (
    BeginWith,
    Borrow,
    Crop,
    Forget,
    KeepUpdates,
    NewCache,
    Order,
    Piece,
    RecordPast,
    Reorder,
    RunBackward,
    RunGraph,
    RunPass,
    TakeOver,
    write_numbers,
)
from swarmd.compute.teams.sliced_span import Prefix, SlicedCache, SlicedSpan
from swarmd.errors import Code, Refused
from swarmd.values import Span


class LedCache(SlicedCache):
    """A session's cache at the leader; followers have one of the same number, which is edited alike."""

    def __init__(self, span: LedSpan, *settings: Any) -> None:
        super().__init__(span, *settings)
        self.number = span.numbers.give(self)
        self._tell = span.tell

    def begin_with(self, prefix: Prefix, n_rows: int) -> None:
        """See SpanCache."""
        written = {block: (write_numbers(keys), write_numbers(values)) for block, (keys, values) in prefix.items()}
        self._tell(BeginWith(self.number, written, n_rows, torch.is_grad_enabled()))
        super().begin_with(prefix, n_rows)

    def record_past(self) -> None:
        """See SpanCache."""
        self._tell(RecordPast(self.number))
        super().record_past()

    def crop(self, n_tokens: int) -> None:
        """See SpanCache."""
        self._tell(Crop(self.number, n_tokens))
        super().crop(n_tokens)

    def reorder(self, rows: torch.Tensor) -> None:
        """See SpanCache."""
        self._tell(Reorder(self.number, rows.tolist()))
        super().reorder(rows)

    def take_over(self, other: SpanCache, start: int, end: int, may_share: bool) -> None:
        """See SpanCache."""
        assert isinstance(other, LedCache)
        self._tell(TakeOver(self.number, other.number, start, end, may_share))
        super().take_over(other, start, end, may_share)

    def borrow(self, other: SpanCache, n_tokens: int) -> None:
        """See SpanCache."""
        assert isinstance(other, LedCache)
        self._tell(Borrow(self.number, other.number, n_tokens))
        super().borrow(other, n_tokens)

    def export_state(self) -> Tensors:
        """Refuse: the rest of it is at others. Raises Refused."""
        raise Refused(Code.UNSUPPORTED, "caches of a team lie in parts, which are not handed over")

    def restore_untrusted(self, state: Tensors, example: SpanCache, n_rows: int, n_tokens: int) -> None:
        """Refuse: it would have to be cut. Raises Refused."""
        raise Refused(Code.UNSUPPORTED, "caches of a team lie in parts, which are not taken from others")


class LedSpan(SlicedSpan):
    """The leader's slices. Once its self-test is done, which followers make at the same time, it leads."""

    def __init__(self, *place: Any, followers: Followers) -> None:
        self.numbers = Numbering()
        self.free_bytes: tuple[int, ...] = ()
        self._followers = followers
        self._leads = False
        self._updates: weakref.WeakKeyDictionary[LoraUpdates, int] = weakref.WeakKeyDictionary()
        super().__init__(*place, weights=followers.weights, member=0, sums=followers.sums)

    def self_test(self) -> None:
        """See LoadedSpan. From now on followers do what this span does."""
        super().self_test()
        self.free_bytes = self._followers.wait_until_ready()
        self._leads = True

    def tokens_that_fit(self, bytes_per_token: int) -> int:
        """How many tokens of sessions half of each follower's memory holds; 0: as many as the leader's does.

        ``bytes_per_token``: of the leader's caches; followers' are larger as their slices are.
        """
        first, *others = self._followers.weights
        per_token = [bytes_per_token * max(1.0, weight / first) for weight in others]
        return min((int(n // 2 // each) for n, each in zip(self.free_bytes, per_token, strict=False)), default=0)

    def tell(self, order: Order) -> None:
        """Have followers do something, after they have given up what nobody here has any more."""
        if forgotten := self.numbers.take_forgotten():
            self._followers.tell(Forget(forgotten))
        self._followers.tell(order)

    def _tell_pass(self, hop: Span, pieces: Sequence[SessionTokens], is_plain: bool = False) -> None:
        written = [self._write_piece(piece) for piece in pieces]
        self.tell(RunPass(hop, written, self._followers.sums.begin(), is_plain))

    def _number_of(self, lora: LoraUpdates | None) -> int | None:
        """The number that members know an adapter by, once they have it."""
        if lora is None:
            return None
        number = self._updates.get(lora)
        if number is None:
            number = self._updates[lora] = self.numbers.give(lora)
            written = {name: (write_numbers(a), write_numbers(b), s) for name, (a, b, s) in lora.updates.items()}
            is_trained = any(a.requires_grad for a, *_ in lora.updates.values())
            self.tell(KeepUpdates(number, written, is_trained))
        return number

    def _write_piece(self, piece: SessionTokens) -> Piece:
        return Piece(
            cache=None if piece.cache is None else piece.cache.number,
            lora=self._number_of(piece.lora),
            n_past=piece.n_past,
            is_exact=piece.is_exact,
            hidden=write_numbers(piece.hidden),
            positions=write_numbers(piece.positions.long()),
            mask=None if piece.mask is None else write_numbers(piece.mask.long()),
        )

    def tell_backward(self, graph: int, gradient: torch.Tensor) -> None:
        """Have followers compute gradients of a graph."""
        self.tell(RunBackward(graph, write_numbers(gradient), self._followers.sums.begin()))

    @property
    def interleaved_tokens(self) -> int:
        """None: followers are in the midst of the same pass."""
        return 0

    def can_interleave(self, n_tokens: int, hop: Span, cache: SpanCache) -> bool:
        """Say no."""
        return False

    def make_cache(self, *settings: Any) -> SpanCache:
        """See LoadedSpan."""
        if not self._leads:
            return super().make_cache(*settings)
        cache = LedCache(self, *settings)
        _, hop, max_tokens, rounded, _ = settings
        self.tell(NewCache(cache.number, hop, max_tokens, rounded is not None))
        return cache

    @torch.inference_mode()
    def run(self, pieces: Sequence[SessionTokens], hop: Span | None = None) -> list[torch.Tensor]:
        """See LoadedSpan."""
        hop = hop or self.span
        if self._leads:
            self._tell_pass(hop, pieces)
        return super().run(pieces, hop)

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
        """See LoadedSpan."""
        hop = hop or self.span
        if self._leads:
            self._tell_pass(hop, [SessionTokens(hidden, positions, cache, n_past, mask=mask)], is_plain=True)
        return super().forward(hidden, positions, mask, cache, n_past, hop)

    def forward_with_grad(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None = None,
        hop: Span | None = None,
        lora: LoraUpdates | None = None,
        cache: SpanCache | None = None,
    ) -> torch.Tensor:
        """See LoadedSpan. A backward is for gradients of the input and of all that is trained, as members make it."""
        hop = hop or self.span
        graph = LedGraph(self)
        is_kept = torch.is_grad_enabled() and hidden.requires_grad
        piece = self._write_piece(SessionTokens(hidden, positions, cache, 0, lora, mask))
        self.tell(RunGraph(graph.number, hop, piece, self._followers.sums.begin(), is_kept))
        outputs = super().forward_with_grad(hidden, positions, mask, hop, lora, cache)
        return _LedBackward.apply(outputs, graph) if is_kept else outputs  # type: ignore[no-untyped-call]


class LedGraph:
    """What autograd keeps of one pass, at the leader; followers have one of the same number."""

    def __init__(self, span: LedSpan) -> None:
        self.span = span
        self.number = span.numbers.give(self)


class _LedBackward(torch.autograd.Function):
    """What left a team's blocks: its backward begins at all members."""

    @staticmethod
    def forward(ctx: Any, outputs: torch.Tensor, graph: LedGraph) -> torch.Tensor:
        ctx.graph = graph
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.graph.span.tell_backward(ctx.graph.number, gradient)
        return gradient, None
