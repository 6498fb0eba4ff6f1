"""Caches that leave a server: all parts in order, then the client hears; whatever fails, it hears that, once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import Code, Unreachable
from swarmd.net.tasks import Tasks
from swarmd.node.serving.migration import SEND_TIMEOUT_S, Migrations
from swarmd.node.worker.worker_link import WorkerLost, WorkerReply
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import HandedOver, HandOver, Refusal
from swarmd.values import PeerId

CLIENT = PeerId("client")
HEIR = PeerId("heir")
KEY = b"s" * 16, 2
REQUEST = HandOver(id=77, session=KEY[0], start=KEY[1], epoch=3, to=HEIR)


class MigrationScene:
    def __init__(self, worker_is_gone: bool = False) -> None:
        self.sent: list[bytes] = []
        self.told: list[tuple[PeerId, Any]] = []
        self.asked: list[HandOver] = []
        self.answer = WorkerReply()
        self.fails_after = 10**9
        self.hangs = False
        self.worker_is_gone = worker_is_gone
        rpc: Any = SimpleNamespace(channel=self.channel)
        worker: Any = SimpleNamespace(ask=self.ask)
        outbox: Any = SimpleNamespace(tell=self.tell)
        self.tasks = Tasks()
        onward: Any = SimpleNamespace(connect=self.connect)
        self.migrations = Migrations(rpc, onward, worker, outbox, self.tasks)

    async def ask(self, request: Any) -> WorkerReply:
        if self.worker_is_gone:
            raise WorkerLost("no worker is running")
        self.asked.append(request)
        return self.answer

    def tell(self, client: PeerId, raw: bytes) -> None:
        (frame,) = FrameDecoder().feed_untrusted(raw)
        self.told.append((client, messages.decode_untrusted(frame.header)))

    async def connect(self, purpose: str, peer: PeerId) -> bool:
        await trio.lowlevel.checkpoint()
        return self.fails_after > 0

    async def channel(self, peer: PeerId, purpose: str) -> Any:
        assert (peer, purpose) == (HEIR, "bulk")
        if len(self.sent) >= self.fails_after:
            raise Unreachable("the heir is gone")
        if self.hangs:
            await trio.sleep_forever()

        async def send_raw(raw: bytes) -> None:
            self.sent.append(raw)

        return SimpleNamespace(send_raw=send_raw)


async def play(stage: MigrationScene, end: Any) -> None:
    """Three parts, then ``end``, as the worker gives them."""
    async with stage.tasks.open():
        await stage.migrations.begin(CLIENT, REQUEST)
        assert stage.migrations.is_under_way(KEY)
        for part in (b"1", b"2", b"3"):
            stage.migrations.put(KEY, part)
            await trio.lowlevel.checkpoint()
        stage.migrations.put((b"o" * 16, 0), b"of another session")
        end()
    assert not stage.migrations.is_under_way(KEY)


async def test_parts_go_out_in_order_and_the_client_hears_under_its_own_number(virtual_time: MockClock) -> None:
    stage = MigrationScene()
    await play(stage, lambda: stage.answer.arrive(HandedOver(re=5, n_bytes=3)))
    assert stage.sent == [b"1", b"2", b"3"]
    assert stage.told == [(CLIENT, HandedOver(re=77, n_bytes=3))]
    assert stage.asked == [REQUEST]


async def test_a_worker_that_says_no_or_ends_is_told_as_it_is(virtual_time: MockClock) -> None:
    stage = MigrationScene()
    await play(stage, lambda: stage.answer.arrive(Refusal(re=5, code=Code.REFUSED.value, message="not this one")))
    ((_, refusal),) = stage.told
    assert (refusal.re, refusal.code, refusal.message) == (77, "refused", "not this one")
    stage = MigrationScene()
    await play(stage, lambda: stage.answer.lose("the worker of this hop ended"))
    assert stage.told[0][1].code == Code.SESSION_LOST


async def test_an_heir_that_cannot_be_reached_costs_one_refusal_and_drops_the_rest(
    virtual_time: MockClock,
) -> None:
    for n_sent, why in [(0, "it cannot be reached from here"), (1, "the connection ended")]:
        stage = MigrationScene()
        stage.fails_after = n_sent
        await play(stage, lambda stage=stage: stage.answer.arrive(HandedOver(re=5, n_bytes=3)))
        assert stage.sent == [b"1"][:n_sent]
        ((_, refusal),) = stage.told
        assert isinstance(refusal, Refusal)
        assert refusal.message == f"the caches could not be sent to heir: {why}"


async def test_an_heir_that_takes_for_ever_is_given_up(virtual_time: MockClock) -> None:
    stage = MigrationScene()
    stage.hangs = True
    begun = trio.current_time()
    await play(stage, lambda: None)
    assert trio.current_time() - begun == pytest.approx(SEND_TIMEOUT_S)
    assert "took too long" in stage.told[0][1].message


async def test_without_a_worker_nothing_begins(virtual_time: MockClock) -> None:
    stage = MigrationScene(worker_is_gone=True)
    async with stage.tasks.open():
        with pytest.raises(WorkerLost):
            await stage.migrations.begin(CLIENT, REQUEST)
    assert not stage.migrations.is_under_way(KEY)
    assert not stage.told
