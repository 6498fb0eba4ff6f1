"""What a scenario's runs say together: tables of numbers, and sentences about what limits the swarm."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from swarmd.plan.chains.placement import DAY_S, TARGET_REDUNDANCY
from swarmd.plan.layouts.flow import LayoutMachine, max_flow
from swarmd.plan.layouts.search import fill_chain, improve
from swarmd.plan.runs.synchronisation import CodecTraffic
from swarmd.values import Span, ranges
from swarmd.whatif.presence import HOUR_S
from swarmd.whatif.scenario import AvailabilityTrace, Scenario, ServedModel
from swarmd.whatif.simulation import SAMPLE_S, ModelSamples, SimulatedRun, run_once
from swarmd.whatif.speeds import block_bytes, count_fitting
from swarmd.whatif.training import TrainingAnswer, answer_training

PERCENTILES = (5, 50, 95)  # of what users feel: the unlucky, the usual, the lucky
SAMPLES_PER_HOUR = int(HOUR_S / SAMPLE_S)  # of each run
MOST_LAID_OUT = 100  # machines, whose layout is compared with a better one: each try is a linear program
LAYOUT_TRIES = 300  # of a search, from each of two layouts: some seconds
MOST_COLUMNS = 300_000  # of all tries' programs together, so that it stays with some seconds


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """Of one model: by hour of virtual time the chance that it can be served, holders and tokens/s on average.

    ``layout_share``: what all streams get by the layout of the end, of what the best one found for the same machines
    lets through; None where these are too few or too many. ``limits``: sentences, what weighs most first.
    """

    name: str
    served_share: float
    served_by_hour: tuple[float, ...]
    online_by_hour: tuple[float, ...]
    tokens_per_s_by_hour: tuple[float, ...]
    mean_tokens_per_s: float
    layout_share: float | None
    limits: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """Of all conversations. Percentiles by (5, 50, 95); ``parts``: shares of a token's time; ``n_lost_while_held``:
    by no fault of the machines, which must be 0; ``n_refused``: no server had room for them within a minute."""

    n_begun: int
    n_done: int
    n_lost: int
    n_lost_while_held: int
    n_refused: int
    n_repairs: int
    replayed_share: float
    tokens_per_s: tuple[float, ...]
    first_token_s: tuple[float, ...]
    paused_s: tuple[float, ...]
    parts: Mapping[str, float]
    sessions_a_day: float


@dataclass(frozen=True, slots=True)
class OneMore:
    """What one more machine of a kind brings: served share, tokens/s of all streams together, before and after."""

    kind: str
    served_share: float
    mean_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class WhatIfAnswer:
    """All that was found."""

    name: str
    n_runs: int
    models: tuple[ModelAnswer, ...]
    load: LoadAnswer | None
    n_moves_a_day: float
    fetched_gb_a_day: float
    leaves: Mapping[str, tuple[float, float]]
    one_more: tuple[OneMore, ...] = ()
    training: tuple[TrainingAnswer, ...] = ()


def answer_scenario(
    scenario: Scenario,
    traces: Mapping[str, AvailabilityTrace],
    codecs: Sequence[CodecTraffic] = (),
    with_one_more: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> WhatIfAnswer:
    """Run a scenario as often as it asks for, and sum up.

    ``codecs``: what training runs may choose from; without them none is predicted.
    """
    runs = []
    for number in range(scenario.runs):
        on_progress(f"run {number + 1} of {scenario.runs}")
        runs.append(run_once(scenario, traces, scenario.seed + number))
    days = scenario.hours * HOUR_S / DAY_S
    leaves: Counter[tuple[str, bool]] = Counter()
    for run in runs:
        leaves.update(run.n_leaves)
    by_kind = {}
    for kind in scenario.machines:
        with_goodbye = leaves[kind.name, False] / len(runs)
        by_kind[kind.name] = (with_goodbye, leaves[kind.name, True] / len(runs))
    models = tuple(_sum_up_model(scenario, model, runs) for model in scenario.models)
    more = tuple(_try_one_more(scenario, traces, on_progress)) if with_one_more else ()
    training = []
    for run_wanted in scenario.training if codecs else ():
        on_progress(f"training {run_wanted.name}")
        training.append(answer_training(scenario, traces, run_wanted, codecs))
    return WhatIfAnswer(
        name=scenario.name,
        n_runs=len(runs),
        models=models,
        load=_sum_up_load(runs, days) if any(run.tally.n_begun for run in runs) else None,
        n_moves_a_day=_mean(run.n_moves for run in runs) / days,
        fetched_gb_a_day=_mean(run.fetched_bytes for run in runs) / days / 1e9,
        leaves=by_kind,
        one_more=more,
        training=tuple(training),
    )


def _mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known) if known else 0.0


def _by_hour(samples: Sequence[NDArray[np.float64]]) -> tuple[float, ...]:
    """Means by hour of virtual time, over all runs."""
    mean = np.mean(np.array(samples), axis=0)
    return tuple(
        float(mean[start : start + SAMPLES_PER_HOUR].mean()) for start in range(0, len(mean), SAMPLES_PER_HOUR)
    )


def _sum_up_model(scenario: Scenario, model: ServedModel, runs: Sequence[SimulatedRun]) -> ModelAnswer:
    samples = [run.models[model.name] for run in runs]
    served = [(s.rarest > 0).astype(float) for s in samples]
    return ModelAnswer(
        name=model.name,
        served_share=float(np.mean(served)),
        served_by_hour=_by_hour(served),
        online_by_hour=_by_hour([s.n_online for s in samples]),
        tokens_per_s_by_hour=_by_hour([s.tokens_per_s for s in samples]),
        mean_tokens_per_s=float(np.mean([s.tokens_per_s for s in samples])),
        layout_share=_compare_layout(*runs[0].layouts[model.name], model.blocks, scenario.seed),
        limits=tuple(_explain_limits(scenario, model, samples, runs)),
    )


def _compare_layout(machines: Sequence[LayoutMachine], spans: Sequence[Span], n_blocks: int, seed: int) -> float | None:
    """Compare a layout with the best one that a search finds for the same machines."""
    if not 2 <= len(machines) <= MOST_LAID_OUT:
        return None
    flow = max_flow(machines, spans, n_blocks)
    if not flow:
        return None
    draw = random.Random(seed).random
    n_tries = min(LAYOUT_TRIES, MOST_COLUMNS // (len(machines) * n_blocks))
    starts = [spans, fill_chain(machines, n_blocks, range(len(machines)))]
    best = flow
    for start in starts:
        if start is not None:
            found = improve(machines, start, n_blocks, draw, n_tries).action
            best = max(best, max_flow(machines, found, n_blocks))
    return flow / best


def _explain_limits(
    scenario: Scenario, model: ServedModel, samples: Sequence[ModelSamples], runs: Sequence[SimulatedRun]
) -> list[str]:
    """Say what keeps a model from being served, or from being served faster."""
    reasons = []
    fitting = {kind.name: count_fitting(kind, model) for kind in scenario.machines if kind.serves in ("", model.name)}
    too_small = [name for name, n_fit in fitting.items() if not n_fit]
    if too_small:
        gb = block_bytes(model) / 1e9
        reasons.append(f"memory: not one block of {gb:.2g} GB fits into half of the memory of {', '.join(too_small)}")
    places = sum(kind.count * fitting.get(kind.name, 0) for kind in scenario.machines)
    if places < model.blocks:
        reasons.append(f"memory: all machines together hold {places} of {model.blocks} blocks")
    elif places < TARGET_REDUNDANCY * model.blocks:
        reasons.append(
            f"memory: all machines together hold each block {places / model.blocks:.1f} times, and {TARGET_REDUNDANCY} "
            "holders of each are wanted, so that anybody may leave"
        )
    lacking = np.mean([s.lacking for s in samples], axis=0)
    if lacking.max() > 0:
        worst = lacking.max()
        blocks = {int(block) for block in np.flatnonzero(lacking >= worst / 2)}
        named = ", ".join(map(str, ranges(blocks)[:3]))
        reasons.append(f"who leaves: blocks {named} are held by nobody for up to {100 * worst:.1f} % of the time")
    interrupted = Counter[str]()
    for run in runs:
        interrupted.update(run.tally.interrupted_by)
    if interrupted:
        kind, n = interrupted.most_common(1)[0]
        reasons.append(f"who leaves: {kind} interrupts {n / len(runs):.0f} conversations in a run, the most of all")
    n_refused = sum(run.tally.n_refused for run in runs)
    if n_refused:
        reasons.append(f"caches: {n_refused / len(runs):.0f} conversations in a run found no room: more memory")
    parts = _mean_parts(runs)
    if parts:
        what, share = max(parts.items(), key=lambda item: item[1])
        meant = {
            "computing": "computing: faster machines, or fewer blocks on each",
            "waiting": "waiting for others' passes: more machines",
            "trips": "trips between places: fewer hops, or nearer ones",
            "lines": "what lines carry: faster uplinks",
            "client": "the client itself",
        }[what]
        reasons.append(f"a token's time: {100 * share:.0f} % of it is {meant}")
    return reasons or ["nothing that this scenario asks for"]


def _mean_parts(runs: Sequence[SimulatedRun]) -> dict[str, float]:
    """Shares of a token's time, over all conversations."""
    totals = Counter[str]()
    for run in runs:
        for part, seconds in run.tally.parts_s.items():
            totals[part] += sum(seconds)  # type: ignore[assignment]
    whole = sum(totals.values())
    return {part: seconds / whole for part, seconds in totals.items()} if whole else {}


