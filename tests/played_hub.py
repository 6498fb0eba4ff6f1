"""The hub, played by a web server on loopback: what all that play it have in common."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest


class HubHandler(BaseHTTPRequestHandler):
    """Answers for ranges of files, and says nothing of it."""

    def begin_range(self, path: Path, said_start: int | None = None) -> bytes:
        """Begin to answer with the range that was asked for; returns its bytes, which are still to be sent.

        ``said_start``: where it says that they begin, if that is not so.
        """
        matches = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"])
        assert matches is not None
        whole = path.read_bytes()
        start, stop = int(matches[1]), min(int(matches[2]) + 1, len(whole))
        data = whole[start:stop]
        self.send_response(206)
        self.send_header("Content-Length", str(len(data)))
        begin = start if said_start is None else said_start
        self.send_header("Content-Range", f"bytes {begin}-{begin + len(data) - 1}/{len(whole)}")
        self.end_headers()
        return data

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def served(handler: type[HubHandler], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve, as the hub that everything asks."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
