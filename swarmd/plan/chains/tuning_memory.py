"""What a worker keeps of micro-batches until their backward comes: bounded, and the client that holds most gives way.

Numbers only: the tensors are the worker's (``compute.serving.fine_tuning``), which drops those that are named here.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from swarmd.values import Decision

Key = tuple[bytes, int]
"""A lane, and its first block here."""
BatchKey = tuple[Key, int]
"""A lane's micro-batch, by its number."""


@dataclass(slots=True)
class HeldBatch:
    """What a worker keeps of one micro-batch for its backward; ``order``: its age."""

    key: BatchKey
    client: bytes
    input_bytes: int
    order: int
    graph_bytes: int = 0

    @property
    def n_bytes(self) -> int:
        """What it takes of memory: its input, and the graphs that are kept."""
        return self.input_bytes + self.graph_bytes


@dataclass(frozen=True, slots=True)
class Room:
    """What gives way to a new micro-batch, and whether that is kept."""

    without_graphs: tuple[BatchKey, ...]  # their inputs stay
    forgotten: tuple[BatchKey, ...]
    is_kept: bool


# What is kept of a micro-batch between its forward and its backward, from the most to the least:
#
#     graphs of all blocks  ->  graphs given up: the hop's input only  ->  nothing
#     backward as it is         backward computes the forward again        backward is refused, NOT_HELD
#
# Room is made in this order: graphs before inputs, and of the batches those first that are needed last, the newest.
# What lanes remember of rows (``remembered_bytes``) is in the same memory, and does not give way.
class BatchBook:
    """The micro-batches that are kept, within ``limit_bytes``."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: dict[BatchKey, HeldBatch] = {}
        self._orders = itertools.count()

    def has_room_for(self, n_bytes: int, remembered_bytes: int) -> bool:
        """Do so many bytes fit beside all that is kept for clients?"""
        held_bytes = sum(batch.n_bytes for batch in self._held.values())
        return held_bytes + remembered_bytes + n_bytes <= self._limit_bytes

    def may_remember(self, n_lanes: int, lane_bytes: int) -> bool:
        """Is there room for what so many lanes may remember of rows? Half of the memory is for that."""
        return n_lanes * lane_bytes <= self._limit_bytes // 2

    def keep(
        self,
        key: BatchKey,
        client: bytes,
        n_bytes: int,
        remembered_bytes: int,
    ) -> Decision[Room]:
        """Keep a micro-batch for its backward if there is, or can be made, room for its input."""
        without_graphs = []
        with_graphs = [batch for batch in self._held.values() if batch.graph_bytes]
        for batch in sorted(with_graphs, key=lambda batch: -batch.order):
            if self.has_room_for(n_bytes, remembered_bytes):
                break
            batch.graph_bytes = 0
            without_graphs.append(batch.key)
        evicted = make_room([*self._held.values()], client, n_bytes, self._limit_bytes)
        forgotten = evicted.action or []
        for old in forgotten:
            del self._held[old]
        is_kept = evicted.action is not None
        if is_kept:
            self._held[key] = HeldBatch(key, client, n_bytes, next(self._orders))
        return Decision(Room(tuple(without_graphs), tuple(forgotten), is_kept), evicted.reason)

    def add_graph(self, key: BatchKey, n_bytes: int) -> None:
        """Count the graph of one more block of a micro-batch that is kept."""
        self._held[key].graph_bytes += n_bytes

    def graph_bytes(self, key: BatchKey) -> int:
        """What the graphs of a micro-batch take."""
        return self._held[key].graph_bytes

    def give_up_graphs(self, key: BatchKey) -> None:
        """Count a micro-batch's input only."""
        self._held[key].graph_bytes = 0

    def settle(self, lane: Key, seq: int) -> list[int]:
        """Forget a lane's micro-batches up to ``seq``, whose backward will never come; returns their numbers."""
        settled = [key for key in self._held if key[0] == lane and key[1] <= seq]
        for key in settled:
            del self._held[key]
        return [number for _, number in settled]

    def forget(self, key: BatchKey) -> None:
        """A micro-batch's backward is done; one that is not kept is no error."""
        self._held.pop(key, None)

    def forget_lane(self, lane: Key) -> None:
        """A lane is over."""
        self._held = {key: batch for key, batch in self._held.items() if key[0] != lane}


def make_room(
    batches: Sequence[HeldBatch], client: bytes, n_bytes: int, limit_bytes: int
) -> Decision[list[BatchKey] | None]:
    """Choose what gives way to ``n_bytes`` more of ``client``; None: nothing does, and the new one is not kept.

    What was kept last will be asked for last, so of a client the newest goes first; and only clients that would still
    hold as much as this one give anything.
    """
    free = limit_bytes - sum(batch.n_bytes for batch in batches)
    if n_bytes <= free:
        return Decision([], "there is room")
    # Invariant: no client loses a batch to one that would then hold more than it. So two clients never evict each
    # other's batches in turns, and the loop ends: each round shrinks the largest holder.
    bytes_of_client: Counter[bytes] = Counter()
    for batch in batches:
        bytes_of_client[batch.client] += batch.n_bytes
    evicted: list[BatchKey] = []
    remaining = sorted(batches, key=lambda batch: batch.order)
    while free < n_bytes:
        other_clients = [c for c in bytes_of_client if c != client]
        largest_client = max(other_clients, key=lambda c: bytes_of_client[c], default=None)
        newest = next((batch for batch in reversed(remaining) if batch.client == largest_client), None)
        n_after = bytes_of_client[client] + n_bytes
        if newest is None or bytes_of_client[newest.client] - newest.n_bytes < n_after:
            return Decision(None, f"{n_bytes} B more than fits, and nobody holds more than this client")
        remaining.remove(newest)
        evicted.append(newest.key)
        bytes_of_client[newest.client] -= newest.n_bytes
        free += newest.n_bytes
    return Decision(evicted, f"{len(evicted)} of clients that hold more give way")
