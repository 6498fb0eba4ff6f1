"""Where the keys and values of a pass's tokens lie, as numbers that compiled code and CUDA graphs read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from swarmd.compute.cache.kvcache import N_PLACES
from swarmd.compute.cache.pieces import SessionTokens

Numbers = npt.NDArray[Any]


def make_room(pieces: Sequence[SessionTokens]) -> tuple[Numbers, Numbers]:
    """Make room for the pieces' tokens, one after another, and say where: kept [layers, n, 6], counts [n, 2].

    ``addresses`` is as ``SpanCache.places`` has it, of the row that a token is in. ``counts`` says how many keys are shared,
    and how many of its own are before each token. ``keep`` follows when keys and values are there.
    """
    n = sum(piece.n_tokens for piece in pieces)
    addresses = np.empty((len(pieces[0].cache.owned), n, N_PLACES - 1), np.int64)
    counts, first = np.empty((n, 2), np.int64), 0
    for piece in pieces:
        b, t, _ = piece.hidden.shape
        places, layer = piece.cache.places(t), piece.cache.owned[0]
        for row in range(b):
            addresses[:, first : first + t] = places[:, None, : N_PLACES - 1]
            if row:  # its own keys and values lie behind those of the rows before it
                addresses[:, first : first + t, 3:5] += row * places[:, None, N_PLACES - 1 :]
            counts[first : first + t, 0] = layer.n_shared
            counts[first : first + t, 1] = np.arange(layer.n_behind, layer.n_behind + t)
            first += t
    return addresses, counts


def keep(pieces: Sequence[SessionTokens]) -> None:
    """The pieces' keys and values were written where ``make_room`` said."""
    for piece in pieces:
        for layer in piece.cache.owned:
            layer.added(piece.hidden.shape[1])
