"""A gateway as verbs ask it: the one of this home that runs, or a child for as long as a verb needs one. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from swarmd_cli.context import JsonObject, home
from swarmd_cli.terminal import rewrite_line

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
TAKEN_WITHIN_S = 10.0  # a connection, and what is asked; an answer may need a model that is read first


class ModelPresence(msgspec.Struct, frozen=True):
    """What the swarm has of a model: the blocks that nobody serves, and whether it can chat (None: not known)."""

    missing: tuple[Any, ...]
    chats: bool | None


class ModelEntry(msgspec.Struct, frozen=True):
    """A model as GET /v1/models lists it."""

    id: str
    swarmd: ModelPresence


class AnswerDoubt(msgspec.Struct, frozen=True):
    """From this token on an answer may be wrong: which hop, and why."""

    token: int
    hop: str
    reason: str


class AnswerDetails(msgspec.Struct, frozen=True):
    """What a gateway tells about an answer beside its text."""

    chain: tuple[str, ...] = ()
    repairs: tuple[str, ...] = ()
    longest_stall_s: float = 0.0
    doubts: tuple[AnswerDoubt, ...] = ()


class AnswerUsage(msgspec.Struct, frozen=True):
    """How many tokens an answer has."""

    completion_tokens: int


class TextDelta(msgspec.Struct, frozen=True):
    """What a chat's answer has grown by."""

    content: str | None = None
    reasoning_content: str | None = None


class StreamChoice(msgspec.Struct, frozen=True):
    """What an answer has grown by: ``delta`` of a chat, ``text`` of a completion."""

    delta: TextDelta | None = None
    text: str | None = None


class StreamEvent(msgspec.Struct, frozen=True):
    """One event of an answer that is streamed; ``usage`` comes with the last."""

    choices: tuple[StreamChoice, ...] = ()
    usage: AnswerUsage | None = None
    swarmd: AnswerDetails = AnswerDetails()


@dataclass(frozen=True, slots=True)
class GatewayClient:
    """Where a gateway is, and what lets this machine's user in."""

    url: str
    token: str

    def models(self) -> list[ModelEntry]:
        """List the models of the swarm, as GET /v1/models has them. Raises SwarmError."""
        import httpx

        try:
            with _open_client(httpx.Timeout(30)) as http:
                answer = http.get(f"{self.url}/v1/models", headers=self._headers)
        except httpx.TransportError as error:
            raise _connection_lost(error) from None
        _require_ok(answer)
        return _convert(answer.json()["data"], list[ModelEntry])

    def stream(self, path: str, body: JsonObject) -> Generator[StreamEvent]:
        """Yield the events of an answer, the usage with the last. Raises SwarmError: refused, or broken off."""
        import httpx

        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        limits = httpx.Timeout(TAKEN_WITHIN_S, read=None)
        try:
            url = self.url + path
            with (
                _open_client(limits) as http,
                http.stream("POST", url, json=body, headers=self._headers) as answer,
            ):
                _require_ok(answer)
                for line in answer.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise _error_of_refusal(event["error"])
                        yield _convert(event, StreamEvent)
        except httpx.TransportError as error:
            raise _connection_lost(error) from None

    @property
    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token}"} if self.token else {}


def find_gateway() -> GatewayClient | None:
    """Find the gateway of this home, if one runs and answers: one that was killed leaves its address behind."""
    from swarmd.gateway.address import read_token, read_url

    folder = home().folder
    url = read_url(folder)
    if url is None or not _does_answer(url):
        return None
    return GatewayClient(url, read_token(folder))


