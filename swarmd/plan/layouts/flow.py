"""How many tokens/s all streams together get through a layout: a maximum flow over machines and the blocks they hold.

A linear program, by HiGHS. ``x[i, b]`` tokens/s are computed at block b by machine i, and ``m[i, j, b]`` of them come
to it from machine j, which computed the block before. What comes to a machine at a block, or stays there from the
block before, is computed there; a machine's blocks share its time, a link's hand-overs its bytes:

    block       b - 1                    b
    machine i   x[i, b-1] --stays------> x[i, b]
    machine j   x[j, b-1] --m[i, j, b]-^           sum over b of m[i, j, b] <= what the link carries

With links that never are the limit, who computed the block before does not matter, and the program is small: each block
gets the same flow. After Helix (Mei et al., ASPLOS 2025), whose streams pass a machine's blocks as a whole; here they
enter and leave anywhere (``is_whole`` False), as swarmd's sessions do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarmd.values import Span

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayoutMachine:
    """How many tokens/s a machine passes through all its blocks, by how many it holds: the first is of one block."""

    tokens_per_s: tuple[float, ...]

    @property
    def most_blocks(self) -> int:
        """How many fit."""
        return len(self.tokens_per_s)

    def blocks_per_s(self, n_held: int) -> float:
        """Tokens/s times blocks, while it holds so many."""
        return n_held * self.tokens_per_s[n_held - 1]


def max_flow(
    machines: Sequence[LayoutMachine],
    spans: Sequence[Span],
    n_blocks: int,
    links: Floats | None = None,
    is_whole: bool = False,
) -> float:
    """Compute the tokens/s of all streams; 0 where a block has no holder.

    ``links``: tokens/s that pass from a machine to another [machines, machines]; None: more than they compute.
    """
    covered = np.zeros(n_blocks, dtype=bool)
    for span in spans:
        covered[span.start : span.end] = True
    if not covered.all():
        return 0.0
    program = _Program(machines, spans, n_blocks)
    if links is None and not is_whole:
        program.share_blocks()
    else:
        program.follow_links(links, is_whole)
    return program.solve()


class _Program:
    """Columns are flows, the last one the sum of all streams; rows are added as triplets."""

    def __init__(self, machines: Sequence[LayoutMachine], spans: Sequence[Span], n_blocks: int) -> None:
        self._spans = spans
        self._n_blocks = n_blocks
        self._column: dict[tuple[int, int], int] = {}
        for i, span in enumerate(spans):
            for block in span.blocks():
                self._column[i, block] = len(self._column)
        self._n_columns = len(self._column)
        self._equal: list[list[tuple[int, float]]] = []
        self._below: list[tuple[list[tuple[int, float]], float]] = []
        self._all_streams = -1
        for i, span in enumerate(spans):
            token_s = 1.0 / machines[i].blocks_per_s(len(span))
            self._below.append(([(self._column[i, b], token_s) for b in span.blocks()], 1.0))

    def share_blocks(self) -> None:
        """Each block gets the same flow, from whoever holds it."""
        self._all_streams = self._n_columns
        for block in range(self._n_blocks):
            row = [(self._column[i, block], 1.0) for i, span in enumerate(self._spans) if block in span.blocks()]
            self._equal.append([*row, (self._all_streams, -1.0)])

    def follow_links(self, links: Floats | None, is_whole: bool) -> None:
        """What a machine computes of a block has come from somewhere, and goes on to somewhere."""
        next_column = self._n_columns
        carried: dict[tuple[int, int], list[tuple[int, float]]] = {}
        entering: dict[tuple[int, int], list[int]] = {}
        leaving: dict[tuple[int, int], list[int]] = {}
        for block in range(1, self._n_blocks):
            sources = [j for j, s in enumerate(self._spans) if s.start < block <= s.end]
            targets = [i for i, s in enumerate(self._spans) if s.start <= block < s.end]
            for j in sources:
                for i in targets:
                    is_between = self._spans[j].end == block == self._spans[i].start
                    if i == j or (is_whole and not is_between):
                        continue
                    carried.setdefault((j, i), []).append((next_column, 1.0))
                    entering.setdefault((i, block), []).append(next_column)
                    leaving.setdefault((j, block), []).append(next_column)
                    next_column += 1
        self._all_streams = next_column
        for i, span in enumerate(self._spans):
            for block in span.blocks():
                if block == 0:
                    continue
                row = [(self._column[i, block], -1.0)]
                if block > span.start:
                    row.append((self._column[i, block - 1], 1.0))
                    handed_over = [(column, 1.0) for column in leaving.get((i, block), ())]
                    row += [(column, -1.0) for column, _ in handed_over]
                    self._below.append(([*handed_over, (self._column[i, block - 1], -1.0)], 0.0))
                row += [(column, 1.0) for column in entering.get((i, block), ())]
                self._equal.append(row)
            if span.end < self._n_blocks:
                row = [(self._column[i, span.end - 1], 1.0)]
                row += [(column, -1.0) for column in leaving.get((i, span.end), ())]
                self._equal.append(row)
        first = [(self._column[i, 0], 1.0) for i, span in enumerate(self._spans) if span.start == 0]
        self._equal.append([*first, (self._all_streams, -1.0)])
        if links is not None:
            for (j, i), row in carried.items():
                self._below.append((row, float(links[j, i])))

    def solve(self) -> float:
        """Return the sum of all streams; 0 where nothing passes."""
        from scipy.optimize import linprog  # slow to import, and few need it
        from scipy.sparse import csr_array

        def matrix(rows: Sequence[Sequence[tuple[int, float]]]) -> csr_array:
            places = [(number, column, value) for number, row in enumerate(rows) for column, value in row]
            at_row, at_column, values = zip(*places, strict=True)
            return csr_array((values, (at_row, at_column)), shape=(len(rows), self._all_streams + 1))

        cost = np.zeros(self._all_streams + 1)
        cost[-1] = -1.0
        solved = linprog(
            cost,
            A_ub=matrix([row for row, _ in self._below]),
            b_ub=[limit for _, limit in self._below],
            A_eq=matrix(self._equal),
            b_eq=np.zeros(len(self._equal)),
            bounds=(0, None),
            method="highs",
        )
        return float(solved.x[-1]) if solved.success else 0.0
