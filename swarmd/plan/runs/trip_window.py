"""How many micro-batches a driver has under way, so that holders of stages wait for none of them. Pure."""

from __future__ import annotations

import math

N_TRIPS = 512  # after which the shortest is looked for anew, with none more under way
MOST_MORE = 60.0  # each is kept by two holders at a time: hidden states of a micro-batch, some MB
STEP = 0.5  # for each trip that ends: half as many again, or half as many fewer, in the time of one
SMOOTHING = 0.3  # weight of the newest trip in how long they usually take


class TripWindow:
    """Adds to what a driver has under way, ``more``, while too few micro-batches wait anywhere; takes away from it.

    Those that wait are known from how long trips take, as in TCP Vegas (Brakmo and Peterson 1994): the shortest met no
    other one, so of ``n`` under way ``n (1 - shortest / usual)`` wait. Over slow links many travel at a time.
    """

    def __init__(self) -> None:
        self.more = 0.0
        self._n = 0
        self._shortest_s = math.inf
        self._usual_s = 0.0

    def note(self, took_s: float, under_way: int, wanted: int) -> None:
        """Note a trip that has ended; ``under_way``: how many were so with it; ``wanted``: how many are to wait."""
        self._n += 1
        if self._n % N_TRIPS == 0:  # links and holders change; those that waited all the time hid how long a trip is
            self.more = 0.0
            self._shortest_s = math.inf
        self._shortest_s = min(self._shortest_s, took_s)
        self._usual_s += (SMOOTHING if self._usual_s else 1.0) * (took_s - self._usual_s)
        waiting = under_way * (1 - self._shortest_s / max(self._usual_s, 1e-9))
        if waiting < wanted:
            self.more = min(MOST_MORE, self.more + STEP)
        elif waiting > 2 * wanted:
            self.more = max(0.0, self.more - STEP)
