"""Attention of a few new tokens over the keys and values of their sessions, and keeping their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from swarmd.compute.compiled.layout import FLOAT32, HEAD, HEADS, KEPT, KEPT_HEADS
from swarmd.compute.compiled.machine import exp, fast, narrow, widen


@fast
def _attend_to(
    stored: Any, keys_at: Any, values_at: Any, n: Any, head: Any, query: Any, logits: Any, mixed: Any, state: Any
) -> Any:
    """One kept head's queries [g, head] over n of its tokens; ``mixed`` [g, head] and ``state`` [g, 2] go on.

    state: the largest logit so far, and the sum of e to what is below it.
    """
    n_bytes = head * (4 if stored == FLOAT32 else 2)
    line = np.empty(head, np.float32)
    for t in range(n):
        widen(stored, keys_at + t * n_bytes, head, line)
        for g in range(query.shape[0]):
            total = np.float32(0)
            for i in range(head):
                total += query[g, i] * line[i]
            logits[g, t] = total
    for g in range(query.shape[0]):
        most = state[g, 0]
        for t in range(n):
            most = max(most, logits[g, t])
        shrunk = exp(state[g, 0] - most)
        total = state[g, 1] * shrunk
        for t in range(n):
            logits[g, t] = exp(logits[g, t] - most)
        for t in range(n):
            total += logits[g, t]
        for i in range(head):
            mixed[g, i] *= shrunk
        state[g, 0], state[g, 1] = most, total
    for t in range(n):
        widen(stored, values_at + t * n_bytes, head, line)
        for g in range(query.shape[0]):
            share = logits[g, t]
            for i in range(head):
                mixed[g, i] += share * line[i]


LOWEST = np.float32(-1e30)  # below any logit


@fast
def attend(shape: Any, scale: Any, query: Any, kept: Any, counts: Any, logits: Any, out: Any) -> Any:
    """Attention of each new token: query and out [n, heads * head]; see ``run`` for kept and counts."""
    kept_heads, head, stored = shape[KEPT_HEADS], shape[HEAD], shape[KEPT]
    groups = shape[HEADS] // kept_heads
    size = 4 if stored == FLOAT32 else 2
    state = np.empty((groups, 2), np.float32)
    for t in range(query.shape[0]):
        shared, own = counts[t, 0], counts[t, 1] + 1
        for h in range(kept_heads):
            part = slice(h * groups * head, (h + 1) * groups * head)
            queries, mixed = query[t, part].reshape(groups, head), out[t, part].reshape(groups, head)
            for g in range(groups):
                state[g, 0], state[g, 1] = LOWEST, np.float32(0)
                for i in range(head):
                    queries[g, i] *= scale
                    mixed[g, i] = np.float32(0)
            if shared:
                offset = h * kept[t, 2] * size
                args = (kept[t, 0] + offset, kept[t, 1] + offset)
                _attend_to(stored, args[0], args[1], shared, head, queries, logits, mixed, state)
            offset = h * kept[t, 5] * size
            _attend_to(stored, kept[t, 3] + offset, kept[t, 4] + offset, own, head, queries, logits, mixed, state)
            for g in range(groups):
                for i in range(head):
                    mixed[g, i] /= state[g, 1]


@fast
def keep(shape: Any, keys: Any, values: Any, kept: Any, counts: Any) -> Any:
    """Write new keys and values [n, kept heads * head] behind what is there."""
    head, stored = shape[HEAD], shape[KEPT]
    size = 4 if stored == FLOAT32 else 2
    for t in range(keys.shape[0]):
        for h in range(shape[KEPT_HEADS]):
            offset = (h * kept[t, 5] + counts[t, 1] * head) * size
            narrow(stored, keys[t, h * head : (h + 1) * head], kept[t, 3] + offset)
            narrow(stored, values[t, h * head : (h + 1) * head], kept[t, 4] + offset)
