"""What a ledger says, for who computes it again; one machine that takes every step of a DiLoCo run, peer by peer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from swarmd.plan.runs.ledger import Ledger
from swarmd.protocol.runs.commit import Commit, CountedContribution
from swarmd.protocol.runs.recipe import Recipe
from swarmd.train.gradients.source import InnerStep
from swarmd.train.vectors.codecs import codec_of
from swarmd.train.vectors.state import Vector, fragment_of

Take = Callable[[dict[str, Vector], str, range, InnerStep], object]
"""Takes a step of a peer's own, by the mean gradient of its draws, on its inner vectors."""


def counted_of(commit: Commit) -> Iterator[tuple[CountedContribution, int, bool]]:
    """Each contributor, how many of its draws were late, and whether it began anew."""
    n = len(commit.contributors)
    yield from zip(commit.contributors, commit.late or [0] * n, commit.anew or [False] * n, strict=True)


@dataclass
class Stepping:
    """A contributor: its vectors, its steps, and the fragment that it gave last."""

    inner: dict[str, Vector]
    steps: int = 0
    given: Vector | None = None


class Giving:
    """What each contributor's numbers stand for, as it coded them, with its own memory of what was left out."""

    def __init__(self, recipe: Recipe, n_elements: int) -> None:
        self.residuals: dict[str, Vector] = {}
        self._recipe = recipe
        self._codec = codec_of(recipe)
        self._nothing: Vector = np.zeros(n_elements, recipe.precision)

    def of(self, peer: str, is_anew: bool, low: int, whole: Vector, least: Vector) -> Vector:
        """``whole``, from element ``low`` on, as the round got it."""
        if self._codec.is_plain:
            return whole
        left_out = self.residuals.get(peer, self._nothing)
        residual = self.residuals[peer] = (self._nothing if is_anew else left_out).copy()
        place = slice(low, low + len(whole))
        whole = whole + residual[place]
        given = self._codec.code(whole, least).values
        if self._codec.leaves_out:
            residual[place] = (whole - given) * whole.dtype.type(self._recipe.parts.decay)
        return given

    def average(self, total: Vector, n_samples: int) -> Vector:
        """The mean as everybody got it."""
        mean: Vector = total / n_samples
        return mean if self._codec.forwards else self._codec.code(mean).values


def replay_diloco(ledger: Ledger, first: Vector, take: Take, epoch: int) -> Vector:
    """The parameters after ``epoch`` updates from ``first``."""
    recipe = ledger.run.recipe
    before, now, momentum = first, first.copy(), np.zeros_like(first)
    peers: dict[str, Stepping] = {}
    giving = Giving(recipe, len(first))
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
            least = np.abs(now[low:high]) * now.dtype.type(recipe.parts.threshold * c.n / recipe.diloco.learning_rate)
            total += giving.of(c.peer, is_anew, low, (now[low:high] - one.given) * c.n, least)
        for peer in peers.keys() - {c.peer for c in commit.contributors}:
            peers[peer].given = None
        average = giving.average(total, commit.n_samples)
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
