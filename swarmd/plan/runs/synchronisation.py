"""Which synchronisation and codec a run should have: what each would come to, from what was measured.

An update of ``step`` is gathering, then a round, one after the other; where peers compute on, the longer of the two. A
round is the bytes on the slowest link (plan.runs.partition) and a few round trips; DiLoCo has one for every so many
steps that a peer takes. Of the settings that compute at least ``LEAST_UTILISATION`` of the time, the choice is the one
that changes the mathematics least. Pure. ``python benchmarks/plan.py`` compares it with what training takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmd.plan.runs import partition, topology
from swarmd.plan.runs.partition import PartitionMember, ReductionTrees, Sizes
from swarmd.values import Decision

LEAST_UTILISATION = 0.9  # of the time that all could compute
MOST_EXCESS = 1.25  # times what a recipe asks for, in an update: while a round lasts, others compute on
INNER_STEPS = 100  # of each peer between updates, where a recipe does not say (DiLoCo's H)
FRAGMENTS = 8  # of a streamed run, where a recipe does not say
ROUND_TRIPS = 4.0  # of a round, one after the other: join, parts, shares, commit; others hide behind the parts
LINK_SHARE = 0.85  # of a link that a round's parts reach: they begin and end one by one
NEWS_DELAY_S = 0.3  # until all know that enough samples are there: they compute on meanwhile


@dataclass(frozen=True, slots=True)
class CodecTraffic:
    """How a codec lets numbers travel. ``forwards``: averages are as large as all contributions together.

    ``plain_bytes``: of an element as it is.
    """

    codec: str
    bytes_per_element: float
    forwards: bool
    plain_bytes: float = 4.0


@dataclass(frozen=True, slots=True)
class RunConditions:
    """Who trains, what was measured, and what a recipe asks for.

    ``batch`` samples make an update, ``inner_batch`` a step of a peer's own; ``micro_batch_s``: what is not broken off;
    ``sites``: of each member, where it is known (plan.runs.topology).
    """

    members: tuple[PartitionMember, ...]
    samples_per_s: tuple[float, ...]
    n_elements: int
    batch: int
    inner_batch: int
    round_trip_s: float
    micro_batch_s: float = 0.0
    sites: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """What a recipe may say: ``n_steps`` of each peer between updates where it takes its own, else 0."""

    synchronisation: str
    codec: CodecTraffic
    n_steps: int = 0
    fragments: int = 1
    topology: str = "auto"

    def __str__(self) -> str:
        streamed = f", {self.fragments} fragments" if self.fragments > 1 else ""
        layout = f", {self.topology}" if self.topology != "auto" else ""
        return f"{self.synchronisation}{streamed}, {self.codec.codec}{layout}"


@dataclass(frozen=True, slots=True)
class Prediction:
    """An update: its seconds and samples, the share of the time that is computed, and bytes moved for each sample.

    ``excess``: how many times the samples that were asked for an update has.
    """

    setting: Setting
    update_s: float
    n_samples: float
    excess: float
    utilisation: float
    samples_per_s: float
    bytes_per_sample: float


def predict_update(swarm: RunConditions, setting: Setting) -> Prediction:
    """Predict what a setting comes to. Raises ValueError when nobody computes, or nobody can reduce."""
    rate = sum(swarm.samples_per_s)
    if not rate > 0:
        raise ValueError("nobody computes: how fast it goes is not known")
    n_computing = sum(r > 0 for r in swarm.samples_per_s)
    target = swarm.batch if not setting.n_steps else swarm.inner_batch * setting.n_steps * n_computing
    unbroken_s = swarm.micro_batch_s
    if setting.n_steps:
        unbroken_s = swarm.inner_batch / min(r for r in swarm.samples_per_s if r > 0)
    n_asked = max(1, target // setting.fragments)
    compute_s = n_asked / rate + NEWS_DELAY_S + unbroken_s / 2  # who is at a micro-batch ends it
    sites = swarm.sites or range(len(swarm.members))
    layout = topology.lay_out_group(setting.topology, swarm.members, sites).action
    plan = partition.divide_vector(layout.members, _round_sizes(swarm, setting), layout.trees).action
    trips = ROUND_TRIPS + _tree_depth(layout.trees) - 1
    round_s = plan.expected_s / LINK_SHARE + trips * swarm.round_trip_s + unbroken_s / 2  # for which others wait
    if setting.synchronisation == "delayed" or setting.fragments > 1:
        update_s = compute_s = max(compute_s, round_s)
    else:
        update_s = compute_s + round_s
    n_samples = compute_s * rate
    excess = max(1.0, round_s * rate / n_asked) if update_s == compute_s else 1.0
    return Prediction(
        setting,
        update_s,
        n_samples,
        excess,
        utilisation=compute_s / update_s,
        samples_per_s=n_samples / update_s,
        bytes_per_sample=plan.moved_bytes / n_samples,
    )


def choose_setting(predictions: Sequence[Prediction]) -> Decision[Prediction]:
    """Choose the first that computes enough of the time, else what computes most. In the order of ``list_settings``."""
    enough = [p for p in predictions if p.utilisation >= LEAST_UTILISATION and p.excess <= MOST_EXCESS]
    if enough:
        chosen = enough[0]
        share = f"{100 * chosen.utilisation:.0f} % of the time is computed"
        if chosen is predictions[0]:
            return Decision(chosen, f"{share}, and all see each other's gradients at once")
        return Decision(chosen, f"{share}; {_explain_shortfall(predictions[predictions.index(chosen) - 1])}")
    chosen = max(predictions, key=lambda p: (p.utilisation, -p.excess))
    return Decision(
        chosen, f"nothing computes {100 * LEAST_UTILISATION:.0f} % of the time on these links; this comes closest"
    )


def _explain_shortfall(near: Prediction) -> str:
    """Explain why what changes the mathematics a little less is not chosen."""
    if near.utilisation < LEAST_UTILISATION:
        return f"{near.setting}, which changes less, would compute {100 * near.utilisation:.0f} %"
    return f"{near.setting}, which moves more, would put {near.excess:.1f} times the samples into an update"


def list_settings(
    codecs: Sequence[CodecTraffic], n_steps: int = INNER_STEPS, fragments: int = FRAGMENTS
) -> list[Setting]:
    """List what there is to choose from; what changes the mathematics least comes first."""
    exact = [w for w in codecs if not w.forwards]
    forwarding = [w for w in codecs if w.forwards]
    candidates = [Setting("step", codec) for codec in exact]
    candidates += [Setting("delayed", codec) for codec in exact]
    candidates += [Setting("diloco", codec, n_steps) for codec in [*exact, *forwarding]]
    candidates += [Setting("diloco", codec, n_steps, fragments) for codec in [*exact, *forwarding]]
    candidates += [Setting("step", codec) for codec in forwarding]
    return [*candidates, *(Setting("delayed", codec) for codec in forwarding)]


def _round_sizes(swarm: RunConditions, setting: Setting) -> Sizes:
    """Compute the sizes of what travels in a round."""
    codec = setting.codec
    n_elements = swarm.n_elements / setting.fragments
    n_bytes = max(1, round(n_elements * codec.bytes_per_element))
    n_contributors = float(sum(m.contributes for m in swarm.members)) if codec.forwards else 1.0
    return Sizes(n_bytes, n_contributors, codec.plain_bytes / codec.bytes_per_element, codec.forwards)


def _tree_depth(trees: ReductionTrees) -> int:
    """Count the hops between a member and a root, at most."""

    def count_hops(place: int, root: int, parents: Sequence[int]) -> int:
        n = 0
        while place != root:
            place = parents[place]
            n += 1
        return n

    root, parents = next(iter(trees.parents.items()))
    n_hops = [count_hops(place, root, parents) for place in range(len(parents))]
    return max(1, *n_hops)
