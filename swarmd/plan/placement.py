"""Which blocks a volunteer should serve: the ones that the fewest others hold, as many as fit."""

from __future__ import annotations

from swarmd.values import Decision, Span

MAX_SHARE_OF_MEMORY = 0.5


def blocks_that_fit(free_bytes: int, bytes_per_block: int, n_blocks: int) -> int:
    """How many blocks to take when at most half of the free memory goes to weights, cache and workspace."""
    return max(1, min(n_blocks, int(free_bytes * MAX_SHARE_OF_MEMORY) // max(1, 2 * bytes_per_block)))


def choose_span(coverage: list[int], n_fit: int) -> Decision[Span]:
    """Choose the window of at most ``n_fit`` blocks that helps the least-covered blocks most.

    Windows compete on their sorted coverage: first the number of servers of their rarest block, then of the next.
    """
    n = len(coverage)
    size = max(1, min(n_fit, n))
    starts = range(n - size + 1)
    best = min(starts, key=lambda s: (sorted(coverage[s : s + size]), s))
    span = Span(best, best + size)
    lowest = min(coverage[span.start : span.end])
    held = "nobody" if lowest == 0 else f"{lowest} other{'s' if lowest > 1 else ''}"
    return Decision(span, f"blocks {span} of {n}: the rarest of them is served by {held}, and {size} fit this machine")
