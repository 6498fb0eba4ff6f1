"""Every verb of the command line, a new one too, started in every way that programs are started.

Each ends with an exit code of docs/operating.md, and one sentence at most: never a traceback, never a wait. And nothing
that asks this machine's own daemon or gateway goes to a proxy.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import typer
from swarmd_cli.main import app

from swarmd.gateway.address import ADDRESS_FILE
from swarmd.home.founder import Founder
from swarmd.home.paths import Home
from swarmd.node.machine.control import VERBS
from swarmd.node.worker.forkserver import ForkedProcess
from tests.cli import started_as
from tests.cli.answers import filled

pytestmark = pytest.mark.slow
NAME = "größe-→"
CODES = {0, 1, 2, 3, 4, 5, 75, 130}
TIMEOUT_S = 60.0  # of a command on a busy machine: one that waits for ever fails
# What a verb needs so that it ends: else it starts what runs until it is told to stop, or asks a person.
WORDS = {
    "up": ["--listen", NAME],
    "gateway": ["--listen", NAME],
    "demo": ["--chat", NAME],
    "top": ["--interval", "0.5"],
    "open": ["--print"],
    "run": [NAME, NAME],
    "members favour": [NAME, "2"],
    "policy set": ["not_while", NAME],
}
WITHOUT_MEMBERSHIP = ("init", "join")
WITHOUT_DAEMON = ("down", "leave")  # they wait until it is gone, and the one that is played stays
IMPORTED = ("swarmd_cli.main", "swarmd.daemon", "swarmd.net.libp2p.host", "swarmd.training_runs", "rich.live", "httpx")


def find_verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield each verb as it is typed, with what it takes, from the program itself."""
    if path and (command.invoke_without_command if hasattr(command, "commands") else True):
        yield " ".join(path), command
    for name, verb in getattr(command, "commands", {}).items():
        yield from find_verbs(verb, (*path, name))


ALL = dict(find_verbs(typer.main.get_command(app)))


def words_of(verb: str) -> list[str]:
    """What is typed: the verb, and a word that is no ASCII for everything that it must have."""
    if verb in WORDS:
        return [*verb.split(), *WORDS[verb]]
    words = verb.split()
    for parameter in ALL[verb].params:
        if parameter.required:
            words += [parameter.opts[0], NAME] if parameter.param_type_name == "option" else [NAME]
    return words


# --- a daemon and a gateway that only answer ---------------------------------------------------------------------


class Answering(BaseHTTPRequestHandler):
    """Answers each path with the JSON that ``server.answers`` has for it, and {} for any other."""

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        body = self.server.answers.get(urlsplit(self.path).path, b"{}")  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def address_string(self) -> str:
        return "a socket"

    def log_message(self, *_: object) -> None: ...


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Homes to run verbs in (a member whose daemon and gateway answer, one without, nobody), and a fork server."""
    folder = tmp_path_factory.mktemp("sweep")
    homes = {name: folder / name for name in ("member", "alone", "nobody")}
    Founder(Home(homes["alone"])).found(NAME)
    shutil.copytree(homes["alone"], homes["member"])
    daemon = UnixServer(str(folder / "daemon"), Answering)
    daemon.answers = {f"/v1/{verb.path}": msgspec.json.encode(filled(verb.answer)) for verb in VERBS}  # type: ignore[attr-defined]
    gateway = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    model = {"id": NAME, "swarmd": {"missing": [], "chats": True}}
    event = {"choices": [{"delta": {"content": NAME}}], "usage": {"completion_tokens": 1}}
    gateway.answers = {  # type: ignore[attr-defined]
        "/v1/models": json.dumps({"data": [model]}).encode(),
        "/v1/chat/completions": b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n",
    }
    (homes["member"] / "control.sock").symlink_to(folder / "daemon")
    (homes["member"] / ADDRESS_FILE).write_text(f"http://127.0.0.1:{gateway.server_port}\n")
    for server in (daemon, gateway):
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    path = folder / "forks"
    command = [sys.executable, "-m", "swarmd.node.worker.forkserver", str(path), "tests.cli.started_as", *IMPORTED]
    plain = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"}  # a child can stand in the locale C only then
    forks = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=plain)
    assert forks.stdin is not None
    assert forks.stdout is not None
    assert forks.stdout.readline() == b"ready\n"
    yield {**homes, "forks": path}
    forks.stdin.close()
    forks.wait(10)
    forks.stdout.close()
    for server in (daemon, gateway):
        server.shutdown()
        server.server_close()


def try_verb(verb: str, way: str, serving: dict[str, Path], folder: Path, **environment: str) -> str:
    """Run a verb in a home of its own; returns what was wrong with its end, "" for nothing."""
    kind = "nobody" if verb in WITHOUT_MEMBERSHIP else "alone" if verb in WITHOUT_DAEMON else "member"
    folder.mkdir()
    home, crash, output = folder / "home", folder / "crash", folder / "output"
    if kind != "nobody":
        shutil.copytree(serving[kind], home, symlinks=True)
    words = [way, str(crash), str(folder), "--home", str(home), *words_of(verb)]
    variables = {"HOME": str(folder), "PATH": str(folder), "TERM": "dumb", **environment}
    with output.open("w+b") as out:
        process = ForkedProcess(str(serving["forks"]), "tests.cli.started_as", words, [out.fileno()] * 2, variables, 2)
        try:
            code = process.wait(TIMEOUT_S)
        except TimeoutError:
            process.send_signal(9)
            return f"{verb} {way}: it does not end"
    text = output.read_bytes().decode(errors="replace")
    sentences = len(re.findall(r"^swarmd: ", text, re.MULTILINE))
    if crash.exists():
        return f"{verb} {way}: {crash.read_text()}"
    if code not in CODES or sentences > 1 or "Traceback" in text or "Exception ignored" in text:
        return f"{verb} {way}: exit code {code}\n{text}"
    return ""


@pytest.mark.parametrize("verb", ALL)
def test_a_verb_ends_well_however_it_is_started(verb: str, serving: dict[str, Path], tmp_path: Path) -> None:
    ways = [way for way in started_as.WAYS if way != started_as.AS_USUAL]
    tried = [try_verb(verb, way, serving, tmp_path / str(number)) for number, way in enumerate(ways)]
    assert not any(tried), "\n".join(filter(None, tried))


@pytest.mark.parametrize("verb", ALL)
def test_a_verb_asks_this_machine_without_a_proxy(verb: str, serving: dict[str, Path], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        proxy.setblocking(False)
        url = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        variables = {
            name: url for word in ("HTTP", "HTTPS", "ALL") for name in (f"{word}_PROXY", f"{word}_proxy".lower())
        }
        tried = try_verb(
            verb, started_as.AS_USUAL, serving, tmp_path / "0", NO_PROXY="[::1]", SSL_CERT_FILE="/gone.pem", **variables
        )
        assert not tried
        with pytest.raises(BlockingIOError):
            proxy.accept()
