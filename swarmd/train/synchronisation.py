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
    list_settings,
    predict_update,
)
from swarmd.plan.runs.workload import micro_batch_size
from swarmd.protocol.runs.recipe import CodecName, Parts, Recipe
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
        """Note that an update was applied; ``n_counted`` samples are in the ledger by now."""
        if not self._seen or n_counted > self._seen[-1][1]:
            self._seen.append((now, n_counted))

    @property
    def samples_per_s(self) -> float | None:
        """None before the second update."""
        if len(self._seen) < 2:
            return None
        first_at, n_before = self._seen[0]
        latest_at, n_counted = self._seen[-1]
        if latest_at <= first_at:
            return None
        return (n_counted - n_before) / (latest_at - first_at)


def codec_traffic(precision: str, own_parts: Parts | None = None) -> list[CodecTraffic]:
    """Describe each codec, with a recipe's own settings for the one that it names."""
    traffic = []
    for name in get_args(CodecName):
        parts = own_parts if own_parts is not None and own_parts.codec == name else Parts(codec=name)
        codec = codec_of_parts(parts, precision)
        bytes_per_element = codec.n_bytes(_MANY) / _MANY
        traffic.append(CodecTraffic(name, bytes_per_element, codec.forwards, codec.dtype.itemsize))
    return traffic


def predict_settings(
    recipe: Recipe, members: Sequence[PartitionMember], samples_per_s: Sequence[float], n_elements: int
) -> tuple[Prediction | None, list[Prediction]]:
    """Predict what the recipe itself comes to, and all that there is to choose from; nothing where nobody computes."""
    n_computing = sum(rate > 0 for rate in samples_per_s)
    if not n_computing:
        return None, []
    fastest = max(samples_per_s)
    unbroken_s = micro_batch_size(recipe.batch.micro, fastest) / fastest
    batch = recipe.batch.target if not recipe.steps_inside else recipe.diloco.batch * n_computing
    swarm = RunConditions(
        members=tuple(members),
        samples_per_s=tuple(samples_per_s),
        n_elements=n_elements,
        batch=batch,
        inner_batch=recipe.diloco.batch,
        round_trip_s=ROUND_TRIP_S,
        micro_batch_s=unbroken_s,
    )
    codecs = codec_traffic(recipe.precision, recipe.parts)
    n_steps = INNER_STEPS
    if recipe.steps_inside:
        n_steps = max(1, recipe.batch.target * recipe.fragments // batch)
    codec = next(w for w in codecs if w.codec == recipe.parts.codec)
    own_setting = Setting(
        recipe.synchronisation,
        codec,
        n_steps if recipe.steps_inside else 0,
        fragments=recipe.fragments,
        topology=recipe.topology,
    )
    fragments = recipe.fragments if recipe.fragments > 1 else FRAGMENTS
    other_layouts = [replace(own_setting, topology=kind) for kind in TOPOLOGIES if kind != own_setting.topology]
    candidates = [*list_settings(codecs, n_steps, fragments), *other_layouts]
    return predict_update(swarm, own_setting), [predict_update(swarm, setting) for setting in candidates]
