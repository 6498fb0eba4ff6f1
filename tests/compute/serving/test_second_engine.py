"""The face of an engine suffices: a worker serves sessions with one that is not torch's, and knows nothing of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.serving.engine import Engine, LoadedEngine, LoadSignals, NoAdapters, NoFineTuning
from swarmd.compute.serving.engines import EngineKind, load_engine
from swarmd.compute.serving.worker import Worker
from swarmd.errors import ConfigError
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import Frame, FrameDecoder
from swarmd.protocol.wire.messages import (
    CachePart,
    Edit,
    HandOver,
    Inherited,
    Op,
    OpenSession,
    Refusal,
)
from swarmd.protocol.wire.tuning import Forward
from swarmd.protocol.wire.worker import Loaded, LoadSpan, Measured
from swarmd.values import Span
from swarmd.wire.history import SentOp
from swarmd.wire.ops import encode_op
from swarmd.wire.tensors import unpack_untrusted

D = 4
SESSION = b"s" * 16
HEIR = b"h" * 16


class CountingCache:
    """How many tokens a session has: all that this engine needs of the past."""

    is_plain = False

    def __init__(self) -> None:
        self.n_tokens = 0

    def record_past(self) -> None: ...

    def refuses_places(self, places: torch.Tensor, is_real: torch.Tensor | None, n_left: int, order: Any) -> str:
        return ""

    def refuses_crop(self, n_tokens: int) -> str:
        return "" if n_tokens < 2 else "it takes back single tokens only"

    def crop(self, n_tokens: int) -> None:
        self.n_tokens -= n_tokens

    def reorder(self, rows: torch.Tensor) -> None: ...

    def take_over(self, other: Any, start: int, end: int, may_share: bool) -> None:
        raise AssertionError("it is not plain")

    def export_state(self) -> dict[str, torch.Tensor]:
        return {"count": torch.tensor(self.n_tokens)}

    def restore_untrusted(self, state: dict[str, torch.Tensor], example: Any, n_rows: int, n_tokens: int) -> None:
        self.n_tokens = int(state["count"])

    def n_bytes(self) -> int:
        return 8

    def recorded_bytes(self) -> int:
        return 0


class CountingEngine:
    """Each block adds 1 to hidden states, and a session's first token has its number of past tokens added once."""

    n_blocks = 8
    hidden_size = D
    dtype = torch.float32
    device = torch.device("cpu")
    adapters = NoAdapters("this engine reads no adapters")
    can_batch = True
    shares_prefixes = False
    interleaved_tokens = 0

    def __init__(self, span: Span, signals: LoadSignals) -> None:
        self.span = span
        self.on_block = signals.on_block

    def refuses_rows(self, rows: torch.Tensor) -> str:
        return ""

    def new_cache(self, hop: Span, max_tokens: int, is_exact: bool = False) -> CountingCache:
        return CountingCache()

    def example_cache(self, hop: Span, n_tokens: int = 1) -> CountingCache:
        return CountingCache()

    def can_interleave(self, n_tokens: int, hop: Span, cache: Any) -> bool:
        return False

    def run(self, pieces: Sequence[SessionTokens], hop: Span) -> list[torch.Tensor]:
        outs = []
        for piece in pieces:
            outs.append(piece.hidden + len(hop) + piece.cache.n_tokens)
            piece.cache.n_tokens += piece.hidden.shape[1]
            self.on_block()
        return outs


def load(request: LoadSpan, signals: LoadSignals) -> LoadedEngine:
    engine: Engine = CountingEngine(Span(request.start, request.end), signals)
    description = Loaded(device="abacus", numerics="counting", hidden=D, speed=Measured(decode_tokens_per_s=1.0))
    return LoadedEngine(engine, description, NoFineTuning("counting"))


COUNTING = EngineKind("counting", lambda request: request.path.endswith(".count"), load)
REQUEST = LoadSpan(path="model.count", start=2, end=5)


