"""Contributions clipped round the momentum: one big machine still, and nobody moves an average beyond the radius."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import trio
from trio.testing import MockClock

from swarmd.plan.runs.contributions import (
    MOST_CLIPPED_RATIO,
    RADIUS_FACTOR,
    WeighedContributions,
    clipping_radius,
    find_outliers,
)
from swarmd.plan.runs.history import contribution_radius
from swarmd.protocol.runs.recipe import Optimizer, Parts
from swarmd.train.vectors.clipping import clip_total
from swarmd.train.vectors.optimizers import centre_of
from swarmd.train.vectors.state import Vector
from swarmd.values import PeerId
from tests.train.replaying import counted_of
from tests.train.world import N_ELEMENTS, TrainingWorld, gradient, torch_optimizer, training


def test_radius_follows_the_usual_distance_and_grows_for_means_of_few() -> None:
    history = [
        WeighedContributions(16, 1.0),
        WeighedContributions(4, 2.0),
        WeighedContributions(64, 0.5),
    ]  # all alike: a distance of 4 for one sample
    assert clipping_radius(history, 16) == pytest.approx(RADIUS_FACTOR * 1.0)
    assert clipping_radius(history, 64) == pytest.approx(RADIUS_FACTOR * 0.5)
    assert clipping_radius([], 16) == math.inf


def test_who_gives_more_than_the_radius_is_left_out() -> None:
    history = [WeighedContributions(16, 1.0)] * 4
    members = {PeerId(p): WeighedContributions(16, 1.0) for p in "abc"}
    members[PeerId("far")] = WeighedContributions(16, 1.1 * RADIUS_FACTOR * MOST_CLIPPED_RATIO)
    assert find_outliers(members, history) == {}
    assert set(find_outliers(members, history, lambda n: clipping_radius(history, n))) == {"far"}
    assert find_outliers(members, history, lambda n: clipping_radius([], n)) == {}


def test_a_sum_is_clipped_round_the_centre() -> None:
    centre = np.array([1.0, 0.0])
    given = clip_total(np.array([8.0, 16.0]), 4, centre, limit=2.0)  # a mean of (2, 4): (1, 4) away
    assert np.linalg.norm(given / 4) == pytest.approx(2.0)
    assert np.allclose(given / np.linalg.norm(given), np.array([1.0, 4.0]) / math.sqrt(17))
    assert np.allclose(clip_total(np.array([8.0, 16.0]), 4, centre, math.inf), [4.0, 16.0])


def replay(world: TrainingWorld, epoch: int) -> Vector:
    """One machine that clips each contributor's mean as the recipe says, with torch's own optimizers."""
    recipe, ledger = world.recipe, world.ledger
    matrix = torch.full((6, 6), 3.0, requires_grad=True)
    bias = torch.full((N_ELEMENTS - 36,), 3.0, requires_grad=True)
    optimizer = torch_optimizer(recipe.optimizer, {"w": matrix, "b": bias})
    assert isinstance(optimizer, torch.optim.Optimizer)
    names = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "momentum": "momentum_buffer"}
    for sealed in ledger.sealed[:epoch]:
        now = torch.cat([matrix.detach().flatten(), bias.detach()]).numpy()
        kept = [optimizer.state[p] for p in (matrix, bias)]
        moments = {
            name: torch.cat([k[names[name]].flatten() for k in kept]).numpy()
            for name in recipe.optimizer.moments
            if kept[0]
        }
        steps = sealed.commit.epoch - 1
        centre = centre_of(recipe, moments, steps) if moments else np.zeros(1, np.float32)
        total = np.zeros(N_ELEMENTS, np.float32)
        for c, _, _ in counted_of(sealed.commit):
            own = sum(gradient(now, recipe.seed, c.peer, draw)[1] for draw in range(c.first, c.first + c.n))
            total += clip_total(np.asarray(own), c.n, centre, contribution_radius(ledger, c.n, sealed.commit.epoch))
        mean = torch.as_tensor(total / sealed.commit.n_samples + centre)
        matrix.grad, bias.grad = mean[:36].reshape(6, 6).clone(), mean[36:].clone()
        optimizer.step()
    return torch.cat([matrix.detach().flatten(), bias.detach()]).numpy()


@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer(kind="sgd", learning_rate=0.1, momentum=0.9),
        Optimizer(kind="sgd", learning_rate=0.1),
        Optimizer(kind="adamw", learning_rate=0.05),
    ],
)
async def test_clipped_the_swarm_still_is_one_big_machine(virtual_time: MockClock, optimizer: Optimizer) -> None:
    async with training(seed=21, n=3, optimizer=optimizer, robust="clip", audit=4) as world:
        world.add(sample_s=0.2)
        await world.until(12)
        member = world.trainers()[0]
        assert member.trainer.state is not None
        epoch = member.trainer.state.epoch
        found, expected = member.trainer.state.parameters, replay(world, epoch)
        assert np.linalg.norm(found - expected) <= 1e-4 * np.linalg.norm(expected)
        assert sum(m.trainer.audits.counts.checked for m in world.trainers()) > 10
        assert sum(m.trainer.audits.counts.wrong for m in world.trainers()) == 0


@pytest.mark.parametrize("codec", ["none", "int8"])
async def test_nobody_moves_an_average_further_than_the_radius(virtual_time: MockClock, codec: str) -> None:
    """One gives seven times its gradient, which the rule about sizes alone lets pass: it is clipped, or left out."""
    optimizer = Optimizer(kind="sgd", learning_rate=0.05, momentum=0.9)
    async with training(seed=22, n=5, optimizer=optimizer, robust="clip", parts=Parts(codec=codec)) as world:
        await world.until(3)
        liar = world.trainers()[0]
        assert liar.source is not None
        honest = liar.source.gradient_of

        def seven_times(*draw: object) -> tuple[float, Vector]:
            loss, right = honest(*draw)  # type: ignore[arg-type]
            return loss, -7 * right

        liar.source.gradient_of = seven_times
        await world.until(world.epoch + 6)
        check_norms(world)


def check_norms(world: TrainingWorld) -> None:
    for sealed in world.ledger.sealed[1:]:
        for c in sealed.commit.contributors:
            assert c.norm <= MOST_CLIPPED_RATIO * contribution_radius(world.ledger, c.n, sealed.commit.epoch)


async def test_who_does_not_clip_is_left_out(virtual_time: MockClock) -> None:
    optimizer = Optimizer(kind="sgd", learning_rate=0.05, momentum=0.9)
    async with training(seed=23, n=5, optimizer=optimizer, robust="clip") as world:
        await world.until(3)
        liar = world.trainers()[0]
        feedback = liar.trainer.memories.feedback
        assert feedback is not None
        code = feedback.code
        feedback.code = lambda offered, limit: code(offered, math.inf)  # type: ignore[method-assign]
        assert liar.source is not None
        honest = liar.source.gradient_of
        liar.source.gradient_of = lambda *draw: (honest(*draw)[0], -7 * honest(*draw)[1])
        with trio.fail_after(100):
            others = [m for m in world.trainers() if m is not liar]
            before = world.epoch
            while world.epoch < before + 6:
                await trio.sleep(0.2)
        counted = world.contributors(6)
        assert any(liar.peer not in who for who in counted)
        assert all(len(who) >= len(others) - 1 for who in counted)
        check_norms(world)
