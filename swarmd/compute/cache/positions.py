"""Where the keys and values of a pass's tokens lie, as numbers that compiled code and CUDA graphs read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cache.span_cache import N_PLACES

Numbers = npt.NDArray[Any]


def make_room(pieces: Sequence[SessionTokens]) -> tuple[Numbers, Numbers]:
    """Make room for the pieces' tokens, one after another; returns addresses [layers, n, 6] and counts [n, 2].

    ``addresses`` is as ``LayerPlaces.reserve`` has it, of the row that a token is in. ``counts`` says how many keys are
    shared, and how many of its own are before each token. ``count_written`` follows when keys and values are written.
    """
    n = sum(piece.n_tokens for piece in pieces)
    n_layers = len(pieces[0].cache.owned)
    addresses = np.empty((n_layers, n, N_PLACES - 1), np.int64)
    counts = np.empty((n, 2), np.int64)
    first = 0
    for piece in pieces:
        b, t, _ = piece.hidden.shape
        places = piece.cache.places.reserve(t)
        layer = piece.cache.owned[0]
        for row in range(b):
            tokens = slice(first, first + t)
            addresses[:, tokens] = places[:, None, : N_PLACES - 1]
            if row:  # its own keys and values lie behind those of the rows before it
                row_bytes = places[:, None, N_PLACES - 1 :]
                addresses[:, tokens, 3:5] += row * row_bytes
            counts[tokens, 0] = layer.n_shared
            counts[tokens, 1] = np.arange(layer.n_behind, layer.n_behind + t)
            first += t
    return addresses, counts


def count_written(pieces: Sequence[SessionTokens]) -> None:
    """Count the pieces' keys and values, which were written where ``make_room`` said."""
    for piece in pieces:
        for layer in piece.cache.owned:
            layer.added(piece.hidden.shape[1])
