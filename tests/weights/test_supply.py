"""What a machine needs is on its disk, once, from whoever is there and has not lost its standing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import ConfigError, SwarmUnavailable
from swarmd.net.pace import Pace
from swarmd.net.standing import Standing
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.records import PeerRecord
from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.wire.messages import ChunksAre, ManifestIs, WantManifest
from swarmd.values import PeerId
from swarmd.weights.donor import read_piece
from swarmd.weights.folder import ModelFolder
from swarmd.weights.library import Library
from swarmd.weights.supply import Supply, SupplyListener

pytestmark = pytest.mark.usefixtures("threads_inline")
A = PeerId("a")
B = PeerId("b")
ME = PeerId("me")


class Swarm:
    """Donors that hold a whole model and answer at once."""

    def __init__(self, full_model: ModelFolder, *donors: PeerId) -> None:
        self.full_model = full_model
        self.asked: list[PeerId] = []
        self.standing = Standing()
        self.network: Any = SimpleNamespace(peer_id=ME, learn=lambda *_: None)
        self.donors = list(donors)

    def view(self) -> SwarmView:
        times: dict[str, Any] = {"sequence": 1, "issued_at": 0, "expires_at": 60, "certificate": ()}
        holds = {self.full_model.model: ((0, self.full_model.head + 1),)}
        return SwarmView({p: PeerRecord(peer=p, holds=holds, **times) for p in self.donors}, (), Catalog())

    async def call(self, peer: PeerId, message: Any, timeout_s: float, purpose: str) -> Any:
        await trio.sleep(0.1)
        self.asked.append(peer)
        if isinstance(message, WantManifest):
            return ManifestIs(re=1), SimpleNamespace(payload=memoryview(manifests.encode(self.full_model.manifest)))
        return ChunksAre(re=1), SimpleNamespace(payload=memoryview(read_piece(self.full_model, message.refs)))


def supply_of(swarm: Swarm, root: Path, changed: list[int]) -> Supply:
    rpc: Any = swarm
    listener = SupplyListener(on_change=lambda: changed.append(1))
    return Supply(Library(root, {}), rpc, swarm.view, Pace(lambda: None), listener=listener)


async def test_two_who_need_the_same_blocks_fetch_them_once(
    virtual_time: MockClock, full_model: ModelFolder, tmp_path: Path
) -> None:
    swarm = Swarm(full_model, A)
    changed = list[int]()
    supply = supply_of(swarm, tmp_path / "mine", changed)
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(supply.ensure, full_model.model, [0, 1])
    chunks = list(swarm.asked)
    folder = await supply.ensure(full_model.model, [0, 1])
    assert folder.held >= {0, 1}
    assert len(swarm.asked) == len(chunks), "what is here is not asked for"
    assert changed == [1], "others hear of what is held now, once"
    assert not supply.progress()


async def test_who_lost_its_standing_is_not_asked(
    virtual_time: MockClock, full_model: ModelFolder, tmp_path: Path
) -> None:
    swarm = Swarm(full_model, A, B)
    swarm.standing.fault(A, Fault.BAD_CHUNK, "it lied before")
    await supply_of(swarm, tmp_path / "mine", []).ensure(full_model.model)
    assert set(swarm.asked) == {B}


async def test_blocks_that_a_model_does_not_have_and_models_that_nobody_has_are_named(
    virtual_time: MockClock, full_model: ModelFolder, tmp_path: Path
) -> None:
    swarm = Swarm(full_model, A)
    supply = supply_of(swarm, tmp_path / "mine", [])
    with pytest.raises(ConfigError, match="there is no block 99"):
        await supply.ensure(full_model.model, [0, 99])
    swarm.donors = []
    with pytest.raises(SwarmUnavailable, match="nobody gives the manifest"):
        await supply_of(swarm, tmp_path / "other", []).ensure(full_model.model)
