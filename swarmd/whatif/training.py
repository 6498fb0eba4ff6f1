"""What a training run would come to with the machines that are there on average: plan.runs.synchronisation decides.

Links are those of the scenario's machines, speeds their arithmetic. Members who come and go cost what a member that is
away does not compute; a round that fails because one leaves in it is not counted.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from swarmd.plan.layouts.pipelines import PipelineLinks, arrange_stages
from swarmd.plan.runs.partition import PartitionMember
from swarmd.plan.runs.synchronisation import (
    CodecTraffic,
    Prediction,
    RunConditions,
    choose_setting,
    list_settings,
    predict_update,
)
from swarmd.values import Decision, PeerId
from swarmd.whatif.geography import AccessLine, Geography
from swarmd.whatif.presence import HOUR_S
from swarmd.whatif.scenario import AvailabilityTrace, MachineKind, Scenario, ServedModel, TrainingScenario
from swarmd.whatif.simulation import draw_machine
from swarmd.whatif.speeds import PREFILL_SHARE_OF_PEAK, block_speed

FLOPS_PER_PARAMETER = 6.0  # of a token, forward and backward
TRAIN_SHARE = 0.3  # of arithmetic that training reaches on cards and processors
MOST_DEALT = 64  # machines into stages: each try is some matchings
STAGE_TRIES = 300  # of a deal: some seconds
PARAMETERS_PER_WIDTH = 300.0  # a model's parameters by its width squared: 12 times 24 blocks, about
MOST_MEMBERS = 256  # that a round is planned for here: more train in groups


@dataclass(frozen=True, slots=True)
class TrainingAnswer:
    """Every synchronisation and codec with what it comes to, and which one would be chosen and why.

    ``stages``: how machines are dealt into stages, where the run has such, and what links take of an update then.
    """

    name: str
    n_members: int
    predictions: tuple[Prediction, ...]
    chosen: Decision[Prediction] | None
    stages: str = ""


def answer_training(
    scenario: Scenario,
    traces: Mapping[str, AvailabilityTrace],
    run: TrainingScenario,
    codecs: Sequence[CodecTraffic],
) -> TrainingAnswer:
    """Predict a run by all settings that there are. Without anybody who computes there is nothing to predict."""
    members: list[PartitionMember] = []
    rates: list[float] = []
    lines: list[AccessLine] = []
    for kind in scenario.machines:
        if run.machines and kind.name not in run.machines:
            continue
        for line in _lines_of_present(scenario, traces, kind):
            if len(members) == MOST_MEMBERS:
                break
            member = PartitionMember(
                PeerId(f"{kind.name} {len(members)}"),
                up_bytes_per_s=line.up_bytes_per_s,
                down_bytes_per_s=line.down_bytes_per_s,
            )
            members.append(member)
            rates.append(_samples_per_s(kind, run, scenario.models[0]))
            lines.append(line)
    if not members:
        return TrainingAnswer(run.name, 0, (), None)
    geography = Geography(scenario)
    first = lines[0]
    trips = sorted(geography.trip_s(first, line) for line in lines)
    conditions = RunConditions(
        members=tuple(members),
        samples_per_s=tuple(rates),
        n_elements=int(run.parameters),
        batch=run.batch,
        inner_batch=run.inner_batch,
        round_trip_s=2 * trips[len(trips) // 2],
        micro_batch_s=1 / max(rates),
    )
    predictions = [predict_update(conditions, setting) for setting in list_settings(codecs)]
    stages = _deal_stages(run, lines, geography, scenario.seed) if run.stages > 1 else ""
    return TrainingAnswer(run.name, len(members), tuple(predictions), choose_setting(predictions), stages)


def _deal_stages(run: TrainingScenario, lines: Sequence[AccessLine], geography: Geography, seed: int) -> str:
    """Deal as many machines as can be dealt evenly, and say what links take."""
    n = min(len(lines), MOST_DEALT) // run.stages * run.stages
    if not n:
        return f"{len(lines)} machines are too few for {run.stages} stages"
    dealt = lines[:n]
    delay_s = np.array([[geography.trip_s(a, b) for b in dealt] for a in dealt])
    rates = np.array([[geography.bytes_per_s(a, b) for b in dealt] for a in dealt])
    n_tokens = run.batch / (n // run.stages) * run.tokens_per_sample
    width = math.sqrt(run.parameters / PARAMETERS_PER_WIDTH)
    links = PipelineLinks(
        delay_s, rates, activation_bytes=2 * width * n_tokens, gradient_bytes=2 * run.parameters / run.stages
    )
    found = arrange_stages(links, run.stages, random.Random(seed).random, STAGE_TRIES)
    return f"{run.stages} stages of {n // run.stages} machines: {found.reason}"


def _samples_per_s(kind: MachineKind, run: TrainingScenario, model: ServedModel) -> float:
    """By the data sheet; of a machine that was measured by how fast it computes a prompt of ``model``."""
    flops = FLOPS_PER_PARAMETER * run.parameters * run.tokens_per_sample
    flops_per_s = TRAIN_SHARE * kind.tflops * 1e12
    if not flops_per_s:
        prompt_flops_per_s = 2 * model.block_parameters / block_speed(kind, model).prefill_s
        flops_per_s = prompt_flops_per_s * TRAIN_SHARE / PREFILL_SHARE_OF_PEAK
    return flops_per_s / flops


def _lines_of_present(
    scenario: Scenario, traces: Mapping[str, AvailabilityTrace], kind: MachineKind
) -> list[AccessLine]:
    """Draw as many machines of a kind as are there on average."""
    until_s = scenario.hours * HOUR_S
    there_s = 0.0
    lines = []
    for number in range(kind.count):
        rng = random.Random(f"{scenario.seed} {kind.name} {number}")
        line, stays = draw_machine(scenario, traces, kind, scenario.start_hour_utc, until_s, rng)
        lines.append(line)
        there_s += sum(stay.end_s - stay.start_s for stay in stays)
    return lines[: round(there_s / until_s)]