class Daemon:
    """The other end of a worker's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._decoder = FrameDecoder()
        self._frames = self._receive()

    def _receive(self) -> Iterator[Frame]:
        while data := self.connection.recv(1 << 16):
            yield from self._decoder.feed_untrusted(data)

    def send(self, message: Any, payload: Any = b"") -> None:
        self.connection.sendall(messages.encode_frame(message, payload))

    def put(self, session: bytes, seq: int, hidden: torch.Tensor, n_past: int, *edits: Edit) -> None:
        positions = torch.arange(n_past, n_past + hidden.shape[1], dtype=torch.int32).unsqueeze(0)
        sent = SentOp(seq, edits, hidden, positions, None)
        self.connection.sendall(encode_op(Op(session=session, start=2, epoch=1, settled=seq - 1), sent, "raw"))

    def next(self, kind: type[Any]) -> tuple[Any, Frame]:
        """The next message of a kind; ticks and the like are left out."""
        for frame in self._frames:
            message = worker.decode(frame.header)
            if isinstance(message, kind):
                return message, frame
        raise EOFError

    def answer(self) -> torch.Tensor:
        message, frame = self.next(Op)
        return unpack_untrusted(message.tensor, frame.payload)[0]


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)

    def serve() -> None:
        with theirs, suppress(EOFError, BrokenPipeError, ConnectionResetError):
            Worker(theirs, [COUNTING]).run()

    thread = threading.Thread(target=serve)
    thread.start()
    with ours:
        yield Daemon(ours)
    thread.join()


def open_session(daemon: Daemon, session: bytes, inherit: str = "") -> None:
    daemon.send(OpenSession(session=session, start=2, end=5, max_tokens=20, epoch=1, client=session, inherit=inherit))


def test_a_worker_serves_a_session_with_another_engine(daemon: Daemon) -> None:
    daemon.send(REQUEST)
    loaded, _ = daemon.next(Loaded)
    assert (loaded.device, loaded.numerics) == ("abacus", "counting")
    open_session(daemon, SESSION)
    hidden = torch.randn(1, 3, D)
    daemon.put(SESSION, 1, hidden, 0)
    assert torch.equal(daemon.answer(), hidden + 3)
    daemon.put(SESSION, 2, hidden[:, :1], 2, Edit(crop=1))
    assert torch.equal(daemon.answer(), hidden[:, :1] + 3 + 2), "a token was taken back"
    daemon.put(SESSION, 3, hidden[:, :1], 1, Edit(crop=2))
    refusal, _ = daemon.next(Refusal)
    assert "single tokens only" in refusal.message


def test_its_caches_are_handed_over_in_its_own_words(daemon: Daemon) -> None:
    daemon.send(REQUEST)
    open_session(daemon, SESSION)
    hidden = torch.randn(1, 3, D)
    daemon.put(SESSION, 1, hidden, 0)
    daemon.answer()
    daemon.send(HandOver(id=1, session=SESSION, start=2, epoch=1, to="heir"))
    part, frame = daemon.next(CachePart)
    open_session(daemon, HEIR, inherit="elsewhere")
    fields = {name: getattr(part, name) for name in part.__struct_fields__}
    daemon.send(CachePart(**{**fields, "session": HEIR}), frame.payload)
    inherited, _ = daemon.next(Inherited)
    assert inherited.tokens == 3
    daemon.put(HEIR, 2, hidden[:, :1], 3)
    assert torch.equal(daemon.answer(), hidden[:, :1] + 3 + 3)


def test_what_it_cannot_is_refused_in_a_sentence(daemon: Daemon) -> None:
    daemon.send(REQUEST)
    daemon.next(Loaded)
    daemon.send(worker.LoadAdapter(id=7, adapter="a" * 64))
    loaded, _ = daemon.next(worker.AdapterLoaded)
    assert loaded.failure == "this engine reads no adapters"
    daemon.send(Forward(session=SESSION, start=2, seq=1))
    refusal, _ = daemon.next(Refusal)
    assert "counting computes no gradients" in refusal.message


def test_the_request_decides_which_engine_loads_it() -> None:
    signals = LoadSignals(lambda: None, lambda stage, done, total: None)
    assert load_engine(REQUEST, signals, [COUNTING]).description.numerics == "counting"
    with pytest.raises(ConfigError, match="no engine here computes this model; tried: counting"):
        load_engine(LoadSpan(path="model.safetensors", start=0, end=1), signals, [COUNTING])
