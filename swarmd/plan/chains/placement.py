"""Which blocks a server should hold: what a newcomer takes, and who moves where when the swarm is out of balance.

A server of ``blocks_per_s`` that holds ``k`` blocks passes ``blocks_per_s / k`` tokens a second through each of them.
The swarm is as fast as its slowest block (its *bottleneck*), and a block with fewer holders than the target is a risk.
So placements compete first on uncovered blocks, then on blocks below the target, then on a soft minimum over all
blocks' tokens/s, which rises with the bottleneck and also tells apart two placements that leave it as it is. Moves are
decided by all members alike from the same view, so only the one whose move helps most moves. After Petals (Borzunov
et al. 2023, section 3.2), which looks at the bottleneck alone.

Over all models a block that nobody holds comes before more speed elsewhere: servers that may hold any model leave the
one they serve, where each of their blocks has another holder, for one that lacks blocks (``find_rescues``).
"""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarmd.plan.chains.view import coverage
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import Decision, ModelId, PeerId, Span, count, ranges, some_of

TARGET_REDUNDANCY = 2  # holders of each block: one may leave at any time
SHARPNESS = 16  # of the soft minimum: the power mean with this negative exponent
MIN_GAIN = 0.01  # of the soft minimum, for a move, and never less than one server's share: nobody flaps
MOST_CONSIDERED = 256  # servers, for one move: a look at thousands must not hold up the daemon
MOST_TIMES_USUAL = 16.0  # the usual speed: machines differ that much, and a claim beyond it moves nobody
MAX_MOVES_PER_DAY = 4  # a move costs a download and its sessions' patience
DAY_S = 86_400.0  # one day
TAKEN = ("online", "joining")  # states of blocks that are, or will soon be, somebody's

