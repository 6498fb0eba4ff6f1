"""A pass over a few new tokens as a CUDA graph: a step launches hundreds of kernels that take microseconds each.

Recorded is the straight line of a span (``capture``), with the attention of ``cuda.attention``, for some numbers of
tokens; a pass takes the next larger one. What is missing are tokens that nobody reads, of a cache that is nobody's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from swarmd.compute.cache.kvcache import SlabLayer, SpanCache
from swarmd.compute.cache.pieces import SessionTokens, in_one_row, of_each
from swarmd.compute.cache.positions import keep, make_room
from swarmd.compute.cuda.attention import Attention
from swarmd.compute.passes.ragged import RaggedAttention
from swarmd.compute.passes.traced import Pass

SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens of passes that are recorded
OWN_PLACES = 3  # numbers of a token's own keys and values, at the end of its places
WARMING = 2  # passes before one is recorded: libraries set themselves up in the first


@dataclass(slots=True)
class _RecordedGraph:
    """A graph, and the memory that it reads and writes."""

    hidden: torch.Tensor
    positions: torch.Tensor
    table: torch.Tensor  # where the keys and values of each layer and token lie: [layers, n, 4]
    out: torch.Tensor
    repeat: Callable[[], None]
    held: object  # what else it writes to


class GraphedPass:
    """See the module. ``example`` is a token of some session, to see how its layers keep keys and values.

    Raises RuntimeError and others where the line cannot be recorded, or its layers are of several shapes.
    """

    def __init__(
        self, ragged: RaggedAttention, line: Pass, example: SessionTokens, on_pass: Callable[[], None] = lambda: None
    ) -> None:
        self._ragged, self._line = ragged, line
        self._on_pass = on_pass
        self._like = example.hidden
        owned = example.cache.owned
        shapes = {layer.stored[0].shape[1::2] for layer in owned} | {layer.stored[1].shape[1::2] for layer in owned}
        if len(shapes) > 1:
            raise RuntimeError(f"its layers keep keys and values of several shapes: {sorted(shapes)}")
        self._kept_heads, self._width = (int(n) for n in shapes.pop())
        self._layers = {layer: index for index, layer in enumerate(ragged.sites)}
        if len(self._layers) != len(owned):
            raise RuntimeError("not every layer attends once")
        nobodys = torch.zeros(2, self._kept_heads, self._width, dtype=self._like.dtype, device=self._like.device)
        self._nobodys = nobodys
        self._none = torch.tensor([nobodys[0].data_ptr(), nobodys[1].data_ptr(), self._width, 0])
        self._pool = torch.cuda.graph_pool_handle() if self._like.is_cuda else None
        self._recorded = {n: self._record(n) for n in SIZES}

    @property
    def timed(self) -> Sequence[int]:
        """Tokens of passes that are worth timing, as many as it may be taken for."""
        return SIZES

    @property
    def longest(self) -> int:
        """New tokens of one session that it is worth taking for."""
        return SIZES[-1]

    def takes(self, caches: Sequence[SpanCache]) -> bool:
        """Do all sessions keep plain keys and values, and have some, on their own?"""
        return all(
            type(layer) is SlabLayer and layer.beginning is None and layer.has_shape and layer.dtype == self._like.dtype
            for cache in caches
            for layer in cache.owned
        )

    def run(self, pieces: Sequence[SessionTokens]) -> list[torch.Tensor]:
        """Compute the new tokens of all pieces, each [b, t, d], and keep their keys and values."""
        hidden, positions = in_one_row(pieces)
        n = hidden.shape[1]
        size = next(size for size in SIZES if size >= n)
        recorded, (kept, counts) = self._recorded[size], make_room(pieces)
        table = self._none.repeat(len(self._layers), size, 1)
        table[:, :n, :OWN_PLACES] = torch.from_numpy(kept[:, :, -OWN_PLACES:])
        table[:, :n, OWN_PLACES] = torch.from_numpy(counts[:, 1])
        recorded.table.copy_(table)
        recorded.hidden[:, :n], recorded.positions[:, :n] = hidden, positions
        recorded.repeat()
        out = recorded.out[0, :n].clone()
        keep(pieces)
        self._on_pass()
        return of_each(out, pieces)

    def _record(self, n: int) -> _RecordedGraph:
        device = self._like.device
        hidden = torch.zeros(1, n, self._like.shape[2], dtype=self._like.dtype, device=device)
        positions = torch.zeros(1, n, dtype=torch.int64, device=device)
        table = self._none.repeat(len(self._layers), n, 1).to(device)
        attention: list[Attention] = []

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
            if not attention:
                attention.append(Attention(n, query.shape[1], self._kept_heads, self._width, query))
            where, scale = table[self._layers[layer]], self._ragged.scale_of(layer, self._width)
            return attention[0].compute(query, key, value, where, scale)

        def once() -> torch.Tensor:
            with self._ragged.attending_by(attend):
                return self._line(hidden, positions)

        if self._pool is None:  # a test's, where there is no card
            recorded = _RecordedGraph(hidden, positions, table, once(), lambda: None, attention)
            recorded.repeat = lambda: setattr(recorded, "out", once())
            return recorded
        here, aside = torch.cuda.current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(WARMING):
                once()
            with _no_waiting():
                once()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(here), torch.cuda.graph(graph, pool=self._pool):
            out = once()
        return _RecordedGraph(hidden, positions, table, out, graph.replay, attention)


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Within, what waits for the card is refused: a recording that fails in its midst leaves the allocator in it."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
