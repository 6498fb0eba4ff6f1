"""A decode step in machine code: all blocks of a span for a few new tokens, in one fused kernel.

Numba compiles these functions when they are first needed and keeps the result on disk. Everything is float32 once it
is read; weights, keys and values are widened on the way, so that a step takes about the time of reading them. What
lies in memory is given by addresses: it belongs to torch, whose tensors the caller keeps alive.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from swarmd.compute.compiled.attention import attend, store_keys_and_values
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
from swarmd.compute.compiled.machine import carray, exp, fast, fast_without_lock, pointer, wait_at_barrier
from swarmd.compute.compiled.matrices import layer_of, multiply


@fast
def _normalise(
    x: Any,
    address: Any,
    epsilon: Any,
    width: Any,
    out: Any,
    first: Any,
    last: Any,
) -> Any:
    """Apply the root mean square norm to each ``width`` columns from first to last (Zhang and Sennrich 2019)."""
    weight = carray(pointer(address), (width,), np.float32)
    for t in range(x.shape[0]):
        for begin in range(first, last, width):
            row = x[t, begin : begin + width]
            out_row = out[t, begin : begin + width]
            total = np.float32(0)
            for i in range(width):
                total += row[i] * row[i]
            mean = total / np.float32(width)
            scale = np.float32(1) / np.sqrt(mean + epsilon)
            for i in range(width):
                out_row[i] = row[i] * scale * weight[i]


# The first half of a head is turned against the second, number by number; the rest of a head, if any, stays:
#
#     | a0 a1 .. | b0 b1 .. | rest |      a' = a cos - b sin,  b' = b cos + a sin
#      <- half ->  <- half ->
@fast
def _rotate(
    x: Any,
    cosines: Any,
    sines: Any,
    head: Any,
    first: Any,
    last: Any,
) -> Any:
    """Apply rotary positions, halves beside each other (Su et al. 2021, as GPT-NeoX lays them out)."""
    half = cosines.shape[1]
    for t in range(x.shape[0]):
        for begin in range(first, last, head):
            left = x[t, begin : begin + half]
            right = x[t, begin + half : begin + 2 * half]
            for i in range(half):
                a = left[i]
                b = right[i]
                left[i] = a * cosines[t, i] - b * sines[t, i]
                right[i] = b * cosines[t, i] + a * sines[t, i]


@fast
def _activate_gate(
    gate: Any,
    up: Any,
    curve: Any,
    first: Any,
    last: Any,
) -> Any:
    """Multiply the activation of the gate with ``up``, into the gate, for these columns.

    Both activations are x * sigmoid(y): SiLU with y = x; GELU, by its tanh, with y of the third degree.
    """
    for t in range(gate.shape[0]):
        gates = gate[t, first:last]  # indices from 0: with others Numba makes no vectors
        ups = up[t, first:last]
        for i in range(len(gates)):
            x = gates[i]
            y = x
            if curve == GELU_TANH:
                cube = np.float32(0.044715) * x * x * x
                y = np.float32(1.5957691216) * (x + cube)
            activation = x / (np.float32(1) + exp(-y))
            gates[i] = activation * ups[i]


@fast
def _position_heads(
    shape: Any,
    floats: Any,
    addresses: Any,
    rotary: Any,
    query: Any,
    key: Any,
    first: Any,
    last: Any,
) -> Any:
    """Apply norms and rotary positions to queries and keys, of kept heads ``first`` to ``last``."""
    head = shape[HEAD]
    groups = shape[HEADS] // shape[KEPT_HEADS]
    cosines, sines = rotary
    first_key = first * head  # columns
    last_key = last * head
    first_query = first_key * groups
    last_query = last_key * groups
    if addresses[QUERY_NORM] != 0:
        _normalise(query, addresses[QUERY_NORM], floats[0], head, query, first_query, last_query)
        _normalise(key, addresses[KEY_NORM], floats[0], head, key, first_key, last_key)
    _rotate(query, cosines, sines, head, first_query, last_query)
    _rotate(key, cosines, sines, head, first_key, last_key)


@fast
def _angles(positions: Any, frequencies: Any, factor: Any) -> Any:
    """Return cosines and sines [n, half] of rotary positions."""
    n = len(positions)
    half = len(frequencies)
    cosines = np.empty((n, half), np.float32)
    sines = np.empty((n, half), np.float32)
    for t in range(n):
        for i in range(half):
            angle = np.float32(positions[t]) * frequencies[i]
            cosines[t, i] = np.cos(angle) * factor
            sines[t, i] = np.sin(angle) * factor
    return cosines, sines


# Threads share one allocation, which the caller makes (``layout.n_shared`` numbers a token):
#
#     | query [n, a] | mixed [n, a] | key [n, b] | value [n, b] | gate [n, c] | up [n, c] |
@fast
def _shared_arrays(room: Any, n: Any, widths: Any) -> Any:
    """Cut room into two arrays [n, width] for each of three widths."""
    a = 2 * n * widths[0]
    b = 2 * n * widths[1]
    c = 2 * n * widths[2]
    queries = room[:a].reshape(2, n, widths[0])
    keys = room[a : a + b].reshape(2, n, widths[1])
    end = a + b
    gates = room[end : end + c].reshape(2, n, widths[2])
    query = queries[0]  # by index: what is unpacked is another type to Numba, for which all would be compiled again
    key = keys[0]
    gate = gates[0]
    return query, queries[1], key, keys[1], gate, gates[1]


# One block, and what threads share of it. Each thread computes the norms for itself, into an array of its own: they
# cost less than a barrier. Barriers stand where a thread reads what others have written:
#
#     x --norm--> query, key, value          threads share rows of weights
#     == barrier ==
#     norms and positions of heads, keys and values to the cache, attention -> mixed     threads share kept heads
#     == barrier ==
#     x += out(mixed)                        rows
#     == barrier ==
#     x --norm--> gate, up                   rows
#     == barrier ==
#     gate = activation(gate) * up           columns
#     == barrier ==
#     x += down(gate)                        rows
#     == barrier ==
#
# ``adds_to`` and ``replaces`` are True and False, computed from n: for the plain names Numba would compile all of
# ``multiply`` once for each.
@fast_without_lock
def run_blocks(
    shape: Any,
    floats: Any,
    table: Any,
    frequencies: Any,
    x: Any,
    of_pass: Any,
    thread_share: Any,
) -> Any:
    """Compute n new tokens through all blocks: x [n, d] float32 becomes the output of the last one.

    ``shape``: see ``layout``. ``floats``: epsilon of the norms, scale of the logits, factor of the rotary cosines
    and sines. ``table``: int64 addresses [blocks, N_ADDRESSES]. ``frequencies``: float32, of half of the turned numbers
    of a head. ``of_pass``: positions, int64 [n]; ``kv_places``, int64 [blocks, n, 6], and ``counts``, int64 [n, 2],
    tell where keys and values are (see ``attention``).

    ``thread_share``: room, barrier, thread, n_threads. So many threads make this call at once, with the same arguments
    but their number. They share the room, float32 [n * layout.n_shared], and a barrier, an int64 [1], 0 at first.
    """
    n, d = x.shape
    positions, kv_places, counts = of_pass
    room, barrier, thread, n_threads = thread_share
    kept_heads = shape[KEPT_HEADS]
    inner = shape[INNER]
    stored = shape[STORED]
    widths = shape[HEADS] * shape[HEAD], kept_heads * shape[HEAD], inner
    query, mixed, key, value, gate, up = _shared_arrays(room, n, widths)
    normed = np.empty((n, d), np.float32)
    rotary = _angles(positions, frequencies, floats[2])
    most_tokens = 1
    for t in range(n):
        most_tokens = max(most_tokens, counts[t, 0], counts[t, 1] + 1)
    logits = np.empty((n * shape[HEADS] // kept_heads, most_tokens), np.float32)
    first_head = kept_heads * thread // n_threads
    last_head = kept_heads * (thread + 1) // n_threads
    first_column = inner * thread // n_threads
    last_column = inner * (thread + 1) // n_threads
    n_passed = 0
    counter = barrier.ctypes.data
    adds_to = n >= 0
    replaces = n < 0
    for block in range(len(table)):
        addresses = table[block]
        _normalise(x, addresses[NORM], floats[0], d, normed, 0, d)
        multiply(stored, layer_of(addresses, QUERY), normed, query, replaces, thread, n_threads)
        multiply(stored, layer_of(addresses, KEY), normed, key, replaces, thread, n_threads)
        multiply(stored, layer_of(addresses, VALUE), normed, value, replaces, thread, n_threads)
        n_passed = wait_at_barrier(counter, n_passed, n_threads)
        _position_heads(shape, floats, addresses, rotary, query, key, first_head, last_head)
        store_keys_and_values(shape, key, value, kv_places[block], counts, first_head, last_head)
        scale = floats[1]
        attend(shape, scale, query, kv_places[block], counts, logits, mixed, first_head, last_head)
        n_passed = wait_at_barrier(counter, n_passed, n_threads)
        multiply(stored, layer_of(addresses, OUT), mixed, x, adds_to, thread, n_threads)
        n_passed = wait_at_barrier(counter, n_passed, n_threads)
        _normalise(x, addresses[MLP_NORM], floats[0], d, normed, 0, d)
        multiply(stored, layer_of(addresses, GATE), normed, gate, replaces, thread, n_threads)
        multiply(stored, layer_of(addresses, UP), normed, up, replaces, thread, n_threads)
        n_passed = wait_at_barrier(counter, n_passed, n_threads)
        _activate_gate(gate, up, shape[CURVE], first_column, last_column)
        n_passed = wait_at_barrier(counter, n_passed, n_threads)
        multiply(stored, layer_of(addresses, DOWN), gate, x, adds_to, thread, n_threads)
        n_passed = wait_at_barrier(counter, n_passed, n_threads)