def _percentiles(values: Iterable[float]) -> tuple[float, ...]:
    known = list(values)
    return tuple(float(p) for p in np.percentile(known, PERCENTILES)) if known else (0.0,) * len(PERCENTILES)


def _sum_up_load(runs: Sequence[SimulatedRun], days: float) -> LoadAnswer:
    tallies = [run.tally for run in runs]
    n_tokens = sum(tally.n_tokens for tally in tallies)
    return LoadAnswer(
        n_begun=sum(tally.n_begun for tally in tallies),
        n_done=sum(tally.n_done for tally in tallies),
        n_lost=sum(tally.n_lost for tally in tallies),
        n_lost_while_held=sum(tally.n_lost_while_held for tally in tallies),
        n_refused=sum(tally.n_refused for tally in tallies),
        n_repairs=sum(tally.n_repairs for tally in tallies),
        replayed_share=sum(tally.replayed_tokens for tally in tallies) / n_tokens if n_tokens else 0.0,
        tokens_per_s=_percentiles(value for tally in tallies for value in tally.tokens_per_s),
        first_token_s=_percentiles(value for tally in tallies for value in tally.first_token_s),
        paused_s=_percentiles(value for tally in tallies for value in tally.paused_s if value),
        parts=_mean_parts(runs),
        sessions_a_day=sum(tally.n_begun for tally in tallies) / len(runs) / days,
    )


def _try_one_more(
    scenario: Scenario, traces: Mapping[str, AvailabilityTrace], on_progress: Callable[[str], None]
) -> list[OneMore]:
    """Run the servers alone with one more machine of each kind; all others have the same chance as before."""
    tried = []
    for place, kind in enumerate(scenario.machines):
        on_progress(f"one more {kind.name}")
        kinds = list(scenario.machines)
        kinds[place] = msgspec.structs.replace(kind, count=kind.count + 1)
        wider = msgspec.structs.replace(scenario, machines=tuple(kinds))
        runs = [run_once(wider, traces, scenario.seed + number, with_load=False) for number in range(scenario.runs)]
        served = []
        rates = []
        for run in runs:
            served += [float((samples.rarest > 0).mean()) for samples in run.models.values()]
            rates += [float(samples.tokens_per_s.mean()) for samples in run.models.values()]
        tried.append(OneMore(kind.name, _mean(served), _mean(rates)))
    return tried
