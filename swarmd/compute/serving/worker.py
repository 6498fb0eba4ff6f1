"""The worker process: torch and no network. It loads a span and computes what its daemon sends, pass by pass.

Started by the daemon (``node.worker.worker_link``) with one end of a Unix socketpair. It ends when the
socket does. What goes wrong with an op is answered with a refusal; what goes wrong with the load ends the worker.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch

from swarmd.compute.hardware.device import OwnerReserve, device_description, pick_device
from swarmd.compute.hardware.exit_reason import last_words
from swarmd.compute.hardware.measurements import Measurements
from swarmd.compute.model.head import LogitsHead
from swarmd.compute.passes import precompile
from swarmd.compute.passes.backend_selection import Preempted
from swarmd.compute.passes.improvements import MOST_TEXT, Improvements
from swarmd.compute.passes.rates import decode_rates, first_rates, prefill_rates
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.engine import Engine
from swarmd.compute.serving.fine_tuning import Training
from swarmd.errors import ConfigError, RemoteProtocolError
from swarmd.plan.chains.fine_tuning import Allowance
from swarmd.plan.owner.duty import Duty
from swarmd.protocol.fields import Message
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import Frame, FrameDecoder
from swarmd.protocol.wire.messages import Op
from swarmd.protocol.wire.worker import (
    AdapterLoaded,
    LoadAdapter,
    Loaded,
    Loading,
    LoadSpan,
    Measured,
    Rest,
    SetComputeShare,
    Tick,
    WorkerFailed,
)
from swarmd.values import Span
from swarmd.wire.history import Budget
from swarmd.wire.tensors import DTYPES

logger = logging.getLogger(__name__)

TICK_INTERVAL_S = 0.5  # an eighth of the silence after which the daemon gives a worker up
IDLE_S = 0.3  # nothing to do for so long: then measure, which would delay work
QUICK_S = 0.05  # for a first speed to announce: the worker is online so much sooner
BUSY_PAUSE_S = 1.0  # between steps to quick ways that do not give way: those who decode notice each
BUDGET_S = 0.15  # for a steady speed, at each number of streams
MEASURE_INTERVAL_S = 600.0  # other programs come and go on a volunteer's machine
BLOCK_S = 1.0  # what a forward of one block may take: decoding waits for it, and the daemon for a sign of life
MIN_MICRO_BATCH_TOKENS = 64  # fewer waste the matrix units of any CPU
STREAMS = (1, 4, 16)  # sessions decoding at once; between them speed is interpolated
_RECEIVE_BYTES = 4 * 2**20  # a whole activation of a prefill in one read


class Worker:
    """Takes all frames that are there, computes a pass, answers all that it completed in one send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = FrameDecoder()
        self._engine: Engine | None = None
        self._late: list[Frame] = []  # came in the midst of a pass, and can wait for its end
        self._is_letting_in = False
        self._training: Training
        self._allowance = Allowance(0.0)
        self._rests = False
        self._n_own = 0
        self._ticked_at = 0.0
        self._measure_at = 0.0
        self._to_measure: list[int] = []
        self._speed = Measured()
        self._duty = Duty()
        self._woke_at = time.monotonic()
        self._improving: Improvements | None = None
        self._improved_at = 0.0
        self._gives_way = False

    def run(self) -> None:
        answers: list[bytes] = []
        while True:
            if not answers and not self._late:
                self._measure_while_idle()
            late, self._late = self._late, []
            for frame in (*late, *self._receive(wait=not self._has_work and not answers and not late)):
                answers += self._take(frame)
                self._tick()
            if self._engine is None or not self._has_work:
                self._send(answers)
                answers = []
                continue
            if rest_s := self._duty.wait_s(time.monotonic()):
                if answers:
                    self._send(answers)
                    answers = []
                self._wait(min(rest_s, TICK_INTERVAL_S))
                self._tick()
                continue
            trained, wait_s = self._train() if self._training.has_work else ([], 0.0)
            if not self._engine.has_work:
                self._send([*answers, *trained])
                answers = []
                self._worked()
                if wait_s:
                    self._wait(wait_s)
                continue
            answers += trained
            if (wait_s := self._engine.patience_s()) and self._wait(wait_s):
                continue
            if answers:
                self._send(answers)  # before those of steps that this pass lets in
            if self._improving is not None and time.monotonic() - self._improved_at > BUSY_PAUSE_S:
                self._improve(gives_way=False)
            self._send(list(self._engine.run_pass()))
            answers = list(self._engine.settle())  # what was answered is on its way meanwhile
            self._worked()

    def _wait(self, seconds: float) -> bool:
        """Wait for a frame; has one come?"""
        self._worked()
        has_come = bool(select.select([self._connection], [], [], seconds)[0])
        self._woke_at = time.monotonic()
        return has_come

    def _worked(self) -> None:
        """All that was done since it last waited is work."""
        now = time.monotonic()
        self._duty.worked(now - self._woke_at, now)
        self._woke_at = now

    @property
    def _has_work(self) -> bool:
        if self._engine is None or self._rests:
            return False
        return self._engine.has_work or self._training.has_work

    def _train(self) -> tuple[list[bytes], float]:
        """Compute some of what fine-tuning waits for; returns its answers, or how long decoding leaves it no time."""
        assert self._engine is not None
        begun = time.monotonic()
        wait_s = self._allowance.wait_s(begun, self._engine.has_work).action
        if wait_s:
            return [], wait_s
        answers = list(self._training.run_slice())
        self._allowance.spend(time.monotonic() - begun)
        return answers, 0.0

    def _improve(self, *, gives_way: bool) -> bool:
        """Make a step to quicker ways, and tell what came of it; was it made?"""
        assert self._improving is not None
        self._gives_way = gives_way
        try:
            is_made = self._improving.step()
        except Preempted:
            return False
        finally:
            self._gives_way = False
            self._worked()  # its owner's share is for all that is computed
            self._improved_at = time.monotonic()
        if is_made and self._improving.news:
            self._send([messages.framed(self._improving.news.pop())])
        if self._improving.is_done:
            self._improving = None
        return is_made

    def _measure_while_idle(self) -> None:
        """While nothing comes, become quicker and measure, pass by pass: a frame that arrives waits for one at most."""
        wait_s = IDLE_S
        while self._improving is not None and not self._has_work and not self._rests:
            if self._wait(max(wait_s, self._duty.wait_s(time.monotonic()))):
                return
            wait_s = 0.0 if self._improve(gives_way=True) else IDLE_S
        while self._engine is not None and not self._has_work and not self._rests:
            wait_s = max(IDLE_S, self._measure_at - time.monotonic())
            if self._wait(wait_s):
                return
            if not self._to_measure:
                self._to_measure = [n_streams for n_streams in STREAMS if n_streams == 1 or self._engine.span.can_batch]
            is_measured = self._measure(self._engine.span, self._to_measure[0])
            self._woke_at = time.monotonic()  # nobody who comes now is to wait for that
            if not is_measured:
                return
            self._to_measure.pop(0)
            self._measure_at = time.monotonic() + (IDLE_S if self._to_measure else MEASURE_INTERVAL_S)

    def _measure(self, span: LoadedSpan, n_streams: int) -> bool:
        """Measure and tell; False when a frame came, and nothing is known."""
        rate = self._undisturbed(decode_rates(span, n_streams, BUDGET_S))
        prefill = self._undisturbed(prefill_rates(span, BUDGET_S)) if n_streams == 1 and rate else 0.0
        if not rate or (n_streams == 1 and not prefill):
            return False
        if n_streams == 1:
            self._speed = msgspec.structs.replace(self._speed, decode_tokens_per_s=rate, prefill_tokens_per_s=prefill)
        else:
            batches = {**self._speed.batch_tokens_per_s, n_streams: rate}
            self._speed = msgspec.structs.replace(self._speed, batch_tokens_per_s=batches)
        self._send([messages.framed(self._speed)])
        return True

    def _undisturbed(self, rates: Iterable[float]) -> float:
        """The last of some rates, each of which takes a pass to find; 0 when a frame arrives before."""
        newest = 0.0
        for rate in rates:
            if select.select([self._connection], [], [], 0)[0]:
                return 0.0
            newest = rate
        return newest

    def _receive(self, *, wait: bool) -> Iterator[Frame]:
        """Yield what has arrived; wait for something only if there is nothing else to do. Raises EOFError."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        while True:
            if not flags:
                self._worked()
            try:
                data = self._connection.recv(_RECEIVE_BYTES, flags)
            except BlockingIOError:
                return
            if not data:
                raise EOFError
            if not flags:
                self._woke_at = time.monotonic()  # it has waited
            yield from self._decoder.feed_untrusted(data)
            if self._decoder.is_between_frames:
                flags = socket.MSG_DONTWAIT

    def _take(self, frame: Frame) -> list[bytes]:
        try:
            message = worker.decode(frame.header)
        except RemoteProtocolError as error:  # a mistake of the daemon's, for which no session here has to end
            logger.error("skipped what the daemon sent: %s", error)
            self._n_own += 1
            return []
        if isinstance(message, LoadSpan):
            self._n_own += 1
            return [messages.framed(self._load(message))]
        if isinstance(message, Rest | SetComputeShare):
            self._n_own += 1
            self._rests |= isinstance(message, Rest)
            if isinstance(message, SetComputeShare):
                self._duty, self._woke_at = Duty(message.share), time.monotonic()  # loading is nobody's debt
            return []
        assert self._engine is not None, "the daemon sends work after Loaded"
        if isinstance(message, LoadAdapter):
            self._n_own += 1
            return [messages.framed(self._load_adapter(self._engine.span, message, bytes(frame.payload)))]
        if (trained := self._training.take(message, frame)) is not None:
            return list(trained)
        return list(self._engine.take(message, frame, self._training.tuned))

    def _send(self, answers: list[bytes]) -> None:
        handled = self._n_own + (self._engine.handled + self._training.handled if self._engine else 0)
        reused = self._engine.n_reused if self._engine else 0
        self._connection.sendall(b"".join((*answers, messages.framed(Tick(handled=handled, reused=reused)))))
        self._ticked_at = time.monotonic()

    @staticmethod
    def _load_adapter(span: LoadedSpan, request: LoadAdapter, config: bytes) -> Message:
        try:
            span.adapters.load(request.adapter, [Path(shard) for shard in request.shards], config)
        except (ConfigError, torch.OutOfMemoryError) as error:
            return AdapterLoaded(re=request.id, failure=str(error)[:500])
        return AdapterLoaded(re=request.id)

    def _load(self, request: LoadSpan) -> Message:
        if request.threads:
            torch.set_num_threads(request.threads)
        OwnerReserve.n_bytes = request.leave_free_bytes
        folder = self._kept_in(request)
        try:
            is_cpu = pick_device(request.device) == "cpu"
            compiler = precompile.start(folder) if is_cpu and not precompile.is_compiled(folder) else None
            span = self._load_span(request)
            head = _load_head(request, span) if request.head else None
            decode, prefill = first_rates(span, QUICK_S)
            self._speed = Measured(decode_tokens_per_s=decode, prefill_tokens_per_s=prefill)
            self._improving = Improvements(span, Path(request.path), compiler)
        except (ConfigError, torch.OutOfMemoryError) as error:
            return WorkerFailed(message=str(error)[:4000])
        budget = Budget(request.history_bytes or 1 << 30, folder)
        self._engine = Engine(span, budget, calls_aside=span.device.type == "cpu", head=head)
        per_block = len(span.span) * self._speed.prefill_tokens_per_s  # tokens/s
        self._training = Training(span, request.tuning_bytes, max(MIN_MICRO_BATCH_TOKENS, int(BLOCK_S * per_block)))
        self._allowance = Allowance(request.tuning_share)
        about = describe(span, request.model, self._speed)
        return msgspec.structs.replace(about, kernels=self._improving.kernels, has_head=head is not None)

    def _load_span(self, request: LoadSpan) -> LoadedSpan:
        """Load blocks, and find out what they can do. Raises ConfigError."""
        folder, blocks, device = Path(request.path), Span(request.start, request.end), pick_device(request.device)
        kept_in = self._kept_in(request)
        span = LoadedSpan(
            folder,
            blocks,
            DTYPES[request.dtype],
            device,
            request.quantize,
            self._on_block,
            kept_in,
            kv_cache=request.kv_cache,
            on_part=self._tell_progress,
            remembered=Measurements(Path(request.spill_folder) if request.spill_folder else None),
        )
        span.self_test()
        return span

    @staticmethod
    def _kept_in(request: LoadSpan) -> Path:
        return Path(request.spill_folder or tempfile.gettempdir())

    def _tell_progress(self, stage: str, done: int, total: int) -> None:
        """While it loads: what is done, as often as ticks are sent."""
        if time.monotonic() - self._ticked_at >= TICK_INTERVAL_S:
            self._send([messages.framed(Loading(stage=stage, done=done, total=total))])

    def _on_block(self) -> None:
        """In the midst of a pass: give a sign of life, and let in steps of others, which are short.

        A pass that only serves to become quicker is broken off where somebody waits.
        """
        self._tick()
        if self._gives_way and select.select([self._connection], [], [], 0)[0]:
            raise Preempted
        if self._engine is None or not self._engine.lets_in or self._is_letting_in:
            return
        self._is_letting_in = True
        try:
            with torch.inference_mode(False):  # what sessions keep is not of the pass that this is in the midst of
                self._let_in(self._engine)
        finally:
            self._is_letting_in = False

    def _let_in(self, engine: Engine) -> None:
        answers: list[bytes] = []
        for frame in () if self._late else self._receive(wait=False):
            if self._late or not _is_op(frame):  # what follows has to wait with it
                self._late.append(frame)
            else:
                answers += self._take(frame)
        answers += engine.run_aside()
        if answers:
            self._send(answers)
            if settled := list(engine.settle()):
                self._send(settled)

    def _tick(self) -> None:
        if time.monotonic() - self._ticked_at >= TICK_INTERVAL_S:
            self._send([])


def _load_head(request: LoadSpan, span: LoadedSpan) -> LogitsHead | None:
    """Norm and head, where the span ends the model. Raises ConfigError."""
    if span.span.end < span.n_layers:
        return None
    return LogitsHead(Path(request.path), span.dtype, span.device, span.layer_arity)


def _is_op(frame: Frame) -> bool:
    try:
        return isinstance(worker.decode(frame.header), Op)
    except RemoteProtocolError:
        return False


def describe(span: LoadedSpan, model: str, speed: Measured) -> Loaded:
    """What is told of a span that is loaded."""
    name, memory_bytes = device_description(str(span.device))
    return Loaded(
        device=name,
        device_memory_bytes=memory_bytes,
        numerics=span.numerics(model),
        hidden=span.hidden_size,
        layer_arity=span.layer_arity,
        cache_bytes_per_token=span.cache_bytes_per_token(),
        batching=span.batching[:MOST_TEXT],
        speed=speed,
    )


def main() -> None:
    gc.freeze()  # what importing made stays, and need not be looked at again
    gc.enable()
    logging.basicConfig(level=logging.WARNING, format="worker %(process)d: %(message)s")
    os.environ["HF_HUB_OFFLINE"] = "1"
    with socket.socket(fileno=int(sys.argv[1])) as connection, last_words(connection):
        Worker(connection).run()


if __name__ == "__main__":
    main()
