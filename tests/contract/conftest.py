"""Two networks for one suite: the same tests run over libp2p on loopback and over the simulator."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest
import trio

from swarmd.net.api import Network
from swarmd.net.direct import DirectNetwork
from swarmd.net.libp2p.host import HostOptions, Libp2pNetwork
from swarmd.net.sim import SimWorld
from swarmd.protocol.membership.identity import Identity

Pair = Callable[[], AbstractAsyncContextManager[tuple[Network, Network]]]


@asynccontextmanager
async def simulated() -> AsyncIterator[tuple[Network, Network]]:
    world = SimWorld(seed=1)
    a, b = world.join(Identity.generate().peer_id), world.join(Identity.generate().peer_id)
    async with trio.open_nursery() as nursery:
        await nursery.start(a.run)
        await nursery.start(b.run)
        yield a, b
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def real() -> AsyncIterator[tuple[Network, Network]]:
    options = HostOptions(listen=("/ip4/127.0.0.1/tcp/0",))
    a, b = (Libp2pNetwork(Identity.generate(), b"k" * 32, options) for _ in range(2))
    async with a.running(), b.running():
        a.learn(b.peer_id, b.addresses())
        b.learn(a.peer_id, a.addresses())
        yield a, b


@asynccontextmanager
async def direct() -> AsyncIterator[tuple[Network, Network]]:
    async with real() as (a, b):
        hosts = ("127.0.0.1",)
        over_a, over_b = DirectNetwork(a, hosts), DirectNetwork(b, hosts)  # type: ignore[arg-type]
        async with over_a.running(), over_b.running():
            yield over_a, over_b


@pytest.fixture(params=["sim", "libp2p", "direct"])
def pair(request: pytest.FixtureRequest) -> Pair:
    return {"sim": simulated, "libp2p": real, "direct": direct}[request.param]
