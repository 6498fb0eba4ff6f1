"""Sums over the members of a team on one machine, through memory that all of them have.

Each member has two places in it, used by turns, and a count of the sums that it has given its part to:

    counts   [member 0] [member 1] ...           one cache line each
    places   [member 0: even, odd] [member 1: even, odd] ...

A member writes its part into its place for this sum, then its count; it waits until all counts are as high, and adds up
all places in the order of members, so that all have the same bits. Two places suffice: who writes the next but one has
seen all counts of the next, and those were written after this one was read.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Callable
from functools import reduce

import numpy as np
import torch

from swarmd.compute.teams.sums import PassGivenUp, TeamBroken, next_pass
from swarmd.errors import ConfigError

ORDERED = ("x86_64", "AMD64")  # processors whose stores others see in the order in which they were made
LINE = 64  # bytes of a cache line
PART_NUMBERS = 1 << 18  # of a part that is added up at once: longer ones go piece by piece
SPINS = 200  # looks at the counts before others may have the core
PATIENCE_S = 0.005  # a member that takes so long loads, or is stopped: then it is looked for from time to time
PAUSE_S = 0.0005  # between such looks
LOOK_EVERY_S = 0.02  # whether the others still live
MOST_WAIT_S = 60.0  # that a leader waits for the part of one that lives: loading blocks takes longest
N_PLACES = 2  # of each member: while one is read, the next part is written


def shared_bytes(n_members: int) -> int:
    """How much memory a team's sums take."""
    return n_members * (LINE + N_PLACES * PART_NUMBERS * 4)


def make_shared(n_members: int) -> int:
    """Make memory for a team's sums; returns a file's number, for ``SharedSums`` of each member."""
    number = os.memfd_create("swarmd-team")
    os.ftruncate(number, shared_bytes(n_members))
    return number


class SharedSums:
    """One member's side. ``is_whole`` says whether all other members still live; it is asked while one waits.

    ``n_given``: how many sums this member has given its part to. Raises ConfigError on processors that do not keep the
    order of stores.
    """

    def __init__(self, number: int, member: int, n_members: int, is_whole: Callable[[], bool]) -> None:
        if platform.machine() not in ORDERED:
            raise ConfigError(f"sums through shared memory are for {', '.join(ORDERED)}, not {platform.machine()}")
        memory = mmap.mmap(number, shared_bytes(n_members))
        words = np.frombuffer(memory, np.int64, n_members * LINE // 8)
        self._counts = words[:: LINE // 8]
        self._ended = words[1:2]  # beside the leader's count: the last sum of the pass before the one that it is in
        places = torch.frombuffer(memory, dtype=torch.float32, offset=n_members * LINE)
        self._places = places.view(n_members, N_PLACES, PART_NUMBERS)
        self._member = member
        self._is_whole = is_whole
        self.n_given = 0

    def begin(self) -> int:
        """Begin a pass, at the leader; returns what members have to ``align`` to."""
        self._ended[0] = self.n_given
        self.n_given = next_pass(self.n_given) + self.n_given % N_PLACES  # so that the next sum takes the other place
        return self.n_given

    def align(self, n_given: int) -> None:
        """Be where the leader is, between passes: a pass that failed at all members may have ended anywhere."""
        self.n_given = n_given
        self._counts[self._member] = n_given

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over members of parts alike in shape and type, added in float32. Raises TeamBroken."""
        flat = part.detach().reshape(-1)
        sums = [self._add(piece) for piece in torch.split(flat, PART_NUMBERS)]
        total = sums[0] if len(sums) == 1 else torch.cat(sums)
        return total.view(part.shape).to(part.dtype)

    def _add(self, part: torch.Tensor) -> torch.Tensor:
        self.n_given += 1
        place, n = self.n_given % N_PLACES, len(part)
        self._places[self._member, place, :n] = part
        self._counts[self._member] = self.n_given
        self._wait()
        return reduce(torch.add, self._places[:, place, :n].unbind())

    def _wait(self) -> None:
        """Wait until all have given their part to this sum. Raises TeamBroken, or PassGivenUp at a follower."""
        n_looks, begun, looked_at = 0, 0.0, 0.0
        while (self._counts < self.n_given).any():
            n_looks += 1
            if n_looks < SPINS:
                continue
            now = time.monotonic()
            begun = begun or now
            if now - begun < PATIENCE_S:
                os.sched_yield()
                continue
            time.sleep(PAUSE_S)
            if now - looked_at > LOOK_EVERY_S:
                looked_at = now
                is_late = self._member == 0 and now - begun > MOST_WAIT_S
                if is_late or not self._is_whole():
                    reason = f"has given nothing for {MOST_WAIT_S:.0f} s" if is_late else "is gone"
                    raise TeamBroken(f"a member of the team {reason}: what it computes a part of is computed again")
        is_other_pass = self._counts[0] >= next_pass(self.n_given)
        if is_other_pass and self.n_given > self._ended[0]:
            raise PassGivenUp("the leader has begun another pass")
