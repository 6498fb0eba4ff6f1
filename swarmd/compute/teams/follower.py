"""A follower's process: it holds its slices, and does what the leader of its team does, op for op.

    python -m swarmd.compute.teams.follower CONNECTION MEMORY MEMBER MEMBERS

The first two are numbers of open files: the leader's socketpair, and the memory of sums. It ends when the leader does.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from functools import partial

import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.hardware.child_process import end_with_parent
from swarmd.compute.hardware.device import use_threads
from swarmd.compute.hardware.worker_process import describe_error
from swarmd.compute.passes.family import PROBE_ERRORS
from swarmd.compute.passes.load_request import load_blocks
from swarmd.compute.teams.led_span import SlicedSpan
from swarmd.compute.teams.measuring import answer_measure
from swarmd.compute.teams.orders import (
    Borrow,
    Crop,
    Forget,
    Measure,
    NewCache,
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
from swarmd.compute.teams.sums import Adding, TeamBroken

Graph = tuple[torch.Tensor, torch.Tensor]
"""What entered blocks, and what left them."""


class Follower:
    """One member's slices, and its part of the caches."""

    def __init__(self, span: SlicedSpan, sums: Adding) -> None:
        self._span = span
        self._sums = sums
        self._caches: dict[int, SpanCache] = {}
        self._graphs: dict[int, Graph] = {}

    def do(self, order: Order) -> None:
        """Do as the leader does."""
        caches = self._caches
        match order:
            case RunPass():
                self._run(order)
            case NewCache(cache, hop, max_tokens):
                caches[cache] = self._span.new_cache(hop, max_tokens)
            case RunGraph():
                self._run_graph(order)
            case RunBackward():
                self._run_backward(order)
            case Forget(forgotten):
                for number in forgotten:
                    caches.pop(number, None)
                    self._graphs.pop(number, None)
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
            outputs = self._span.forward_with_grad(inputs, piece.positions, piece.mask, order.hop)
            if order.is_kept:
                self._graphs[order.graph] = (inputs, outputs)

    def _run_backward(self, order: RunBackward) -> None:
        gradient = read_numbers(order.gradient)
        inputs, outputs = self._graphs.pop(order.graph)
        self._sums.align(order.n_given)
        with suppress(*PROBE_ERRORS):
            torch.autograd.grad(outputs, inputs, gradient)

    def _read_piece(self, piece: Piece) -> SessionTokens:
        return SessionTokens(
            read_numbers(piece.hidden),
            read_numbers(piece.positions),
            None if piece.cache is None else self._caches[piece.cache],
            piece.n_past,
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
