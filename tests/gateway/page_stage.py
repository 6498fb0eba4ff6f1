"""The page's own files before a gateway that says what a test has it say: no swarm, no model, a real Chromium."""

from __future__ import annotations

import json
import queue
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from playwright import sync_api as playwright

from swarmd.gateway.page import FILES, HEADERS, KINDS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WAIT_MS = 20_000
NARROW = {"width": 320, "height": 700}


def model(name: str, *missing: tuple[int, int], chats: bool | None = True, n_blocks: int = 6) -> dict[str, Any]:
    return {
        "name": name,
        "model": name * 8,
        "n_blocks": n_blocks,
        "missing": [list(m) for m in missing],
        "chats": chats,
    }


def swarm(*models: dict[str, Any]) -> dict[str, Any]:
    """A swarm of one peer that serves what is not missing."""
    spans = [
        {"model": m["model"], "start": 0, "end": m["n_blocks"], "state": "online", "dtype": "float32"}
        | {"quantize": "none", "tokens_per_s": 30.5}
        for m in models
    ]
    numbers = {"memory_gib": 15.6, "up_mbit": 20.0, "down_mbit": 100.0, "version": "0.2.0", "seen_at": 0}
    peer = {
        "peer": "12D3KooWabcdefgh",
        "short": "abcdefgh",
        "is_here": True,
        "device": "cpu",
        "spans": spans,
        **numbers,
    }
    return {"n_peers": 1, "models": list(models), "peers": [peer]}


@dataclass
class Stage:
    """A page, and the gateway behind it."""

    page: Any
    url: str
    news: queue.Queue[bytes]
    complaints: list[str] = field(default_factory=list)

    def say(self, name: str, body: Any) -> None:
        self.news.put(f"event: {name}\ndata: {json.dumps(body)}\n\n".encode())

    def open(self, view: str = "chat") -> None:
        self.page.goto(f"{self.url}/#/{view}")

    def see(self, selector: str, text: str) -> None:
        self.page.locator(selector, has_text=text).first.wait_for(timeout=WAIT_MS)

    def too_wide(self) -> int:
        """How many pixels the page is wider than its window."""
        return int(self.page.evaluate("() => document.documentElement.scrollWidth - innerWidth"))


@contextmanager
def stage(viewport: dict[str, int] | None = None) -> Iterator[Stage]:
    news: queue.Queue[bytes] = queue.Queue()

    class Gateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.rpartition("/")[2] or "index.html"
            self.send_response(200 if name == "news" or name in FILES else 404)
            kind = "text/event-stream" if name == "news" else KINDS.get(f".{name.rpartition('.')[2]}", "text/plain")
            for key, value in {**HEADERS, "content-type": kind}.items():
                self.send_header(key, value)
            self.end_headers()
            if name in FILES:
                self.wfile.write(FILES[name].read_bytes())
            while name == "news" and (said := news.get()):
                self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with playwright.sync_playwright() as api:
            chromium = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = chromium.new_context(viewport=viewport or NARROW).new_page()
            found = Stage(page, f"http://127.0.0.1:{server.server_port}", news)
            page.on("console", lambda m: found.complaints.append(m.text) if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: found.complaints.append(str(error)))
            yield found
            assert not found.complaints, "the console is silent"
            chromium.close()
    finally:
        news.put(b"")
        server.shutdown()
        server.server_close()
