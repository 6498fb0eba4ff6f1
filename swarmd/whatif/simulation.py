"""One run of a scenario: machines, servers and conversations on one clock, and samples of how the swarm is."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swarmd.plan.chains.placement import bottleneck, holders_of
from swarmd.plan.layouts.flow import LayoutMachine
from swarmd.values import Span
from swarmd.whatif.clock import VirtualClock
from swarmd.whatif.geography import AccessLine, Geography, draw_line
from swarmd.whatif.presence import HOUR_S, Stay, draw_stays
from swarmd.whatif.scenario import HOURS_OF_DAY, AvailabilityTrace, LinkKind, Load, MachineKind, Scenario, Whereabouts
from swarmd.whatif.servers import ServerPool
from swarmd.whatif.sessions import ModelledSessions, Tally

TAIL_S = 600.0  # after the hours that were asked for, for what is under way
SAMPLE_S = 60.0  # between two looks at which blocks are held
SETTLING_S = 600.0  # in which machines that are there from the beginning come, one by one
USER_LINK = LinkKind("user", up_mbit=20, down_mbit=100, access_ms=10)  # where a load names none


@dataclass(frozen=True, slots=True)
class ModelSamples:
    """What one run saw of a model, one number a sample: machines online, holders of its rarest block, its throughput.

    ``lacking``: for each block the share of samples in which nobody held it.
    """

    n_online: NDArray[np.float64]
    rarest: NDArray[np.float64]
    tokens_per_s: NDArray[np.float64]
    lacking: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What one run of a scenario came to."""

    models: Mapping[str, ModelSamples]
    tally: Tally
    n_moves: int
    fetched_bytes: float
    n_leaves: Mapping[tuple[str, bool], int]
    layouts: Mapping[str, tuple[list[LayoutMachine], list[Span]]]  # by model, of those that served in the end


def run_once(
    scenario: Scenario, traces: Mapping[str, AvailabilityTrace], seed: int, with_load: bool = True
) -> SimulatedRun:
    """Run a scenario with the chance of one seed. Machines have a chance of their own each: one more changes no other.

    ``with_load`` False: servers only, for what a placement alone can tell.
    """
    warm_up_s = scenario.warm_up_hours * HOUR_S
    until_s = warm_up_s + scenario.hours * HOUR_S
    clock = VirtualClock()
    geography = Geography(scenario)
    pool = ServerPool(scenario, geography, clock, random.Random(f"{seed} pool"))
    _add_machines(scenario, traces, pool, seed, until_s + TAIL_S)
    pool.begin()
    sessions = ModelledSessions(scenario, pool, geography, clock, random.Random(f"{seed} sessions"), warm_up_s)
    if with_load:
        for number, load in enumerate(scenario.load):
            _plan_load(scenario, load, sessions, clock, random.Random(f"{seed} load {number}"), until_s)
    sampler = _Sampler(scenario, pool)

    def sample() -> None:
        sampler.take()
        if clock.now + SAMPLE_S < until_s:
            clock.plan(clock.now + SAMPLE_S, sample)

    clock.plan(warm_up_s, sample)
    clock.run(warm_up_s)
    before = pool.count()
    clock.run(until_s)
    counted = pool.count()
    layouts = {model.name: pool.layout(model.name) for model in scenario.models}
    clock.run(until_s + TAIL_S)  # conversations that began in time come to their end
    return SimulatedRun(
        models=sampler.samples(),
        tally=sessions.tally,
        n_moves=counted.n_moves - before.n_moves,
        fetched_bytes=counted.fetched_bytes - before.fetched_bytes,
        n_leaves=counted.n_leaves - before.n_leaves,
        layouts=layouts,
    )


def _add_machines(
    scenario: Scenario, traces: Mapping[str, AvailabilityTrace], pool: ServerPool, seed: int, until_s: float
) -> None:
    start_hour = scenario.start_hour_utc - scenario.warm_up_hours  # before Monday, where it is negative
    for kind in scenario.machines:
        for number in range(kind.count):
            rng = random.Random(f"{seed} {kind.name} {number}")
            line, stays = draw_machine(scenario, traces, kind, start_hour, until_s, rng)
            if stays and stays[0].start_s == 0.0:
                settled_s = min(rng.random() * SETTLING_S, stays[0].end_s)
                stays[0] = replace(stays[0], start_s=settled_s)
            pool.add(kind, line, stays)


