"""HTTP for strangers: what escapes one connection ends it alone, and nothing becomes another protocol."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio
from hypercorn.config import Config as HypercornConfig
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarmd.net.http import Connect, serve_http

ANSWER = b"still there"


@asynccontextmanager
async def server(connect: Connect | None = None) -> AsyncIterator[int]:
    """An application that says one thing; yields its port. What ends the server fails the test."""

    async def endpoint(request: Request) -> Response:
        return Response(ANSWER)

    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    config = HypercornConfig()
    config.accesslog = config.errorlog = None
    application = Starlette(routes=[Route("/", endpoint, methods=["GET", "POST"])])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_http, application, config, [listening], connect)
        with trio.fail_after(20):
            yield listening.getsockname()[1]
        nursery.cancel_scope.cancel()


async def said(port: int, raw: bytes) -> bytes:
    """All that comes back for some bytes until the other side closes."""
    answer = bytearray()
    async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
        await stream.send_all(raw)
        async for part in stream:
            answer += part
    return bytes(answer)


def request(*headers: bytes, method: bytes = b"GET") -> bytes:
    return b"\r\n".join([method + b" / HTTP/1.1", b"Host: x", b"Connection: close", *headers, b"", b""])


@pytest.mark.parametrize("error", [LookupError, RecursionError, MemoryError, ValueError])
async def test_what_escapes_one_connection_ends_that_connection(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    async def stumble(stream: trio.SocketStream) -> None:
        first = await stream.receive_some()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            if first.startswith(b"BAD"):
                raise error("secret words of a stranger")
            await stream.send_all(ANSWER)
            nursery.cancel_scope.cancel()

    async with server(stumble) as port, await trio.open_tcp_stream("127.0.0.1", port) as waiting:
        assert await said(port, b"BAD") == b""
        await waiting.send_all(b"good")
        assert await waiting.receive_some() == ANSWER, "another connection, open all the time, goes on"
        assert await said(port, b"good") == ANSWER
    assert f"a connection over HTTP ended with {error.__name__}" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    "headers",
    [
        (b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAMAAABkAAQAAP__"),
        (b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Key: x", b"Sec-WebSocket-Version: 13"),
    ],
)
async def test_an_upgrade_is_passed_over(headers: tuple[bytes, ...]) -> None:
    async with server() as port:
        answer = await said(port, request(*headers))
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(ANSWER)


async def test_http_2_is_refused_at_its_opening_line() -> None:
    async with server() as port:
        answer = await said(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64))
        assert answer.startswith(b"HTTP/1.1 505 ")
        assert ANSWER in await said(port, request())


@pytest.mark.parametrize(
    "raw", [b"\xff" * 40, b"GET\r\n\r\n", b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01"]
)
async def test_other_openings_end_nothing(raw: bytes) -> None:
    async with server() as port:
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(raw)
        assert ANSWER in await said(port, request())


async def test_two_requests_share_a_connection() -> None:
    async with server() as port:
        first = request(b"Content-Length: 0", method=b"POST").replace(b"Connection: close\r\n", b"")
        assert (await said(port, first + request())).count(ANSWER) == 2
