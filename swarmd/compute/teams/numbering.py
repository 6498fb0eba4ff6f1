"""Numbers for what members of a team have of their own, too: caches, graphs, adapters."""

from __future__ import annotations

import itertools
import weakref


class Numbering:
    """Gives numbers to things, and notes which things nobody has any more."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._forgotten: list[int] = []

    def give(self, thing: object) -> int:
        """Return a number for a new thing."""
        number = next(self._numbers)
        weakref.finalize(thing, self._forgotten.append, number).atexit = False
        return number

    @property
    def n_forgotten(self) -> int:
        """How many numbers are free since these were taken last."""
        return len(self._forgotten)

    def take_forgotten(self) -> list[int]:
        """Return the numbers of things that are no more, each once."""
        numbers = self._forgotten[:]  # others may be added while this is read
        del self._forgotten[: len(numbers)]
        return numbers