def draw_machine(
    scenario: Scenario,
    traces: Mapping[str, AvailabilityTrace],
    kind: MachineKind,
    start_hour_utc: float,
    until_s: float,
    rng: random.Random,
) -> tuple[AccessLine, list[Stay]]:
    """Draw one machine of a kind: where it is on which line, and when it is there."""
    place = _draw_place(kind, scenario.places, rng)
    link = next(link for link in scenario.links if link.name == kind.link)
    line = draw_line(link, place.name, rng)
    habit = next((habit for habit in scenario.habits if habit.name == kind.habit), None)
    stays = draw_stays(habit, traces.get(kind.habit), place.utc_offset_h, start_hour_utc, until_s, rng)
    return line, stays


def _draw_place(kind: MachineKind, places: tuple[Whereabouts, ...], rng: random.Random) -> Whereabouts:
    if not kind.places:
        return places[0] if len(places) == 1 else rng.choice(places)
    name = rng.choices([*kind.places], weights=[*kind.places.values()])[0]
    return next(place for place in places if place.name == name)


def _plan_load(
    scenario: Scenario, load: Load, sessions: ModelledSessions, clock: VirtualClock, rng: random.Random, until_s: float
) -> None:
    """Plan when conversations begin: a Poisson process whose rate follows the hours of the place."""
    links = {link.name: link for link in scenario.links}
    place = next((p for p in scenario.places if p.name == load.place), scenario.places[0])
    link = links.get(load.link, USER_LINK)
    weights = load.by_hour or (1.0,) * HOURS_OF_DAY
    mean_weight = sum(weights) / HOURS_OF_DAY
    most_per_s = load.sessions_per_hour * max(weights) / mean_weight / HOUR_S
    start_hour = scenario.start_hour_utc - scenario.warm_up_hours + place.utc_offset_h

    def begin() -> None:
        hour = int(start_hour + clock.now / HOUR_S) % HOURS_OF_DAY
        if rng.random() < weights[hour] / max(weights):
            sessions.begin(load, draw_line(link, place.name, rng))
        plan_next()

    def plan_next(after_s: float = 0.0) -> None:
        at_s = max(clock.now, after_s) + rng.expovariate(most_per_s)
        if at_s < until_s:
            clock.plan(at_s, begin)

    if most_per_s > 0:
        plan_next((scenario.warm_up_hours - scenario.lead_hours) * HOUR_S)


class _Sampler:
    """Looks at the servers now and then, and keeps what it saw."""

    def __init__(self, scenario: Scenario, pool: ServerPool) -> None:
        self._scenario = scenario
        self._pool = pool
        self._coverage: dict[str, list[list[int]]] = {model.name: [] for model in scenario.models}
        self._rates: dict[str, list[float]] = {model.name: [] for model in scenario.models}
        self._online: dict[str, list[int]] = {model.name: [] for model in scenario.models}

    def take(self) -> None:
        """Look once."""
        for model in self._scenario.models:
            serving = self._pool.serving(model.name)
            self._coverage[model.name].append(self._pool.coverage(model.name))
            self._rates[model.name].append(bottleneck(holders_of(serving), model.blocks) if serving else 0.0)
            self._online[model.name].append(len(serving))

    def samples(self) -> dict[str, ModelSamples]:
        """What was seen of each model."""
        seen = {}
        for model in self._scenario.models:
            coverage = np.array(self._coverage[model.name])
            seen[model.name] = ModelSamples(
                n_online=np.array(self._online[model.name], dtype=float),
                rarest=coverage.min(axis=1).astype(float),
                tokens_per_s=np.array(self._rates[model.name]),
                lacking=(coverage == 0).mean(axis=0),
            )
        return seen
