"""How verbs ask a gateway of this machine, whatever the environment says of proxies and certificates."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from swarmd_cli.gateway_client import GatewayClient

MODELS = {"data": [{"id": "demo", "swarmd": {"missing": [], "chats": True}}]}
EVENT = {"choices": [{"text": "hello"}], "usage": {"completion_tokens": 1}}


class PlayedGateway(BaseHTTPRequestHandler):
    """Lists one model, and answers with one event."""

    def do_GET(self) -> None:
        self._answer(json.dumps(MODELS))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self._answer(f"data: {json.dumps(EVENT)}\n\ndata: [DONE]\n\n")

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def gateway() -> Iterator[GatewayClient]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), PlayedGateway)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))  # how often it looks whether to end
    thread.start()
    yield GatewayClient(f"http://127.0.0.1:{server.server_address[1]}", "secret")
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("name", ["HTTP_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"])
def test_a_gateway_of_this_machine_is_never_asked_through_a_proxy(
    gateway: GatewayClient, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A proxy would read the prompt and the token."""
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        proxy.settimeout(0.0)
        monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        assert [entry.id for entry in gateway.models()] == ["demo"]
        (event,) = gateway.stream("/v1/completions", {"model": "demo", "prompt": "hello"})
        assert event.usage is not None
        with pytest.raises(BlockingIOError):
            proxy.accept()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NO_PROXY", "[::1]"),
        ("SSL_CERT_FILE", "/nowhere/ca.pem"),
        ("ALL_PROXY", "socks5://127.0.0.1:1"),
        ("HTTP_PROXY", "x"),
    ],
)
def test_settings_for_other_hosts_that_cannot_be_used_hinder_nothing(
    gateway: GatewayClient, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert [entry.id for entry in gateway.models()] == ["demo"]