Models = Mapping[str, tuple[str, int]]
"""Name of a model to its hash and number of blocks, as in the catalog."""
Own = tuple[str, int]
"""A server: its peer, and which of that peer's workers."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Holder:
    """One server as placement sees it: what it holds, how fast it is, whether it may move and is ready."""

    peer: PeerId
    span: Span
    blocks_per_s: float
    is_online: bool = True
    may_move: bool = True
    slot: int = 0  # which of the peer's workers


@dataclass(frozen=True, slots=True)
class Move:
    """``peer`` should hold ``span`` instead of what it holds."""

    peer: PeerId
    span: Span
    slot: int = 0


@dataclass(frozen=True, slots=True)
class Target:
    """What a server should hold instead: blocks of a model, or (None) those of it that are needed most."""

    model: ModelId
    span: Span | None


@dataclass(frozen=True, slots=True)
class Rescue:
    """Who could take the blocks of a model that nobody holds, the first in line first; nobody without the weights."""

    model: ModelId
    name: str
    lacking: tuple[Span, ...]
    servers: tuple[Own, ...]
    is_given: bool = True

    def __str__(self) -> str:
        blocks = ", ".join(map(str, self.lacking))
        if not self.is_given:
            return (
                f"blocks {blocks} are held by nobody, and no member that is up has their weights: start the daemon of "
                f"one that has, or say swarmd models add FOLDER --name {shlex.quote(self.name)} where they are"
            )
        if not self.servers:
            return (
                f"blocks {blocks} are held by nobody, and no server that may choose its model can leave what it "
                f"serves without a gap there: swarmd up --serve {self.name} on a machine that has room"
            )
        peers = some_of([peer[-8:] for peer, _ in self.servers])
        return f"blocks {blocks} are held by nobody; {peers} can take them, the first within a few minutes"


def holders_of(spans: Iterable[SpanRecord]) -> list[Holder]:
    """Spans' records as placement sees them: their best throughput, whatever the batch, as far as it can be believed.

    Nobody counts for more than ``MOST_TIMES_USUAL`` the median of what all say.
    """

    def blocks_per_s(span: SpanRecord) -> float:
        tokens_per_s = max(span.decode_tokens_per_s or 1.0, *span.batch_tokens_per_s.values(), 0.001)
        return tokens_per_s * (span.end - span.start)

    known = list(spans)
    speeds = [blocks_per_s(span) for span in known]
    max_speed = MOST_TIMES_USUAL * statistics.median(speeds) if speeds else 0.0
    holders = []
    for span, speed in zip(known, speeds, strict=True):
        holder = Holder(
            PeerId(span.peer),
            Span(span.start, span.end),
            min(speed, max_speed),
            span.state == "online",
            span.moves_left > 0,
            span.slot,
        )
        holders.append(holder)
    return holders


def choose_model(
    spans: Sequence[SpanRecord],
    models: Models,
    requested: str,
    cached_models: frozenset[ModelId],
    unfit: Collection[ModelId] = (),
) -> Decision[tuple[ModelId, int] | None]:
    """Choose what a server that has just come serves: the model it was told (by name or hash), else the rarest one.

    Among equally rare ones those come first that are on this disk already. ``unfit`` could not be loaded here: the
    others come before them.
    """
    listed = {}
    for name, (model, n_blocks) in sorted(models.items()):
        listed[name] = (ModelId(model), n_blocks)
    names = ", ".join(listed) or "none yet"
    if not requested and not listed:
        return Decision(None, "waiting for the swarm's catalog to list a model: swarmd models add, by the founder")
    if requested:
        matches = (model for name, model in listed.items() if requested in (name, model[0]))
        model_and_size = next(matches, None)
        if model_and_size is None:
            return Decision(None, f"waiting for the swarm's catalog to list a model {requested!r}; it lists: {names}")
        return Decision(model_and_size, f"{requested}, as --serve says")

    def rank(name: str) -> tuple[bool, int, bool]:
        model, n_blocks = listed[name]
        return model in unfit, min(coverage(spans, model, n_blocks)), model not in cached_models

    name = min(listed, key=rank)
    return Decision(listed[name], f"{name}: its rarest block has {count(rank(name)[1], 'server')}")


def find_rescues(
    spans: Sequence[SpanRecord],
    models: Models,
    is_available: Callable[[ModelId, int], bool] = lambda model, block: True,
) -> list[Rescue]:
    """For each model with blocks that nobody holds or loads: who could come from another model, without a gap there.

    ``is_available`` says whether the weights of a block can be fetched: nobody leaves anything for those that cannot.
    Those whose present blocks have most other holders come first; of two models that lack blocks each gets every
    second of them.
    """
    # Every member computes this from the same records and comes to the same list, so nobody has to be asked. A server
    # that finds itself in the list moves; the order of the list is the order in which they do.
    listed = _first_names(models)
    counts = {model: coverage(spans, model, n, TAKEN) for model, n in listed.values()}
    lacking = [name for name, (model, _) in listed.items() if min(counts[model]) == 0]
    online = {model: coverage(spans, model, n) for model, n in listed.values()}

    def spare(span: SpanRecord) -> int:
        """Other holders of the rarest of its blocks."""
        n_holders = online.get(ModelId(span.model), [])[span.start : span.end]
        return min(n_holders, default=1) - 1

    mobile = [s for s in spans if s.state == "online" and s.any_model and s.moves_left]
    free = [s for s in mobile if spare(s) > 0]
    free.sort(key=lambda s: (-spare(s), s.peer, s.slot))
    plans = []
    for number, name in enumerate(lacking):
        model, _ = listed[name]
        candidates = [s for s in free if s.model != model]
        servers = candidates[number :: len(lacking)] or candidates
        gaps = ranges({block for block, n in enumerate(counts[model]) if n == 0})
        missing_blocks = [block for gap in gaps for block in range(gap.start, gap.end)]
        can_be_had = all(is_available(model, block) for block in missing_blocks)
        able_peers = tuple((s.peer, s.slot) for s in servers) if can_be_had else ()
        plans.append(Rescue(model, name, tuple(gaps), able_peers, can_be_had))
    return plans


def _first_names(models: Models) -> dict[str, tuple[ModelId, int]]:
    """The catalog's models, in order of their names; one with several names by the first of them."""
    listed: dict[str, tuple[ModelId, int]] = {}
    known_hashes = set[str]()
    for name, (model, n_blocks) in sorted(models.items()):
        if model not in known_hashes:
            known_hashes.add(model)
            listed[name] = (ModelId(model), n_blocks)
    return listed


