"""The engine that several processes compute together: which of them, and whether they are quicker than one.

With weights that its owner names the team is as he says. With ``team = "auto"`` the leader computes alone first, as
fast as it can; then all are measured, and a team that is predicted to be quicker is tried; it stays if it is.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from swarmd.compute.hardware.device import pick_device, use_threads
from swarmd.compute.model.slicing import Slicing
from swarmd.compute.passes.load_request import spill_folder
from swarmd.compute.serving.engine import LoadedEngine, LoadSignals
from swarmd.compute.serving.rates import BUDGET_S, decode_rates, last
from swarmd.compute.serving.torch_engine import fine_tuning_of, introduce, load_span, load_torch_engine
from swarmd.compute.teams.far_followers import FarFollowers
from swarmd.compute.teams.followers import Followers
from swarmd.compute.teams.led_span import LedSpan
from swarmd.compute.teams.local_followers import LocalFollowers
from swarmd.compute.teams.measuring import memory_for_weights
from swarmd.compute.teams.whole_span import WholeSpan
from swarmd.errors import ConfigError
from swarmd.plan.teams.choice import FULL, BlockShape, MemberSpeed, TeamChoice, choose_team
from swarmd.plan.teams.slices import slices
from swarmd.protocol.models.configuration import PACKED
from swarmd.protocol.models.manifest import read_config
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.resources import count_numa_nodes, count_processors
from swarmd.values import Decision

IMPROVING_S = 120.0  # for the leader alone to become as fast as it can: code is compiled at the first start
COMPILING_S = 0.1  # between looks whether that is done


def takes_team(request: LoadSpan) -> bool:
    """Are the blocks to be computed by several processes? Not where a team is to be found out and cannot be."""
    if request.team_mode == "auto":
        return not _why_no_team(request)
    return len(request.team) > 1


def load_team(request: LoadSpan, signals: LoadSignals) -> LoadedEngine:
    """Load slices of the blocks here, and in processes that follow this one. Raises ConfigError."""
    if why := _why_no_team(request):
        raise ConfigError(why)
    request = msgspec.structs.replace(request, spill_folder=str(spill_folder(request)))
    if request.team_mode == "auto":
        return _load_quickest(request, signals)
    followers = _start(request)
    try:
        if len(followers.weights) < 2:
            return _load_alone(request, signals, "; ".join(("alone", *followers.missing)))
        followers.take(followers.weights)
        if request.team_mode == "whole":
            assert isinstance(followers, FarFollowers)
            return _share_prompts(request, signals, followers)
        return _lead(request, signals, followers, "")
    except BaseException:
        followers.close()
        raise


def _why_no_team(request: LoadSpan) -> str:
    """Why these blocks cannot be computed by several processes; empty if they may be. Raises ConfigError."""
    if pick_device(request.device) != "cpu":
        return "a team computes on processors: say device = cpu, or no team"
    if read_config(Path(request.path))["model_type"] == PACKED:
        return 'GGUF models at their own bits are not computed by teams: say team = ""'
    return ""


def _start(request: LoadSpan) -> Followers:
    return FarFollowers(request) if request.seats else LocalFollowers(request, request.team)


def _lead(request: LoadSpan, signals: LoadSignals, followers: Followers, reason: str) -> LoadedEngine:
    """Load the leader's slices while followers load theirs. Raises ConfigError or TeamBroken."""
    span = load_span(request, signals, partial(LedSpan, followers=followers))
    assert isinstance(span, LedSpan)
    head, description = introduce(request, span)
    description = msgspec.structs.replace(
        description,
        kernels=f"a team of {len(followers.weights)}: each computes a slice of every block",
        team="; ".join(filter(None, (describe_slices(span.slicing), reason or "; ".join(followers.missing)))),
        seats=followers.seats,
        cache_tokens=span.tokens_that_fit(description.cache_bytes_per_token),
    )
    return LoadedEngine(
        engine=span,
        description=description,
        fine_tuning=fine_tuning_of(request, span, description),
        head=head,
    )


def _share_prompts(request: LoadSpan, signals: LoadSignals, followers: FarFollowers) -> LoadedEngine:
    """Load all of the blocks here, while members do who share long prompts. Raises ConfigError or TeamBroken."""
    loaded = load_torch_engine(request, signals, partial(load_span, kind=WholeSpan))
    span = loaded.engine
    assert isinstance(span, WholeSpan)
    free_bytes = followers.wait_until_ready()
    sharing = span.share_with(followers.links)
    said = "; ".join((sharing.reason, *followers.missing))
    if not sharing.action:
        followers.close()
        return _with(loaded, team=said)
    cache_tokens = min(free_bytes) // 2 // loaded.description.cache_bytes_per_token  # of copies at members
    description = msgspec.structs.replace(
        loaded.description, team=said, seats=followers.seats, cache_tokens=max(1, cache_tokens)
    )
    return replace(loaded, description=description)