@contextmanager
def open_gateway() -> Iterator[GatewayClient]:
    """Yield the gateway of this home that runs, else a child that ends with this process."""
    running = find_gateway()
    if running is not None:
        yield running
        return
    from swarmd.config import SUPERVISED
    from swarmd.errors import SwarmUnavailable
    from swarmd.gateway.address import read_token
    from swarmd.node.machine.gateway_process import command

    folder = home().folder
    log = folder / "chat.log"
    # The child is supervised: it ends when its standard input is closed, which the kernel does however this process
    # ends. It prints where it listens once it does; a line without that, or none, is its end.
    with log.open("w", encoding="utf-8") as errors:
        child = subprocess.Popen(
            [*command(folder), "--listen", "127.0.0.1:0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, SUPERVISED: "1"},
        )
    is_terminal = sys.stderr.isatty()
    if is_terminal:
        rewrite_line("waking up ...")
    try:
        assert child.stdout is not None
        line = child.stdout.readline().decode()
        if is_terminal:
            rewrite_line("")
        if " is at " not in line:
            log_lines = log.read_text(encoding="utf-8").strip().splitlines() or [
                "the gateway ended, and did not say why"
            ]
            raise SwarmUnavailable(log_lines[-1].removeprefix("swarmd: "))
        yield GatewayClient(line.split(" is at ")[1].split()[0], read_token(folder))
    finally:
        child.terminate()
        child.wait()


def require_listed(name: str, listed: list[ModelEntry]) -> None:
    """Refuse a name that is none of the models listed, and no hash. Raises ConfigError."""
    from swarmd.errors import ConfigError
    from swarmd.names import is_model_hash

    names = [entry.id for entry in listed]
    if name not in names and not is_model_hash(name):
        raise ConfigError(f"the swarm has no model {name!r}; it has: {', '.join(names) or 'none yet'}")


def describe_answer(details: AnswerDetails) -> list[str]:
    """Write for a user what a gateway tells about an answer: repairs, and from where on it may be wrong."""
    repairs = [f"repaired meanwhile ({details.longest_stall_s:.2f} s): {reason}" for reason in details.repairs]
    doubts = [describe_doubt(doubt.token, doubt.hop, doubt.reason) for doubt in details.doubts[:1]]
    return repairs + doubts


def describe_doubt(token: int, hop: str, reason: str) -> str:
    """Tell a user that the tokens of an answer from ``token`` on (the first is 0) are in doubt."""
    return f"from token {token + 1} of the answer on the text may be wrong: {hop}: {reason}"


def _convert(value: Any, kind: type[T]) -> T:
    """Decode what a gateway sent. Raises SwarmError when one of another version says something else."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        from swarmd.errors import SwarmError

        raise SwarmError(f"the gateway is of another version than this command: {error}: start it anew") from None


def _open_client(timeout: httpx.Timeout) -> httpx.Client:
    """Open what asks a gateway of this machine: never through a proxy, which would read prompts and the token."""
    import httpx

    return httpx.Client(timeout=timeout, trust_env=False)


def _does_answer(url: str) -> bool:
    import httpx

    try:
        with _open_client(httpx.Timeout(5)) as http:
            http.get(f"{url}/health")
    except httpx.TransportError:
        return False
    return True


def _require_ok(answer: Any) -> None:
    """Raise what a gateway refused with."""
    if answer.status_code == 200:
        return
    answer.read()
    try:
        refusal = dict(answer.json()["error"])
    except (ValueError, KeyError, TypeError):
        refusal = {"message": f"the gateway answered {answer.status_code}"}
    raise _error_of_refusal(refusal)


def _error_of_refusal(refusal: JsonObject) -> Exception:
    """Make the error that a refusal in OpenAI's form stands for."""
    from swarmd.errors import ConfigError, NoRoute, SwarmUnavailable

    message = str(refusal.get("message", ""))
    if refusal.get("code") == "model_incomplete":
        return NoRoute(message)
    return ConfigError(message) if refusal.get("type") == "invalid_request_error" else SwarmUnavailable(message)


def _connection_lost(error: Exception) -> Exception:
    from swarmd.errors import SwarmUnavailable

    return SwarmUnavailable(f"the gateway is gone: {error or type(error).__name__}")
