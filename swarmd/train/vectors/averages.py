"""Averages that rounds came to on this peer, until a commit says which of them counts."""

from __future__ import annotations

import math

from swarmd.train.vectors.state import Vector
from swarmd.train.vectors.sums import squares_of


class Averages:
    """Vectors by their hash, each with the parent of its round."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[bytes, Vector]] = {}

    def put(self, parent: bytes, digest: bytes, average: Vector) -> None:
        """Keep what the round after a commit came to."""
        self._known[digest] = parent, average

    def take(self, digest: bytes, head: bytes) -> Vector | None:
        """Take what a commit names, if it is here; forget what no commit after ``head`` can name."""
        entry = self._known.pop(digest, None)
        self._known = {name: known for name, known in self._known.items() if known[0] == head}
        return entry[1] if entry is not None else None

    def clip_factor(self, digest: bytes, limit: float) -> float:
        """Compute what clips an average to the norm ``limit`` (0: none); 1 for one that is not here."""
        return clip_factor(self._known[digest][1], limit) if digest in self._known else 1.0

    def norm(self, digest: bytes) -> float:
        """Compute the norm of an average; 0 for one that is not here."""
        if digest not in self._known:
            return 0.0
        return math.sqrt(squares_of(self._known[digest][1]))


def clip_factor(average: Vector, limit: float) -> float:
    """Compute what brings the norm of an average to ``limit``; 1.0 where it is not above, or there is none."""
    norm = math.sqrt(squares_of(average)) if limit else 0.0
    return min(1.0, limit / norm) if norm else 1.0