def describe_slices(slicing: Slicing) -> str:
    """Say how the blocks are cut: 1:2, of 3 units 1+2, of 48 16+32."""
    weights = ":".join(f"{weight:g}" for weight in slicing.weights)
    cuts: list[str] = []
    for n_units in dict.fromkeys(n for n, _ in slicing.sections.values()):
        sizes = "+".join(str(len(units)) for units in slices(n_units, slicing.weights))
        cuts.append(f"of {n_units} {'units ' if not cuts else ''}{sizes}")
    return ", ".join((weights, *cuts))


# --- chosen by measuring -----------------------------------------------------------------------------------------


def _load_quickest(request: LoadSpan, signals: LoadSignals) -> LoadedEngine:
    """Load the blocks alone or as a team, whichever takes less time for a token. Raises ConfigError."""
    if not request.seats:
        n_members = min(max(2, count_numa_nodes()), request.threads or count_processors())
        request = msgspec.structs.replace(request, team=(1.0,) * n_members)
    if len(request.team) < 2:
        return _load_alone(request, signals, "alone: there is one processor, and no other member")
    followers = _start(request)
    try:
        alone, alone_s = _measure_alone(request, signals)
        choice = _choose(followers, request, alone_s)
        weights = choice.action.weights
        if not weights:
            followers.close()
            return _with(alone, team=choice.reason) if alone else _load_alone(request, signals, choice.reason)
        del alone
        gc.collect()  # its weights make room for slices
        if 0 in weights and not request.seats:  # processes of one machine are as many as there are weights
            followers.close()
            weights = tuple(weight for weight in weights if weight)
            followers = LocalFollowers(request, weights)
        followers.take(weights)
        team = _lead(request, signals, followers, choice.reason)
    except BaseException:
        followers.close()
        raise
    team_s = _token_s(team)
    if alone_s is None or team_s <= alone_s:
        return _with(team, team=f"{team.description.team}; there it takes {1000 * team_s:.1f}")
    followers.close()
    return _load_alone(request, signals, f"alone: {choice.reason}, and took {1000 * team_s:.1f} when it was tried")


def _measure_alone(request: LoadSpan, signals: LoadSignals) -> tuple[LoadedEngine | None, float | None]:
    """Load the blocks whole, as fast as they become, and time a token; None where they are not to fit."""
    if request.n_bytes > FULL * memory_for_weights(request):
        return None, None
    use_threads(request.threads)
    alone = load_torch_engine(_without_team(request), signals)
    deadline = time.monotonic() + IMPROVING_S
    background = alone.background
    while background is not None and not background.is_done and time.monotonic() < deadline:
        signals.on_part("measuring it alone", 0, 1)
        if not background.step():
            time.sleep(COMPILING_S)
    if background is not None and background.news:
        alone = _with(alone, kernels=background.news.pop().kernels)
    return alone, _token_s(alone)


def _choose(followers: Followers, request: LoadSpan, alone_s: float | None) -> Decision[TeamChoice]:
    """Measure all who are there, and choose. Raises TeamBroken."""
    alone = TeamChoice((), alone_s or 0.0)
    missing = [f"; {reason}" for reason in followers.missing]
    if len(followers.weights) < 2:
        return Decision(alone, "".join(("alone", *missing)))
    try:
        measured = followers.measure()
    except ConfigError as error:
        return Decision(alone, f"alone: {error}")
    members = [MemberSpeed(each.fixed_s, each.block_s, sum_s, each.free_bytes) for each, sum_s in measured]
    shape = BlockShape(measured[0][0].sections, request.end - request.start, request.n_bytes)
    choice = choose_team(members, shape, alone_s, members[0].free_bytes)
    return Decision(choice.action, "".join((choice.reason, *missing)))


def _token_s(loaded: LoadedEngine) -> float:
    """Seconds of one token in all blocks."""
    return 1 / last(decode_rates(loaded.engine, 1, BUDGET_S))


def _load_alone(request: LoadSpan, signals: LoadSignals, reason: str) -> LoadedEngine:
    use_threads(request.threads)
    return _with(load_torch_engine(_without_team(request), signals), team=reason)


def _with(loaded: LoadedEngine, **told: str) -> LoadedEngine:
    """The same engine, of which something else is told."""
    return replace(loaded, description=msgspec.structs.replace(loaded.description, **told))


def _without_team(request: LoadSpan) -> LoadSpan:
    return msgspec.structs.replace(request, team=(), seats=(), team_mode="weights")
