"""The control API: HTTP over a Unix socket that only its owner can open; the one door for the command line.

One table says which path asks what and what comes back (a struct of ``status``, with "schema": 1); the routes and the
OpenAPI file are made from it. docs/operating.md lists them.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import trio
from hypercorn.config import Config as HypercornConfig
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import swarmd.run_status as run_status
import swarmd.status as answers
from swarmd.errors import ConfigError, SwarmError
from swarmd.member_status import PeersAnswer
from swarmd.net.api import TaskStatus
from swarmd.net.http import serve_http
from swarmd.printable import clean_strings
from swarmd.status import Status

SCHEMA = 1  # of what is answered; raised when a field changes its meaning


class RunControl(Protocol):
    """What it can ask of a daemon's training runs."""

    def status(self) -> run_status.RunsAnswer: ...

    def plan(self, name: str) -> run_status.PlanAnswer: ...

    def pause(self, name: str, is_paused: bool) -> run_status.PauseRunAnswer: ...

    async def join(self, name: str, role: str, stage: int | None = None) -> run_status.JoinRunAnswer: ...

    async def leave(self, name: str, stage: int | None = None) -> run_status.LeaveRunAnswer: ...

    async def order(
        self,
        name: str,
        state: str,
        anchors: tuple[str, ...],
    ) -> run_status.OrderAnswer: ...

    async def checkpoint(self, name: str) -> run_status.CheckpointAnswer: ...


class ControlServices(Protocol):
    """What the control API can ask of a daemon."""

    @property
    def runs(self) -> RunControl: ...

    @property
    def stop(self) -> Callable[[], None]: ...

    def status(self) -> answers.DaemonStatus: ...

    def peers(self) -> PeersAnswer: ...

    def sessions(self) -> answers.SessionsAnswer: ...

    def models(self) -> answers.ModelsAnswer: ...

    def why(self, model: str) -> answers.WhyAnswer: ...

    def addresses(self) -> answers.AddressesAnswer: ...

    async def meet(self, addresses: str) -> answers.MeetAnswer: ...

    async def ping(self, peer: str) -> answers.PingAnswer: ...

    def downloads(self) -> answers.DownloadsAnswer: ...

    def here(self, model: str) -> answers.HereAnswer: ...

    def pull(self, model: str, blocks: str) -> answers.PullAnswer: ...

    def remove(self, model: str) -> answers.RemoveAnswer: ...

    async def reload(self) -> answers.ReloadAnswer: ...

    def drain(self, model: str) -> answers.DrainAnswer: ...

    def pause(self, seconds: str) -> answers.PauseAnswer: ...

    def resume(self, model: str) -> answers.ResumeAnswer: ...


Query = dict[str, str]
Call = Callable[[ControlServices, Query], Status | Awaitable[Status]]


@dataclass(frozen=True, slots=True)
class Verb:
    """One request of the API: its path, the struct of its answer, the parameters of its query ("" if absent)."""

    path: str
    answer: type[Status]
    call: Call
    parameters: tuple[str, ...] = ()
    method: str = "GET"


def _get(
    path: str,
    answer: type[Status],
    call: Call,
    *parameters: str,
) -> Verb:
    """A request that changes nothing."""
    return Verb(path, answer, call, parameters)


def _post(
    path: str,
    answer: type[Status],
    call: Call,
    *parameters: str,
) -> Verb:
    """A request that acts."""
    return Verb(path, answer, call, parameters, "POST")


def _order_run(daemon: ControlServices, query: Query) -> Awaitable[Status]:
    anchors = tuple(anchor for anchor in query["anchors"].split(",") if anchor)
    return daemon.runs.order(query["name"], query["state"], anchors)


def _join_run(daemon: ControlServices, query: Query) -> Awaitable[Status]:
    return daemon.runs.join(query["name"], query["role"], _read_stage(query))


def _leave_run(daemon: ControlServices, query: Query) -> Awaitable[Status]:
    return daemon.runs.leave(query["name"], _read_stage(query))


def _read_stage(query: Query) -> int | None:
    """Read which stage is meant; None: none was named. Raises ConfigError."""
    stage = query["stage"]
    if stage and not stage.isdecimal():
        raise ConfigError(f"a stage is a number from 0 on, not {stage!r}")
    return int(stage) if stage else None


def _pause_run(daemon: ControlServices, query: Query) -> Status:
    return daemon.runs.pause(query["name"], True)


def _unpause_run(daemon: ControlServices, query: Query) -> Status:
    return daemon.runs.pause(query["name"], False)


