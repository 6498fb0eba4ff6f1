"""The worker process: torch and no network. It loads a span and computes what its daemon sends, pass by pass.

Started by the daemon (``node.worker.worker_link``) with one end of a Unix socketpair. It ends when the
socket does. What goes wrong with an op is answered with a refusal; what goes wrong with the load ends the worker.
"""

from __future__ import annotations

import logging
import select
import socket
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import torch

from swarmd.compute.hardware.device import OwnerReserve, device_description, pick_device
from swarmd.compute.hardware.measurements import Measurements
from swarmd.compute.hardware.worker_process import serve_daemon
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
BUSY_PAUSE_S = 1.0  # between steps to faster backends that do not give way: sessions that decode notice each
BUDGET_S = 0.15  # for a steady speed, at each number of streams
MEASURE_INTERVAL_S = 600.0  # other programs come and go on a volunteer's machine
BLOCK_S = 1.0  # what a forward of one block may take: decoding waits for it, and the daemon for a sign of life
MIN_MICRO_BATCH_TOKENS = 64  # fewer waste the matrix units of any CPU
STREAMS = (1, 4, 16)  # sessions decoding at once; between them speed is interpolated
_RECEIVE_BYTES = 4 * 2**20  # a whole activation of a prefill in one read


# One thread, one loop:
#
#     receive all that is there -> fine-tuning, a slice -> a pass over all sessions -> send -> settle -> ...
#
# Nothing here waits while there is work, except when the owner's share of the machine is used up (``_duty``), or when
# a pass is worth delaying because more sessions are about to send their steps (``Engine.patience_s``). A pass cannot be
# interrupted, so what may take long calls ``_on_block`` after each block: there ticks are sent, by which the daemon
# sees a worker that is alive, and steps of other sessions are let in. With nothing to do it looks for faster execution
# backends and measures its speed, in steps that a frame has to wait for at most once.
class Worker:
    """Takes all frames that are there, computes a pass, answers all that it completed in one send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._decoder = FrameDecoder()
        self._engine: Engine | None = None
        self._deferred: list[Frame] = []  # came in the midst of a pass, and can wait for its end
        self._is_letting_in = False
        self._training: Training
        self._allowance = Allowance(0.0)
        self._is_resting = False
        self._n_handled = 0  # frames that neither the engine nor fine-tuning counts
        self._ticked_at = 0.0
        self._measure_at = 0.0
        self._to_measure: list[int] = []
        self._speed = Measured()
        self._duty = Duty()
        self._woke_at = time.monotonic()
        self._improvements: Improvements | None = None
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
            for frame in (*deferred, *self._receive_frames(wait=is_idle)):
                answers += self._take_frame(frame)
                self._tick_if_due()
            if self._engine is None or not self._has_work:
                self._send_frames(answers)
                answers = []
                continue
            if rest_s := self._duty.wait_s(time.monotonic()):
                if answers:
                    self._send_frames(answers)
                    answers = []
                self._wait_for_frame(min(rest_s, TICK_INTERVAL_S))
                self._tick_if_due()
                continue
            trained, wait_s = self._run_fine_tuning() if self._training.has_work else ([], 0.0)
            if not self._engine.has_work:
                self._send_frames([*answers, *trained])
                answers = []
                self._count_work()
                if wait_s:
                    self._wait_for_frame(wait_s)
                continue
            answers += trained
            if (wait_s := self._engine.patience_s()) and self._wait_for_frame(wait_s):
                continue
            if answers:
                self._send_frames(answers)  # before those of steps that this pass lets in
            if self._improvements is not None and time.monotonic() - self._improved_at > BUSY_PAUSE_S:
                self._improve_backends(is_preemptible=False)
            self._send_frames(list(self._engine.run_pass()))
            answers = list(self._engine.settle())  # what was answered is on its way meanwhile
            self._count_work()

    def _wait_for_frame(self, seconds: float) -> bool:
        """Wait for a frame; has one come?"""
        self._count_work()
        has_come = self._has_frame(seconds)
        self._woke_at = time.monotonic()
        return has_come

    def _has_frame(self, timeout_s: float = 0) -> bool:
        """Is there something to receive, or will there be before the timeout?"""
        readable, _, _ = select.select(
            [self._connection],
            [],
            [],
            timeout_s,
        )
        return bool(readable)

    def _count_work(self) -> None:
        """Count all the time since it last waited as work."""
        now = time.monotonic()
        self._duty.worked(now - self._woke_at, now)
        self._woke_at = now

    @property
    def _has_work(self) -> bool:
        if self._engine is None or self._is_resting:
            return False
        return self._engine.has_work or self._training.has_work

    def _run_fine_tuning(self) -> tuple[list[bytes], float]:
        """Compute some of what fine-tuning waits for; returns its answers, or how long decoding leaves it no time."""
        assert self._engine is not None
        begun = time.monotonic()
        wait_s = self._allowance.wait_s(begun, self._engine.has_work).action
        if wait_s:
            return [], wait_s
        answers = list(self._training.run_slice())
        self._allowance.spend(time.monotonic() - begun)
        return answers, 0.0

    def _improve_backends(self, *, is_preemptible: bool) -> bool:
        """Make a step to faster backends, and tell what came of it; was it made?"""
        assert self._improvements is not None
        self._is_preemptible = is_preemptible
        try:
            is_made = self._improvements.step()
        except Preempted:
            return False
        finally:
            self._is_preemptible = False
            self._count_work()  # its owner's share is for all that is computed
            self._improved_at = time.monotonic()
        if is_made and self._improvements.news:
            self._send_frames([messages.encode_frame(self._improvements.news.pop())])
        if self._improvements.is_done:
            self._improvements = None
        return is_made

    def _measure_while_idle(self) -> None:
        """While nothing comes, become faster and measure, pass by pass: a frame that arrives waits for one at most."""
        wait_s = IDLE_S
        while self._improvements is not None and not self._has_work and not self._is_resting:
            if self._wait_for_frame(max(wait_s, self._duty.wait_s(time.monotonic()))):
                return
            wait_s = 0.0 if self._improve_backends(is_preemptible=True) else IDLE_S
        while self._engine is not None and not self._has_work and not self._is_resting:
            wait_s = max(IDLE_S, self._measure_at - time.monotonic())
            if self._wait_for_frame(wait_s):
                return
            if not self._to_measure:
                can_batch = self._engine.span.can_batch
                self._to_measure = [n_streams for n_streams in STREAMS if n_streams == 1 or can_batch]
            is_measured = self._measure_speed(self._engine.span, self._to_measure[0])
            self._woke_at = time.monotonic()  # nobody who comes now is to wait for that
            if not is_measured:
                return
            self._to_measure.pop(0)
            self._measure_at = time.monotonic() + (IDLE_S if self._to_measure else MEASURE_INTERVAL_S)

    def _measure_speed(self, span: LoadedSpan, n_streams: int) -> bool:
        """Measure and tell; False when a frame came, and nothing is known."""
        rate = self._last_undisturbed(decode_rates(span, n_streams, BUDGET_S))
        prefill = 0.0
        if n_streams == 1 and rate:
            prefill = self._last_undisturbed(prefill_rates(span, BUDGET_S))
        if not rate or (n_streams == 1 and not prefill):
            return False
        if n_streams == 1:
            self._speed = msgspec.structs.replace(self._speed, decode_tokens_per_s=rate, prefill_tokens_per_s=prefill)
        else:
            batches = {**self._speed.batch_tokens_per_s, n_streams: rate}
            self._speed = msgspec.structs.replace(self._speed, batch_tokens_per_s=batches)
        self._send_frames([messages.encode_frame(self._speed)])
        return True

    def _last_undisturbed(self, rates: Iterable[float]) -> float:
        """Return the last of some rates, each of which takes a pass to find; 0 when a frame arrives before."""
        newest = 0.0
        for rate in rates:
            if self._has_frame():
                return 0.0
            newest = rate
        return newest

    def _receive_frames(self, *, wait: bool) -> Iterator[Frame]:
        """Yield what has arrived; wait for something only if there is nothing else to do. Raises EOFError."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        while True:
            if not flags:
                self._count_work()
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
            self._duty = Duty(message.share)
            self._woke_at = time.monotonic()  # loading is nobody's debt
            return []
        assert self._engine is not None, "the daemon sends work after Loaded"
        if isinstance(message, LoadAdapter):
            self._n_handled += 1
            loaded = self._load_adapter(self._engine.span, message, bytes(frame.payload))
            return [messages.encode_frame(loaded)]
        trained = self._training.take(message, frame)
        if trained is not None:
            return list(trained)
        return list(self._engine.take(message, frame, self._training.tuned))

    def _send_frames(self, answers: list[bytes]) -> None:
        """Send frames, and with them how much is done; without frames it is a sign of life."""
        handled = self._n_handled
        n_reused = 0
        if self._engine is not None:
            handled += self._engine.handled + self._training.handled
            n_reused = self._engine.n_reused
        tick = messages.encode_frame(Tick(handled=handled, reused=n_reused))
        self._connection.sendall(b"".join((*answers, tick)))
        self._ticked_at = time.monotonic()

    @staticmethod
    def _load_adapter(span: LoadedSpan, request: LoadAdapter, config: bytes) -> Message:
        try:
            span.adapters.load(request.adapter, [Path(shard) for shard in request.shards], config)
        except (ConfigError, torch.OutOfMemoryError) as error:
            return AdapterLoaded(re=request.id, failure=str(error)[:500])
        return AdapterLoaded(re=request.id)

    def _load_model(self, request: LoadSpan) -> Message:
        """Load a span, find out how fast it is, and be ready for work; returns what the daemon is told."""
        if request.threads:
            torch.set_num_threads(request.threads)
        OwnerReserve.n_bytes = request.leave_free_bytes
        folder = self._spill_folder(request)
        try:
            compiles = request.compiled and pick_device(request.device) == "cpu"
            compiler = precompile.start(folder) if compiles and not precompile.is_compiled(folder) else None
            span = self._load_span(request)
            head = _load_head(request, span) if request.head else None
            decode, prefill = first_rates(span, QUICK_S)
            self._speed = Measured(decode_tokens_per_s=decode, prefill_tokens_per_s=prefill)
            self._improvements = Improvements(span, Path(request.path), compiler)
        except (ConfigError, torch.OutOfMemoryError) as error:
            return WorkerFailed(message=str(error)[:4000])
        budget = Budget(request.history_bytes or 1 << 30, folder)
        self._engine = Engine(
            span,
            budget,
            can_interleave=span.device.type == "cpu",
            head=head,
        )
        block_tokens_per_s = len(span.span) * self._speed.prefill_tokens_per_s
        max_tokens = max(MIN_MICRO_BATCH_TOKENS, int(BLOCK_S * block_tokens_per_s))
        self._training = Training(span, request.tuning_bytes, max_tokens)
        self._allowance = Allowance(request.tuning_share)
        loaded = describe(span, request.model, self._speed)
        return msgspec.structs.replace(loaded, kernels=self._improvements.kernels, has_head=head is not None)

    def _load_span(self, request: LoadSpan) -> LoadedSpan:
        """Load blocks, and find out what they can do. Raises ConfigError."""
        span = LoadedSpan(
            Path(request.path),
            Span(request.start, request.end),
            DTYPES[request.dtype],
            pick_device(request.device),
            request.quantize,
            self._on_block,
            self._spill_folder(request),
            kv_cache=request.kv_cache,
            on_part=self._tell_progress,
            is_compiled=request.compiled,
            remembered=Measurements(Path(request.spill_folder) if request.spill_folder else None),
        )
        span.self_test()
        return span

    @staticmethod
    def _spill_folder(request: LoadSpan) -> Path:
        return Path(request.spill_folder or tempfile.gettempdir())

    def _tell_progress(self, stage: str, done: int, total: int) -> None:
        """Tell what is done while it loads, as often as ticks are sent."""
        if time.monotonic() - self._ticked_at >= TICK_INTERVAL_S:
            loading = Loading(stage=stage, done=done, total=total)
            self._send_frames([messages.encode_frame(loading)])

    def _on_block(self) -> None:
        """Give a sign of life in the midst of a pass, and let in steps of others, which are short.

        A pass that only serves to become faster is broken off where somebody waits.
        """
        self._tick_if_due()
        if self._is_preemptible and self._has_frame():
            raise Preempted
        if self._engine is None or not self._engine.is_open_to_steps or self._is_letting_in:
            return
        self._is_letting_in = True
        try:
            with torch.inference_mode(False):  # what sessions keep is not of the pass that this is in the midst of
                self._let_in_steps(self._engine)
        finally:
            self._is_letting_in = False

    def _let_in_steps(self, engine: Engine) -> None:
        """Take ops that have come and compute those that are ready; all other frames wait for the end of the pass."""
        answers: list[bytes] = []
        for frame in () if self._deferred else self._receive_frames(wait=False):
            if self._deferred or not _is_op(frame):  # what follows has to wait with it
                self._deferred.append(frame)
            else:
                answers += self._take_frame(frame)
        answers += engine.run_interleaved()
        if answers:
            self._send_frames(answers)
            if settled := list(engine.settle()):
                self._send_frames(settled)

    def _tick_if_due(self) -> None:
        """Give a sign of life, if the last one is old enough."""
        if time.monotonic() - self._ticked_at >= TICK_INTERVAL_S:
            self._send_frames([])


def _load_head(request: LoadSpan, span: LoadedSpan) -> LogitsHead | None:
    """Load norm and head, where the span ends the model. Raises ConfigError."""
    if span.span.end < span.n_layers:
        return None
    return LogitsHead(
        Path(request.path),
        span.dtype,
        span.device,
        span.layer_arity,
    )


def _is_op(frame: Frame) -> bool:
    try:
        return isinstance(worker.decode(frame.header), Op)
    except RemoteProtocolError:
        return False


def describe(span: LoadedSpan, model: str, speed: Measured) -> Loaded:
    """Return what is told of a span that is loaded."""
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
    """Serve the socket whose number is the first argument."""
    serve_daemon("worker", lambda connection: Worker(connection).run())


if __name__ == "__main__":
    main()
