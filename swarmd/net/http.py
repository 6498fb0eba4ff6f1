"""HTTP/1.1 for strangers: an error that escapes one connection ends that connection, and nothing else.

hypercorn runs all connections in one nursery, which is the server's: what its parsers do not foresee in a stranger's
first bytes would end the program. So each connection is guarded by itself. HTTP/2 and websockets, which nothing here
speaks, never reach a parser: an upgrade is passed over, as HTTP has it, and HTTP/2 is refused at its opening line.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import h11
import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Closed, Event
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr, wrap_app
from starlette.applications import Starlette

logger = logging.getLogger(__name__)
VERSIONS = (b"1.0", b"1.1")
NOT_SUPPORTED = 505  # "HTTP Version Not Supported"

Connect = Callable[[trio.SocketStream], Awaitable[None]]


class _RefusedRequest(Exception):
    """A request of another version of HTTP."""


class _HttpOne(H11Protocol):  # type: ignore[misc]  # hypercorn has no types
    """HTTP/1.1 and nothing that it could become."""

    async def handle(self, event: Event) -> None:
        """Act on what the socket brought; another version of HTTP is told so, and the connection ends."""
        try:
            await super().handle(event)
        except _RefusedRequest:
            await self._send_error_response(NOT_SUPPORTED)
            await self.send(Closed())

    async def _check_protocol(self, request: h11.Request) -> None:
        if request.http_version not in VERSIONS:
            raise _RefusedRequest

    async def _create_stream(self, request: h11.Request) -> None:
        headers = [(name, value) for name, value in request.headers if name.lower() != b"upgrade"]
        plain = h11.Request(
            method=request.method, target=request.target, headers=headers, http_version=request.http_version
        )
        await super()._create_stream(plain)


class _HttpConnection(TCPServer):  # type: ignore[misc]  # hypercorn has no types
    """hypercorn's connection over a plain socket, with HTTP/1.1 alone."""

    async def run(self) -> None:
        """Serve the connection until it ends; the library's own would look for TLS and HTTP/2."""
        connected_socket = self.stream.socket
        try:
            client = parse_socket_addr(connected_socket.family, connected_socket.getpeername())
            server = parse_socket_addr(connected_socket.family, connected_socket.getsockname())
            async with TaskGroup() as task_group:
                self._task_group = task_group
                self.protocol = _HttpOne(
                    self.app,
                    self.config,
                    self.context,
                    task_group,
                    ConnectionState(self.state),
                    False,
                    client,
                    server,
                    self.protocol_send,
                )
                await self.idle_task.restart(task_group, self._idle_timeout)
                await self._read_data()
        except OSError:
            pass
        finally:
            await self._close()


async def serve_http(
    application: Starlette,
    config: HypercornConfig,
    listening: list[socket.socket],
    connect: Connect | None = None,
) -> None:
    """Serve at sockets that listen already, until cancelled; they are closed then.

    ``connect`` is what a connection's whole life is.
    """
    app = wrap_app(application, config.wsgi_max_body_size, "asgi")
    context = WorkerContext(None)

    async def answer(stream: trio.SocketStream) -> None:
        await _HttpConnection(app, config, context, ConnectionState({}), stream)

    async def guarded(stream: trio.SocketStream) -> None:
        try:
            await (connect or answer)(stream)
        except* Exception as errors:  # noqa: BLE001 - a connection is a stranger's: it fails in any way, and ends alone
            logger.warning("a connection over HTTP ended with %s", _error_kinds(errors))

    sockets = [trio.socket.from_stdlib_socket(listening_socket) for listening_socket in listening]
    listeners = [trio.SocketListener(listening_socket) for listening_socket in sockets]
    try:
        await trio.serve_listeners(guarded, listeners)
    finally:
        for listener in listeners:
            listener.socket.close()


def _error_kinds(errors: BaseExceptionGroup[Any]) -> str:
    """Which errors a group is made of, without a word of what a stranger sent."""
    kinds: set[str] = set()
    for error in errors.exceptions:
        kinds.add(_error_kinds(error) if isinstance(error, BaseExceptionGroup) else type(error).__name__)
    return ", ".join(sorted(kinds))
