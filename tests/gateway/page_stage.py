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

import msgspec
from playwright import sync_api as playwright

from swarmd.gateway.page import FILES, HEADERS, KINDS
from swarmd.run_status import AuditsRow, RoundRow, RunPeerRow, RunRow

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
        "label": "abcdefgh (anna)",
        "is_here": True,
        "device": "cpu",
        "spans": spans,
        **numbers,
    }
    return {"n_peers": 1, "models": list(models), "peers": [peer]}


def run(name: str, losses: tuple[float, ...], **fields: Any) -> dict[str, Any]:
    """A training run as the daemon tells of it, well under way."""
    row = RunRow(
        run="c0ffee" * 10,
        name=name,
        role="train",
        state="running",
        why="computes",
        update=12,
        updates=100,
        head="aa",
        state_update=12,
        state_digest="bb",
        state_bytes=3 * 2**20,
        parameters=786_432,
        gathered=96,
        target=256,
        left_s=7.5,
        samples_per_s=21.4,
        anchors=("a",),
        losses=losses,
        samples=3_072,
        samples_gathered=16,
        samples_counted=1_024,
        samples_wasted=8,
        average_here=None,
        rounds_led=6,
        rounds_failed=1,
        last_round=RoundRow(
            gather_s=1.25,
            average_s=0.31,
            commit_s=0.12,
            n_members=3,
            n_reducers=3,
            expected_s=0.3,
            topology="parts",
            left_out=(),
        ),
        last_part_s=0.2,
        catch_ups=1,
        snapshots_fetched=1,
        last_catch_up_s=2.5,
        death_costs_at_most_s=5.0,
        peers=(
            RunPeerRow(peer="12D3KooWabcdefgh", role="anchor", update=12, samples=0, samples_per_s=0, status="signs"),
        ),
        shunned=(),
        audits=AuditsRow(one_in=32, why_not="", checked=4, samples=64, wrong=0, trouble=""),
        measured_samples_per_s=64.1,
        device="cpu",
    )
    return {**msgspec.to_builtins(row), **fields}


@dataclass
class Stage:
    """A page, and the gateway behind it."""

    page: Any
    url: str
    news: queue.Queue[bytes]
    replies: queue.Queue[list[dict[str, Any] | None]]
    asked: list[dict[str, Any]] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    key: str = ""  # without which nothing is told

    def say(self, name: str, body: Any) -> None:
        self.news.put(f"event: {name}\ndata: {json.dumps(body)}\n\n".encode())

    def reply(self, *deltas: dict[str, Any], finish: str = "stop", **extra: Any) -> None:
        """Have the gateway answer the next question so."""
        about = {"chain": ["[0,6) on abcdefgh"], "repairs": [], "doubts": [], "longest_stall_s": 0.0, **extra}
        usage = {"completion_tokens": 9, "prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 5}}
        chunks = [{"choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks.append({"choices": [{"delta": {}, "finish_reason": finish}]})
        self.replies.put([*chunks, {"choices": [], "usage": usage, "swarmd": about}])

    def ask(self, question: str) -> None:
        self.page.fill("#question", question)
        self.page.press("#question", "Enter")

    def open(self, view: str = "chat") -> None:
        self.page.goto(f"{self.url}/#/{view}")

    def see(self, selector: str, text: str) -> None:
        self.page.locator(selector, has_text=text).first.wait_for(timeout=WAIT_MS)

    def too_wide(self) -> int:
        """How many pixels the page is wider than its window."""
        return int(self.page.evaluate("() => document.documentElement.scrollWidth - innerWidth"))


@contextmanager
def started_chromium() -> Iterator[Any]:
    """A browser for many pages: it takes seconds to start, and a page in a context of its own shares nothing."""
    with playwright.sync_playwright() as api:
        chromium = api.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@contextmanager
def stage(chromium: Any, viewport: dict[str, int] | None = None) -> Iterator[Stage]:
    news: queue.Queue[bytes] = queue.Queue()
    replies: queue.Queue[list[dict[str, Any] | None]] = queue.Queue()

    class Gateway(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/page/files/").removeprefix("/page/").removeprefix("/") or "index.html"
            is_refused = name == "news" and stage_shown.key not in (self.headers["authorization"] or "")
            self.send_response(401 if is_refused else 200 if name == "news" or name in FILES else 404)
            kind = "text/event-stream" if name == "news" else KINDS.get(f".{name.rpartition('.')[2]}", "text/plain")
            for key, value in {**HEADERS, "content-type": kind}.items():
                self.send_header(key, value)
            self.end_headers()
            if name in FILES:
                self.wfile.write(FILES[name].read_bytes())
            while name == "news" and not is_refused and (event := news.get()):
                self.wfile.write(event)

        def do_POST(self) -> None:
            stage_shown.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            for chunk in replies.get(timeout=20):
                if chunk is None:  # nothing more, as long as the page listens
                    self.rfile.read(1)
                    return
                self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        context = chromium.new_context(viewport=viewport or NARROW)
        page = context.new_page()
        stage_shown = Stage(page, f"http://127.0.0.1:{server.server_port}", news, replies)
        page.on("console", lambda m: stage_shown.complaints.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: stage_shown.complaints.append(str(error)))
        yield stage_shown
        context.close()
        assert not stage_shown.complaints, "the console is silent"
    finally:
        news.put(b"")
        server.shutdown()
        server.server_close()