def choose_span(
    holders: Sequence[Holder],
    n_blocks: int,
    n_fit: int,
    blocks_per_s: float,
) -> Decision[Span]:
    """Choose what a newcomer that has room for ``n_fit`` blocks should hold."""
    counts, rates = _counts_and_rates(holders, n_blocks)
    size = max(1, min(n_fit, n_blocks))
    start = _best_window(counts, rates, size, blocks_per_s)[1]
    span = Span(start, start + size)
    lowest = int(counts[span.start : span.end].min())
    holder_text = "nobody" if lowest == 0 else f"{lowest} other{'s' if lowest > 1 else ''}"
    reason = f"blocks {span} of {n_blocks}: the rarest of them is served by {holder_text}, and {n_fit} fit this machine"
    return Decision(span, reason)


def list_good_spans(
    holders: Sequence[Holder], n_blocks: int, size: int, blocks_per_s: float, leeway: float, least: float = 0.0
) -> list[Span]:
    """List where a server of ``size`` blocks serves the swarm as well as anywhere, within ``leeway`` of its tokens/s.

    ``least``: tokens/s that the swarm is to have then (``rank_placement``). Nowhere more blocks lack holders.
    """
    counts, rates = _counts_and_rates(holders, n_blocks)
    values = _value_windows(counts, rates, max(1, min(size, n_blocks)), blocks_per_s)
    gaps, thin, soft = max(values)
    enough = max(least, soft * (1 - leeway))
    return [
        Span(start, start + min(size, n_blocks))
        for start, value in enumerate(values)
        if value[:2] == (gaps, thin) and value[2] >= enough
    ]


def rank_placement(holders: Sequence[Holder], n_blocks: int) -> tuple[float, float, float]:
    """What a placement is worth: (-uncovered blocks, -missing holders, soft minimum of tokens/s)."""
    counts, rates = _counts_and_rates(holders, n_blocks)
    return _rank_placements(counts[None], rates[None])[0]


def choose_move(holders: Sequence[Holder], n_blocks: int) -> Decision[Move | None]:
    """Choose the one move that helps most, or none. It never opens a gap, and nobody else moves meanwhile."""
    counts, _ = _counts_and_rates([h for h in holders if h.is_online], n_blocks)
    promised, promised_rates = _counts_and_rates(holders, n_blocks)  # those that still load will be there soon
    current = _rank_placements(promised[None], promised_rates[None])[0]
    # Each holder that may move is taken away, and put back at every place where its blocks fit. The best of all those
    # placements wins, if it is enough better than the present one: a swarm in which all moves gain little stays put,
    # however noisy the measured rates are.
    best: tuple[tuple[float, float, float], Move] | None = None
    for holder in _movable_holders(holders, counts):
        span = holder.span
        rest = promised.copy()
        rest[span.start : span.end] -= 1
        rest_rates = promised_rates.copy()
        rest_rates[span.start : span.end] -= holder.blocks_per_s / len(span)
        value, start = _best_window(rest, rest_rates, len(span), holder.blocks_per_s)
        if best is None or value > best[0]:
            best = value, Move(holder.peer, Span(start, start + len(span)), holder.slot)
    if best is None:
        return Decision(None, "nobody may move without opening a gap")
    (gaps, thin, soft), move = best
    if (gaps, thin) > current[:2]:
        thin_blocks = np.flatnonzero(promised < TARGET_REDUNDANCY)
        missing = ", ".join(map(str, ranges({int(b) for b in thin_blocks})))
        return Decision(move, f"blocks {missing} have fewer than {TARGET_REDUNDANCY} holders; {move.span} helps most")
    min_gain = max(MIN_GAIN, 1 / len(holders))
    if (gaps, thin) == current[:2] and soft > current[2] * (1 + min_gain):
        gain = 100 * (soft / current[2] - 1) if current[2] else 100.0
        return Decision(move, f"the swarm gets {gain:.0f} % more through its thin blocks with {move.span}")
    return Decision(None, f"no move gains {100 * min_gain:.0f} %")


