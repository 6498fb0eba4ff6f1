"""The daemon's end of its worker: start it, load a span, ask and be answered, notice when it dies or stops.

An answer to a request (``ask``, ``call``) goes to the task that asked, by the one id space of this link. What the
worker says by itself goes to the handler of its type. A worker is alive while it makes progress: as long as it has
frames to deal with, it must answer or tick within ``STALL_S``. One that is silent for longer (stopped, swapped out,
hung) is killed and replaced; its sessions are lost, and their clients are told.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import trio

from swarmd.cgroups import memory_kills
from swarmd.errors import Code, Refused, RemoteProtocolError, SwarmError, SwarmUnavailable
from swarmd.net.api import TaskStatus
from swarmd.node.worker.forkserver import VARIABLE, ForkedProcess
from swarmd.node.worker.frame_queue import FrameQueue
from swarmd.node.worker.loading import LoadingProgress
from swarmd.node.worker.share import ComputeShare
from swarmd.plan.owner.restarts import MAX_KILLS, MAX_LOAD_CRASHES, STEADY_S, RestartPolicy, WorkerEnd
from swarmd.protocol.fields import Message, Request
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import Frame, FrameDecoder, next_read_bytes
from swarmd.protocol.wire.messages import Refusal
from swarmd.protocol.wire.worker import (
    Ending,
    Improved,
    Loaded,
    Loading,
    LoadSpan,
    Measured,
    SetComputeShare,
    Tick,
    WorkerFailed,
    WorkerMessage,
)
from swarmd.resources import measure_memory
from swarmd.values import Decision

logger = logging.getLogger(__name__)

STALL_S = 4.0  # a stopped worker is missed by its sessions for so long; one pass may take as long on a slow CPU
STALL_LOADING_S = 600.0  # reading and packing a large model from a slow disk
TELL_INTERVAL_S = 5.0  # of loading, in the log: reading a large model takes minutes
CHECK_INTERVAL_S = 0.5  # an eighth of STALL_S: found late by little


class WorkerLost(SwarmUnavailable):
    """The worker ended or was ended."""


class WorkerProcess(Protocol):
    """A started worker: the real process, or a simulated one."""

    pid: int

    async def send(self, data: bytes) -> None:
        """Write to the worker. Raises WorkerLost."""

    def received(self) -> AsyncIterator[bytes]:
        """Give bytes from the worker until it ends."""

    def kill(self) -> WorkerEnd:
        """End the worker at once, and free what it holds; returns how it had ended, if it had."""


Starter = Callable[[], Awaitable[WorkerProcess]]
Prepare = Callable[[LoadSpan], Awaitable[Decision[LoadSpan]]]
"""Completes a request by what may differ from one start of a worker to the next, and says what people should know."""


# Importing torch and transformers makes objects that stay: collecting them meanwhile costs half a second.
# Ctrl-C, or a terminal that is closed, reaches the whole group: it means the daemon, which drains before it ends its
# workers.
START = (
    "import gc, signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN); "
    "gc.disable(); from {} import main; main()"
)
# -P: the folder in which the daemon was started may be anybody's, and is no place to import from.
COMMAND = (sys.executable, "-P", "-c")
# A worker computes: it fetches nothing, least of all code.
WORKER = "swarmd.compute.serving.worker"
WITHOUT_A_HUB = {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "NO"}
NOT_NEEDED = "not needed any more"  # no fault


class SubprocessWorker:
    """``module`` on the other end of a socketpair."""

    def __init__(self, module: str = WORKER) -> None:
        self._n_memory_kills = memory_kills()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._process = _launch(module, theirs.fileno())
        theirs.close()
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
        self.pid = self._process.pid

    async def send(self, data: bytes) -> None:
        try:
            await self._stream.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            raise WorkerLost("the worker is gone") from None

    async def received(self) -> AsyncIterator[bytes]:
        data = b""
        while True:
            try:
                data = await self._stream.receive_some(next_read_bytes(data))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            if not data:
                return
            yield data

    def kill(self) -> WorkerEnd:
        self._process.send_signal(signal.SIGKILL)  # one that has crashed keeps the status of its crash
        status = self._process.wait()
        self._stream.socket.close()
        n_memory_kills = memory_kills()
        is_memory_short = None if n_memory_kills is None else n_memory_kills != self._n_memory_kills
        return WorkerEnd(status, is_memory_short)


def _launch(module: str, file: int) -> subprocess.Popen[bytes] | ForkedProcess:
    """Start a worker that talks at ``file``: a new process, or one of the fork server where there is one."""
    environment = {**os.environ, **WITHOUT_A_HUB}
    if server := os.environ.get(VARIABLE):
        return ForkedProcess(server, module, ["{0}"], [file], environment)
    command = [*COMMAND, START.format(module), str(file)]
    return subprocess.Popen(command, pass_fds=[file], stdin=subprocess.DEVNULL, env=environment)


class Prestarted:
    """Starts the first worker before it is known what for: importing torch takes longer than joining a swarm."""

    def __init__(self, at_once: bool = True, module: str = WORKER) -> None:
        self._module = module
        self._first = SubprocessWorker(module) if at_once else None

    async def start(self) -> WorkerProcess:
        """Give the first worker, or start another one."""
        first = self._first
        self._first = None
        return first or SubprocessWorker(self._module)

    def close(self) -> None:
        """End the first worker if nobody took it."""
        if self._first is not None:
            self._first.kill()


Handler = Callable[[Any, Frame, bool], Awaitable[None]]
"""Takes what the worker says by itself; True: more was said in the same breath, and follows at once."""
Handlers = Mapping[type[Message], Handler]


class WorkerReply:
    """What a worker will say to a request that was handed to it."""

    def __init__(self) -> None:
        self._arrived = trio.Event()
        self._message: WorkerMessage | None = None
        self._lost_reason = ""
        self.payload = memoryview(b"")  # of what has arrived

    def arrive(self, message: WorkerMessage, payload: memoryview = memoryview(b"")) -> None:
        """Give the worker's answer to the task that waits for it."""
        self._message = message
        self.payload = payload
        self._arrived.set()

    def lose(self, reason: str) -> None:
        """Tell the task that waits: the worker ended before it answered."""
        self._lost_reason = reason
        self._arrived.set()

    async def wait(self) -> WorkerMessage:
        """Wait for the answer. Raises Refused when the worker said no, WorkerLost when it ended before it answered."""
        await self._arrived.wait()
        if self._message is None:
            raise WorkerLost(self._lost_reason)
        if isinstance(self._message, Refusal):
            raise Refused(Code(self._message.code), self._message.message)
        return self._message

    async def reply(self, call_id: int, make: Callable[[Any], Message]) -> Message:
        """Wait, and give what a peer is told that asked for it: what ``make`` makes of the answer, or a refusal."""
        try:
            return make(await self.wait())
        except Refused as error:
            code = error.code
            reason = str(error)
        except WorkerLost as error:
            code = Code.SESSION_LOST
            reason = str(error)
        return Refusal(re=call_id, code=code.value, message=reason[:500])


