"""Answers over HTTP, streamed or not, that end when the client has gone, and streams that never fall silent.

hypercorn on trio cancels a streamed answer by itself, a plain one never, and ``request.is_disconnected`` is always
False there (hypercorn's issue 210): both are done here alike, by a task that waits for the disconnect.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import trio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from swarmd.gateway.apis.refusals import ApiError, bad_request, internal_error

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 5.0  # of silence in a stream: proxies cut it after 50
STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Emit:
    """What a stream's author writes with: events, as JSON or as they are; a name where the API has names.

    ``sign_of_life`` writes what says nothing, in a silence: an event, where the API has one for that, as some clients
    do not count comments (Codex 0.169 gives up after its own patience).
    """

    def __init__(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        self._send = send
        self._headers = headers
        self.has_begun = False
        self._lock = trio.Lock()
        self.last_s = trio.current_time()
        self.sign_of_life: Callable[[], Awaitable[None]] = lambda: self.send_raw(b": still there\n\n")

    async def send_event(self, value: Any, name: str = "") -> None:
        """Send one event; bytes go as they are."""
        data = value if isinstance(value, bytes) else msgspec.json.encode(value)
        head = f"event: {name}\n".encode() if name else b""
        await self.send_raw(head + b"data: " + data + b"\n\n")

    async def send_line(self, value: Any) -> None:
        """Send one line of JSON, where the API has no events."""
        await self.send_raw(msgspec.json.encode(value) + b"\n")

    async def send_raw(self, data: bytes) -> None:
        """Send bytes, one sender at a time: an event must not be cut by a sign of life."""
        async with self._lock:
            self.last_s = trio.current_time()
            if not self.has_begun:
                self.has_begun = True
                await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await self._send({"type": "http.response.body", "body": data, "more_body": True})


# Three tasks share a stream, in one nursery: whichever ends first ends the others.
#
#     produce       writes events, until the answer has ended
#     keep alive    writes a sign of life after each silence, so that neither proxy nor client gives up
#     disconnect    waits until the client has gone, and cancels the answer, whose servers are free at once
#
# The status goes before the first event: an error that comes later can only be an event of the stream. With a greeting
# that is at once, as clients wait less for a status than for a token.


class EventStream(Response):
    """Server-sent events, written by ``produce``; ``fail`` puts an error into the API's form.

    ``refuse`` does so for one that comes before the first event.
    """

    content_type = b"text/event-stream; charset=utf-8"
    greeting = b": one moment\n\n"

    def __init__(
        self,
        produce: Callable[[Emit], Awaitable[None]],
        fail: Callable[[Emit, ApiError], Awaitable[None]],
        refuse: Callable[[ApiError], Response],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(headers=headers)
        self._produce = produce
        self._fail = fail
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        own_headers = [header for header in self.raw_headers if header[0] != b"content-length"]  # of an empty body
        headers = [(b"content-type", self.content_type), *STREAM_HEADERS, *own_headers]
        emit = Emit(send, headers)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
            nursery.start_soon(_keep_alive, emit)
            if self.greeting:
                await emit.send_raw(self.greeting)
            failure: ApiError | None = None
            try:
                await self._produce(emit)
            except ApiError as error:
                failure = error
            except Exception as mistake:
                logger.error("a stream failed", exc_info=mistake)
                failure = internal_error()
            if failure is not None and not emit.has_begun:
                await _with_headers(self._refuse(failure), self)(scope, receive, send)
            else:
                if failure is not None:
                    await self._fail(emit, failure)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            nursery.cancel_scope.cancel()


class LineStream(EventStream):
    """The same as lines of JSON, which begin when there is something to say."""

    content_type = b"application/x-ndjson"
    greeting = b""


class WholeAnswer(Response):
    """One JSON answer, made by ``produce``; ``refuse`` puts an error into the API's form."""

    def __init__(
        self,
        produce: Callable[[], Awaitable[Any]],
        refuse: Callable[[ApiError], Response],
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(headers=headers)
        self._produce = produce
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response: Response | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
            try:
                response = json_response(await self._produce())
            except ApiError as error:
                response = self._refuse(error)
            nursery.cancel_scope.cancel()
        if response is not None:
            await _with_headers(response, self)(scope, receive, send)


def _with_headers(response: Response, planned: Response) -> Response:
    """Give a response what was meant for the one that is sent in its place: who may read it, and what was skipped."""
    response.headers.update({name: value for name, value in planned.headers.items() if name != "content-length"})
    return response


def json_response(
    value: Any,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> Response:
    """Answer with a value as JSON."""
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def error_response(error: ApiError, body: dict[str, Any] | None = None) -> Response:
    """Answer with an error; in OpenAI's form, unless another API's ``body`` is given."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    return json_response(error.body if body is None else body, error.status, headers)


async def run_while_connected(receive: Receive, work: Callable[[], Awaitable[None]]) -> None:
    """Do some work, once the body has come, as long as the client is connected. Raises ApiError when it has gone."""
    failure: ApiError | None = None
    is_done = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_cancel_when_gone, receive, nursery.cancel_scope)
        try:
            await work()
            is_done = True
        except ApiError as error:
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    if not is_done:
        raise bad_request("the client has gone")


# The body must have been read before: ``receive`` gives its parts first, which would be lost here.
async def _cancel_when_gone(receive: Receive, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _keep_alive(emit: Emit) -> None:
    while True:
        await trio.sleep_until(emit.last_s + KEEP_ALIVE_S)
        if trio.current_time() >= emit.last_s + KEEP_ALIVE_S:
            await emit.sign_of_life()
