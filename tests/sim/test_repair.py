"""A chain loses a hop while an op is under way there: every way of losing one, at every place, in virtual time.

Real daemons, clients and engines; the toy model remembers everything, so a lost or repeated token would show in all
later ones. Real processes, fewer cases: tests/real/test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import trio
from trio.testing import MockClock

from swarmd.client.session import ChainSession
from swarmd.node.worker_link import CHECK_INTERVAL_S, STALL_S
from swarmd.plan.routing import Hop
from swarmd.plan.session import SUSPECT_AFTER_S
from swarmd.values import PeerId, Span
from tests.sim.swarm import HIDDEN, Reference, SimSwarm

SPANS = (Span(0, 2), Span(2, 4), Span(4, 6), Span(0, 6), Span(0, 6))
N_TOKENS = 20
REPAIR_S = 1.0  # once it is known who is lost: some round trips of 40 ms, and opening elsewhere
Blow = Callable[[SimSwarm, PeerId], None]


def crash(swarm: SimSwarm, peer: PeerId) -> None:
    swarm.crash(peer)


def silence(swarm: SimSwarm, peer: PeerId) -> None:
    swarm.silence(peer)


def worker_dies(swarm: SimSwarm, peer: PeerId) -> None:
    swarm.workers[peer].kill()


def worker_stops(swarm: SimSwarm, peer: PeerId) -> None:
    """It has stopped already."""


NOTICED_WITHIN_S = {
    crash: 0.0,
    silence: 2 * SUSPECT_AFTER_S,
    worker_dies: 0.0,
    worker_stops: STALL_S + CHECK_INTERVAL_S,
}


async def strike(swarm: SimSwarm, victims: list[PeerId], blow: Blow) -> None:
    """Have an op reach the first victim and stay unanswered there; then strike."""
    for peer in victims:
        swarm.workers[peer].stop()
    await trio.sleep(0.5)
    for peer in victims:
        blow(swarm, peer)


async def generate(swarm: SimSwarm, session: ChainSession, victims: dict[int, list[PeerId]], blow: Blow) -> list[float]:
    """Compare every output with the model computed in one place; returns how long each step took."""
    reference, took = Reference(6), []
    hidden = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
    for token in range(N_TOKENS):
        begun = trio.current_time()
        async with trio.open_nursery() as nursery:
            if token in victims:
                nursery.start_soon(strike, swarm, victims[token], blow)
            out = await session.step((), hidden, torch.zeros(1, hidden.shape[1], dtype=torch.int32), None, False)
        assert out is not None
        assert torch.equal(out[:, -1:], reference.step(hidden)[:, -1:]), f"token {token}"
        hidden = out[:, -1:]
        took.append(trio.current_time() - begun)
    return took


async def in_a_swarm(grade: str, places: dict[int, tuple[int, ...]], blow: Blow) -> tuple[ChainSession, list[float]]:
    """Three hops and two servers that hold everything; ``places`` tells which of the five are struck at which token."""
    with trio.fail_after(300):
        return await _in_a_swarm(grade, places, blow)


async def _in_a_swarm(grade: str, places: dict[int, tuple[int, ...]], blow: Blow) -> tuple[ChainSession, list[float]]:
    async with trio.open_nursery() as nursery:
        swarm = SimSwarm(nursery, 6, seed=2)
        peers = [await swarm.add(span) for span in SPANS]
        while min(swarm.coverage()) < 3 or not swarm.views_agree():
            await trio.sleep(0.5)
        client = await swarm.client()
        while len(client.view().spans) < len(SPANS) or any(s.state != "online" for s in client.view().spans):
            await trio.sleep(0.5)
        route = tuple(Hop(peer, span) for peer, span in zip(peers[:3], SPANS, strict=False))
        session = await client.open_session(replace(swarm.terms(64), grade=grade, route=route))
        victims = {token: [peers[place] for place in struck] for token, struck in places.items()}
        took = await generate(swarm, session, victims, blow)
        struck = {peer for them in victims.values() for peer in them}
        blamed = {peer for peer, _ in session.statistics.blamed}
        assert blamed <= struck, f"healthy peers were blamed: {session.statistics.blamed}"
        await client.close_session(session)
        nursery.cancel_scope.cancel()
    return session, took


@pytest.mark.parametrize("blow", [crash, silence, worker_dies, worker_stops])
@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("grade", ["replayed", "exact"])
async def test_no_token_is_lost(virtual_time: MockClock, grade: str, victims: tuple[int, ...], blow: Blow) -> None:
    session, took = await in_a_swarm(grade, {8: victims}, blow)
    repairs = session.statistics.repairs
    assert repairs
    assert sum(r.replayed_ops for r in repairs) > 0
    assert 0 in victims or not any(r.from_client for r in repairs), "a hop before the lost one was alive"
    assert max(took) < 0.5 + len(victims) * (NOTICED_WITHIN_S[blow] + REPAIR_S)


async def test_whoever_stands_in_is_lost_too(virtual_time: MockClock) -> None:
    session, _ = await in_a_swarm("replayed", {6: (1,), 12: (3, 4)}, worker_dies)
    assert len(session.statistics.repairs) >= 2
