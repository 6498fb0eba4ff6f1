"""A server judges ops and takes room for them at one moment, whatever its worker's queue does meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from swarmd.errors import Code, Refused
from swarmd.node.serving.server import Server, ServerServices
from swarmd.plan.chains.hop import HopState, SessionHop, WaitingOps
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame, FrameDecoder
from swarmd.protocol.wire.messages import CloseSession, Op
from swarmd.values import ModelId, PeerId, Span

CLIENT = PeerId("client")
PREDECESSOR = PeerId("predecessor")
KEY = (b"s" * 16, 4)
GREEDY = (b"g" * 16, 4)


class FullWorker:
    """A worker whose queue is full: whoever sends to it waits, once its frame is in the queue."""

    loaded = None
    n_reused = 0

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.has_room = trio.Event()

    def post(self, raw: bytes) -> None:
        (frame,) = FrameDecoder().feed_untrusted(raw)
        self.frames.append(messages.decode_untrusted(frame.header))

    async def send(self, raw: bytes) -> None:
        self.post(raw)
        await self.has_room.wait()


class FullLedger:
    """One in which each op needs room that the greedy session has."""

    def use(self, key: Any, n_tokens: int, now: float) -> list[Any]:
        return [GREEDY]

    def release(self, key: Any) -> None: ...


def scene() -> tuple[Server, FullWorker]:
    worker: Any = FullWorker()
    rpc: Any = SimpleNamespace(network=SimpleNamespace(peer_id=PeerId("me")), find_channel=lambda *_: None)
    exchange: Any = SimpleNamespace(roster=SimpleNamespace(voucher_of=lambda _: b""))
    books = SimpleNamespace(serve=lambda *_: None)
    served: Any = SimpleNamespace(books=books, model=ModelId("m"), identity=None)
    services = ServerServices(rpc, exchange, supply=None)  # type: ignore[arg-type]
    ledger: Any = FullLedger()
    server = Server(services, served, worker, ledger, changed=lambda: None, deliver=None)  # type: ignore[arg-type]
    for key in (KEY, GREEDY):
        hop = SessionHop(HopState(CLIENT, PREDECESSOR), Span(4, 8), None, WaitingOps(10**6, 100))
        server.sessions.hops.put(key, hop)
    return server, worker


def op(seq: int) -> tuple[Op, Frame]:
    tensor = TensorMeta(b=1, t=1, d=4, has_positions=False)
    made = Op(session=KEY[0], start=KEY[1], epoch=1, seq=seq, tensor=tensor)
    (frame,) = FrameDecoder().feed_untrusted(messages.encode_frame(made, bytes(16)))
    return made, frame


async def test_an_op_that_waits_for_room_is_not_computed_twice(virtual_time: MockClock) -> None:
    """Its client may send it as well while its predecessor's waits."""
    server, worker = scene()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server._on_op, PREDECESSOR, *op(1))
        await wait_all_tasks_blocked()
        nursery.start_soon(server._on_op, CLIENT, *op(1))
        await wait_all_tasks_blocked()
        worker.has_room.set()
    assert [type(message) for message in worker.frames] == [CloseSession, Op]


async def test_ops_reach_the_worker_in_their_order_though_the_first_waits_for_room(virtual_time: MockClock) -> None:
    server, worker = scene()
    async with trio.open_nursery() as nursery:
        for seq in (1, 2):
            nursery.start_soon(server._on_op, CLIENT, *op(seq))
            await wait_all_tasks_blocked()
        worker.has_room.set()
    assert [message.seq for message in worker.frames if isinstance(message, Op)] == [1, 2]


async def test_a_session_without_room_ends_and_its_op_is_refused(virtual_time: MockClock) -> None:
    server, worker = scene()

    def refuse(*_: Any) -> list[Any]:
        raise Refused(Code.NO_CAPACITY, "a fair share is less")

    server.ledger = SimpleNamespace(use=refuse, release=lambda _: None)  # type: ignore[assignment]
    worker.has_room.set()
    with pytest.raises(Refused, match="a fair share") as caught:
        await server._on_op(CLIENT, *op(1))
    assert caught.value.code is Code.SESSION_LOST
    assert [type(message) for message in worker.frames] == [CloseSession]
    assert KEY not in server.sessions.hops
