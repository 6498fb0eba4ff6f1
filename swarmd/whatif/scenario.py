"""What is asked: machines, where they stand, their links and habits, models, load and training runs, as TOML.

Everything is checked where it is read, and named by its place in the file. ``docs/what-if.md`` explains each field.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from pathlib import PurePath
from typing import Annotated

import msgspec

from swarmd.errors import ConfigError
from swarmd.hours import Hours

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Whole = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
HOURS_OF_DAY = 24  # of a table by hours
MOST_MACHINES = 20_000  # what one computation takes in minutes: as many as a swarm's records


class ServedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model as its blocks are. ``cache_numbers``: keys and values of a token in a block; ``bits`` of each weight."""

    name: Name
    blocks: Annotated[int, msgspec.Meta(ge=1, le=1_024)]
    block_parameters: Positive
    hidden: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
    cache_numbers: Positive
    bits: Annotated[float, msgspec.Meta(ge=1, le=32)] = 16


class MachineKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``count`` machines alike. ``block_ms`` is a pass of one token through one block, ``row_ms`` what one more adds,
    ``prefill_ms`` a token of a prompt.

    Where these are not given they follow from memory bandwidth and arithmetic, as measured for machines of all kinds
    (swarmd.whatif.speeds). ``places``: shares by name. ``serves``: only this model. ``is_card``: an NVIDIA card's own
    memory.
    """

    name: Name
    count: Annotated[int, msgspec.Meta(ge=0, le=MOST_MACHINES)]
    memory_gb: Positive
    link: Name
    memory_gb_per_s: Amount = 0
    tflops: Amount = 0
    block_ms: Amount = 0
    row_ms: Amount = 0
    prefill_ms: Amount = 0
    habit: str = ""
    places: dict[Name, Positive] = {}
    serves: str = ""
    is_card: bool = False


class LinkKind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An access line: medians, spread log-normally by ``spread``. ``access_ms`` is one way, from home to the net."""

    name: Name
    up_mbit: Positive
    down_mbit: Positive
    access_ms: Amount = 5
    spread: Annotated[float, msgspec.Meta(ge=0, le=3)] = 0


class Whereabouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where machines and users are. ``within_ms``: one way between two of them, without their access lines."""

    name: Name
    utc_offset_h: Annotated[float, msgspec.Meta(ge=-14, le=14)] = 0
    within_ms: Amount = 5


class Distance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way between two places, without access lines."""

    between: tuple[Name, Name]
    ms: Amount


class Habit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When machines are there: in ``hours`` of their place, for stays and absences of a Weibull distribution.

    ``trace``: a file of a recorded availability, in SkyPilot's form; each machine begins at a time of its own in it.
    ``crashes``: the share of leaves without a goodbye.
    """

    name: Name
    hours: str = ""
    stay_h: Amount = 0
    away_h: Amount = 0
    shape: Annotated[float, msgspec.Meta(gt=0.2, le=20)] = 1
    jitter_h: Amount = 0
    crashes: Share = 0
    trace: str = ""


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conversations that begin at a place, by its local hour (``by_hour``: weights). Lengths are log-normal medians.

    ``client_ms``: of each token, for norm, head and sampling at the client.
    """

    model: Name
    sessions_per_hour: Amount
    place: str = ""
    prompt_tokens: Positive = 200
    new_tokens: Positive = 200
    spread: Annotated[float, msgspec.Meta(ge=0, le=3)] = 0.7
    link: str = ""
    client_ms: Amount = 2
    by_hour: tuple[Amount, ...] = ()


class TrainingScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A training run. ``batch`` samples make an update, ``inner_batch`` a step of one peer (DiLoCo).

    ``stages``: into how many its blocks are divided, where no machine holds all of it; 0: none.
    """

    name: Name
    parameters: Positive
    tokens_per_sample: Positive
    batch: Whole
    inner_batch: Whole = 8
    stages: Annotated[int, msgspec.Meta(ge=0, le=10)] = 0
    machines: tuple[Name, ...] = ()


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole scenario. ``hours`` of virtual time from ``start_hour_utc`` of a Monday; ``runs`` of different chance.

    Before them servers come for ``warm_up_hours``, and conversations for ``lead_hours``, which are not counted.
    """

    models: tuple[ServedModel, ...]
    machines: tuple[MachineKind, ...]
    links: tuple[LinkKind, ...]
    places: tuple[Whereabouts, ...] = (Whereabouts("here"),)
    distances: tuple[Distance, ...] = ()
    habits: tuple[Habit, ...] = ()
    load: tuple[Load, ...] = ()
    training: tuple[TrainingScenario, ...] = ()
    name: str = "scenario"
    hours: Annotated[float, msgspec.Meta(gt=0, le=24 * 31)] = 24
    start_hour_utc: Annotated[float, msgspec.Meta(ge=0, lt=24)] = 0
    warm_up_hours: Annotated[float, msgspec.Meta(ge=0, le=24 * 7)] = 2
    lead_hours: Annotated[float, msgspec.Meta(ge=0, le=24)] = 0.25
    runs: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 3
    seed: int = 1
    cache_tokens: Annotated[int, msgspec.Meta(ge=1, le=10**9)] = 131_072
    default_distance_ms: Amount = 40

    def model_named(self, name: str) -> ServedModel:
        """The model of a name that the scenario is known to have."""
        return next(model for model in self.models if model.name == name)


