"""How often a member enters the index, in virtual time."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import trio
from trio.testing import MockClock

from swarmd.errors import Unreachable
from swarmd.node.members.directory import RENDEZVOUS_INTERVAL_S, SETTLED_RENDEZVOUS_S, Directory
from swarmd.plan.trust.admission import AdmissionPass
from swarmd.protocol.membership.identity import Identity
from swarmd.values import PeerId

OTHER = PeerId("OTHER")


class Index:
    """Stands for the DHT, and for the swarm around it: notes when it is entered."""

    def __init__(self) -> None:
        self.peers: dict[PeerId, Any] = {}
        self.entered_at: list[float] = []
        self.is_there = True

    async def join(self, peers: list[PeerId]) -> None: ...

    async def find_providers(self, key: str) -> dict[PeerId, tuple[str, ...]]:
        return {}

    async def put(self, key: str, value: bytes) -> None:
        self.entered_at.append(trio.current_time())
        if not self.is_there:
            raise Unreachable("nobody keeps it")

    async def provide(self, key: str) -> None: ...


def directory_in(index: Index) -> Directory:
    me = Identity(bytes(32))
    roster = SimpleNamespace(pass_of=lambda _: AdmissionPass(10**6))
    exchange: Any = SimpleNamespace(view=lambda: index, keys=SimpleNamespace(swarm_id="s"), roster=roster)
    rpc: Any = SimpleNamespace(peers=set)
    network: Any = SimpleNamespace(peer_id=me.peer_id)
    return Directory(
        me,
        (),
        network,  # type: ignore[arg-type]
        rpc,
        index,
        exchange,
        wall_clock=lambda: 0.0,
        rng=random.Random(0),
        bootstrap={},
        is_exchange_on=False,
    )


async def test_the_index_is_entered_seldom_once_it_has_worked_and_others_are_known(virtual_time: MockClock) -> None:
    index = Index()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(directory_in(index)._rendezvous_loop)
        await trio.sleep(200)
        alone = len(index.entered_at)
        assert 6 <= alone <= 9, "nobody is known yet: it is looked for"
        index.peers = {OTHER: SimpleNamespace(addresses=())}
        await trio.sleep(RENDEZVOUS_INTERVAL_S)
        begun = len(index.entered_at)
        await trio.sleep(10 * SETTLED_RENDEZVOUS_S)
        assert 7 <= len(index.entered_at) - begun <= 14
        index.is_there = False
        await trio.sleep(2 * SETTLED_RENDEZVOUS_S)
        first, second = index.entered_at[-2:]
        assert second - first == RENDEZVOUS_INTERVAL_S, "what has failed is tried again soon"
        nursery.cancel_scope.cancel()
