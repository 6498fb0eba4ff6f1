"""Rounds whose numbers come together by way of others: the same promises as where all talk to all."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from trio.testing import MockClock

from swarmd.plan.runs.topology import edges_of
from swarmd.protocol.runs.recipe import Parts
from swarmd.train.rounds.parts import InputSource, ReducedPart, chunk_elements
from swarmd.train.rounds.round import Round
from swarmd.train.rounds.round_progress import RoundProgress
from swarmd.train.vectors.codecs import codec_of_parts
from swarmd.train.vectors.state import Vector
from swarmd.values import PeerId
from tests.train.world import Member, TrainingWorld, check_ledger, fingerprint, replay, training

TOPOLOGIES = ["server", "sites", "grid", "ring"]
N = 6


def at_sites(world: TrainingWorld) -> None:
    """Two machines at each of some sites."""
    world.sites = {member.peer: f"site {i // 2}" for i, member in enumerate(world.trainers())}


def check(world: TrainingWorld, member: Member) -> None:
    """The state is what one machine comes to by the ledger."""
    state = member.trainer.state
    assert state is not None
    expected = replay(world, member.trainer.ledger, state.epoch)
    np.testing.assert_allclose(state.parameters, expected, rtol=1e-4, atol=1e-4)
    check_ledger(world)


class Seen:
    """The groups that rounds had, and who stood between others in them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.between: list[set[str]] = []
        begin = Round._begin_version

        def begun(live: Round, group: Any) -> RoundProgress:
            progress = begin(live, group)
            self.between.append({group.members[child].peer for child, _ in edges_of(group).subtotals})
            return progress

        monkeypatch.setattr(Round, "_begin_version", begun)


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_the_mean_is_the_same_by_every_way(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch, topology: str
) -> None:
    seen = Seen(monkeypatch)
    async with training(seed=41, n=N, topology=topology) as world:
        at_sites(world)
        await world.until(6)
        check(world, world.trainers()[0])
        assert all(len(peers) == N for peers in world.contributors(4))
    assert any(seen.between) == (topology != "server"), "nobody stood between others"


@pytest.mark.parametrize("codec", ["float16", "topk"])
@pytest.mark.parametrize("topology", ["grid", "ring"])
async def test_coded_numbers_come_together_by_way_of_others(virtual_time: MockClock, topology: str, codec: str) -> None:
    parts = Parts(codec=codec)  # type: ignore[arg-type]
    async with training(seed=42, n=N, topology=topology, n_elements=6 * 4_096, parts=parts) as world:
        await world.until(4)
        assert len({fingerprint(m) for m in world.trainers()}) == 1
        assert sum(m.trainer.joining.counters.failed for m in world.trainers()) == 0


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_who_stands_between_others_dies(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch, topology: str
) -> None:
    """In the middle of a round: the others average what they have by another way, and nobody's work is lost."""
    async with training(seed=43, n=N, topology=topology) as world:
        at_sites(world)
        await world.until(3)
        usual = max(await world.pace(4))
        victim = await world.in_a_round("member")
        world.crash(victim)
        assert max(await world.pace(3)) < usual + 3.0
        check(world, world.trainers()[0])
        assert {victim.peer} & set().union(*world.contributors(2)) == set()


def test_a_group_may_change_while_a_thread_adds_up() -> None:
    """What is summed was taken before: the parts begin anew meanwhile."""
    codec = codec_of_parts(Parts(codec="topk"), "float32")
    values: Vector = np.random.default_rng(0).standard_normal(4_096).astype(np.float32)
    coded, peer = codec.code(values), PeerId("b")
    part = ReducedPart(0, 4_096, chunk_elements(codec), codec, np.empty(4_096, np.float32))
    payload = bytes(coded.payload(0, 4_096)) * 2
    part.take(peer, 0, 2 * coded.values, payload, is_subtotal=True)
    sources = (InputSource(peer, True, 2),)
    chunk = part.next_chunk(sources)
    assert chunk is not None
    inputs, total = part.inputs(sources, *chunk), part.total
    part.begin_again()
    assert part.next_chunk(sources) is None
    assert part.reduce(inputs, None, *chunk, total).payload == payload
    np.testing.assert_allclose(total, 2 * coded.values, rtol=1e-6)
