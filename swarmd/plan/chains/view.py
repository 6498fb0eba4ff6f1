"""The swarm as one peer knows it: a frozen picture made of verified records."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from swarmd.errors import ConfigError, NoRoute
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.records import PeerRecord, RunRecord, SpanRecord
from swarmd.protocol.wire.tensors import ITEM_BYTES
from swarmd.values import ModelId, PeerId, RunId, Span, count, ranges


def coverage(
    spans: Iterable[SpanRecord],
    model: ModelId,
    n_blocks: int,
    states: Container[str] = ("online",),
) -> list[int]:
    """Count for each block of a model the servers, in one of ``states``, that hold it."""
    counts = [0] * n_blocks
    for span in spans:
        if span.model == model and span.state in states:
            for block in range(span.start, min(span.end, n_blocks)):
                counts[block] += 1
    return counts


def _join_spans(spans: Iterable[Span]) -> str:
    return ", ".join(map(str, spans))


@dataclass(frozen=True, slots=True)
class SwarmView:
    """All records that count at one moment. Free to read, never changes.

    ``out_of_reach`` is served by members that nobody can connect to from here: it counts for nothing.
    """

    peers: Mapping[PeerId, PeerRecord]
    spans: tuple[SpanRecord, ...]
    catalog: Catalog
    runs: tuple[RunRecord, ...] = ()
    out_of_reach: tuple[SpanRecord, ...] = ()

    def in_run(self, run: RunId) -> list[RunRecord]:
        """Who takes part in a training run, in any of its stages."""
        return [r for r in self.runs if run in (r.run, r.whole)]

    def in_ledger(self, run: RunId) -> list[RunRecord]:
        """Who keeps a ledger: that of a run, or of one of its stages."""
        return [r for r in self.runs if r.run == run]

    def serving(self, model: ModelId) -> list[SpanRecord]:
        """Spans of a model that take new sessions."""
        return [s for s in self.spans if s.model == model and s.state == "online"]

    def listed(self) -> list[SpanRecord]:
        """Spans of the catalog's models: of others anybody could announce as many as he likes."""
        models = {model for model, _ in self.catalog.models.values()}
        return [s for s in self.spans if s.model in models]

    def coverage(self, model: ModelId, n_blocks: int) -> list[int]:
        """Count for each block the servers that hold it."""
        return coverage(self.spans, model, n_blocks)

    def holders(self, model: ModelId, n_blocks: int) -> list[frozenset[str]]:
        """The peers that serve each block."""
        holders_by_block: list[set[str]] = [set() for _ in range(n_blocks)]
        for span in self.serving(model):
            for block in range(span.start, min(span.end, n_blocks)):
                holders_by_block[block].add(span.peer)
        return [frozenset(peers) for peers in holders_by_block]

    def missing(self, model: ModelId, n_blocks: int) -> list[Span]:
        """The blocks that nobody serves."""
        return ranges({block for block, n in enumerate(self.coverage(model, n_blocks)) if n == 0})

    def served_dtype(self, model: ModelId, n_blocks: int, requested: str = "auto") -> str:
        """The dtype in which every block is served: ``requested``, or the first of several. Raises NoRoute."""
        candidates = [*ITEM_BYTES] if requested == "auto" else [requested]
        for dtype in candidates:
            if not self._dtype_gaps(model, n_blocks, dtype):
                return dtype
        if missing := self.missing(model, n_blocks):
            n_hidden = sum(span.model == model for span in self.out_of_reach)
            hidden = f"; {count(n_hidden, 'server')} behind a router cannot be reached" if n_hidden else ""
            raise NoRoute(f"no live server holds blocks {_join_spans(missing)} of {n_blocks}{hidden}", tuple(missing))
        gaps = {dtype: self._dtype_gaps(model, n_blocks, dtype) for dtype in ITEM_BYTES}
        complete = [dtype for dtype in ITEM_BYTES if not gaps[dtype]]
        alternatives = (
            f"can be asked for: {', '.join(complete)}" if complete else "every block is served, but not in one dtype"
        )
        lacking = ", ".join(f"{_join_spans(gaps[dtype])} in {dtype}" for dtype in candidates)
        raise NoRoute(
            f"no live server holds blocks {lacking} of {n_blocks}; {alternatives}", tuple(gaps[candidates[0]])
        )

    def _dtype_gaps(self, model: ModelId, n_blocks: int, dtype: str) -> list[Span]:
        """The blocks that nobody serves in a dtype."""
        counts = coverage((span for span in self.spans if span.dtype == dtype), model, n_blocks)
        return ranges({block for block, n in enumerate(counts) if n == 0})

    def is_given(self, model: ModelId, block: int) -> bool:
        """Can the weights of a block be fetched: from a member that has them, or from the hub?"""
        if model in self.catalog.sources:
            return True
        held_blocks = (record.holds.get(model, ()) for record in self.peers.values())
        return any(start <= block < end for groups in held_blocks for start, end in groups)

    def peer_ending(self, ending: str) -> PeerId:
        """The one peer whose id ends so. Raises ConfigError."""
        matches = [peer for peer in self.peers if peer.endswith(ending)] if ending else []
        if len(matches) != 1:
            raise ConfigError(f"{len(matches)} known peers have an id that ends in {ending!r}: see swarmd peers")
        return matches[0]

    def model_named(self, name: str) -> tuple[ModelId, int] | None:
        """Resolve a name of the catalog, or a hash that it lists, to (hash, number of blocks)."""
        for listed_name, (model, n_blocks) in self.catalog.models.items():
            if name in (listed_name, model):
                return ModelId(model), n_blocks
        return None
