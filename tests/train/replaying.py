"""What a ledger says, for who computes it again; one machine that takes every step of a DiLoCo run, peer by peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from swarmd.plan.ledger import Ledger
from swarmd.protocol.commit import Commit, Counted
from swarmd.train.source import InnerStep
from swarmd.train.state import Vector, fragment_of

Take = Callable[[dict[str, Vector], str, range, InnerStep], object]
"""Takes a step of a peer's own, by the mean gradient of its draws, on its inner vectors."""


def counted_of(commit: Commit) -> Iterator[tuple[Counted, int, bool]]:
    """Each contributor, how many of its draws were late, and whether it began anew."""
    n = len(commit.contributors)
    yield from zip(commit.contributors, commit.late or [0] * n, commit.anew or [False] * n, strict=True)


@dataclass
class Stepping:
    """A contributor: its vectors, its steps, and the fragment that it gave last."""

    inner: dict[str, Vector]
    steps: int = 0
    given: Vector | None = None


def replay_diloco(ledger: Ledger, first: Vector, take: Take, epoch: int) -> Vector:
    """The parameters after ``epoch`` updates from ``first``."""
    recipe = ledger.run.recipe
    before, now, momentum = first, first.copy(), np.zeros_like(first)
    peers: dict[str, Stepping] = {}
    for k, sealed in enumerate(ledger.sealed[:epoch]):
        commit = sealed.commit
        low, high = fragment_of(recipe, k + 1, len(now))
        total: Vector = np.zeros(high - low, recipe.precision)
        for c, late, is_anew in counted_of(commit):
            if is_anew:
                zeros = {name: np.zeros_like(now) for name in recipe.optimizer.moments}
                peers[c.peer] = Stepping({"local": (before if late else now).copy(), **zeros})
            one, size = peers[c.peer], recipe.diloco.batch
            for at in range(0, c.n + 1, size):
                if at == late and k:
                    _take_over(one, now, *fragment_of(recipe, k, len(now)))
                if at < c.n:
                    one.steps += 1
                    rate = recipe.learning_rate(k if at < late else k + 1)
                    take(one.inner, c.peer, range(c.first + at, c.first + at + size), InnerStep(rate, one.steps))
            one.given = one.inner["local"][low:high].copy()
            total += (now[low:high] - one.given) * c.n
        for peer in peers.keys() - {c.peer for c in commit.contributors}:
            peers[peer].given = None
        average = total / commit.n_samples
        before, now = now, now.copy()
        momentum[low:high] = momentum[low:high] * recipe.diloco.momentum + average
        now[low:high] -= (average + momentum[low:high] * recipe.diloco.momentum) * recipe.diloco.learning_rate
    return now


def _take_over(one: Stepping, now: Vector, low: int, high: int) -> None:
    """As the peer did at that draw: the update's fragment, with what it had done to it since it gave it."""
    mine = one.inner["local"][low:high]
    if one.given is None:
        mine[:] = now[low:high]
    else:
        mine -= one.given
        mine += now[low:high]
    one.given = None
