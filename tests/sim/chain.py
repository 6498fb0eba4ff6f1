"""A generation through three hops of a simulated swarm, with two servers standing by, compared with the whole model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import torch
import trio

from swarmd.client.links.ops import StepInput
from swarmd.client.sessions.session import ChainSession
from swarmd.client.swarm import AsyncSwarm
from swarmd.plan.chains.routing import Hop
from swarmd.values import PeerId, Span
from tests.sim.swarm import HIDDEN, Reference, SimSwarm

SPANS = (Span(0, 2), Span(2, 4), Span(4, 6), Span(0, 6), Span(0, 6))
N_HOPS = 3
VOCABULARY = 300  # of a head that the last hop is asked for; simulated ones have none


class Generation:
    """One session through the first three of five peers."""

    def __init__(self, swarm: SimSwarm, peers: list[PeerId], client: AsyncSwarm, session: ChainSession) -> None:
        self.swarm = swarm
        self.peers = peers
        self.client = client
        self.session = session
        self._reference = Reference(6)
        self._hidden = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(1))

    async def step(self) -> None:
        """Generate one more token. Raises SwarmError, and AssertionError for one that the whole model does not give."""
        positions = torch.zeros(1, self._hidden.shape[1], dtype=torch.int32)
        out = await self.session.step(StepInput(self._hidden, positions, want=1, vocabulary=VOCABULARY))
        assert out is not None
        assert torch.equal(out[:, -1:], self._reference.step(self._hidden)[:, -1:]), self.session.statistics.steps
        self._hidden = out[:, -1:]

    def blamed(self) -> set[int]:
        """Which of the five were blamed for something."""
        return {self.peers.index(peer) for peer, _ in self.session.statistics.blamed}


@asynccontextmanager
async def generation(grade: str = "replayed", limit_s: float = 300) -> AsyncIterator[Generation]:
    """Begin one, in a swarm of its own that ends with it; all of it within so many virtual seconds."""
    with trio.fail_after(limit_s):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 6, seed=2)
            peers = [await swarm.add(span) for span in SPANS]
            while min(swarm.coverage()) < N_HOPS or not swarm.views_agree():
                await trio.sleep(0.5)
            client = await swarm.client()
            while len(client.view().spans) < len(SPANS) or any(s.state != "online" for s in client.view().spans):
                await trio.sleep(0.5)
            route = tuple(Hop(peer, span) for peer, span in zip(peers[:N_HOPS], SPANS, strict=False))
            session = await client.open_session(replace(swarm.terms(64), grade=grade, route=route))
            yield Generation(swarm, peers, client, session)
            await client.close_session(session)
            nursery.cancel_scope.cancel()
