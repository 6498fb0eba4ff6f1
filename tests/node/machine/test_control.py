"""The control API: one table makes the routes and the OpenAPI file; refusals are one sentence and an exit code."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

import swarmd.run_status as run_status
import swarmd.status as answers
from swarmd.errors import ConfigError, NoRoute
from swarmd.node.machine.control import SCHEMA, VERBS, application, openapi
from tools import openapi as openapi_file


class PlayedRuns:
    async def join(self, name: str, role: str, stage: int | None = None) -> run_status.JoinRunAnswer:
        return run_status.JoinRunAnswer(run="r" * 64, name=name, role=role)

    async def order(self, name: str, state: str, anchors: tuple[str, ...]) -> run_status.OrderAnswer:
        return run_status.OrderAnswer(run="r" * 64, state=state, anchors=anchors)


class PlayedDaemon:
    """Answers some of what can be asked, and notes what it was told."""

    def __init__(self) -> None:
        self.runs = PlayedRuns()
        self.stopped = False
        self.drained: list[str] = []

    def stop(self) -> None:
        self.stopped = True

    def drain(self, model: str) -> answers.DrainAnswer:
        self.drained.append(model)
        return answers.DrainAnswer(draining=True, sessions=2)

    def sessions(self) -> answers.SessionsAnswer:
        row = answers.SessionRow(session="s", client="c", blocks=(0, 3), received=2, finished=1, epoch=1, why="pushes")
        return answers.SessionsAnswer(sessions=(row,))

    def why(self, model: str) -> answers.WhyAnswer:
        raise ConfigError(f"the catalog has no model {model!r}")

    async def ping(self, peer: str) -> answers.PingAnswer:
        raise NoRoute("nobody")


async def ask(daemon: PlayedDaemon, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    transport = httpx.ASGITransport(application(daemon))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://swarmd") as http:
        answer = await http.request(method, f"/v1/{path}")
        is_json = bool(answer.content) and "json" in answer.headers["content-type"]
        return answer.status_code, answer.json() if is_json else {}


async def test_answers_carry_the_schema_and_their_fields() -> None:
    daemon = PlayedDaemon()
    code, body = await ask(daemon, "sessions")
    assert (code, body["schema"]) == (200, SCHEMA)
    assert body["sessions"][0]["blocks"] == [0, 3]
    assert await ask(daemon, "drain?model=demo", "POST") == (200, {"schema": 1, "draining": True, "sessions": 2})
    await ask(daemon, "drain", "POST")
    assert daemon.drained == ["demo", ""]
    code, body = await ask(daemon, "train/join?name=x&role=train", "POST")
    assert (code, body["name"]) == (200, "x")
    code, body = await ask(daemon, "train/order?name=x&state=running&anchors=a,,b", "POST")
    assert body["anchors"] == ["a", "b"]


@pytest.mark.parametrize(("path", "method", "exit_code"), [("why?model=nope", "GET", 2), ("ping?peer=x", "POST", 5)])
async def test_a_refusal_is_a_sentence_and_an_exit_code(path: str, method: str, exit_code: int) -> None:
    code, body = await ask(PlayedDaemon(), path, method)
    assert code == 409
    assert set(body) == {"schema", "error", "exit_code"}
    assert body["exit_code"] == exit_code


async def test_the_wrong_method_does_nothing_and_down_stops_after_its_answer() -> None:
    daemon = PlayedDaemon()
    assert (await ask(daemon, "down"))[0] == 405
    assert not daemon.stopped
    assert await ask(daemon, "down", "POST") == (200, {"schema": 1, "stopping": True})
    assert daemon.stopped


def test_every_answer_is_a_struct_whose_schema_is_in_the_openapi_file() -> None:
    assert openapi_file.FILE.read_text() == openapi_file.text(), "python -m tools.openapi writes it anew"
    assert all(issubclass(verb.answer, answers.Status) for verb in VERBS)
    for verb in VERBS:
        assert f"/v1/{verb.path}" in openapi()["paths"]


def test_an_answer_fits_its_own_schema() -> None:
    row = answers.SessionRow(session="s", client="c", blocks=(0, 3), received=2, finished=1, epoch=1, why="pushes")
    assert msgspec.json.decode(msgspec.json.encode(row), type=answers.SessionRow) == row