VERBS = (
    _get("status", answers.DaemonStatus, lambda d, q: d.status()),
    _get("peers", PeersAnswer, lambda d, q: d.peers()),
    _get("sessions", answers.SessionsAnswer, lambda d, q: d.sessions()),
    _get("models", answers.ModelsAnswer, lambda d, q: d.models()),
    _get("why", answers.WhyAnswer, lambda d, q: d.why(**q), "model"),
    _get("addresses", answers.AddressesAnswer, lambda d, q: d.addresses()),
    _get("downloads", answers.DownloadsAnswer, lambda d, q: d.downloads()),
    _get("here", answers.HereAnswer, lambda d, q: d.here(**q), "model"),
    _post("meet", answers.MeetAnswer, lambda d, q: d.meet(**q), "addresses"),
    _post("ping", answers.PingAnswer, lambda d, q: d.ping(**q), "peer"),
    _post("pull", answers.PullAnswer, lambda d, q: d.pull(**q), "model", "blocks"),
    _post("rm", answers.RemoveAnswer, lambda d, q: d.remove(**q), "model"),
    _post("reload", answers.ReloadAnswer, lambda d, q: d.reload()),
    _post("drain", answers.DrainAnswer, lambda d, q: d.drain(**q), "model"),
    _post("pause", answers.PauseAnswer, lambda d, q: d.pause(**q), "seconds"),
    _post("resume", answers.ResumeAnswer, lambda d, q: d.resume(**q), "model"),
    _post("down", answers.DownAnswer, lambda d, q: answers.DownAnswer(stopping=True)),
    _get("train", run_status.RunsAnswer, lambda d, q: d.runs.status()),
    _get("train/plan", run_status.PlanAnswer, lambda d, q: d.runs.plan(**q), "name"),
    _post("train/join", run_status.JoinRunAnswer, _join_run, "name", "role", "stage"),
    _post("train/pause", run_status.PauseRunAnswer, _pause_run, "name"),
    _post("train/unpause", run_status.PauseRunAnswer, _unpause_run, "name"),
    _post("train/leave", run_status.LeaveRunAnswer, _leave_run, "name", "stage"),
    _post("train/order", run_status.OrderAnswer, _order_run, "name", "state", "anchors"),
    _post("train/checkpoint", run_status.CheckpointAnswer, lambda d, q: d.runs.checkpoint(**q), "name"),
)


# The file system decides who may ask: the socket has mode 0600 in a folder of mode 0700. A token would add nothing: a
# program that can read the folder has the member's keys. A web page cannot ask either: browsers open no Unix sockets.
def application(daemon: ControlServices) -> Starlette:
    """Build the ASGI application."""

    async def stop_daemon() -> None:  # once the answer is on its way
        daemon.stop()

    routes = []
    for verb in VERBS:
        background = BackgroundTask(stop_daemon) if verb.path == "down" else None
        routes.append(_route(daemon, verb, background))
    return Starlette(routes=routes)


def _route(daemon: ControlServices, verb: Verb, background: BackgroundTask | None) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            query = {name: request.query_params.get(name, "") for name in verb.parameters}
            answer = verb.call(daemon, query)
            value = await answer if isinstance(answer, Awaitable) else answer
        except SwarmError as error:
            return _json(answers.RefusalAnswer(error=str(error), exit_code=error.exit_code), 409)
        return _json(value, 200, background)

    return Route(f"/v1/{verb.path}", endpoint, methods=[verb.method])


def _json(value: Status, code: int, background: BackgroundTask | None = None) -> Response:
    fields = msgspec.to_builtins(value)
    body = msgspec.json.encode({"schema": SCHEMA, **clean_strings(fields)})  # it is read in a terminal, sooner or later
    headers = {"connection": "close"}  # hypercorn would keep the handle of a client that has gone
    return Response(body, code, headers, media_type="application/json", background=background)


def openapi() -> dict[str, Any]:
    """The control API as OpenAPI 3.1: docs/openapi.json is this, and a test says so."""
    structs = [*dict.fromkeys(verb.answer for verb in VERBS), answers.RefusalAnswer]
    schemas, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    by_struct = dict(zip(structs, schemas, strict=True))

    def response(struct: type[Status], description: str) -> dict[str, Any]:
        envelope = {"type": "object", "properties": {"schema": {"const": SCHEMA}}, "required": ["schema"]}
        schema = {"allOf": [envelope, by_struct[struct]]}
        return {"description": description, "content": {"application/json": {"schema": schema}}}

    paths: dict[str, Any] = {}
    for verb in VERBS:
        text = {"type": "string"}
        parameters = [{"name": name, "in": "query", "schema": text} for name in verb.parameters]
        responses = {
            "200": response(verb.answer, "the answer"),
            "409": response(answers.RefusalAnswer, "why not"),
        }
        operation = {"parameters": parameters, "responses": responses}
        paths[f"/v1/{verb.path}"] = {verb.method.lower(): operation}
    info = {"title": "swarmd control API", "version": str(SCHEMA)}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def quiet_config() -> HypercornConfig:
    """Of a server within the daemon: it logs nothing by itself."""
    config = HypercornConfig()
    config.accesslog = config.errorlog = None
    return config


async def serve_control(
    daemon: ControlServices, path: Path, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve the API on a Unix socket of mode 0600 until cancelled."""
    path.unlink(missing_ok=True)
    config = quiet_config()
    config.bind = [f"unix:{path}"]
    config.umask = 0o177
    listening = config.create_sockets().insecure_sockets
    for listener in listening:
        listener.listen(config.backlog)
    task_status.started()
    try:
        await serve_http(application(daemon), config, listening)
    finally:
        with trio.CancelScope(shield=True):
            if path.exists():
                os.unlink(path)
