"""How fine-tuning shares a server and a chain: whose micro-batch is next, and how much is done beside decoding.

Decoding goes first. While sessions decode, forward and backward passes get a share of the worker's time, block by
block. What stays in memory between the two is decided in ``tuning_memory``.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmd.values import Decision

QUIET_S = 0.5  # without a decode step for so long, nobody decodes
MAX_SAVED_S = 0.05  # of fine-tuning's share: after a pause it may not block decoding for longer
MIN_MICRO_BATCHES = 8  # for a chain to be busy from end to end
MAX_MICRO_TOKENS = 1_024  # of a micro-batch: a server that fails costs no more than this
IN_FLIGHT_PER_SERVER = 4  # micro-batches: one that is computed, some that wait or travel
LEAST_PER_SERVER = 2  # one that is computed, one that waits
LONG_S = 2.0  # a micro-batch that took so long waited in queues: fewer under way serve as well
TYPICAL_S = 0.02  # of a micro-batch at a server, for how many more fit into a long way


def micro_batches(b: int, t: int, rows: int = 0) -> list[slice]:
    """Cut a batch of [b, t] tokens into row slices that fill a pipeline; ``rows`` of each, or 0 to choose.

    By the batch's shape alone, never by who serves: the same batch gives the same sums wherever it is computed.
    """
    if rows:
        n = -(-b // rows)
    else:
        n_by_tokens = -(-b * t // MAX_MICRO_TOKENS)
        n = min(b, max(MIN_MICRO_BATCHES, n_by_tokens))
    cuts = [b * i // n for i in range(n + 1)]
    return [slice(a, z) for a, z in itertools.pairwise(cuts)]


def max_in_flight(n_servers: int, longest_trip_s: float) -> int:
    """How many micro-batches a client has under way in each direction, so that no server waits for the next one."""
    return max(2, n_servers) * (IN_FLIGHT_PER_SERVER + int(2 * longest_trip_s / TYPICAL_S))


@dataclass(slots=True)
class Window:
    """How many micro-batches are under way in one direction: fewer where each takes long, as they only queue then.

    It grows by one with each that came back soon, until one has not; then it is halved, once for each that began after
    the last time, and grows by one a window. What queues in links holds up the signs of life behind it (RFC 6817).
    """

    size: float = 0.0
    lowered_at: float = float("-inf")

    def room(self, n_servers: int, longest_trip_s: float) -> int:
        """How many may be under way now."""
        min_size = LEAST_PER_SERVER * max(2, n_servers)
        self.size = min(max(self.size, min_size), max_in_flight(n_servers, longest_trip_s))
        return int(self.size)

    def on_done(self, now: float, began_at: float) -> None:
        """One came back, or failed."""
        took_s = now - began_at
        if took_s > LONG_S and began_at > self.lowered_at:
            self.size /= 2
            self.lowered_at = now
        elif took_s < LONG_S / 2:
            self.size += 1.0 if self.lowered_at < 0 else 1.0 / max(1.0, self.size)


@dataclass(frozen=True, slots=True)
class TuningPass:
    """A forward or backward pass that waits in a worker; ``order`` is a running number, ``weight`` its client's."""

    client: bytes
    is_backward: bool
    order: int
    weight: float = 1.0


def choose_work(waiting: Sequence[TuningPass], served: Mapping[bytes, float]) -> Decision[int]:
    """Choose what to compute next, by its place in ``waiting``. ``served``: the seconds that each client was given."""

    def rank(work: TuningPass) -> tuple[float, bool, int]:
        return served.get(work.client, 0.0), not work.is_backward, work.order

    turn = min(waiting, key=rank)
    reason = "a backward pass, which frees memory" if turn.is_backward else "a forward pass, in its turn"
    return Decision(waiting.index(turn), reason)


# Clients take turns by the seconds that each was given, divided by its weight. A pass that was begun is finished before
# another one, since what it holds in memory is given back then.
#
# Invariant: who was idle has no claim on what others got meanwhile. A client that comes, or comes back, begins with no
# less than the least of those who wait; else it would be served alone until it had caught up.
class TuningQueue:
    """The passes that wait in a worker, and the time that each client was given."""

    def __init__(self) -> None:
        self._waiting: list[TuningPass] = []
        self._served: dict[bytes, float] = {}
        self._begun: TuningPass | None = None
        self._n_put = 0

    @property
    def has_work(self) -> bool:
        """Does any pass wait?"""
        return bool(self._waiting)

    def enter(self, client: bytes) -> None:
        """A client has opened a lane."""
        self._served.setdefault(client, min(self._served.values(), default=0.0))

    def leave(self, client: bytes) -> None:
        """A client's last lane is closed."""
        self._served.pop(client, None)

    def put(self, client: bytes, is_backward: bool, weight: float) -> TuningPass:
        """Enter a pass."""
        if all(work.client != client for work in self._waiting):
            active = [self._served.get(work.client, 0.0) for work in self._waiting]
            served = self._served.get(client, 0.0)
            self._served[client] = max(served, min(active, default=0.0))
        self._n_put += 1
        work = TuningPass(client, is_backward, self._n_put, weight)
        self._waiting.append(work)
        return work

    def choose(self) -> TuningPass:
        """Choose what to compute next: the pass that was begun, else the one whose turn it is."""
        if self._begun is None:
            self._begun = self._waiting[choose_work(self._waiting, self._served).action]
        return self._begun

    def spend(self, work: TuningPass, seconds: float) -> None:
        """Count the time that a part of a pass took."""
        self._served[work.client] = self._served.get(work.client, 0.0) + seconds / work.weight

    def remove(self, work: TuningPass) -> None:
        """A pass is done, or needed no more."""
        self._waiting.remove(work)
        if self._begun is work:
            self._begun = None


@dataclass(slots=True)
class Allowance:
    """The time that fine-tuning may take beside decoding: a bucket that ``share`` of the passing time fills."""

    share: float
    saved_s: float = 0.0
    seen_at: float = 0.0
    decoded_at: float = float("-inf")

    def wait_s(self, now: float, is_decode_ready: bool) -> Decision[float]:
        """How long fine-tuning has to wait now; 0 is its turn."""
        self.saved_s = min(MAX_SAVED_S, self.saved_s + self.share * (now - self.seen_at))
        self.seen_at = now
        if is_decode_ready:
            self.decoded_at = now
        if now - self.decoded_at > QUIET_S:
            self.saved_s = 0.0
            return Decision(0.0, "nobody decodes")
        if self.saved_s > 0:
            return Decision(0.0, f"its share of {self.share:.0%} beside decoding")
        remaining_s = self.decoded_at + QUIET_S - now
        if self.share:
            remaining_s = min(remaining_s, -self.saved_s / self.share)
        return Decision(remaining_s + 1e-3, "sessions decode, and its share is used")

    def spend(self, seconds: float) -> None:
        """Take the time of one pass from the bucket, which may go below zero."""
        self.saved_s -= seconds
