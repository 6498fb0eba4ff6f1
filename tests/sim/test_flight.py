"""Windows in flight, whatever is lost, late or killed: the text is the one that the whole model says.

Real daemons, clients and engines in virtual time, seeded: every run has other delays between all peers, other tries,
and another hop that is struck, in another way, at another moment. Real processes: tests/real/test_flight.py.
"""

from __future__ import annotations

import random

import pytest
import torch
import trio
from trio.testing import MockClock

from swarmd.client.links.ops import StepInput
from swarmd.client.sessions.session import MAX_WINDOWS
from swarmd.net.sim import SimLink
from swarmd.values import PeerId
from tests.scripted_source import ScriptedSource
from tests.sim.chain import N_HOPS, Generation, generation
from tests.sim.flying import PROMPT, FlyingText, choose, embed, plain_text

N_TOKENS = 40
N_BLOCKS = 6
IN_CI = 12  # of the seeds


async def strike_later(run: Generation, victim: PeerId, way: str, after_s: float) -> None:
    """Strike one hop of the chain."""
    await trio.sleep(after_s)
    if way == "crash":
        run.swarm.crash(victim)
    elif way == "silence":
        run.swarm.silence(victim)
    elif way == "worker dies":
        run.swarm.workers[victim].kill()
    elif way == "worker stops":
        run.swarm.workers[victim].stop()
    elif way == "leaves":
        run.swarm.daemons[victim][0].hosts.drain()


def spread_delays(run: Generation, rng: random.Random) -> None:
    """Every pair of peers has a delay of its own: what overtakes what differs from run to run."""
    networks = list(run.swarm.world.networks)
    for source in networks:
        for target in networks:
            run.swarm.world.links[source, target] = SimLink(latency_s=rng.choice([0.001, 0.02, 0.05, 0.12]))


SEEDS = [pytest.param(seed, marks=() if seed < IN_CI else pytest.mark.prove) for seed in range(200)]


@pytest.mark.parametrize("seed", SEEDS)
async def test_the_text_is_that_of_the_whole_model(virtual_time: MockClock, seed: int) -> None:
    rng = random.Random(seed)
    expected = plain_text(N_TOKENS, N_BLOCKS)
    async with generation() as run:
        spread_delays(run, rng)
        source = ScriptedSource(
            expected, rng.choice([0.5, 0.8, 0.95]), rng.choice([0.002, 0.015]), seed, rng.choice([0.0, 0.5])
        )
        flying = FlyingText(run.session, source, N_TOKENS)
        victim = run.peers[rng.randrange(N_HOPS)]
        way = rng.choice(["crash", "silence", "worker dies", "worker stops", "leaves", "nothing"])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(strike_later, run, victim, way, rng.uniform(0.0, 1.5))
            assert await flying.run() == expected
            n_shared = min(len(flying.flight.cached), len(expected) - 1) - rng.randrange(3)
            turn = [*expected[:n_shared], 11, 12]
            (*_, following) = plain_text(1, N_BLOCKS, turn)
            assert await flying.go_on(n_shared, turn[n_shared:]) == following, "a next turn goes on in the same session"
            nursery.cancel_scope.cancel()
        speculation = flying.speculation
        assert speculation.n_taken > 0 or "nothing is tried ahead" in speculation.reason
        doubted = {doubt.hop[-8:] for doubt in run.session.statistics.doubts}
        blamed = {peer[-8:] for peer, _ in run.session.statistics.blamed}
        assert doubted | blamed <= ({victim[-8:]} if way != "nothing" else set()), "void work is nobody's fault"


@pytest.mark.parametrize("way", ["crash", "silence", "worker dies", "worker stops"])
async def test_who_sends_as_many_as_may_be_under_way_is_not_stuck_when_a_hop_is_lost(
    virtual_time: MockClock, way: str
) -> None:
    """A gateway sends and receives in one task: what breaks is repaired while it waits for room, too."""
    text = plain_text(MAX_WINDOWS + 4, N_BLOCKS)
    n = len(PROMPT)
    async with generation() as run:
        session = run.session
        await session.step(StepInput(embed(PROMPT), torch.arange(n, dtype=torch.int32)[None], want=1))
        await strike_later(run, run.peers[1], way, 0.0)
        with trio.fail_after(300):
            for place in range(n, len(text)):
                await session.send(StepInput(embed([text[place]]), torch.tensor([[place]], dtype=torch.int32), want=1))
            for place in range(n + 1, len(text)):
                answer = await session.receive()
                assert answer is not None
                assert choose(answer.answer.hidden[0, -1]) == text[place]
        assert session.statistics.repairs
