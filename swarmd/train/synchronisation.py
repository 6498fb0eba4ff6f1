"""What a run could be like: plan.runs.synchronisation asked with a recipe, its codecs, and what its members say."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from swarmd.plan.runs.partition import PartitionMember
from swarmd.plan.runs.synchronisation import (
    FRAGMENTS,
    INNER_STEPS,
    CodecTraffic,
    Prediction,
    RunConditions,
    Setting,
    predict,
    settings,
)
from swarmd.protocol.runs.recipe import CodecName, Parts, Recipe
from swarmd.train.gradients.computing import n_at_once
from swarmd.train.vectors.codecs import BLOCK, codec_of_parts

ROUND_TRIP_S = 0.05  # between homes of one continent; it is not measured
TOPOLOGIES = ("parts", "server", "grid", "ring")  # beside the recipe's; who is near whom only a round's leader hears
N_UPDATES = 10  # latest ones, for how fast a run goes
_MANY = 16 * 16 * BLOCK  # elements: whole blocks of every codec


class RunPace:
    """How fast a run goes, by counted samples of the latest updates; and what the last plan ``predicted``, if any."""

    def __init__(self) -> None:
        self.predicted: float | None = None
        self._seen: deque[tuple[float, int]] = deque(maxlen=N_UPDATES + 1)

    def note(self, now: float, n_counted: int) -> None:
        """An update was applied; ``n_counted`` samples are in the ledger by now."""
        if not self._seen or n_counted > self._seen[-1][1]:
            self._seen.append((now, n_counted))

    @property
    def samples_per_s(self) -> float | None:
        """None before the second update."""
        if len(self._seen) < 2 or self._seen[-1][0] <= self._seen[0][0]:
            return None
        return (self._seen[-1][1] - self._seen[0][1]) / (self._seen[-1][0] - self._seen[0][0])


def ways(precision: str, given: Parts | None = None) -> list[CodecTraffic]:
    """Each codec, with a recipe's own settings for the one that it names."""
    found = []
    for name in get_args(CodecName):
        parts = given if given is not None and given.codec == name else Parts(codec=name)
        codec = codec_of_parts(parts, precision)
        found.append(CodecTraffic(name, codec.n_bytes(_MANY) / _MANY, codec.forwards, codec.dtype.itemsize))
    return found


def predictions(
    recipe: Recipe, members: Sequence[PartitionMember], samples_per_s: Sequence[float], n_elements: int
) -> tuple[Prediction | None, list[Prediction]]:
    """What the recipe itself comes to, and all that there is to choose from; nothing where nobody computes yet."""
    n_computing = sum(rate > 0 for rate in samples_per_s)
    if not n_computing:
        return None, []
    fastest = max(samples_per_s)
    unbroken_s = n_at_once(recipe.batch.micro, fastest) / fastest
    batch = recipe.batch.target if not recipe.steps_inside else recipe.diloco.batch * n_computing
    swarm = RunConditions(
        tuple(members), tuple(samples_per_s), n_elements, batch, recipe.diloco.batch, ROUND_TRIP_S, unbroken_s
    )
    n_steps, found = INNER_STEPS, ways(recipe.precision, recipe.parts)
    if recipe.steps_inside:
        n_steps = max(1, recipe.batch.target * recipe.fragments // batch)
    way = next(w for w in found if w.codec == recipe.parts.codec)
    own = Setting(recipe.synchronisation, way, n_steps if recipe.steps_inside else 0, recipe.fragments, recipe.topology)
    fragments = recipe.fragments if recipe.fragments > 1 else FRAGMENTS
    others = [replace(own, topology=kind) for kind in TOPOLOGIES if kind != own.topology]
    return predict(swarm, own), [predict(swarm, s) for s in [*settings(found, n_steps, fragments), *others]]
