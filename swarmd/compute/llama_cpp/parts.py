"""Which layers of a GGUF file are served as one block: a *part*, for which a worker loads a file of its own.

The library computes a file from its first layer to its last. A hop may be any of a server's blocks, so each block is a
file, and computing it has a price of its own: small layers are taken together until that price does not count. A part
begins where its family's kinds of layers come anew, so that no cut needs layers of zeros (``cut_rules``).
"""

from __future__ import annotations

from collections.abc import Sequence

from swarmd.compute.llama_cpp.cut_rules import FAMILIES, WholeFile
from swarmd.values import Span

PART_BYTES = 16 << 20  # of weights: some 1.3 ms of reading, where starting a pass takes 0.05
FEWEST_PARTS = 4  # where the layers allow it: a model on fewer machines than these is served in fewer pieces anyway


def choose_parts(whole: WholeFile, layer_bytes: Sequence[int]) -> tuple[Span, ...]:
    """Divide a model's layers, which take so many bytes each."""
    rules = FAMILIES[whole.architecture]
    n_layers = len(layer_bytes)
    step = max(1, rules.period(whole))
    kinds = rules.kinds(whole)
    n_wanted = min(n_layers, max(FEWEST_PARTS, sum(layer_bytes) // PART_BYTES))
    starts = sorted({round(number * n_layers / n_wanted / step) * step for number in range(n_wanted)})
    parts = _between([start for start in starts if start < n_layers], n_layers)
    if len(set(kinds)) == 2:
        parts = _with_both_kinds(parts, kinds)
    return tuple(parts)


def _between(starts: Sequence[int], end: int) -> list[Span]:
    return [Span(start, stop) for start, stop in zip(starts, [*starts[1:], end], strict=True)]


def _with_both_kinds(parts: Sequence[Span], kinds: Sequence[bool]) -> list[Span]:
    """Join each part that lacks a kind with the one before it, or else with the one behind."""
    joined: list[Span] = []
    for part in parts:
        is_whole = len(set(kinds[part.start : part.end])) == 2
        lacks_before = bool(joined) and len(set(kinds[joined[-1].start : joined[-1].end])) < 2
        if joined and (lacks_before or not is_whole):
            joined[-1] = Span(joined[-1].start, part.end)
        else:
            joined.append(part)
    return joined
