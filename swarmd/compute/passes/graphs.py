"""A pass over a few new tokens as a CUDA graph: a step launches hundreds of kernels that take microseconds each.

The traced pass of a span (``traced``) is recorded with the attention of ``cuda.attention``, for some numbers of tokens;
a pass takes the next larger one. The missing tokens are padding, which nobody reads, in a cache that is nobody's.

    new tokens      | a | b | c |                of three sessions
    recorded for 4  | a | b | c | padding |      hidden, positions, and for each layer a row of the table:
    table           addresses in the caches of a, b, c | address of the padding's cache
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from swarmd.compute.cache.kvcache import SlabLayer
from swarmd.compute.cache.pieces import SessionTokens, join_rows, split_row
from swarmd.compute.cache.positions import count_written, make_room
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.cuda.attention import Attention
from swarmd.compute.cuda.availability import waiting_forbidden
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
    replay: Callable[[], None]
    buffers: object  # what else it writes to


class GraphedPass:
    """See the module. ``example`` is a token of some session, to see how its layers keep keys and values.

    Raises RuntimeError and others where the pass cannot be recorded, or its layers are of several shapes.
    """

    def __init__(
        self,
        ragged: RaggedAttention,
        traced: Pass,
        example: SessionTokens,
        on_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self._ragged = ragged
        self._traced = traced
        self._on_pass = on_pass
        self._sample = example.hidden
        owned = example.cache.owned
        shapes = {states.shape[1::2] for layer in owned for states in layer.stored}
        if len(shapes) > 1:
            raise RuntimeError(f"its layers keep keys and values of several shapes: {sorted(shapes)}")
        self._kept_heads, self._width = (int(n) for n in shapes.pop())
        self._layers = {layer: index for index, layer in enumerate(ragged.sites)}
        if len(self._layers) != len(owned):
            raise RuntimeError("not every layer attends once")
        device = self._sample.device
        padding = torch.zeros(2, self._kept_heads, self._width, dtype=self._sample.dtype, device=device)
        self._padding_cache = padding  # kept alive: graphs write to it
        addresses = padding[0].data_ptr(), padding[1].data_ptr()
        self._padding_row = torch.tensor([*addresses, self._width, 0])
        self._pool = torch.cuda.graph_pool_handle() if self._sample.is_cuda else None
        self._recorded = {n: self._record(n) for n in SIZES}

    @property
    def sizes(self) -> Sequence[int]:
        """New tokens of the passes that are recorded."""
        return SIZES

    @property
    def longest(self) -> int:
        """New tokens of one session that it is worth taking for."""
        return SIZES[-1]

    @property
    def is_reentrant(self) -> bool:
        """Graphs write to memory of their own, one at a time."""
        return False

    def supports(self, caches: Sequence[SpanCache]) -> bool:
        """Do all sessions keep plain keys and values, and have some, on their own?"""
        return all(self._can_read(layer) for cache in caches for layer in cache.owned)

    def _can_read(self, layer: object) -> bool:
        if type(layer) is not SlabLayer or layer.prefix is not None:
            return False
        return layer.has_shape and layer.dtype == self._sample.dtype

    def run(self, pieces: Sequence[SessionTokens]) -> list[torch.Tensor]:
        """Compute the new tokens of all pieces, each [b, t, d], and keep their keys and values."""
        hidden, positions = join_rows(pieces)
        n = hidden.shape[1]
        size = next(size for size in SIZES if size >= n)
        recorded = self._recorded[size]
        kv_places, counts = make_room(pieces)
        table = self._padding_row.repeat(len(self._layers), size, 1)
        table[:, :n, :OWN_PLACES] = torch.from_numpy(kv_places[:, :, -OWN_PLACES:])
        table[:, :n, OWN_PLACES] = torch.from_numpy(counts[:, 1])
        recorded.table.copy_(table)
        recorded.hidden[:, :n] = hidden
        recorded.positions[:, :n] = positions
        recorded.replay()
        out = recorded.out[0, :n].clone()
        count_written(pieces)
        self._on_pass()
        return split_row(out, pieces)

    def _record(self, n: int) -> _RecordedGraph:
        """Record a pass over n tokens.

        It is run before, on a stream beside: libraries allocate and choose kernels in their first call, which a graph
        must not repeat. Once more it is run with waiting forbidden, since a graph cannot wait for the card either.
        """
        device = self._sample.device
        hidden = torch.zeros(1, n, self._sample.shape[2], dtype=self._sample.dtype, device=device)
        positions = torch.zeros(1, n, dtype=torch.int64, device=device)
        table = self._padding_row.repeat(len(self._layers), n, 1).to(device)
        attention: list[Attention] = []

        def attend(
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            layer: int,
        ) -> torch.Tensor:
            if not attention:
                attention.append(Attention(n, query.shape[1], self._kept_heads, self._width, query))
            scale = self._ragged.scale_of(layer, self._width)
            return attention[0].compute(query, key, value, table[self._layers[layer]], scale)

        def run_once() -> torch.Tensor:
            with self._ragged.attending_by(attend):
                return self._traced(hidden, positions)

        if self._pool is None:  # a test's, where there is no card
            recorded = _RecordedGraph(hidden, positions, table, run_once(), lambda: None, attention)
            recorded.replay = lambda: setattr(recorded, "out", run_once())
            return recorded
        main_stream = torch.cuda.current_stream(device)
        side_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        side_stream.wait_stream(main_stream)
        with torch.cuda.stream(side_stream):
            for _ in range(WARMING):
                run_once()
            with waiting_forbidden():
                run_once()
        main_stream.wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(main_stream), torch.cuda.graph(graph, pool=self._pool):
            out = run_once()
        return _RecordedGraph(hidden, positions, table, out, graph.replay, attention)
