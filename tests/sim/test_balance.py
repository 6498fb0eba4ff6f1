"""Two hundred servers for a virtual day: who joins, moves and leaves, and how near the swarm stays to its best."""

from __future__ import annotations

import heapq
import itertools
import random
from dataclasses import dataclass, field, replace

from swarmd.plan.chains.placement import Holder, bottleneck, choose_move, choose_span, count_moves_left
from swarmd.values import PeerId, Span

N_SERVERS = 200
LOOK_S = 60.0
MEAN_LIFE_S = 6 * 3_600.0


@dataclass
class Day:
    """One run: joins, leaves and looks in virtual time. A server that loads serves nothing."""

    rng: random.Random
    n_blocks: int
    holders: dict[PeerId, Holder] = field(default_factory=dict)
    moved_at: dict[PeerId, list[float]] = field(default_factory=dict)
    events: list[tuple[float, int, str, PeerId]] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    n_moves: int = 0
    avoidable_gaps: int = 0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def at(self, time_s: float, what: str, peer: PeerId = PeerId("")) -> None:
        heapq.heappush(self.events, (time_s, next(self._numbers), what, peer))

    def reload_s(self, span: Span) -> float:
        return 30.0 + 5.0 * len(span)

    def join(self, now: float) -> None:
        peer = PeerId(f"p{next(self._numbers):06}")
        speed, n_fit = self.rng.lognormvariate(5.0, 0.8), self.rng.randint(3, 10)
        span = choose_span(self.ordered(), self.n_blocks, n_fit, speed).action
        self.holders[peer] = Holder(peer, span, speed, is_online=False)
        self.at(now + self.reload_s(span), "ready", peer)
        self.at(now + self.rng.expovariate(1 / MEAN_LIFE_S), "leave", peer)

    def ordered(self) -> list[Holder]:
        return [self.holders[p] for p in sorted(self.holders)]

    def look(self, now: float) -> None:
        movable = [
            replace(h, may_move=count_moves_left(self.moved_at.get(h.peer, []), now) > 0) for h in self.ordered()
        ]
        move = choose_move(movable, self.n_blocks).action
        if move is not None:
            covered = bottleneck(self.ordered(), self.n_blocks) > 0
            self.holders[move.peer] = replace(self.holders[move.peer], span=move.span, is_online=False)
            self.avoidable_gaps += covered and bottleneck(self.ordered(), self.n_blocks) == 0
            self.moved_at.setdefault(move.peer, []).append(now)
            self.n_moves += 1
            self.at(now + self.reload_s(move.span), "ready", move.peer)
        ideal = sum(h.blocks_per_s for h in self.holders.values()) / self.n_blocks
        self.shares.append(bottleneck(self.ordered(), self.n_blocks) / ideal)

    def run(self, length_s: float) -> None:
        for _ in range(N_SERVERS):
            self.join(0.0)
        self.at(LOOK_S, "look")
        self.at(self.rng.expovariate(N_SERVERS / MEAN_LIFE_S), "join")
        while self.events and self.events[0][0] < length_s:
            now, _, what, peer = heapq.heappop(self.events)
            if what == "look":
                self.look(now)
                self.at(now + LOOK_S, "look")
            elif what == "join":
                self.join(now)
                self.at(now + self.rng.expovariate(N_SERVERS / MEAN_LIFE_S), "join")
            elif what == "leave":
                self.holders.pop(peer, None)
            elif peer in self.holders:
                self.holders[peer] = replace(self.holders[peer], is_online=True)


def run_day(seed: int, length_s: float = 86_400.0, n_blocks: int = 80) -> Day:
    day = Day(random.Random(seed), n_blocks)
    day.run(length_s)
    return day


def test_a_churning_swarm_stays_near_its_best_and_opens_no_gap() -> None:
    day = run_day(1, length_s=2 * 3_600.0, n_blocks=40)
    shares = day.shares[5:]
    assert sum(shares) / len(shares) >= 0.85
    assert not day.avoidable_gaps
    assert all(len(moves) <= 4 for moves in day.moved_at.values())
    assert day.n_moves <= len(day.shares), "one at a time"


if __name__ == "__main__":
    import sys
    import time

    for seed in range(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        begun = time.perf_counter()
        day = run_day(seed)
        shares = day.shares[5:]
        most = max((len(m) for m in day.moved_at.values()), default=0)
        print(
            f"seed {seed}: {sum(shares) / len(shares):.3f} of the ideal on average, lowest {min(shares):.2f}, "
            f"{day.n_moves} moves, at most {most} of one server, {day.avoidable_gaps} avoidable gaps, "
            f"{time.perf_counter() - begun:.0f} s"
        )
