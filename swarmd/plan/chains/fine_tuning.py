"""How fine-tuning shares a server and a chain: whose micro-batch next, how much beside decoding, what stays in memory.

Decoding goes first. While sessions decode, forward and backward passes get a share of the worker's time, block by
block. What a server keeps for a backward is bounded, and the client that holds most gives way first.
"""

from __future__ import annotations

import itertools
from collections import Counter
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

Key = tuple[bytes, int]


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
    """A forward or backward pass that waits in a worker; ``order`` is a running number."""

    client: bytes
    is_backward: bool
    order: int


def choose_work(waiting: Sequence[TuningPass], served: Mapping[bytes, float]) -> Decision[int]:
    """Choose what to compute next, by its place in ``waiting``. ``served``: the seconds that each client was given."""

    def rank(work: TuningPass) -> tuple[float, bool, int]:
        return served.get(work.client, 0.0), not work.is_backward, work.order

    turn = min(waiting, key=rank)
    reason = "a backward pass, which frees memory" if turn.is_backward else "a forward pass, in its turn"
    return Decision(waiting.index(turn), reason)


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


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """What a worker keeps of one micro-batch for its backward."""

    key: tuple[Key, int]
    client: bytes
    n_bytes: int
    order: int


def make_room(
    batches: Sequence[HeldBatch], client: bytes, n_bytes: int, limit_bytes: int
) -> Decision[list[tuple[Key, int]] | None]:
    """Choose what gives way to ``n_bytes`` more of ``client``; None: nothing does, and the new one is not kept.

    What was kept last will be asked for last, so of a client the newest goes first; and only clients that would still
    hold as much as this one give anything.
    """
    free = limit_bytes - sum(batch.n_bytes for batch in batches)
    if n_bytes <= free:
        return Decision([], "there is room")
    # Invariant: no client loses a batch to one that would then hold more than it. So two clients never evict each
    # other's batches in turns, and the loop ends: each round shrinks the largest holder.
    bytes_of_client: Counter[bytes] = Counter()
    for batch in batches:
        bytes_of_client[batch.client] += batch.n_bytes
    evicted: list[tuple[Key, int]] = []
    remaining = sorted(batches, key=lambda batch: batch.order)
    while free < n_bytes:
        other_clients = [c for c in bytes_of_client if c != client]
        largest_client = max(other_clients, key=lambda c: bytes_of_client[c], default=None)
        newest = next((batch for batch in reversed(remaining) if batch.client == largest_client), None)
        n_after = bytes_of_client[client] + n_bytes
        if newest is None or bytes_of_client[newest.client] - newest.n_bytes < n_after:
            return Decision(None, f"{n_bytes} B more than fits, and nobody holds more than this client")
        remaining.remove(newest)
        evicted.append(newest.key)
        bytes_of_client[newest.client] -= newest.n_bytes
        free += newest.n_bytes
    return Decision(evicted, f"{len(evicted)} of clients that hold more give way")