class _TraceMetadata(msgspec.Struct, frozen=True):
    gap_seconds: Positive


class AvailabilityTrace(msgspec.Struct, frozen=True):
    """How many instances could be had at each probe, ``gap_seconds`` apart: the form of SkyPilot's spot traces."""

    metadata: _TraceMetadata
    data: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=2, max_length=1_000_000)]


def read_scenario(text: str, path: str = "the scenario") -> Scenario:
    """Read a scenario, and check that its names fit together. Raises ConfigError."""
    try:
        scenario = msgspec.convert(tomllib.loads(text), Scenario)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {error}: docs/what-if.md lists all fields") from None
    _check_names(scenario, path)
    _check_values(scenario, path)
    return scenario


def read_trace(text: str, path: str) -> AvailabilityTrace:
    """Read a recorded availability. Raises ConfigError."""
    try:
        return msgspec.convert(json.loads(text), AvailabilityTrace)
    except (json.JSONDecodeError, msgspec.ValidationError) as error:
        expected = '{"metadata": {"gap_seconds": 300}, "data": [1, 1, 0]}'
        raise ConfigError(f"{path}: expected a trace such as {expected}: {error}") from None


def read_traces(
    scenario: Scenario, read_text: Callable[[PurePath], str], folder: PurePath
) -> dict[str, AvailabilityTrace]:
    """Read the trace of each habit that has one, by the habit's name; files lie beside the scenario."""
    traces = {}
    for habit in scenario.habits:
        if habit.trace:
            path = folder / habit.trace
            traces[habit.name] = read_trace(read_text(path), str(path))
    return traces


def _check_names(scenario: Scenario, path: str) -> None:
    """Every name that is referred to exists, and none exists twice. Raises ConfigError."""
    tables: dict[str, list[str]] = {}
    for table in ("models", "machines", "links", "places", "habits", "training"):
        names = [row.name for row in getattr(scenario, table)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"{path}: {table} has {twice!r} twice: names tell them apart")
        tables[table] = names
    references: list[tuple[str, str, str]] = []
    for kind in scenario.machines:
        references.append((f"machine {kind.name!r}", "links", kind.link))
        references.append((f"machine {kind.name!r}", "habits", kind.habit))
        references.append((f"machine {kind.name!r}", "models", kind.serves))
        references += [(f"machine {kind.name!r}", "places", place) for place in kind.places]
    for distance in scenario.distances:
        references += [("a distance", "places", place) for place in distance.between]
    for load in scenario.load:
        references.append(("a load", "models", load.model))
        references.append(("a load", "places", load.place))
        references.append(("a load", "links", load.link))
    for run in scenario.training:
        references += [(f"training {run.name!r}", "machines", name) for name in run.machines]
    for who, table, name in references:
        if name and name not in tables[table]:
            raise ConfigError(f"{path}: {who} names {name!r}; {table} has: {_listed(tables[table])}")


def _check_values(scenario: Scenario, path: str) -> None:
    """What one field alone does not show. Raises ConfigError."""
    if not scenario.models or not scenario.places:
        raise ConfigError(f"{path}: a scenario needs a model and a place at least")
    n_machines = sum(kind.count for kind in scenario.machines)
    if n_machines > MOST_MACHINES:
        raise ConfigError(f"{path}: {n_machines} machines; at most {MOST_MACHINES} are computed")
    for kind in scenario.machines:
        if not kind.block_ms and not (kind.memory_gb_per_s and kind.tflops):
            raise ConfigError(
                f"{path}: machine {kind.name!r} needs memory_gb_per_s and tflops (of its data sheet), or block_ms and "
                "row_ms (measured)"
            )
    for habit in scenario.habits:
        try:
            Hours.parse(habit.hours)
        except ConfigError as error:
            raise ConfigError(f"{path}: habit {habit.name!r}: {error}") from None
        if habit.trace and (habit.hours or habit.stay_h):
            raise ConfigError(f"{path}: habit {habit.name!r} has a trace, which says when; leave out hours and stay_h")
        if bool(habit.away_h) and not habit.stay_h:
            raise ConfigError(f"{path}: habit {habit.name!r} has away_h without stay_h: give both")
    for load in scenario.load:
        if load.by_hour and (len(load.by_hour) != HOURS_OF_DAY or not sum(load.by_hour)):
            raise ConfigError(f"{path}: by_hour needs {HOURS_OF_DAY} numbers, one at least above 0")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "nothing"
