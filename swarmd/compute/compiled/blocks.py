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
from swarmd.compute.compiled.machine import alone, carray, exp, fast, meet, pointer
from swarmd.compute.compiled.matrices import layer_of, multiply


@fast
def _normalise(x: Any, address: Any, epsilon: Any, width: Any, out: Any, first: Any, last: Any) -> Any:
    """Root mean square norm of each ``width`` numbers of a row, from one to another (Zhang and Sennrich 2019)."""
    weight = carray(pointer(address), (width,), np.float32)
    for t in range(x.shape[0]):
        for at in range(first, last, width):
            row, to, total = x[t, at : at + width], out[t, at : at + width], np.float32(0)
            for i in range(width):
                total += row[i] * row[i]
            scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
            for i in range(width):
                to[i] = row[i] * scale * weight[i]


@fast
def _turn(x: Any, cosines: Any, sines: Any, head: Any, first: Any, last: Any) -> Any:
    """Rotary positions, halves beside each other (Su et al. 2021, as GPT-NeoX lays them out)."""
    half = cosines.shape[1]
    for t in range(x.shape[0]):
        for at in range(first, last, head):
            one, other = x[t, at : at + half], x[t, at + half : at + 2 * half]
            for i in range(half):
                a, b = one[i], other[i]
                one[i] = a * cosines[t, i] - b * sines[t, i]
                other[i] = b * cosines[t, i] + a * sines[t, i]


@fast
def _gated(gate: Any, up: Any, curve: Any, first: Any, last: Any) -> Any:
    """The activation of the gate, times what goes up, into the gate."""
    for t in range(gate.shape[0]):
        gates, ups = gate[t, first:last], up[t, first:last]  # indices from 0: with others Numba makes no vectors
        for i in range(len(gates)):
            x = gates[i]
            y = x
            if curve == GELU_TANH:
                y = np.float32(1.5957691216) * (x + np.float32(0.044715) * x * x * x)
            gates[i] = x / (np.float32(1) + exp(-y)) * ups[i]


@fast
def _prepare(shape: Any, floats: Any, at: Any, rotary: Any, query: Any, key: Any, first: Any, last: Any) -> Any:
    """Norms and positions of queries and keys, of kept heads ``first`` to ``last``."""
    head, groups = shape[HEAD], shape[HEADS] // shape[KEPT_HEADS]
    cosines, sines = rotary
    if at[QUERY_NORM] != 0:
        _normalise(query, at[QUERY_NORM], floats[0], head, query, first * groups * head, last * groups * head)
        _normalise(key, at[KEY_NORM], floats[0], head, key, first * head, last * head)
    _turn(query, cosines, sines, head, first * groups * head, last * groups * head)
    _turn(key, cosines, sines, head, first * head, last * head)


@fast
def _angles(positions: Any, frequencies: Any, factor: Any) -> Any:
    """Cosines and sines [n, half] of rotary positions."""
    n, half = len(positions), len(frequencies)
    cosines, sines = np.empty((n, half), np.float32), np.empty((n, half), np.float32)
    for t in range(n):
        for i in range(half):
            angle = np.float32(positions[t]) * frequencies[i]
            cosines[t, i], sines[t, i] = np.cos(angle) * factor, np.sin(angle) * factor
    return cosines, sines


@fast
def _room_for(room: Any, n: Any, widths: Any) -> Any:
    """Two arrays [n, width] beside each other for each of three widths."""
    a, b, c = 2 * n * widths[0], 2 * n * widths[1], 2 * n * widths[2]
    queries = room[:a].reshape(2, n, widths[0])
    keys = room[a : a + b].reshape(2, n, widths[1])
    gates = room[a + b : a + b + c].reshape(2, n, widths[2])
    return queries[0], queries[1], keys[0], keys[1], gates[0], gates[1]


@alone
def run(shape: Any, floats: Any, table: Any, frequencies: Any, x: Any, of_pass: Any, team: Any) -> Any:
    """Compute n new tokens through all blocks: x [n, d] float32 becomes what leaves the last one.

    ``shape``: see ``layout``. ``floats``: epsilon of the norms, scale of the logits, factor of the rotary cosines
    and sines. ``table``: int64 addresses [blocks, N_ADDRESSES]. ``frequencies``: float32, of half of the turned numbers
    of a head. ``of_pass``: positions, int64 [n]; ``kept``, int64 [blocks, n, 6], for each token where its session's
    keys and values are: addresses of the shared ones, and how many numbers a head's begin after those before it; then
    the same for its own; ``counts``, int64 [n, 2], shared tokens, and its own ones before this: this one is put there.

    ``team``: room, meeting, part, parts. So many parts are computed by threads that make this call at once, with the
    same but their number. They share the room, float32 [n * layout.n_shared], and meet at an int64 [1], of 0 at first.
    """
    (n, d), (positions, kept, counts), (room, meeting, part, parts) = x.shape, of_pass, team
    kept_heads, inner, stored = shape[KEPT_HEADS], shape[INNER], shape[STORED]
    widths = shape[HEADS] * shape[HEAD], kept_heads * shape[HEAD], inner
    query, mixed, key, value, gate, up = _room_for(room, n, widths)
    normed, rotary, most = np.empty((n, d), np.float32), _angles(positions, frequencies, floats[2]), 1
    for t in range(n):
        most = max(most, counts[t, 0], counts[t, 1] + 1)
    logits = np.empty((n * shape[HEADS] // kept_heads, most), np.float32)
    heads = kept_heads * part // parts, kept_heads * (part + 1) // parts
    n_met, place = 0, meeting.ctypes.data
    onto, anew = n >= 0, n < 0  # True and False, which Numba would compile all of it for by their names
    for block in range(len(table)):
        at = table[block]
        _normalise(x, at[NORM], floats[0], d, normed, 0, d)
        multiply(stored, layer_of(at, QUERY), normed, query, anew, part, parts)
        multiply(stored, layer_of(at, KEY), normed, key, anew, part, parts)
        multiply(stored, layer_of(at, VALUE), normed, value, anew, part, parts)
        n_met = meet(place, n_met, parts)
        _prepare(shape, floats, at, rotary, query, key, heads[0], heads[1])
        keep(shape, key, value, kept[block], counts, heads[0], heads[1])
        attend(shape, floats[1], query, kept[block], counts, logits, mixed, heads[0], heads[1])
        n_met = meet(place, n_met, parts)
        multiply(stored, layer_of(at, OUT), mixed, x, onto, part, parts)
        n_met = meet(place, n_met, parts)
        _normalise(x, at[MLP_NORM], floats[0], d, normed, 0, d)
        multiply(stored, layer_of(at, GATE), normed, gate, anew, part, parts)
        multiply(stored, layer_of(at, UP), normed, up, anew, part, parts)
        n_met = meet(place, n_met, parts)
        _gated(gate, up, shape[CURVE], inner * part // parts, inner * (part + 1) // parts)
        n_met = meet(place, n_met, parts)
        multiply(stored, layer_of(at, DOWN), gate, x, onto, part, parts)
        n_met = meet(place, n_met, parts)
