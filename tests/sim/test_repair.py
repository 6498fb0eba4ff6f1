"""A chain loses a hop while an op is under way there: every way of losing one, at every place, in virtual time.

Real daemons, clients and engines; the toy model remembers everything, so a lost or repeated token would show in all
later ones. Real processes, fewer cases: tests/real/test_faults.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import trio
from trio.testing import MockClock

from swarmd.client.sessions.session import ChainSession
from swarmd.node.worker.worker_link import CHECK_INTERVAL_S, STALL_S
from swarmd.plan.chains.watch import SUSPECT_AFTER_S
from swarmd.values import PeerId
from tests.sim.chain import generation
from tests.sim.swarm import SimSwarm

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


async def struck(grade: str, places: dict[int, tuple[int, ...]], blow: Blow) -> tuple[ChainSession, list[float]]:
    """Generate; ``places`` tells which of the five are struck at which token. Returns how long each step took."""
    took = []
    async with generation(grade) as run:
        for token in range(N_TOKENS):
            begun = trio.current_time()
            async with trio.open_nursery() as nursery:
                if token in places:
                    nursery.start_soon(strike, run.swarm, [run.peers[place] for place in places[token]], blow)
                await run.step()
            took.append(trio.current_time() - begun)
        hit = {place for them in places.values() for place in them}
        assert run.blamed() <= hit, f"healthy peers were blamed: {run.session.statistics.blamed}"
    return run.session, took


@pytest.mark.parametrize("blow", [crash, silence, worker_dies, worker_stops])
@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("grade", ["replayed", "exact"])
async def test_no_token_is_lost(virtual_time: MockClock, grade: str, victims: tuple[int, ...], blow: Blow) -> None:
    session, took = await struck(grade, {8: victims}, blow)
    repairs = session.statistics.repairs
    assert repairs
    assert sum(r.replayed_ops for r in repairs) > 0
    assert 0 in victims or not any(r.from_client for r in repairs), "a hop before the lost one was alive"
    assert max(took) < 0.5 + len(victims) * (NOTICED_WITHIN_S[blow] + REPAIR_S)


async def test_whoever_stands_in_is_lost_too(virtual_time: MockClock) -> None:
    session, _ = await struck("replayed", {6: (1,), 12: (3, 4)}, worker_dies)
    assert len(session.statistics.repairs) >= 2
