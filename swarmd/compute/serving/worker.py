"""The worker process: tensors, no network but a team's links. It loads an engine and computes what its daemon sends.

Started by the daemon (``node.worker.worker_link``) with one end of a Unix socketpair. It ends when the
socket does. What goes wrong with an op is answered with a refusal; what goes wrong with the load ends the worker.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from swarmd.compute.hardware.device import OwnerReserve, use_threads
from swarmd.compute.hardware.preemption import Preempted
from swarmd.compute.hardware.worker_process import serve_daemon
from swarmd.compute.passes.load_request import spill_folder
from swarmd.compute.serving.daemon_socket import TICK_INTERVAL_S, DaemonSocket
from swarmd.compute.serving.engine import Adapters, BackgroundWork, FineTuning, LoadSignals
from swarmd.compute.serving.engines import ENGINES, EngineKind, load_engine
from swarmd.compute.serving.rates import SpeedMeter
from swarmd.compute.serving.scheduler import Scheduler
from swarmd.errors import ConfigError, RemoteProtocolError
from swarmd.plan.chains.fine_tuning import Allowance
from swarmd.protocol.fields import Message
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import Op, Void
from swarmd.protocol.wire.worker import (
    AdapterLoaded,
    LoadAdapter,
    Loading,
    LoadSpan,
    Rest,
    SetComputeShare,
    Tick,
    WorkerFailed,
)
from swarmd.wire.history import Budget

logger = logging.getLogger(__name__)

IDLE_S = 0.3  # nothing to do for so long: then measure, which would delay work
BUSY_PAUSE_S = 1.0  # between steps to faster backends that do not give way: sessions that decode notice each
MEASURE_INTERVAL_S = 600.0  # other programs come and go on a volunteer's machine


# One thread, one loop:
#
#     receive all that is there -> fine-tuning, a slice -> a pass over all sessions -> send -> settle -> ...
#
# Nothing here waits while there is work, except when the owner's share of the machine is used up
# (``DaemonSocket.rest_s``), or when a pass is worth delaying because more sessions are about to send their steps
# (``Scheduler.patience_s``). A pass cannot be interrupted, so what may take long calls ``_on_block`` after each block:
# there ticks are sent, by which the daemon sees a worker that is alive, and steps of other sessions are let in. With
# nothing to do it looks for faster execution backends and measures its speed, in steps that a frame has to wait for at
# most once.
class Worker:
    """Takes all frames that are there, computes a pass, answers all that it completed in one send."""

    def __init__(self, connection: socket.socket, engine_kinds: Sequence[EngineKind] = ENGINES) -> None:
        self._socket = DaemonSocket(connection)
        self._engine_kinds = engine_kinds
        self._scheduler: Scheduler | None = None
        self._deferred: list[Frame] = []  # came in the midst of a pass, and can wait for its end
        self._is_letting_in = False
        self._training: FineTuning
        self._allowance = Allowance(0.0)
        self._is_resting = False
        self._n_handled = 0  # frames that neither the engine nor fine-tuning counts
        self._measure_at = 0.0
        self._meter: SpeedMeter
        self._background: BackgroundWork | None = None
        self._improved_at = 0.0
        self._is_preemptible = False

    def run(self) -> None:
        """Serve until the socket closes, which raises EOFError."""
        answers: list[bytes] = []
        while True:
            if not answers and not self._deferred:
                self._measure_while_idle()
            deferred = self._deferred
            self._deferred = []
            is_idle = not self._has_work and not answers and not deferred
            for frame in (*deferred, *self._socket.receive(wait=is_idle)):
                answers += self._take_frame(frame)
                self._tick_if_due()
            if self._scheduler is None or not self._has_work:
                self._send_frames(answers)
                answers = []
                continue
            if rest_s := self._socket.rest_s():
                if answers:
                    self._send_frames(answers)
                    answers = []
                self._socket.wait_for_frame(min(rest_s, TICK_INTERVAL_S))
                self._tick_if_due()
                continue
            trained, wait_s = self._run_fine_tuning() if self._training.has_work else ([], 0.0)
            if not self._scheduler.has_work:
                self._send_frames([*answers, *trained])
                answers = []
                self._socket.count_work()
                if wait_s:
                    self._socket.wait_for_frame(wait_s)
                continue
            answers += trained
            if (wait_s := self._scheduler.patience_s()) and self._socket.wait_for_frame(wait_s):
                continue
            if answers:
                self._send_frames(answers)  # before those of steps that this pass lets in
            if self._background is not None and time.monotonic() - self._improved_at > BUSY_PAUSE_S:
                self._improve_backends(is_preemptible=False)
            self._send_frames(list(self._scheduler.run_pass()))
            answers = list(self._scheduler.settle())  # what was answered is on its way meanwhile
            self._socket.count_work()

    @property
    def _has_work(self) -> bool:
        if self._scheduler is None or self._is_resting:
            return False
        return self._scheduler.has_work or self._training.has_work

    def _run_fine_tuning(self) -> tuple[list[bytes], float]:
        """Compute some of what fine-tuning waits for; returns its answers, or how long decoding leaves it no time."""
        assert self._scheduler is not None
        begun = time.monotonic()
        wait_s = self._allowance.wait_s(begun, self._scheduler.has_work).action
        if wait_s:
            return [], wait_s
        answers = list(self._training.run_slice())
        self._allowance.spend(time.monotonic() - begun)
        return answers, 0.0

    def _improve_backends(self, *, is_preemptible: bool) -> bool:
        """Make a step to faster backends, and tell what came of it; was it made?"""
        assert self._background is not None
        self._is_preemptible = is_preemptible
        try:
            is_made = self._background.step()
        except Preempted:
            return False
        finally:
            self._is_preemptible = False
            self._socket.count_work()  # its owner's share is for all that is computed
            self._improved_at = time.monotonic()
        if is_made and self._background.news:
            self._send_frames([messages.encode_frame(self._background.news.pop())])
        if self._background.is_done:
            self._background = None
        return is_made

    def _measure_while_idle(self) -> None:
        """While nothing comes, become faster and measure, pass by pass: a frame that arrives waits for one at most."""
        wait_s = IDLE_S
        while self._background is not None and not self._has_work and not self._is_resting:
            if self._socket.wait_for_frame(max(wait_s, self._socket.rest_s())):
                return
            wait_s = 0.0 if self._improve_backends(is_preemptible=True) else IDLE_S
        while self._scheduler is not None and not self._has_work and not self._is_resting:
            wait_s = max(IDLE_S, self._measure_at - time.monotonic())
            if self._socket.wait_for_frame(wait_s):
                return
            is_measured = self._meter.measure()
            if is_measured:
                self._send_frames([messages.encode_frame(self._meter.speed)])
            self._socket.begin_work()  # nobody who comes now is to wait for that
            if not is_measured:
                return
            self._measure_at = time.monotonic() + (MEASURE_INTERVAL_S if self._meter.is_complete else IDLE_S)

    def _take_frame(self, frame: Frame) -> list[bytes]:
        """Handle one frame of the daemon's; returns the frames to send."""
        try:
            message = worker.decode(frame.header)
        except RemoteProtocolError as error:  # a mistake of the daemon's, for which no session here has to end
            logger.error("skipped what the daemon sent: %s", error)
            self._n_handled += 1
            return []
        if isinstance(message, LoadSpan):
            self._n_handled += 1
            return [messages.encode_frame(self._load_model(message))]
        if isinstance(message, Rest):
            self._n_handled += 1
            self._is_resting = True
            return []
        if isinstance(message, SetComputeShare):
            self._n_handled += 1
            self._socket.set_share(message.share)
            return []
        assert self._scheduler is not None, "the daemon sends work after Loaded"
        if isinstance(message, LoadAdapter):
            self._n_handled += 1
            loaded = _load_adapter(self._scheduler.engine.adapters, message, bytes(frame.payload))
            return [messages.encode_frame(loaded)]
        trained = self._training.take(message, frame)
        if trained is not None:
            return list(trained)
        return list(self._scheduler.take(message, frame, self._training.tuned))

    def _send_frames(self, answers: list[bytes]) -> None:
        """Send frames, and with them how much is done; without frames it is a sign of life."""
        handled = self._n_handled
        n_reused = 0
        if self._scheduler is not None:
            handled += self._scheduler.handled + self._training.handled
            n_reused = self._scheduler.n_reused
        self._socket.send(answers, Tick(handled=handled, reused=n_reused))

    def _load_model(self, request: LoadSpan) -> Message:
        """Load blocks, and be ready for work; returns what the daemon is told."""
        use_threads(request.threads)
        OwnerReserve.n_bytes = request.leave_free_bytes
        try:
            loaded = load_engine(request, LoadSignals(self._on_block, self._tell_progress), self._engine_kinds)
        except (ConfigError, torch.OutOfMemoryError) as error:
            return WorkerFailed(message=str(error)[:4000])
        budget = Budget(request.history_bytes or 1 << 30, spill_folder(request))
        self._scheduler = Scheduler(loaded.engine, budget, can_interleave=True, head=loaded.head)
        self._background = loaded.background
        self._meter = SpeedMeter(loaded.engine, loaded.description.speed, self._socket.has_frame)
        self._training = loaded.fine_tuning
        self._allowance = Allowance(request.tuning_share)
        return loaded.description

    def _tell_progress(self, stage: str, done: int, total: int) -> None:
        """Tell what is done while it loads, as often as ticks are sent."""
        if self._socket.is_tick_due:
            loading = Loading(stage=stage, done=done, total=total)
            self._send_frames([messages.encode_frame(loading)])

    def _on_block(self) -> None:
        """Give a sign of life in the midst of a pass, and let in steps of others, which are short.

        A pass that only serves to become faster is broken off where somebody waits.
        """
        self._tick_if_due()
        if self._is_preemptible and self._socket.has_frame():
            raise Preempted
        if self._scheduler is None or not self._scheduler.is_open_to_steps or self._is_letting_in:
            return
        self._is_letting_in = True
        try:
            with torch.inference_mode(False):  # what sessions keep is not of the pass that this is in the midst of
                self._let_in_steps(self._scheduler)
        finally:
            self._is_letting_in = False

    def _let_in_steps(self, scheduler: Scheduler) -> None:
        """Take ops that have come and compute those that are ready; all other frames wait for the end of the pass."""
        answers: list[bytes] = []
        for frame in () if self._deferred else self._socket.receive(wait=False):
            if self._deferred or not _is_of_step(frame):  # what follows has to wait with it
                self._deferred.append(frame)
            else:
                answers += self._take_frame(frame)
        answers += scheduler.run_interleaved()
        if answers:
            self._send_frames(answers)
            if settled := list(scheduler.settle()):
                self._send_frames(settled)

    def _tick_if_due(self) -> None:
        """Give a sign of life, if the last one is old enough."""
        if self._socket.is_tick_due:
            self._send_frames([])


def _is_of_step(frame: Frame) -> bool:
    """Is it an op, or says that some are void?"""
    try:
        return isinstance(worker.decode(frame.header), Op | Void)
    except RemoteProtocolError:
        return False


def _load_adapter(adapters: Adapters, request: LoadAdapter, config: bytes) -> Message:
    try:
        adapters.load(request.adapter, [Path(shard) for shard in request.shards], config)
    except (ConfigError, torch.OutOfMemoryError) as error:
        return AdapterLoaded(re=request.id, failure=str(error)[:500])
    return AdapterLoaded(re=request.id)


def main() -> None:
    """Serve the socket whose number is the first argument."""
    serve_daemon("worker", lambda connection: Worker(connection).run())


if __name__ == "__main__":
    main()
