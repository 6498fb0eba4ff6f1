"""Batches while they run: a few of their requests at a time, beside those of people who wait, until the window ends.

A request that is told to come back comes back; one that is refused for good has its error written down.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator

import trio

from swarmd.gateway.apis.refusals import ApiError, bad_request, internal_error
from swarmd.gateway.apis.schema import JsonObject
from swarmd.gateway.batches.batch import (
    BatchLine,
    BatchRequest,
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
FULL_DISK_S = 10.0  # until it is tried again

Answer = Callable[[str, str, bytes], Awaitable[JsonObject]]


class Batches:
    """All batches of one gateway; ``n_at_once`` of their requests are answered at a time.

    ``admit`` counts a request of an owner, ``answer`` takes an endpoint, an owner and a body; both raise ApiError.
    ``clock``: seconds since 1970.
    """

    def __init__(
        self,
        store: BatchStore,
        admit: Callable[[str], None],
        answer: Answer,
        n_at_once: int,
        clock: Callable[[], float],
    ) -> None:
        self.store = store
        self.clock = clock
        self._admit = admit
        self._answer = answer
        self._n_at_once = n_at_once
        self._room = trio.Semaphore(n_at_once)
        self._scopes: dict[str, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Go on with the batches that a former gateway left, and run those that come, until cancelled."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for batch in self.store.open_batches():
                    nursery.start_soon(self._run, batch, None)
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.store.close()

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
        if faults:
            batch.faults = tuple(faults)
            batch.state, batch.ended_at = "failed", now
        else:
            self.store.require_room(owner, 2)
            batch.n_lines = len(lines)
            for field in ("output", "error"):
                file = self.store.add_file(owner, f"{name}_{field}.jsonl", b"", now, "batch_output")
                setattr(batch, f"{field}_file_id", file.id)
        self.store.keep_batch(batch)
        if not faults:
            self._nursery.start_soon(self._run, batch, lines)
        return batch

    def cancel(self, batch: StoredBatch) -> None:
        """Have a batch end with what there is. Raises ApiError for one that has ended."""
        if batch.state != "in_progress":
            raise ApiError(409, "invalid_request_error", f"this batch has ended: {batch.state}", "batch_id")
        batch.cancelling_at = batch.cancelling_at or int(self.clock())
        scope = self._scopes.get(batch.id)
        if scope is not None:
            scope.cancel()
        else:  # it has not begun, or has stopped
            batch.state, batch.ended_at = "cancelled", int(self.clock())
        self.store.keep_batch(batch)

    # --- one batch -----------------------------------------------------------------------------------------------

    async def _run(self, batch: StoredBatch, lines: list[BatchLine] | None) -> None:
        try:
            if batch.state == "in_progress":
                if lines is None:
                    lines, _ = read_lines(self.store.read(batch.input_file_id), batch.endpoint)
                await self._run_to_its_end(batch, lines)
        except OSError as error:
            logger.warning("%s stops, and goes on after a restart: %s", batch.id, error)
        except Exception as mistake:
            logger.error("%s stops, and goes on after a restart", batch.id, exc_info=mistake)
        finally:
            self._scopes.pop(batch.id, None)

    # As many tasks as there is room take its requests from one iterator. So all batches have the same share of the
    # room, however many requests they have, and none is held in memory twice.
    async def _run_to_its_end(self, batch: StoredBatch, lines: list[BatchLine]) -> None:
        answered = self._read_answered(batch)
        left = [line for line in lines if line.custom_id not in answered]
        requests = iter(left)
        with trio.move_on_after(max(0.0, batch.expires_at - self.clock())) as scope:
            self._scopes[batch.id] = scope
            if batch.cancelling_at is not None:
                scope.cancel()
            async with trio.open_nursery() as nursery:
                for _ in range(min(self._n_at_once, len(left))):
                    nursery.start_soon(self._work, batch, requests, answered)
        state: State = "completed"
        if not lines:
            batch.faults = (LineFault("missing_file", "the file of requests is gone"),)
            state = "failed"
        elif scope.cancelled_caught and batch.cancelling_at is not None:
            state = "cancelled"
        elif scope.cancelled_caught:
            state = "expired"
            late = [line for line in lines if line.custom_id not in answered]
            await self._write(batch.error_file_id, b"".join(write_expired(line.custom_id) for line in late))
            batch.n_failed += len(late)
        batch.state, batch.ended_at = state, int(self.clock())
        self.store.keep_batch(batch)

    def _read_answered(self, batch: StoredBatch) -> set[str]:
        """Read which requests have an answer, and count them; a line that was cut is dropped. Raises OSError."""
        found = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is None:
                raise OSError(f"{batch.id} names no file for its answers")
            ids, n_bytes = read_answered(self.store.read(file_id))
            self.store.cut(file_id, n_bytes)
            found.append(ids)
        batch.n_completed, batch.n_failed = map(len, found)
        return found[0] | found[1]

    async def _work(self, batch: StoredBatch, requests: Iterator[BatchLine], answered: set[str]) -> None:
        for line in requests:
            try:
                written = write_answer(line.custom_id, 200, await self._answer_line(batch, line))
                is_answered = True
            except ApiError as error:
                written = write_answer(line.custom_id, error.status, error.body)
                is_answered = False
            await self._write(batch.output_file_id if is_answered else batch.error_file_id, written)
            answered.add(line.custom_id)
            batch.n_completed += is_answered
            batch.n_failed += not is_answered

    async def _answer_line(self, batch: StoredBatch, line: BatchLine) -> JsonObject:
        """Answer one request, coming back as often as it takes. Raises ApiError for what cannot be answered."""
        is_admitted = False  # once: a request that has to come back is none more
        while True:
            try:
                async with self._room:
                    if not is_admitted:
                        self._admit(batch.owner)
                        is_admitted = True
                    return await self._answer(batch.endpoint, batch.owner, bytes(line.body))
            except ApiError as error:
                if error.retry_after_s is None:
                    raise
                wait_s = error.retry_after_s
            except Exception as mistake:
                logger.error("a request of %s failed", batch.id, exc_info=mistake)
                raise internal_error() from None
            await trio.sleep(wait_s)

    async def _write(self, file_id: str | None, lines: bytes) -> None:
        """Add lines to a file of answers, as soon as the disk takes them. Raises OSError for one that is gone."""
        assert file_id is not None
        while not self.store.append(file_id, lines):
            await trio.sleep(FULL_DISK_S)
