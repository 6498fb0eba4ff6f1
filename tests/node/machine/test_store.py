"""What a daemon keeps, fetches and gives: what is served stays, failures are told, decoding gets its uplink."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmd.config import Config
from swarmd.errors import Code, ConfigError, Refused
from swarmd.home.models import bundled_folder, bundled_model
from swarmd.net.standing import Standing
from swarmd.node.machine.store import SHARE_WHILE_DECODING, Store
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.links.traffic import MBIT
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.wire.messages import ManifestIs, Ping, WantManifest
from swarmd.values import ModelId, PeerId
from swarmd.weights.library import Library

DEMO = bundled_model()[0]
NOWHERE = ModelId("f" * 64)


def store(tmp_path: Path, **settings: Any) -> Store:
    view = SwarmView({}, (), Catalog())
    rpc: Any = SimpleNamespace(network=SimpleNamespace(peer_id=PeerId("me")), standing=Standing())
    library = Library(tmp_path, {DEMO: bundled_folder()})
    return Store(rpc, lambda: view, library, Config(**settings), lambda: None)


async def test_what_is_here_is_told_and_what_a_worker_holds_is_not_deleted(tmp_path: Path) -> None:
    models = store(tmp_path)
    status = models.here(DEMO)
    assert (status.here, status.blocks_here) == (True, ((0, 6),))
    assert not models.here(NOWHERE).here
    models.hold(0, NOWHERE, frozenset({0, 1, 2}))
    models.hold(1, NOWHERE, frozenset({2, 3, 4}))
    assert models._in_use() == {NOWHERE: frozenset(range(5))}, "two workers of one model hold what either holds"
    with pytest.raises(ConfigError, match="swarmd drain first"):
        models.remove(NOWHERE)
    models.release(0)
    assert models._in_use() == {NOWHERE: frozenset({2, 3, 4})}
    models.release(1)
    models.release(1)
    assert not models._in_use()


async def test_a_download_that_fails_says_why_and_can_be_asked_for_again(
    virtual_time: MockClock, tmp_path: Path
) -> None:
    models = store(tmp_path)
    async with trio.open_nursery() as nursery:
        await nursery.start(models.run, lambda: (None, False), lambda model: None)
        models.pull(NOWHERE, None)
        assert models.here(NOWHERE).pulling
        with pytest.raises(ConfigError, match="being fetched already"):
            models.pull(NOWHERE, None)
        await trio.sleep(60)
        status = models.here(NOWHERE)
        assert not status.pulling
        assert status.exit_code == 75
        assert "nobody gives the manifest" in str(status.failure)
        models.pull(NOWHERE, None)
        assert models.here(NOWHERE).failure is None
        nursery.cancel_scope.cancel()


async def test_the_uplink_is_shared_only_while_sessions_decode(tmp_path: Path) -> None:
    uplink: tuple[float | None, bool] = (None, True)
    models = store(tmp_path, up_limit_mbit=80.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(models.run, lambda: uplink, lambda model: None)
        assert models._up_bytes_per_s() == 80 * MBIT
        uplink = (5e6, True)
        assert models._up_bytes_per_s() == SHARE_WHILE_DECODING * 5e6
        uplink = (5e6, False)
        assert models._up_bytes_per_s() == 80 * MBIT
        nursery.cancel_scope.cancel()


async def test_it_answers_for_models_and_refuses_what_is_not_here(tmp_path: Path) -> None:
    models = store(tmp_path)
    sent: list[Any] = []

    async def send(message: Any, payload: bytes = b"") -> None:
        sent.append((message, payload))

    channel: Any = SimpleNamespace(answer=send, peer=PeerId("a"))
    assert await models.handle(channel, WantManifest(id=3, model=DEMO))
    assert sent[0][0] == ManifestIs(re=3)
    assert not await models.handle(channel, Ping(id=1))
    with pytest.raises(Refused) as caught:
        await models.handle(channel, WantManifest(id=4, model=NOWHERE))
    assert caught.value.code is Code.NOT_HERE
