"""A follower's process: it holds its slices, and does what the leader of its team does, op for op.

    python -m swarmd.compute.teams.follower CONNECTION MEMORY MEMBER MEMBERS

The first two are numbers of open files: the leader's socketpair, and the memory of sums. It ends when the leader does.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from swarmd.compute.cache.adapters import LoraUpdates
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.hardware.child_process import end_with_parent
from swarmd.compute.hardware.device import use_threads
from swarmd.compute.hardware.worker_process import describe_error
from swarmd.compute.passes.family import PROBE_ERRORS
from swarmd.compute.passes.load_request import load_blocks
from swarmd.compute.teams.measuring import answer_measure
from swarmd.compute.teams.orders import (
    BeginWith,
    Borrow,
    Crop,
    Forget,
    KeepUpdates,
    Measure,
    NewCache,
    Numbers,
    Order,
    Piece,
    RecordPast,
    Reorder,
    RunBackward,
    RunGraph,
    RunPass,
    Take,
    TakeOver,
    decode,
    read_numbers,
    receive,
    send,
)
from swarmd.compute.teams.shared_sums import SharedSums
from swarmd.compute.teams.sliced_span import SlicedSpan
from swarmd.compute.teams.sums import Adding, TeamBroken

Graph = tuple[list[torch.Tensor], torch.Tensor]
"""What gradients are taken by, and what left blocks."""


class Follower:
    """One member's slices, its part of the caches, and what clients have of their own."""

    def __init__(self, span: SlicedSpan, sums: Adding) -> None:
        self._span = span
        self._sums = sums
        self._caches: dict[int, SpanCache] = {}
        self._prefixes: dict[int, list[torch.Tensor]] = {}  # of caches, by their numbers
        self._updates: dict[int, LoraUpdates] = {}
        self._graphs: dict[int, Graph] = {}

    def do(self, order: Order) -> None:
        """Do as the leader does."""
        caches = self._caches
        match order:
            case RunPass():
                self._run(order)
            case NewCache(cache, hop, max_tokens, is_rounded):
                caches[cache] = self._span.new_cache(hop, max_tokens, with_gradients=not is_rounded)
            case BeginWith():
                self._begin_with(order)
            case KeepUpdates():
                self._keep_updates(order)
            case RunGraph():
                self._run_graph(order)
            case RunBackward():
                self._run_backward(order)
            case Forget(forgotten):
                held: tuple[dict[int, Any], ...] = (caches, self._prefixes, self._updates, self._graphs)
                for things, number in itertools.product(held, forgotten):
                    things.pop(number, None)
            case RecordPast(cache):
                caches[cache].record_past()
            case Crop(cache, n_tokens):
                caches[cache].crop(n_tokens)
            case Reorder(cache, rows):
                caches[cache].reorder(torch.tensor(rows))
            case TakeOver(cache, other, start, end, may_share):
                caches[cache].take_over(caches[other], start, end, may_share)
            case Borrow(cache, other, n_tokens):
                caches[cache].borrow(caches[other], n_tokens)

    def _begin_with(self, order: BeginWith) -> None:
        def read(numbers: Numbers) -> torch.Tensor:
            return read_numbers(numbers).requires_grad_(order.is_trained)

        prefix = {block: (read(keys), read(values)) for block, (keys, values) in order.prefix.items()}
        self._prefixes[order.cache] = [part for each in prefix.values() for part in each]
        self._caches[order.cache].begin_with(prefix, order.n_rows)

    def _keep_updates(self, order: KeepUpdates) -> None:
        lora = self._updates[order.number] = LoraUpdates()
        for module, (*written, scale) in order.updates.items():
            a, b = (read_numbers(matrix).requires_grad_(order.is_trained) for matrix in written)
            lora.updates[module] = (a, b, scale)
        self._span.adapters.hook(lora)

    def _run(self, order: RunPass) -> None:
        pieces = [self._read_piece(piece) for piece in order.pieces]
        self._sums.align(order.n_given)
        with suppress(*PROBE_ERRORS):  # what fails fails at the leader, too, which answers for it
            if order.is_plain:
                (piece,) = pieces
                self._span.forward(piece.hidden, piece.positions, piece.mask, piece.cache, piece.n_past, order.hop)
            else:
                self._span.run(pieces, order.hop)

    def _run_graph(self, order: RunGraph) -> None:
        piece = self._read_piece(order.piece)
        inputs = piece.hidden.requires_grad_(order.is_kept)
        self._sums.align(order.n_given)
        with suppress(*PROBE_ERRORS), torch.set_grad_enabled(order.is_kept):
            outputs = self._span.forward_with_grad(
                inputs, piece.positions, piece.mask, order.hop, piece.lora, piece.cache
            )
            if order.is_kept:
                sources = [inputs, *self._trained_by(order.piece)]
                self._graphs[order.graph] = (sources, outputs)

    def _trained_by(self, piece: Piece) -> Iterator[torch.Tensor]:
        """What of a client's own gradients are taken by, in a pass of this piece."""
        for a, b, _ in self._updates[piece.lora].updates.values() if piece.lora is not None else ():
            yield from (a, b)
        if piece.cache is not None:
            yield from self._prefixes[piece.cache]

    def _run_backward(self, order: RunBackward) -> None:
        gradient = read_numbers(order.gradient)
        sources, outputs = self._graphs.pop(order.graph)
        self._sums.align(order.n_given)
        with suppress(*PROBE_ERRORS):
            torch.autograd.grad(outputs, sources, gradient, allow_unused=True)

    def _read_piece(self, piece: Piece) -> SessionTokens:
        return SessionTokens(
            read_numbers(piece.hidden),
            read_numbers(piece.positions),
            None if piece.cache is None else self._caches[piece.cache],
            piece.n_past,
            lora=None if piece.lora is None else self._updates[piece.lora],
            mask=None if piece.mask is None else read_numbers(piece.mask),
            is_exact=piece.is_exact,
        )


def load(take: Take, sums: Adding) -> SlicedSpan:
    """Load this member's slices, and test them together with the others. Raises ConfigError."""
    use_threads(take.load.threads)
    return load_blocks(take.load, partial(SlicedSpan, weights=take.weights, member=take.member, sums=sums))


def main() -> None:
    """Follow until the leader ends."""
    connection, memory, member, n_members = map(int, sys.argv[1:])
    leader = os.getppid()
    end_with_parent(leader)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with socket.socket(fileno=connection) as orders:
        is_whole = partial(_has_parent, leader)
        try:
            sums = SharedSums(memory, member, n_members, is_whole)
            order = decode(receive(orders))
            if isinstance(order, Measure):
                answer_measure(order, sums, partial(send, orders), has_own_memory=False)
                order = decode(receive(orders))
            assert isinstance(order, Take)
            follower = Follower(load(order, sums), sums)
            while True:
                follower.do(decode(receive(orders)))
        except (EOFError, TeamBroken):
            return
        except Exception as error:  # noqa: BLE001 - a family fails with anything, and the leader says that one is gone
            sys.exit(f"member {member} of a team: {describe_error(error)}")


def _has_parent(leader: int) -> bool:
    return os.getppid() == leader


if __name__ == "__main__":
    main()
