"""Which blocks each machine should hold so that all streams together get most: exactly for a few, by search for many.

A layout that is as good as can be for a few machines is found by mixed integers (``solve_exactly``, HiGHS). For more a
search begins with a chain of all, each as long as lets the same flow pass (``fill_chain``), or with what they hold now,
and changes one machine at a time while that helps (``improve``); the caller bounds the tries, and how many may move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from swarmd.plan.layouts.flow import Floats, LayoutMachine, max_flow
from swarmd.values import Decision, Span

HEAT = 0.02  # of the flow, that a change may cost in the beginning: it lets the search out of a corner
GAIN = 1e-6  # of the flow: less is rounding


def fill_chain(machines: Sequence[LayoutMachine], n_blocks: int, order: Sequence[int]) -> list[Span] | None:
    """Lay machines end to end in ``order``, each as many blocks as pass the most that all of them can pass.

    Machines left over double those that are held least. None where all together hold too few blocks.
    """
    flows = sorted({rate for machine in machines for rate in machine.tokens_per_s}, reverse=True)
    most = sum(machine.most_blocks for machine in machines)
    if most < n_blocks:
        return None
    sizes = [machine.most_blocks for machine in machines]
    for flow in flows:
        tried = [sum(rate >= flow for rate in machine.tokens_per_s) for machine in machines]
        if sum(tried) >= n_blocks:
            sizes = tried
            break
    spans: list[Span | None] = [None] * len(machines)
    start = 0
    for i in order:
        size = min(sizes[i], n_blocks - start)
        if size > 0:
            spans[i] = Span(start, start + size)
            start += size
    counts = np.zeros(n_blocks)
    for span in spans:
        if span is not None:
            counts[span.start : span.end] += 1
    laid: list[Span] = []
    for i, span in enumerate(spans):
        if span is None:
            size = max(1, min(sizes[i] or 1, n_blocks))
            begin = int(np.argmin([counts[s : s + size].sum() for s in range(n_blocks - size + 1)]))
            span = Span(begin, begin + size)
            counts[begin : begin + size] += 1
        laid.append(span)
    return laid


def improve(
    machines: Sequence[LayoutMachine],
    spans: Sequence[Span],
    n_blocks: int,
    draw: Callable[[], float],
    n_tries: int,
    links: Floats | None = None,
    is_whole: bool = False,
    most_moved: int | None = None,
) -> Decision[list[Span]]:
    """Change one machine's blocks at a time, ``n_tries`` times, and keep what lets more pass.

    ``draw``: numbers in [0, 1). At most ``most_moved`` machines (None: any number) hold other blocks in the end.
    """
    current = list(spans)
    flow = max_flow(machines, current, n_blocks, links, is_whole)
    begun = flow
    best, best_flow = list(current), flow
    for number in range(n_tries):
        i = int(draw() * len(machines))
        span = _propose(machines[i], current, i, n_blocks, draw)
        if span is None or span == current[i]:
            continue
        tried = [*current[:i], span, *current[i + 1 :]]
        if most_moved is not None and sum(a != b for a, b in zip(tried, spans, strict=True)) > most_moved:
            continue
        tried_flow = max_flow(machines, tried, n_blocks, links, is_whole)
        heat = HEAT * (1 - number / n_tries)
        may_cost = -heat * max(flow, GAIN) * math.log(max(draw(), GAIN))
        if tried_flow >= flow - may_cost:
            current, flow = tried, tried_flow
        if flow > best_flow * (1 + GAIN):
            best, best_flow = list(current), flow
    n_moved = sum(a != b for a, b in zip(best, spans, strict=True))
    return Decision(best, f"{best_flow:.0f} tokens/s pass instead of {begun:.0f}, with {n_moved} machines moved")


def _propose(
    machine: LayoutMachine, spans: Sequence[Span], i: int, n_blocks: int, draw: Callable[[], float]
) -> Span | None:
    """Propose other blocks for a machine: an end moved a little, or a place where another one's blocks begin or end."""
    span = spans[i]
    kind = draw()
    if kind < 0.6:
        start, end = span.start, span.end
        step = 1 if draw() < 0.7 else 2
        sign = 1 if draw() < 0.5 else -1
        which = draw()
        if which < 0.4:
            start += sign * step
        elif which < 0.8:
            end += sign * step
        else:
            start += sign * step
            end += sign * step
    else:
        other = spans[int(draw() * len(spans))]
        size = 1 + int(draw() * machine.most_blocks)
        corner = draw()
        start = other.start if corner < 0.5 else other.end
        if draw() < 0.5:
            start -= size
        end = start + size
    if start < 0 or end > n_blocks or not 0 < end - start <= machine.most_blocks:
        return None
    return Span(start, end)


def solve_exactly(
    machines: Sequence[LayoutMachine], n_blocks: int, time_limit_s: float = 60.0
) -> Decision[list[Span] | None]:
    """Find the layout that lets most pass where links are not the limit. For a few machines: it takes every place."""
    # One binary for each machine and place of its blocks, and a flow for each block of that place:
    #
    #     sum over places of y[i, p] = 1
    #     sum over blocks of x[i, p, b] <= blocks_per_s(p) * y[i, p]       a machine's time
    #     sum over machines and places of x[i, p, b] = F, for each block   all streams
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import lil_array

    places = []
    for i, machine in enumerate(machines):
        for size in range(1, min(machine.most_blocks, n_blocks) + 1):
            places += [(i, Span(start, start + size)) for start in range(n_blocks - size + 1)]
    columns = sum(len(span) for _, span in places)
    n_columns = len(places) + columns + 1
    one_each = lil_array((len(machines), n_columns))
    time = lil_array((len(places), n_columns))
    streams = lil_array((n_blocks, n_columns))
    column = len(places)
    for p, (i, span) in enumerate(places):
        one_each[i, p] = 1.0
        time[p, p] = -machines[i].blocks_per_s(len(span))
        for block in span.blocks():
            time[p, column] = 1.0
            streams[block, column] = 1.0
            column += 1
    streams[:, [n_columns - 1]] = -1.0
    cost = np.zeros(n_columns)
    cost[-1] = -1.0
    integrality = np.zeros(n_columns)
    integrality[: len(places)] = 1
    upper = np.full(n_columns, np.inf)
    upper[: len(places)] = 1
    solved = milp(
        cost,
        constraints=[
            LinearConstraint(one_each.tocsr(), 1, 1),
            LinearConstraint(time.tocsr(), -np.inf, 0),
            LinearConstraint(streams.tocsr(), 0, 0),
        ],
        integrality=integrality,
        bounds=Bounds(0, upper),
        options={"time_limit": time_limit_s},
    )
    if solved.x is None:
        return Decision(None, f"no layout was found within {time_limit_s:.0f} s")
    chosen = {places[p][0]: places[p][1] for p in range(len(places)) if solved.x[p] > 0.5}
    return Decision([chosen[i] for i in range(len(machines))], f"{-solved.fun:.0f} tokens/s pass; {solved.message}")