def _movable_holders(holders: Sequence[Holder], counts: Floats) -> list[Holder]:
    """Who may move and leaves no block to nobody; of very many those whose rarest block has most other holders."""
    movable: list[tuple[float, int, Holder]] = []
    for holder in holders:
        if holder.is_online and holder.may_move:
            rarest = counts[holder.span.start : holder.span.end].min()
            if rarest > 1:
                movable.append((-rarest, len(movable), holder))
    if len(movable) > MOST_CONSIDERED:
        movable.sort()
    return [holder for _, _, holder in movable[:MOST_CONSIDERED]]


def bottleneck(holders: Sequence[Holder], n_blocks: int) -> float:
    """Tokens a second through the slowest block, by holders that are online."""
    _, rates = _counts_and_rates([h for h in holders if h.is_online], n_blocks)
    return float(rates.min())


def count_moves_left(moved_at: Sequence[float], now: float) -> int:
    """How many moves a server may still make within this day."""
    return MAX_MOVES_PER_DAY - sum(now - move_time < DAY_S for move_time in moved_at)


def hazard_per_s(lifetimes_s: Sequence[float], ages_s: Sequence[float]) -> float | None:
    """The rate at which members leave: departures over all time observed; None before anybody left.

    The maximum-likelihood estimate for exponential lifetimes with those still here as censored observations.
    """
    total = sum(lifetimes_s) + sum(ages_s)
    return len(lifetimes_s) / total if lifetimes_s and total > 0 else None


def gap_chance(
    holders: Iterable[frozenset[str]],
    hazard: float,
    within_s: float = 3_600.0,
) -> float:
    """The chance that at least one block loses all its present holders within ``within_s``, if nobody comes or moves.

    ``holders`` are those of each block. Members leave independently; blocks with the same holders go together and count
    once, and a set that holds a smaller one adds nothing. Sets that overlap count as if apart: it errs upwards.
    """
    leave = -math.expm1(-hazard * within_s)
    # A block is lost when all its holders leave. A set that contains another one cannot be lost without that one, so
    # only the minimal sets count:  P(gap) = 1 - product over minimal sets of (1 - leave ^ size).
    sets = set(holders)
    minimal_sets = [s for s in sets if not any(subset < s for subset in sets)]
    return 1.0 - math.prod(1.0 - leave ** len(s) for s in minimal_sets)


def _counts_and_rates(holders: Sequence[Holder], n_blocks: int) -> tuple[Floats, Floats]:
    counts = np.zeros(n_blocks)
    rates = np.zeros(n_blocks)
    for holder in holders:
        counts[holder.span.start : holder.span.end] += 1
        rates[holder.span.start : holder.span.end] += holder.blocks_per_s / len(holder.span)
    return counts, rates


def _best_window(
    counts: Floats, rates: Floats, size: int, blocks_per_s: float
) -> tuple[tuple[float, float, float], int]:
    """The best (value, start) for a server of ``blocks_per_s`` and ``size`` blocks added to what there is."""
    values = _value_windows(counts, rates, size, blocks_per_s)
    best = max(range(len(values)), key=values.__getitem__)
    return values[best], best


def _value_windows(counts: Floats, rates: Floats, size: int, blocks_per_s: float) -> list[tuple[float, float, float]]:
    """What the swarm is worth with a server more, by the first of its blocks."""
    # One row for each start, one column for each block: all windows are valued at once.
    block = np.arange(len(counts))
    starts = np.arange(len(counts) - size + 1)
    is_after_start = block >= starts[:, None]
    is_before_end = block < starts[:, None] + size
    inside = is_after_start & is_before_end
    return _rank_placements(counts + inside, rates + inside * (blocks_per_s / size))


def _rank_placements(counts: Floats, rates: Floats) -> list[tuple[float, float, float]]:
    """What placements are worth, one a row: (-uncovered blocks, -missing holders, soft minimum of tokens/s)."""
    gaps = -(counts < 0.5).sum(1)
    thin = -np.maximum(0, TARGET_REDUNDANCY - counts).sum(1)
    powers = np.maximum(rates, 1e-9) ** -SHARPNESS
    soft = np.mean(powers, axis=1) ** (-1 / SHARPNESS)
    return list(zip(gaps.tolist(), thin.tolist(), soft.tolist(), strict=True))
