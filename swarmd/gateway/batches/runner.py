"""Batches while they run: a few of their requests at a time, beside those of people who wait, until the window ends.

A request that is told to come back comes back; one that is refused for good has its error written down.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator

import trio

from swarmd.gateway.apis.refusals import ApiError, bad_request, internal_error
from swarmd.gateway.batches.batch import (
    BatchLine,
    BatchRequest,
    JsonObject,
    LineFault,
    State,
    StoredBatch,
    read_answered,
    read_lines,
    write_answer,
    write_expired,
)
from swarmd.gateway.batches.store import BatchStore
from swarmd.net.api import TaskStatus

logger = logging.getLogger(__name__)

MOST_OPEN = 4  # batches of one key at a time: each has its file in memory

Answer = Callable[[str, str, bytes], Awaitable[JsonObject]]


class Batches:
    """All batches of one gateway. ``answer`` takes an endpoint, a key's name and a body, and raises ApiError.

    ``n_at_once`` of all batches' requests are answered at a time. ``clock``: seconds since 1970.
    """

    def __init__(self, store: BatchStore, answer: Answer, n_at_once: int, clock: Callable[[], float]) -> None:
        self.store = store
        self._answer = answer
        self._n_at_once = n_at_once
        self._room = trio.Semaphore(n_at_once)
        self.clock = clock
        self._scopes: dict[str, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on with the batches that a former gateway left, and run those that come, until cancelled."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            for batch in self.store.open_batches():
                nursery.start_soon(self._run, batch)
            task_status.started()
            await trio.sleep_forever()

    def begin(self, owner: str, request: BatchRequest, endpoints: tuple[str, ...]) -> StoredBatch:
        """Take a batch; one whose file has faults has failed. Raises ApiError."""
        assert self._nursery is not None
        if request.endpoint not in endpoints:
            raise bad_request(f"endpoint is one of {', '.join(endpoints)}", "endpoint")
        source = self.store.file(owner, request.input_file_id)
        if sum(batch.owner == owner for batch in self.store.open_batches()) >= MOST_OPEN:
            message = f"{MOST_OPEN} batches of this key are not answered yet: wait for one, or cancel it"
            raise ApiError(429, "rate_limit_error", message, None, "rate_limit_exceeded")
        now = int(self.clock())
        name = f"batch_{secrets.token_hex(12)}"
        batch = StoredBatch(name, owner, request.endpoint, source.id, now, request.metadata)
        lines, faults = read_lines(self.store.read(source.id), batch.endpoint)
        batch.faults = tuple(faults)
        if faults:
            batch.state, batch.ended_at = "failed", now
        else:
            batch.n_lines = len(lines)
            for field in ("output", "error"):
                file = self.store.add_file(owner, f"{name}_{field}.jsonl", b"", now, "batch_output")
                setattr(batch, f"{field}_file_id", file.id)
        self.store.keep_batch(batch)
        if not faults:
            self._nursery.start_soon(self._run, batch)
        return batch

    def cancel(self, batch: StoredBatch) -> None:
        """Have a batch end with what there is. Raises ApiError for one that has ended."""
        if batch.state != "in_progress":
            raise ApiError(409, "invalid_request_error", f"this batch has ended: {batch.state}", "batch_id")
        batch.cancelling_at = batch.cancelling_at or int(self.clock())
        self.store.keep_batch(batch)
        scope = self._scopes.get(batch.id)
        if scope is not None:
            scope.cancel()

    # --- one batch -----------------------------------------------------------------------------------------------

    # As many tasks as there is room take its requests from one iterator. So all batches have the same share of the
    # room, however many requests they have, and none is held in memory twice.
    async def _run(self, batch: StoredBatch) -> None:
        lines, _ = read_lines(self.store.read(batch.input_file_id), batch.endpoint)
        if not lines:
            batch.faults = (LineFault("missing_file", "the file was deleted before a restart"),)
            self._end(batch, "failed")
            return
        left = self._find_left(batch, lines)
        requests = iter(left)
        with trio.move_on_after(max(0.0, batch.expires_at - self.clock())) as scope:
            self._scopes[batch.id] = scope
            if batch.cancelling_at is not None:
                scope.cancel()
            async with trio.open_nursery() as nursery:
                for _ in range(min(self._n_at_once, len(left))):
                    nursery.start_soon(self._work, batch, requests)
        del self._scopes[batch.id]
        state: State = "completed"
        if scope.cancelled_caught:
            state = "cancelled" if batch.cancelling_at is not None else "expired"
        if state == "expired":
            for line in self._find_left(batch, lines):
                self._note(batch, write_expired(_number(), line.custom_id), is_failure=True)
        self._end(batch, state)

    def _end(self, batch: StoredBatch, state: State) -> None:
        batch.state, batch.ended_at = state, int(self.clock())
        try:
            self.store.keep_batch(batch)
        except ApiError:
            logger.error("that %s has ended is not kept: after a restart it ends again", batch.id)

    async def _work(self, batch: StoredBatch, requests: Iterator[BatchLine]) -> None:
        for line in requests:
            number = _number()
            try:
                answer = await self._answer_line(batch, line)
            except ApiError as error:
                self._note(batch, write_answer(number, line.custom_id, error.status, error.body), is_failure=True)
            else:
                self._note(batch, write_answer(number, line.custom_id, 200, answer))

    async def _answer_line(self, batch: StoredBatch, line: BatchLine) -> JsonObject:
        """Answer one request, coming back as often as it takes. Raises ApiError for what cannot be answered."""
        while True:
            try:
                async with self._room:
                    return await self._answer(batch.endpoint, batch.owner, bytes(line.body))
            except ApiError as error:
                if error.retry_after_s is None:
                    raise
                wait_s = error.retry_after_s
            except Exception as mistake:
                logger.error("a request of %s failed", batch.id, exc_info=mistake)
                raise internal_error() from None
            await trio.sleep(wait_s)

    def _find_left(self, batch: StoredBatch, lines: list[BatchLine]) -> list[BatchLine]:
        """Find the requests that have no answer yet, and count those that have one; a line that was cut is dropped."""
        answered: set[str] = set()
        counts = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            assert file_id is not None
            ids, n_bytes = read_answered(self.store.read(file_id))
            self.store.cut(file_id, n_bytes)
            answered |= ids
            counts.append(len(ids))
        batch.n_completed, batch.n_failed = counts
        return [line for line in lines if line.custom_id not in answered]

    def _note(self, batch: StoredBatch, line: bytes, is_failure: bool = False) -> None:
        """Add an answer to its file, if that is still there, and count it."""
        file_id = batch.error_file_id if is_failure else batch.output_file_id
        assert file_id is not None
        if not self.store.append(file_id, line):
            logger.error("an answer of %s is lost: its file has gone, or the disk is full", batch.id)
        elif is_failure:
            batch.n_failed += 1
        else:
            batch.n_completed += 1


def _number() -> str:
    return f"batch_req_{secrets.token_hex(12)}"
