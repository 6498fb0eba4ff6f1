"""A gateway, and a daemon, that say what a test has them say, without a process."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import msgspec
from swarmd_cli.gateway_client import GatewayClient, ModelEntry, ModelPresence, StreamEvent


class PlayedGateway(GatewayClient):
    """Knows whole models by name, and which of them can chat; says some events, and an error where there is one."""

    def __init__(self, chats: dict[str, bool | None], *events: Any) -> None:
        super().__init__("http://nowhere", "")
        object.__setattr__(self, "played", (chats, events))

    def models(self) -> list[ModelEntry]:
        chats, _ = self.played  # type: ignore[attr-defined]
        return [ModelEntry(name, ModelPresence((), can)) for name, can in chats.items()]

    def stream(self, path: str, body: dict[str, Any]) -> Generator[StreamEvent]:
        _, events = self.played  # type: ignore[attr-defined]
        for event in events:
            if isinstance(event, Exception):
                raise event
            yield msgspec.convert(event, StreamEvent)


@contextmanager
def play_daemon(socket: Path, answer_to: Callable[[str], Any]) -> Iterator[None]:
    """Answer at a home's control socket what ``answer_to`` makes of a path, such as "status"."""

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            path = self.path.removeprefix("/v1/").partition("?")[0]
            body = json.dumps({"schema": 1, **answer_to(path)}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *words: Any) -> None: ...

    with socketserver.ThreadingUnixStreamServer(str(socket), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            socket.unlink()
