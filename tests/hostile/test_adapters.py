"""What a session may make a server fetch as an adapter: one of the catalog, of its own model, of bounded size."""

from __future__ import annotations

import json
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import Code, Refused
from swarmd.node.serving.adapters import ServerAdapters
from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.models.configuration import ADAPTER
from swarmd.protocol.models.manifest import CHUNK_BYTES, Entry, Manifest
from swarmd.protocol.wire.worker import AdapterLoaded, WorkerMessage
from swarmd.values import ModelId

BASE = ModelId("b" * 64)
LORA = "a" * 64
LISTED = {LORA: str(BASE)}


def manifest(n_bytes: int = 8, **changes: Any) -> Manifest:
    config = {"model_type": ADAPTER, "num_hidden_layers": 0, "base": BASE, "adapter": {"r": 8}, **changes}
    chunks = (bytes(32),) * -(-n_bytes // CHUNK_BYTES)
    tensors = (Entry("base_model.model.layers.0.q.lora_A.weight", "U8", (n_bytes,), chunks),)
    return Manifest(manifests.VERSION, 0, json.dumps(config), (), tensors)


class PlayedWorker:
    """Loads whatever it is asked to, or says why not."""

    def __init__(self, failure: str = "") -> None:
        self.asked: list[str] = []
        self.failure = failure

    async def call(self, request: Any, payload: bytes) -> WorkerMessage:
        await trio.lowlevel.checkpoint()
        self.asked.append(request.adapter)
        return AdapterLoaded(re=1, failure=self.failure)


class PlayedSupply:
    def __init__(self, known: Manifest) -> None:
        self.known = known
        self.fetched: list[str] = []
        self.discarded: list[str] = []

    def discard(self, model: ModelId) -> None:
        self.discarded.append(model)

    async def manifest(self, model: ModelId) -> Manifest:
        await trio.sleep(0.1)
        return self.known

    async def ensure(self, model: ModelId) -> Any:
        self.fetched.append(model)
        return type("Folder", (), {"manifest": self.known, "shards": staticmethod(list)})


async def settle(shelf: ServerAdapters) -> Refused | None:
    """Ask until the answer is no longer that it is on its way."""
    for _ in range(10):
        try:
            shelf.require(LORA)
        except Refused as error:
            if error.code is not Code.NOT_HELD:
                return error
            await trio.sleep(0.5)
        else:
            return None
    raise AssertionError("still on its way")


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        (manifest(model_type="llama"), "no adapter"),
        (manifest(base="c" * 64), "made for cccc"),
        (manifest(n_bytes=2 << 30), "at most"),
    ],
)
async def test_other_things_are_not_fetched_as_adapters(virtual_time: MockClock, known: Manifest, reason: str) -> None:
    supply = PlayedSupply(known)
    async with trio.open_nursery() as nursery:
        shelf = ServerAdapters(supply, BASE, PlayedWorker(), lambda: LISTED)  # type: ignore[arg-type]
        await nursery.start(shelf.run)
        refusal = await settle(shelf)
        assert refusal is not None
        assert reason in str(refusal)
        assert not supply.fetched
        nursery.cancel_scope.cancel()


async def test_a_session_waits_until_the_worker_has_its_adapter(virtual_time: MockClock) -> None:
    supply, worker = PlayedSupply(manifest()), PlayedWorker()
    async with trio.open_nursery() as nursery:
        shelf = ServerAdapters(supply, BASE, worker, lambda: LISTED)  # type: ignore[arg-type]
        await nursery.start(shelf.run)
        assert await settle(shelf) is None
        assert supply.fetched == [LORA]
        shelf.forget()
        assert await settle(shelf) is None, "a new worker is given it again"
        nursery.cancel_scope.cancel()
    assert worker.asked == [LORA, LORA]


async def test_what_no_catalog_lists_is_refused_before_any_byte(virtual_time: MockClock) -> None:
    """Made-up names neither fetch anything nor keep others from being fetched."""
    supply = PlayedSupply(manifest())
    async with trio.open_nursery() as nursery:
        shelf = ServerAdapters(supply, BASE, PlayedWorker(), lambda: {**LISTED, "e" * 64: "f" * 64})  # type: ignore[arg-type]
        await nursery.start(shelf.run)
        for number in range(200):
            with pytest.raises(Refused, match="no catalog") as refused:
                shelf.require(f"{number:064}")
            assert refused.value.code is Code.NOT_HELD
        with pytest.raises(Refused, match="is made for ffff"):
            shelf.require("e" * 64)
        assert not shelf._coming
        assert await settle(shelf) is None
        assert supply.fetched == [LORA]
        nursery.cancel_scope.cancel()


async def test_an_adapter_that_the_worker_cannot_use_is_deleted(virtual_time: MockClock) -> None:
    supply = PlayedSupply(manifest())
    async with trio.open_nursery() as nursery:
        shelf = ServerAdapters(supply, BASE, PlayedWorker("no such module"), lambda: LISTED)  # type: ignore[arg-type]
        await nursery.start(shelf.run)
        refusal = await settle(shelf)
        assert refusal is not None
        assert "no such module" in str(refusal)
        assert supply.discarded == [LORA]
        nursery.cancel_scope.cancel()
