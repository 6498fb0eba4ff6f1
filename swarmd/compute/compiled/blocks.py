"""A decode step in machine code: all blocks of a span for a few new tokens, in one call, compiled where it runs.

Numba compiles these functions when they are first needed and keeps the result on disk. Everything is float32 once it
is read; weights, keys and values are widened on the way, so that a step takes about the time of reading them. What
lies in memory is given by addresses: it belongs to torch, whose tensors the caller keeps alive.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from swarmd.compute.compiled.attention import attend, keep
from swarmd.compute.compiled.layout import (
    CURVE,
    DOWN,
    GATE,
    GELU_TANH,
    HEAD,
    HEADS,
    INNER,
    KEPT_HEADS,
    KEY,
    KEY_NORM,
    MLP_NORM,
    NORM,
    OUT,
    QUERY,
    QUERY_NORM,
    STORED,
    UP,
    VALUE,
)
from swarmd.compute.compiled.machine import carray, exp, fast, pointer
from swarmd.compute.compiled.matrices import multiply


@fast
def _normalise(x: Any, address: Any, epsilon: Any, width: Any, out: Any) -> Any:
    """Root mean square norm of each ``width`` numbers of a row (Zhang and Sennrich 2019)."""
    weight = carray(pointer(address), (width,), np.float32)
    for t in range(x.shape[0]):
        for at in range(0, x.shape[1], width):
            total = np.float32(0)
            for i in range(width):
                total += x[t, at + i] * x[t, at + i]
            scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
            for i in range(width):
                out[t, at + i] = x[t, at + i] * scale * weight[i]


@fast
def _turn(x: Any, cosines: Any, sines: Any, head: Any) -> Any:
    """Rotary positions, halves beside each other (Su et al. 2021, as GPT-NeoX lays them out)."""
    half = cosines.shape[1]
    for t in range(x.shape[0]):
        for at in range(0, x.shape[1], head):
            for i in range(half):
                first, second = x[t, at + i], x[t, at + half + i]
                x[t, at + i] = first * cosines[t, i] - second * sines[t, i]
                x[t, at + half + i] = second * cosines[t, i] + first * sines[t, i]


@fast
def _gated(gate: Any, up: Any, curve: Any) -> Any:
    """The activation of the gate, times what goes up, into the gate."""
    for t in range(gate.shape[0]):
        for i in range(gate.shape[1]):
            x = gate[t, i]
            y = x
            if curve == GELU_TANH:
                y = np.float32(1.5957691216) * (x + np.float32(0.044715) * x * x * x)
            gate[t, i] = x / (np.float32(1) + exp(-y)) * up[t, i]


@fast
def run(shape: Any, floats: Any, table: Any, frequencies: Any, x: Any, positions: Any, kept: Any, counts: Any) -> Any:
    """Compute n new tokens through all blocks: x [n, d] float32 becomes what leaves the last one.

    ``shape``: see ``layout``. ``floats``: epsilon of the norms, scale of the logits, factor of the rotary cosines
    and sines. ``table``: int64 addresses [blocks, N_ADDRESSES]. ``frequencies``: float32, of half of the turned numbers
    of a head. ``positions``: int64 [n]. ``kept``: int64 [blocks, n, 6], for each token where its session's keys and
    values are: addresses of the shared ones, and how many numbers a head's begin after those before it; then the
    same for its own. ``counts``: int64 [n, 2], shared tokens, and its own ones before this; this one is put there.
    """
    n, d = x.shape
    head, stored = shape[HEAD], shape[STORED]
    normed = np.empty((n, d), np.float32)
    query, mixed = np.empty((n, shape[HEADS] * head), np.float32), np.empty((n, shape[HEADS] * head), np.float32)
    key, value = (
        np.empty((n, shape[KEPT_HEADS] * head), np.float32),
        np.empty((n, shape[KEPT_HEADS] * head), np.float32),
    )
    gate, up = np.empty((n, shape[INNER]), np.float32), np.empty((n, shape[INNER]), np.float32)
    cosines, sines = np.empty((n, len(frequencies)), np.float32), np.empty((n, len(frequencies)), np.float32)
    for t in range(n):
        for i in range(len(frequencies)):
            angle = np.float32(positions[t]) * frequencies[i]
            cosines[t, i], sines[t, i] = np.cos(angle) * floats[2], np.sin(angle) * floats[2]
    most = 1
    for t in range(n):
        most = max(most, counts[t, 0], counts[t, 1] + 1)
    logits = np.empty((n * shape[HEADS] // shape[KEPT_HEADS], most + 1), np.float32)  # an even number is enough
    for block in range(len(table)):
        at = table[block]
        _normalise(x, at[NORM], floats[0], d, normed)
        multiply(stored, at, QUERY, normed, query, False)
        multiply(stored, at, KEY, normed, key, False)
        multiply(stored, at, VALUE, normed, value, False)
        if at[QUERY_NORM] != 0:
            _normalise(query, at[QUERY_NORM], floats[0], head, query)
            _normalise(key, at[KEY_NORM], floats[0], head, key)
        _turn(query, cosines, sines, head)
        _turn(key, cosines, sines, head)
        keep(shape, key, value, kept[block], counts)
        attend(shape, floats[1], query, kept[block], counts, logits, mixed)
        multiply(stored, at, OUT, mixed, x, True)
        _normalise(x, at[MLP_NORM], floats[0], d, normed)
        multiply(stored, at, GATE, normed, gate, False)
        multiply(stored, at, UP, normed, up, False)
        _gated(gate, up, shape[CURVE])
        multiply(stored, at, DOWN, gate, x, True)
