"""Runs in stages: where stages begin, which holder is next, and when a driver sends another micro-batch. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from swarmd.plan.runs.progress import Action, MemberProgress, decide_action
from swarmd.protocol.fields import MAX_STAGES
from swarmd.protocol.runs.recipe import ENDS, Recipe
from swarmd.values import Decision, PeerId

OTHER_BYTES = 600 * 10**6  # of a holder: daemon and worker with their libraries, and the graph of a block
USABLE_SHARE = 0.5  # of a member's memory: the rest is its user's, and files' in whose place others come
PER_HOLDER = 2  # micro-batches under way: one is computed while the next one travels


@dataclass(frozen=True, slots=True)
class HolderLoad:
    """A holder of a stage, as a driver sees it: micro-batches sent to it that are not back, and how long one takes."""

    n_under_way: int = 0
    pass_s: float | None = None
    banned_until: float = 0.0


def divide_blocks(n_blocks: int, n_stages: int) -> tuple[int, ...]:
    """Return the first block of each stage: as equal as whole blocks can be. Raises ValueError."""
    if not 1 <= n_stages <= n_blocks:
        raise ValueError(f"{n_stages} stages of {n_blocks} blocks: expected 1 to {n_blocks}")
    return tuple(n_blocks * stage // n_stages for stage in range(n_stages))


def decide_stage_action(
    me: MemberProgress,
    other_members: Sequence[MemberProgress],
    target: int,
    is_left_behind: bool,
    under_way: int,
    is_first: bool,
) -> Decision[Action]:
    """Choose what a holder does. ``is_left_behind``: other stages are past this update already.

    Then this stage ends it with what it has; with nothing, by a commit that it stays as it is, which the first of its
    holders proposes. ``under_way``: micro-batches that are not back yet.
    """
    # What comes is no even stream, and it ends where there is enough: nothing is forecast.
    still = [replace(member, samples_per_s=0.0) for member in (me, *other_members)]
    decision = decide_action(still[0], still[1:], 1 if is_left_behind else target)
    total = sum(member.n_samples for member in still if member.head == me.head)
    if decision.action is Action.CONTINUE and is_left_behind and not total and not under_way and is_first:
        return Decision(Action.STAY, "other stages are past this update, and nothing is left to give to it")
    return decision


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How many parameters a model has: in its largest block, and around its blocks.

    ``state_bytes``: what a holder keeps of each.
    """

    n_blocks: int
    block: int
    ends: int
    state_bytes: int

    def stage_bytes(self, n_stages: int) -> int:
        """What a stage of blocks takes of a holder's memory, of so many stages."""
        return OTHER_BYTES + self.state_bytes * self.block * -(-self.n_blocks // n_stages)

    @property
    def ends_bytes(self) -> int:
        """What the ends take of a holder's memory."""
        return OTHER_BYTES + self.state_bytes * self.ends


def state_bytes(recipe: Recipe) -> int:
    """What a holder keeps of each parameter: the parameter, sums of gradients, moments, all in float32."""
    return 4 * (len(recipe.shared_vectors) + len(recipe.optimizer.moments))


@dataclass(frozen=True, slots=True)
class PipelineForecast:
    """What a run in stages comes to with the holders that it has, at most: ``samples_per_s``, by its slowest stage.

    ``lacking``: stages that nobody holds; ``with_one_more``: samples/s if a machine of the usual speed held the slowest
    stage, too.
    """

    samples_per_s: float
    slowest: int | None
    lacking: tuple[int, ...]
    with_one_more: float


def forecast_pipeline(speeds: Mapping[int, Sequence[float]]) -> PipelineForecast:
    """Forecast a run; ``speeds``: samples/s that each holder of each stage computes, 0 where that is not known."""
    lacking = tuple(stage for stage, of_stage in sorted(speeds.items()) if not of_stage)
    known = [speed for of_stage in speeds.values() for speed in of_stage if speed > 0]
    totals = {stage: sum(of_stage) for stage, of_stage in speeds.items()}
    if lacking or not all(totals.values()):
        return PipelineForecast(0.0, None, lacking, 0.0)
    slowest = min(totals, key=totals.__getitem__)
    more = {**totals, slowest: totals[slowest] + statistics.median(known)}
    return PipelineForecast(totals[slowest], slowest, (), min(more.values()))


def choose_stages(size: ModelSize, room: Sequence[int]) -> Decision[int]:
    """Choose as few stages as members can hold, each as many as it has room for, in bytes; 0: they cannot.

    Fewer stages mean fewer trips for a micro-batch, and less time in which the pipeline runs dry.
    """
    for n_stages in range(1, min(size.n_blocks, MAX_STAGES) + 1):
        choice = fit_stages(size, n_stages, room)
        if choice.action:
            return choice
    needed = (size.ends_bytes + size.stage_bytes(1)) / 1e9
    there = sum(room) / 1e9
    return Decision(
        0, f"the model takes {needed:.1f} GB to train, and {len(room)} members have {there:.1f} GB to give, in parts"
    )


def fit_stages(size: ModelSize, n_stages: int, room: Sequence[int]) -> Decision[int]:
    """Can members with so much ``room``, in bytes, hold so many stages and the ends? ``n_stages``, or 0."""
    left = list(room)
    blocks = -(-size.n_blocks // n_stages)
    each = f"{blocks} blocks each take {size.stage_bytes(n_stages) / 1e9:.1f} GB of a holder's memory"
    for need in sorted([size.ends_bytes, *[size.stage_bytes(n_stages)] * n_stages], reverse=True):
        if not _take_room(left, need):
            most = max(left, default=0) / 1e9
            return Decision(0, f"{each}; where {need / 1e9:.1f} GB more are needed, {most:.1f} GB are left at most")
    return Decision(n_stages, each)


def _take_room(left: list[int], need: int) -> bool:
    """Take room for a stage where most is left; False where there is none."""
    most = max(range(len(left)), key=left.__getitem__, default=None)
    if most is None or left[most] < need:
        return False
    left[most] -= need
    return True


def choose_holder(holders: Mapping[PeerId, HolderLoad], now: float) -> Decision[PeerId | None]:
    """Choose who computes a micro-batch: where it will be done first. Of those alike, the first by name."""
    free = {peer: holder for peer, holder in holders.items() if holder.banned_until <= now}
    if not free:
        return Decision(None, "nobody who answers holds the stage")
    known = [holder.pass_s for holder in free.values() if holder.pass_s is not None]
    usual_s = min(known, default=1.0)  # of one that is not known yet: it is tried

    def done_in_s(peer: PeerId) -> tuple[float, PeerId]:
        holder = free[peer]
        return (holder.n_under_way + 1) * (holder.pass_s if holder.pass_s is not None else usual_s), peer

    best = min(free, key=done_in_s)
    return Decision(best, f"it has {free[best].n_under_way} under way")


def micro_batches_at_once(n_holders: Iterable[int], n_drivers: int) -> int:
    """How many micro-batches a driver has under way: its part of two for each holder, and two for each stage.

    ``n_holders``: of each stage of blocks, 0 where that is not known.
    """
    holders = [max(1, n) for n in n_holders]
    return PER_HOLDER * max(len(holders), math.ceil(sum(holders) / n_drivers))


def size_of_next(target: int, gathered: float, under_way: int, micro: int, at_once: int, n_drivers: int) -> int:
    """How many samples a driver sends next; 0: none now. ``under_way``: its own samples that are not back yet.

    The other drivers are taken to have as many. ``at_once``: micro-batches (``micro_batches_at_once``).
    """
    lacking = math.ceil(target - gathered) - n_drivers * under_way
    if under_way >= at_once * micro:
        return 0
    return max(0, min(micro, lacking))


def choose_stage(holders: Mapping[int, Iterable[float]], mine: Iterable[int], drawn: float) -> Decision[int]:
    """Choose the stage that a newcomer holds: nobody's first, then the slowest, then the one with fewest holders.

    ``holders``: samples/s of each holder of each stage, 0 where that is not known; ``mine``: stages held here already;
    ``drawn`` from [0, 1) decides between those alike, so that two that come at once seldom take the same.
    """
    speeds = {stage: list(of_stage) for stage, of_stage in holders.items()}
    open_stages = [stage for stage in speeds if stage not in set(mine)]
    if not open_stages:
        raise ValueError("all stages are held here already")

    def need(stage: int) -> tuple[int, float]:
        return len(speeds[stage]), sum(speeds[stage])

    if not any(speeds.values()) and ENDS in open_stages:
        return Decision(ENDS, "nobody holds anything yet, and who holds the ends drives")
    most = min(map(need, open_stages))
    alike = [stage for stage in open_stages if need(stage) == most]
    best = alike[int(drawn * len(alike))]
    n = len(speeds[best])
    return Decision(best, "nobody holds it" if not n else f"it has {n} holders, the fewest")


def next_draw(ranges: Iterable[tuple[str, int, int]], driver: str) -> int:
    """Return the draw of a driver that no commit has counted yet; ``ranges``: (driver, first, n) of all commits."""
    return max((first + n for name, first, n in ranges if name == driver), default=0)
