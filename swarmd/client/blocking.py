"""The client for scripts, notebooks and several threads: the same swarm in a trio thread of its own.

Every call crosses over to that thread and waits; a step of a session is a queue there and back.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import trio

from swarmd.client import drafts
from swarmd.client.links.answers import WindowAnswer
from swarmd.client.links.client_parameters import TunedParameters
from swarmd.client.links.link import ServedLogits, SessionOptions, Statistics
from swarmd.client.links.ops import StepInput
from swarmd.client.model.decoding import ModelSpeculation
from swarmd.client.model.remote_model import remote_model
from swarmd.client.model.swarm_head import HeadChecks, head_called
from swarmd.client.sessions.session import ChainSession
from swarmd.client.swarm import AsyncSwarm, ClientMembership, join_swarm
from swarmd.client.text.tokenizer import load_tokenizer
from swarmd.client.tuning.lane import Lane
from swarmd.client.tuning.lane_pass import LaneAnswer, MicroBatch
from swarmd.client.tuning.pipeline import Pipeline, PipelineStatistics
from swarmd.client.tuning.ticket import ForwardTicket
from swarmd.compute.hardware.device import pick_card
from swarmd.compute.model.skeleton import text_config
from swarmd.config import DTYPES, FORMATS, HEADS
from swarmd.errors import ConfigError, SwarmError, Unreachable, first_error
from swarmd.plan.chains.routing import Hop
from swarmd.plan.chains.view import SwarmView
from swarmd.values import ModelId

T = TypeVar("T")
logger = logging.getLogger(__name__)


# A step crosses threads twice, without trio's portal, which would take longer:
#
#     caller's thread   step(): _submit(work) --run_sync_soon--> _wake.set()    |   _answers.get() blocks
#     trio thread       _run_work():    _wake.wait() -> session.step(work) -> _answers.put(answer)
#
# Windows that fly are work like steps, but their answers come from a task of their own:
#
#     caller's thread   send(), send(), ...                receive(): _arrived.get()
#     trio thread       _run_work(): session.send(work)    _receive_windows(): session.receive() -> _arrived.put(answer)
#
# An interrupted caller never reads its answer. So the session closes then: the next step must not take that answer for
# its own.
class BlockingSession:
    """A chain session for threads: a step is a queue there and back, not a portal call (facts: hotpath)."""

    def __init__(self, thread: TrioThread, swarm: AsyncSwarm, terms: SessionOptions) -> None:
        self.chain_session: ChainSession = thread.call(swarm.open_session, terms)
        self._thread = thread
        self._swarm = swarm
        self._answers: queue.SimpleQueue[torch.Tensor | BaseException | None] = queue.SimpleQueue()
        self._arrived: queue.SimpleQueue[WindowAnswer | BaseException] = queue.SimpleQueue()
        self._work: deque[StepInput | _OutgoingWindow | _Void | None] = deque()
        self._wake = trio.Event()
        self._is_receiving = False
        self._is_closed = False
        self._is_over = threading.Event()
        thread.spawn(self._run_work)

    @property
    def layer_arity(self) -> int:
        return self.chain_session.layer_arity

    @property
    def statistics(self) -> Statistics:
        return self.chain_session.statistics

    @property
    def chain(self) -> tuple[str, ...]:
        """The hops in order, as people read them."""
        return self.chain_session.hop_names

    def step(self, step: StepInput) -> torch.Tensor | None:
        """See ChainSession.step. Blocks the calling thread."""
        self._submit(step)
        try:
            answer = self._answers.get()
        except BaseException:  # interrupted: the answer of this step must not be taken for that of another
            self.close()
            raise
        if isinstance(answer, BaseException):
            raise answer
        return answer

    @property
    def hops_s(self) -> tuple[float, ...]:
        """See ChainSession."""
        return self.chain_session.hops_s

    @property
    def can_fly(self) -> bool:
        """See ChainSession."""
        return self.chain_session.can_fly

    @property
    def next_number(self) -> int:
        """The number of the next window, as long as nothing is under way."""
        return self.chain_session.chain.position.seq + 1

    def send(self, number: int, step: StepInput) -> None:
        """See ChainSession.send; does not wait."""
        self._submit(_OutgoingWindow(number, step))

    def receive(self, timeout_s: float | None) -> WindowAnswer | None:
        """See ChainSession.receive; waits for so long at most (None: as long as it takes)."""
        try:
            answer = self._arrived.get(timeout=timeout_s) if timeout_s != 0 else self._arrived.get_nowait()
        except queue.Empty:
            return None
        except BaseException:  # interrupted: see ``step``
            self.close()
            raise
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def void_from(self, number: int) -> None:
        """See ChainSession.void_from; does not wait."""
        self._submit(_Void(number))

    @property
    def served_logits(self) -> ServedLogits | None:
        """See ChainSession."""
        return self.chain_session.served_logits

    def reject_logits(self, logits: ServedLogits, reason: str) -> None:
        """See ChainSession."""
        self._thread.call(self.chain_session.reject_logits, logits, reason)

    def close(self) -> None:
        """End the session; ``wait_closed`` waits until its hops are given back."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(trio.RunFinishedError):
                self._thread.soon(self._enqueue, None)

    def finish(self) -> None:
        """Wait until all that was asked to be is verified. Raises WrongAnswer, or why it cannot be."""
        if self.chain_session.second is not None and not self._is_closed:
            self._thread.call(self.chain_session.second.finish)

    def wait_closed(self, timeout_s: float = 10.0) -> None:
        """Wait until its hops are given back and what is left of it is checked; it must have been closed."""
        self._is_over.wait(timeout_s)

    def _submit(self, work: StepInput | _OutgoingWindow | _Void) -> None:
        if self._is_closed:
            raise ConfigError("this session was closed")
        self._thread.soon(self._enqueue, work)

    def _enqueue(self, work: StepInput | _OutgoingWindow | _Void | None) -> None:
        self._work.append(work)
        self._wake.set()

    async def _run_work(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                while True:
                    await self._wake.wait()
                    self._wake = trio.Event()
                    while self._work:
                        work = self._work.popleft()
                        if work is None:
                            nursery.cancel_scope.cancel()
                            return
                        await self._do(work, nursery)
        finally:
            for answers in (self._answers, self._arrived):
                answers.put(Unreachable("the connection to the swarm was closed"))
            try:
                await self._swarm.close_session(self.chain_session)
            finally:
                self._is_over.set()

    async def _do(self, work: StepInput | _OutgoingWindow | _Void, nursery: trio.Nursery) -> None:
        session = self.chain_session
        if isinstance(work, _Void):
            session.void_from(work.number)
        elif isinstance(work, _OutgoingWindow):
            try:
                seq = await session.send(work.step)
            except Exception as error:  # noqa: BLE001 - raised again in the thread that waits for the answer
                self._arrived.put(error)
                return
            assert seq == work.number, "between windows nothing else is sent"
            if not self._is_receiving:
                self._is_receiving = True
                nursery.start_soon(self._receive_windows)
        else:
            try:
                self._answers.put(await session.step(work))
            except Exception as error:  # noqa: BLE001 - raised again in the thread that waits for the answer
                self._answers.put(error)

    async def _receive_windows(self) -> None:
        """Take answers as long as windows are under way."""
        try:
            while (answer := await self.chain_session.receive()) is not None:
                self._arrived.put(answer)
        except Exception as error:  # noqa: BLE001 - raised again in the thread that waits for the answer
            self._arrived.put(error)
        finally:
            self._is_receiving = False


@dataclass(frozen=True, slots=True)
class _OutgoingWindow:
    """A window is to be sent, with this number."""

    number: int
    step: StepInput


@dataclass(frozen=True, slots=True)
class _Void:
    """Windows from this number on are void."""

    number: int


class BlockingLanes:
    """A pipeline for threads."""

    def __init__(self, thread: TrioThread, pipeline: Pipeline) -> None:
        self._thread = thread
        self._pipeline = pipeline

    @property
    def layer_arity(self) -> int:
        return self._pipeline.layer_arity

    @property
    def statistics(self) -> PipelineStatistics:
        return self._pipeline.statistics

    @property
    def open(self) -> tuple[Lane, ...]:
        """The lanes that are open now."""
        return self._pipeline.lanes

    def forward(self, batches: Sequence[MicroBatch]) -> list[ForwardTicket]:
        """See Pipeline.forward. Blocks the calling thread."""
        return self._thread.call(self._pipeline.forward, batches)

    def backward(
        self,
        tickets: Sequence[ForwardTicket],
        gradients: Sequence[torch.Tensor],
    ) -> list[LaneAnswer]:
        """See Pipeline.backward. Blocks the calling thread."""
        return self._thread.call(self._pipeline.backward, tickets, gradients)

    def close(self) -> None:
        """Have the servers forget what they keep for this model; more can follow."""
        with contextlib.suppress(trio.RunFinishedError):
            self._thread.spawn(self._pipeline.close)

    def __del__(self) -> None:
        self.close()


class TrioThread:
    """A trio loop in a daemon thread, with one nursery to start things in."""

    def __init__(self) -> None:
        self._started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._token: trio.lowlevel.TrioToken
        self._nursery: trio.Nursery
        self._stop: trio.Event
        self.value: Any = None

    def start(self, make: Callable[[], contextlib.AbstractAsyncContextManager[Any]]) -> Any:
        """Enter an async context manager in the thread; returns what it yields, or raises what it raised."""
        self._thread = threading.Thread(target=self._main, args=(make,), name="swarmd", daemon=True)
        self._thread.start()
        failure = self._started.get()
        if failure is not None:
            self._thread.join()
            raise failure
        return self.value

    def _main(self, make: Callable[[], contextlib.AbstractAsyncContextManager[Any]]) -> None:
        async def main() -> None:
            async with make() as self.value, trio.open_nursery() as self._nursery:
                self._token = trio.lowlevel.current_trio_token()
                self._stop = trio.Event()
                self._started.put(None)
                await self._stop.wait()
                self._nursery.cancel_scope.cancel()

        try:
            trio.run(main)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
            self._started.put(first_error(error))

    def soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Have a function called in the thread, and do not wait."""
        self._token.run_sync_soon(function, *args)

    def spawn(self, function: Callable[[], Awaitable[Any]]) -> None:
        """Start a task in the thread, and do not wait."""
        self.soon(self._nursery.start_soon, function)

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async function in the thread, and wait for what it returns or raises."""
        return trio.from_thread.run(function, *args, trio_token=self._token)

    def close(self) -> None:
        """Leave the context manager, and wait until the thread has ended."""
        with contextlib.suppress(trio.RunFinishedError):
            self.soon(self._stop.set)
        self._thread.join(timeout=10)


class Swarm:
    """A swarm for scripts, notebooks and several threads; a context manager.

    >>> with swarmd.connect(invite) as swarm:                        # doctest: +SKIP
    ...     model, tokenizer = swarm.model("demo"), swarm.tokenizer("demo")
    ...     ids = model.generate(**tokenizer("The", return_tensors="pt"), max_new_tokens=20)
    """

    def __init__(self, membership: ClientMembership) -> None:
        self._thread = TrioThread()
        self._swarm: AsyncSwarm = self._thread.start(lambda: join_swarm(membership))

    @property
    def within(self) -> AsyncSwarm:
        """The same inside its own thread, for what ``call`` runs there."""
        return self._swarm

    def call(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Run an async function in the swarm's thread, and wait for it."""
        return self._thread.call(function, *args)

    def view(self) -> SwarmView:
        """The frozen picture of all records."""
        return self._swarm.view()

    def model(
        self,
        name: str,
        *,
        exact: bool = False,
        dtype: str = "auto",
        chain: tuple[Hop, ...] = (),
        codec: str = "auto",
        adapter: str = "",
        quantize: str = "auto",
        draft: str = drafts.AUTO,
        lookup: bool = True,
        head: str = "auto",
        device: str = "",
        only: Sequence[str] = (),
        verify: float = 0.0,
        wait_s: float = 10.0,
    ) -> Any:
        """Return a transformers model by its name in the catalog (or its hash).

        ``exact`` asks for the exact grade: recovery on peers of equal numerics, op by op. ``chain`` fixes the first
        chain of every session; ``codec`` says how hidden states travel (auto, raw, float16, bfloat16, int8, int4; in
        fine-tuning also aqsgd: docs/protocol.md). ``adapter`` is a LoRA of the catalog, by name or hash.
        ``dtype`` is what servers compute in; auto is that in which all blocks are served, float32 if in several.
        ``quantize`` says on which servers: none, int8, nf4, any, or auto: none where these hold every block, else any.
        Where it pays, ``generate`` tries draft tokens: with ``lookup`` those that followed before in the same text (not
        in the exact grade), with ``draft`` those of one that the catalog names, or of a small model with the same
        tokenizer; both run here. auto: of one that learned here, or of the catalog. What is generated is the same, but
        for ties that rounding (float32 1e-6, bfloat16 a percent) decides.
        ``head``: own, by what is fastest here, which may be a card (``device`` "cpu" asks none, "cuda:1" that one);
        int8, which reads half of the bytes and is off by half a percent; swarm: that of last servers, where they have
        one and the 256 largest logits are enough; auto: own, or theirs where that is quicker. ``only`` these peers
        (ids, or how they end) read the text. At least a share ``verify`` of what servers compute is checked; with 1.0
        all of it: WrongAnswer at the first lie. Raises ConfigError for an unknown name, NoRoute when blocks are missing
        for longer than ``wait_s``.
        """
        _require_choices(
            quantize=(quantize, ("auto", "any", *FORMATS)),
            head=(head, HEADS),
            dtype=(dtype, ("auto", *DTYPES)),
        )
        (model, n_blocks), folder = self._prepare_model(name)
        dtype = self._thread.call(self._swarm.wait_for, model, n_blocks, wait_s, dtype)
        lora = self._swarm.adapter(adapter, model)
        readers = frozenset(map(self.view().peer_ending, only))
        head = "own" if exact and head == "auto" else head  # which depends on what is measured
        head_source = head_called(head, self._swarm.weights_folder, verify)
        card = pick_card(device)

        def terms(batch: int, max_tokens: int, tuned: TunedParameters | None = None) -> SessionOptions:
            return SessionOptions(
                model=model,
                n_blocks=n_blocks,
                batch=batch,
                max_tokens=max_tokens,
                dtype=dtype,
                grade="exact" if exact else "replayed",
                route=chain,
                codec=codec,
                adapter=lora,
                quantize=self._swarm.quantize(model, n_blocks) if quantize == "auto" else quantize,
                tuned=tuned,
                only=readers,
                verify=verify,
                head=isinstance(head_source, HeadChecks) and head_source.is_needed,
            )

        def open_session(batch: int, max_tokens: int, tuned: TunedParameters | None) -> BlockingSession:
            if tuned is not None and lora:
                raise ConfigError("an adapter of the catalog and one of your own cannot be used together")
            return BlockingSession(self._thread, self._swarm, terms(batch, max_tokens, tuned))

        torch_dtype = getattr(torch, dtype)
        lanes = BlockingLanes(self._thread, self._swarm.pipeline(terms(1, 1)))
        tries = ModelSpeculation(lookup and not exact)
        remote = remote_model(folder, open_session, lanes, torch_dtype, tries, head_source, exact, card)
        if draft and not (exact and draft == drafts.AUTO):
            self._add_draft(remote, draft, (model, folder), exact, torch_dtype)
        return remote

    def _prepare_model(self, name: str) -> tuple[tuple[ModelId, int], Path]:
        """Return a model's hash and blocks, and the folder of the client's part. Raises SwarmError."""
        model, n_blocks = self._thread.call(self._swarm.resolve, name)
        folder = self._thread.call(self._swarm.folder, model, n_blocks)
        return (model, n_blocks), folder

    def _add_draft(self, remote: Any, draft: str, model: tuple[ModelId, Path], exact: bool, dtype: torch.dtype) -> None:
        """Have a draft propose tokens. Raises SwarmError for one that was named; others are done without."""
        if exact:
            raise ConfigError("no draft in the exact grade: its ops must not depend on what was measured")
        try:
            base, folder = model
            found = self._thread.call(drafts.find_draft, self._swarm, draft, base)
            if found is None:
                return
            embed, hidden = remote.get_input_embeddings(), text_config(remote.config).hidden_size
            remote.speculation.sources.append(drafts.load_draft(found, folder, embed, hidden, dtype))
        except SwarmError as error:
            if draft != drafts.AUTO:
                raise
            logger.warning("without a draft: %s", error)

    def tokenizer(self, name: str) -> Any:
        """Return the model's own tokenizer. Raises ConfigError when it cannot be built without code of its own."""
        model, n_blocks = self._thread.call(self._swarm.resolve, name)
        return load_tokenizer(self._thread.call(self._swarm.folder, model, n_blocks))

    def close(self) -> None:
        """Leave the swarm."""
        self._thread.close()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _require_choices(**options: tuple[str, Sequence[str]]) -> None:
    """Require of each option, a choice with all its choices, that it is one of them. Raises ConfigError."""
    for name, (choice, choices) in options.items():
        if choice not in choices:
            raise ConfigError(f"{name} is one of {', '.join(choices)}, not {choice!r}")