@dataclass(frozen=True, slots=True)
class WorkerLinkStatus:
    """What the link says of its worker: state is loading, online, failed or down."""

    state: str
    pid: int | None
    restarts: int
    loaded: Loaded | None
    reason: str
    last_end: str  # why the last worker did that ended by itself; empty: none did


#     run: start -> loading -> online -.     ends by itself, or is killed: down, a pause, and start again
#            ^                         |     cannot load, or killed again and again for want of memory: failed, for good
#            '-- pause, twice as long -'
#
# Three ways a worker fails, and how each is noticed: it dies (its socket closes), it says so (WorkerFailed), or it
# makes no progress with what it was given (``frame_queue``). Every failure loses all waiting answers with a reason, so
# nobody waits for a worker that is gone.
class WorkerLink:
    """Supervises one worker that serves one span."""

    def __init__(
        self, start: Starter, request: LoadSpan, share: ComputeShare | None = None, prepare: Prepare | None = None
    ) -> None:
        self._loaded: Loaded | None = None
        self._share = share or ComputeShare()
        self._start = start
        self._prepare = prepare
        self._prepared = ""  # what people should know of the request as it was completed
        self._request = request
        self._handlers: Handlers = {}
        self._on_change: Callable[[], Awaitable[None]]
        self._answers: dict[int, WorkerReply] = {}
        self._n_asked = 0
        self._process: WorkerProcess | None = None
        self._queue: FrameQueue | None = None  # of the process that runs
        self.n_reused = 0
        self._loading = LoadingProgress()
        self._told_at = 0.0
        self._last_words = ""
        self._last_end = ""  # why the last worker did that ended by itself
        self._was_online = False  # the worker that runs, or ran last
        self._restarts = -1
        self._state = "down"
        self._reason = "not started"

    @property
    def is_online(self) -> bool:
        """Is the worker loaded, and does it compute?"""
        return self._state == "online"

    @property
    def loaded(self) -> Loaded | None:
        """What the worker said of itself, its speeds as its owner's share of the time leaves them."""
        if self._loaded is None:
            return None
        speed = _shared(self._loaded.speed, self._share.value)
        return msgspec.structs.replace(self._loaded, speed=speed)

    def snapshot(self) -> WorkerLinkStatus:
        pid = self._process.pid if self._process else None
        return WorkerLinkStatus(
            state=self._state,
            pid=pid,
            restarts=max(0, self._restarts),
            loaded=self.loaded,
            reason=self._reason,
            last_end=self._last_end,
        )

    async def send(self, frame: bytes) -> None:
        """Hand one frame to the worker, and wait while much is on its way to it. Raises WorkerLost."""
        self.post(frame)
        if self._queue is not None:
            await self._queue.wait_for_room()

    def post(self, frame: bytes) -> None:
        """Hand one frame to the worker and wait for nothing: for small ones, in the order of all. Raises WorkerLost."""
        if self._queue is None:
            raise WorkerLost("no worker is running")
        self._queue.put(frame)

    async def ask(self, request: Request, payload: bytes | memoryview = b"") -> WorkerReply:
        """Number a request and hand it to the worker, after all that was handed to it before. Raises WorkerLost."""
        self._n_asked += 1
        call_id = self._n_asked
        answer = self._answers[call_id] = WorkerReply()
        try:
            await self.send(messages.encode_frame(msgspec.structs.replace(request, id=call_id), payload))
        except BaseException:
            self._answers.pop(call_id, None)
            raise
        return answer

    async def call(self, request: Request, payload: bytes | memoryview = b"") -> WorkerMessage:
        """Ask, and wait for the answer. Raises WorkerLost or Refused."""
        return await (await self.ask(request, payload)).wait()

    async def run(
        self,
        handlers: Handlers,
        on_change: Callable[[], Awaitable[None]],
        task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Keep a worker running until cancelled; pause longer after each failure, and stop on a hopeless load.

        ``handlers`` take what the worker says by itself, ``on_change`` is told of every change of its state.
        """
        self._handlers = handlers
        self._on_change = on_change
        task_status.started()
        policy = RestartPolicy()
        while self._state != "failed":
            self._restarts += 1
            begun = trio.current_time()
            end = await self._run_once()
            policy.note_end(end, trio.current_time() - begun, was_loading=not self._was_online)
            if policy.is_too_large and self._state != "failed":
                await self._fail_for_memory()
            elif policy.is_unloadable and self._state != "failed":
                await self._fail_for_crashes()
            elif policy.is_compiled_code_suspect and self._request.compiled:
                self._do_without_compiled_code()
            if self._state != "failed":
                await trio.sleep(policy.pause_s)

    async def _run_once(self) -> WorkerEnd:
        """Run one worker to its end; returns how it ended."""
        self._process = await self._start()
        queue = self._queue = FrameQueue()
        self._last_words = ""
        self._was_online = False
        is_by_daemon = True
        self._set("loading", f"loading blocks [{self._request.start},{self._request.end})")
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, queue, nursery.cancel_scope)
                nursery.start_soon(queue.pass_on, self._process)
                await self.send(messages.encode_frame(await self._complete_request()))
                nursery.start_soon(self._follow_share)
                await self._read(self._process, queue)
                is_by_daemon = False
                nursery.cancel_scope.cancel()
        except* WorkerLost as group:
            self._reason = str(group.exceptions[0])
            is_by_daemon = False
        except* RemoteProtocolError as group:
            self._reason = str(group.exceptions[0])
        finally:
            end = dataclasses.replace(self._process.kill(), is_by_daemon=is_by_daemon)
            self._process = None
            self._queue = None
            self._loaded = None
            queue.close()
            if self._state != "failed":
                self._set("down", self._why_down(end))
                self._last_end = "" if self._reason == NOT_NEEDED else self._reason
            answers = self._answers
            self._answers = {}
            for answer in answers.values():
                answer.lose(f"the worker of this hop ended: {self._reason}"[:500])
        await self._on_change()
        return end

    async def _complete_request(self) -> LoadSpan:
        """What this start of a worker is asked. Raises WorkerLost."""
        if self._prepare is None:
            return self._request
        self._reason = f"getting a team together for blocks [{self._request.start},{self._request.end})"
        try:
            prepared = await self._prepare(self._request)
        except SwarmError as error:
            raise WorkerLost(f"no team: {error}") from None
        self._prepared = prepared.reason
        return prepared.action

    async def _read(self, process: WorkerProcess, queue: FrameQueue) -> None:
        decoder = FrameDecoder()
        async for data in process.received():
            queue.heard_at = trio.current_time()
            decoded = [(worker.decode(frame.header), frame) for frame in decoder.feed_untrusted(data)]
            answers = [(message, frame) for message, frame in decoded if not isinstance(message, Tick)]
            for n, (message, frame) in enumerate(answers, 1):
                await self._take(message, frame, n < len(answers))
                queue.heard_at = trio.current_time()  # what delivering took is not the worker's silence
            for tick, _ in decoded:
                if isinstance(tick, Tick):
                    queue.n_handled = tick.handled
                    self.n_reused = tick.reused

    async def _take(self, message: WorkerMessage, frame: Frame, has_more: bool) -> None:
        if isinstance(message, Loaded):
            self._loaded = message
            self._was_online = True
            self._set("online", self._serving(message))
            await self._on_change()
        elif isinstance(message, Improved) and self._loaded is not None:
            changes = {"kernels": message.kernels, "quantization_error": message.quantization_error}
            self._loaded = msgspec.structs.replace(self._loaded, **changes)
            self._reason = self._serving(self._loaded)
            await self._on_change()
        elif isinstance(message, Loading):
            progress = self._loading.describe(message, trio.current_time())
            self._reason = f"loading blocks [{self._request.start},{self._request.end}): {progress}"
            if trio.current_time() >= self._told_at + TELL_INTERVAL_S:
                self._told_at = trio.current_time()
                logger.info("worker %s: %s", self._state, self._reason)
        elif isinstance(message, Ending):
            self._last_words = message.reason
        elif isinstance(message, WorkerFailed):
            self._set("failed", message.message)
            await self._on_change()
        elif isinstance(message, Measured) and self._loaded is not None:
            self._loaded = msgspec.structs.replace(self._loaded, speed=message)
            await self._on_change()
        else:
            await self._deliver(message, frame, has_more)

    async def _deliver(self, message: WorkerMessage, frame: Frame, has_more: bool) -> None:
        """Give a message to the task that asked for it, or else to the handler of its type."""
        answer = self._answers.pop(getattr(message, "re", 0), None)
        if answer is not None:
            answer.arrive(message, frame.payload)
            return
        handle = self._handlers.get(type(message))
        if handle is not None:
            await handle(message, frame, has_more)

    def _do_without_compiled_code(self) -> None:
        self._request = msgspec.structs.replace(self._request, compiled=False)
        logger.warning(
            "worker crashed twice within %.0f s of its start (%s): it goes on without compiled code, until the daemon "
            'is started again; `compiled = "off"` in config.toml has that last',
            STEADY_S,
            self._reason,
        )

    def _serving(self, loaded: Loaded) -> str:
        loss = loaded.quantization_error
        rounded = "" if loss is None else f"; 8 or 4 bits put it {100 * loss:.2g} % off on a probe"
        without = "" if self._request.compiled else "; without compiled code"
        prepared = f"; {self._prepared}" if self._prepared else ""
        return f"serving on {loaded.device}{rounded}{without}{prepared}"

    async def _fail_for_memory(self) -> None:
        """Say that what was asked for does not fit, so that fewer blocks are asked for, or the owner hears of it."""
        may_use = f"{measure_memory().total_bytes / 2**30:.2f} GiB may be used here"
        blocks = f"blocks [{self._request.start},{self._request.end})"
        self._set(
            "failed",
            f"{self._reason}, {MAX_KILLS} times in a row with {blocks}: {may_use}; serve fewer blocks (--blocks, "
            "max_blocks), use quantize, or allow it more memory",
        )
        await self._on_change()

    async def _fail_for_crashes(self) -> None:
        """Say that these blocks end the code that loads them, so that others are served, or the owner hears of it."""
        blocks = f"blocks [{self._request.start},{self._request.end})"
        self._set(
            "failed",
            f"{self._reason}, {MAX_LOAD_CRASHES} times in a row while it loaded {blocks}: it is not started again; "
            "swarmd models verify MODEL says whether its files are whole",
        )
        await self._on_change()

    def _why_down(self, end: WorkerEnd) -> str:
        if trio.current_effective_deadline() == -math.inf:
            return NOT_NEEDED
        if self._reason.startswith("no progress"):
            return self._reason
        return end.describe(self._last_words)

    async def _follow_share(self) -> None:
        with suppress(WorkerLost):
            while True:
                await self.send(messages.encode_frame(SetComputeShare(share=self._share.value)))
                await self._share.change()

    async def _watch(self, queue: FrameQueue, scope: trio.CancelScope) -> None:
        while True:
            await queue.wait_until_busy()
            await trio.sleep(CHECK_INTERVAL_S)
            silent_s = trio.current_time() - queue.heard_at
            limit_s = STALL_S if self.is_online else STALL_LOADING_S
            if queue.is_outstanding and silent_s > limit_s:
                self._reason = f"no progress for {silent_s:.1f} s"
                scope.cancel()

    def _set(self, state: str, reason: str) -> None:
        is_wrong = state in ("down", "failed") and reason != NOT_NEEDED
        logger.log(logging.WARNING if is_wrong else logging.INFO, "worker %s: %s", state, reason)
        self._state = state
        self._reason = reason
        self._told_at = trio.current_time()


def _shared(speed: Measured, share: float) -> Measured:
    """The speed of a worker that computes for a share of the time."""
    return Measured(
        decode_tokens_per_s=share * speed.decode_tokens_per_s,
        prefill_tokens_per_s=share * speed.prefill_tokens_per_s,
        batch_tokens_per_s={n: share * rate for n, rate in speed.batch_tokens_per_s.items()},
    )
