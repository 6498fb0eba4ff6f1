"""The worker: what comes while it computes a prompt."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from swarmd.compute.serving.engine import LoadSignals
from swarmd.compute.serving.torch_engine import load_span
from swarmd.compute.serving.worker import Worker, main
from swarmd.errors import ConfigError
from swarmd.protocol.wire import messages
from swarmd.protocol.wire import worker as protocol
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import CloseSession, Op
from tests import families


class PlayedScheduler:
    """In the midst of a pass all the time."""

    is_open_to_steps = True
    handled = 0
    n_reused = 0

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.n_aside = 0
        self.taken: list[Any] = []

    def take(self, message: Any, *_: Any) -> Iterator[bytes]:
        assert not torch.is_inference_mode_enabled(), "what is kept could not be changed later"
        self.taken.append(message)
        yield from ()

    def run_interleaved(self) -> Iterator[bytes]:
        self.n_aside += 1
        for op in self.taken:
            yield messages.encode_frame(op)

    def settle(self) -> Iterator[bytes]:
        self.worker._on_block()  # as caches that are handed over do
        yield from ()


def test_in_the_midst_of_a_prompt_it_takes_steps_and_nothing_that_comes_behind_what_has_to_wait() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(theirs)
        scheduler = PlayedScheduler(worker)
        worker._scheduler = scheduler  # type: ignore[assignment]
        worker._training = SimpleNamespace(take=lambda *_: None, tuned=None, handled=0)  # type: ignore[assignment]
        step = Op(session=b"a" * 16, seq=1)
        close = CloseSession(session=b"b" * 16)
        for message in (step, close, msgspec.structs.replace(step, seq=2)):
            ours.sendall(messages.encode_frame(message))
        with torch.inference_mode():
            worker._on_block()
        assert [m.seq for m in scheduler.taken] == [1]
        assert len(worker._deferred) == 2
        assert scheduler.n_aside == 1, "and not within itself"
        answers = list(FrameDecoder().feed_untrusted(ours.recv(1 << 16)))
        assert any(b"seq" in answer.header for answer in answers), "what it gave is on its way at once"
        ours.sendall(messages.encode_frame(step))
        worker._on_block()
        assert len(worker._deferred) == 2, "what comes later stays where it is"


def test_a_worker_that_ends_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(worker: Worker) -> None:
        raise AttributeError("no keys")

    ours, theirs = socket.socketpair()
    monkeypatch.setattr(Worker, "run", run)
    monkeypatch.setattr("sys.argv", ["worker", str(theirs.detach())])
    with ours:
        with pytest.raises(AttributeError):
            main()
        (frame,) = FrameDecoder().feed_untrusted(ours.recv(1 << 16))
    assert protocol.decode(frame.header) == protocol.Ending(reason="AttributeError: no keys")


class PlayedTime:
    """A clock that waiting and ``pass_by`` move on; a frame comes after ten seconds."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def select(self, *waited: Any) -> tuple[list[socket.socket], list[Any], list[Any]]:
        seconds = float(waited[3])
        is_there = self.now + seconds >= 1010
        self.now = 1010.0 if is_there else self.now + seconds
        return [self.connection] if is_there else [], [], []


def test_becoming_quicker_takes_no_more_than_the_owners_share(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker = Worker(theirs)
        clock = PlayedTime(theirs)
        monkeypatch.setattr("swarmd.compute.serving.worker.time", clock)
        monkeypatch.setattr("swarmd.compute.serving.daemon_socket.time", clock)
        monkeypatch.setattr("swarmd.compute.serving.daemon_socket.select", clock)
        made_at: list[float] = []

        def step() -> bool:
            made_at.append(clock.now)
            clock.pass_by(0.1)
            return True

        worker._socket.set_share(0.1)
        worker._background = SimpleNamespace(step=step, news=[], is_done=False)  # type: ignore[assignment]
        worker._measure_while_idle()
        assert len(made_at) == 10, "a tenth of ten seconds"


@pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
def test_who_is_given_borders_that_do_not_fit_a_model_reads_of_them(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = families.make_named("gemma4_text with shared keys", tmp_path)
    families.lay_out(folder)
    config = json.loads((folder / "config.json").read_text())
    config["swarmd"]["first_layers"] = [0, 4]
    (folder / "config.json").write_text(json.dumps(config))
    request = protocol.LoadSpan(path=str(folder), model="m", start=1, end=2)
    signals = LoadSignals(lambda: None, lambda stage, done, total: None)
    with pytest.raises(ConfigError, match=r"family; of its blocks config\.json says: they begin at layers 0, 4;"):
        load_span(request, signals)
