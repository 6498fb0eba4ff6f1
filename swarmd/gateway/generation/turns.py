"""Who is next: a bounded queue in which every key has the same share, however much it asks for.

The choice is pure; ``Turns`` holds the requests that wait, in one trio program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import trio


class QueueFull(Exception):
    """As many wait as are let in."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request that waits: whose it is, and its number in the order of arrival."""

    key: str
    number: int
    called: trio.Event = field(default_factory=trio.Event, compare=False)


# Fair by key, not by request: the next turn goes to the key with the fewest requests running, and to its oldest
# request. A key that sends a hundred requests waits for itself; another key's first request overtakes them all.
# One key may hold only a part of the queue, or it could fill it and have everybody else refused.


def choose_next(waiting: Sequence[Waiting], running: Counter[str]) -> Waiting:
    """Choose the oldest request of the key that has the fewest running."""
    return min(waiting, key=lambda request: (running[request.key], request.number))


class Turns:
    """At most ``n_running`` at a time, at most ``n_waiting`` that wait, of which one key has ``n_of_key`` at most."""

    def __init__(self, n_running: int, n_waiting: int, n_of_key: int) -> None:
        self._n_running = n_running
        self._n_waiting = n_waiting
        self._n_of_key = n_of_key
        self._waiting: list[Waiting] = []
        self.running: Counter[str] = Counter()
        self._number = 0

    @property
    def n_waiting(self) -> int:
        """Requests that wait now."""
        return len(self._waiting)

    @property
    def n_running(self) -> int:
        """Requests that run now."""
        return self.running.total()

    def require_room(self, key: str) -> None:
        """Raise QueueFull if one more of this key would not be let in."""
        is_free = self.n_running < self._n_running and not self._waiting
        n_of_key = sum(request.key == key for request in self._waiting)
        if not is_free and (len(self._waiting) >= self._n_waiting or n_of_key >= self._n_of_key):
            raise QueueFull(f"{len(self._waiting)} requests wait already, {n_of_key} of them with this key")

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Wait for a turn, and give it back. Raises QueueFull."""
        await self._wait(key)
        try:
            yield
        finally:
            self.running[key] -= 1
            self._call_next()

    async def _wait(self, key: str) -> None:
        self.require_room(key)
        if self.n_running < self._n_running and not self._waiting:
            self.running[key] += 1
            return
        # The turn is counted by the one who calls, before the sleeper wakes: between the two nobody can take it.
        self._number += 1
        ticket = Waiting(key, self._number)
        self._waiting.append(ticket)
        try:
            await ticket.called.wait()
        except trio.Cancelled:
            if ticket.called.is_set():  # called and cancelled at once: the turn is for somebody else
                self.running[key] -= 1
                self._call_next()
            else:
                self._waiting.remove(ticket)
            raise

    def _call_next(self) -> None:
        self.running += Counter()  # forgets those that have none
        while self._waiting and self.n_running < self._n_running:
            chosen = choose_next(self._waiting, self.running)
            self._waiting.remove(chosen)
            self.running[chosen.key] += 1
            chosen.called.set()
