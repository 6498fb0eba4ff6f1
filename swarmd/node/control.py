"""The control API: HTTP over a Unix socket that only its owner can open; the one door for the command line.

Routes return plain JSON with "schema": 1. docs/operating.md lists them.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import trio
from hypercorn.config import Config as HypercornConfig
from hypercorn.trio import serve
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from swarmd.errors import SwarmError
from swarmd.net.api import TaskStatus


class ControlledRuns(Protocol):
    """What it can ask of a daemon's training runs."""

    def status(self) -> dict[str, Any]: ...

    def plan(self, name: str) -> dict[str, Any]: ...

    def pause(self, name: str, is_paused: bool) -> dict[str, Any]: ...

    async def join(self, name: str, role: str) -> dict[str, Any]: ...

    async def leave(self, name: str) -> dict[str, Any]: ...

    async def order(self, name: str, state: str, anchors: tuple[str, ...]) -> dict[str, Any]: ...

    async def checkpoint(self, name: str) -> dict[str, Any]: ...


class Controlled(Protocol):
    """What the control API can ask of a daemon."""

    @property
    def runs(self) -> ControlledRuns: ...

    def status(self) -> dict[str, Any]: ...

    def peers(self) -> list[dict[str, Any]]: ...

    def sessions(self) -> list[dict[str, Any]]: ...

    def models(self) -> list[dict[str, Any]]: ...

    def why(self, model: str) -> dict[str, Any]: ...

    def addresses(self) -> dict[str, Any]: ...

    async def ping(self, peer: str) -> dict[str, Any]: ...

    def downloads(self) -> list[dict[str, Any]]: ...

    def here(self, model: str) -> dict[str, Any]: ...

    def pull(self, model: str, blocks: str) -> dict[str, Any]: ...

    def remove(self, model: str) -> dict[str, Any]: ...

    def reload(self) -> dict[str, Any]: ...

    def drain(self) -> dict[str, Any]: ...

    def resume(self) -> dict[str, Any]: ...

    def stop(self) -> None: ...


Answer = Callable[[Request], Any]


def application(daemon: Controlled) -> Starlette:
    """Build the ASGI application."""

    def route(path: str, answer: Answer, method: str = "GET", after: Callable[[], object] | None = None) -> Route:
        async def endpoint(request: Request) -> JSONResponse:
            try:
                value = answer(request)
                if isinstance(value, Awaitable):
                    value = await value
            except SwarmError as error:
                body = {"schema": 1, "error": str(error), "exit_code": error.exit_code}
                return JSONResponse(body, status_code=409)
            return JSONResponse({"schema": 1, **value}, background=BackgroundTask(after) if after else None)

        return Route(path, endpoint, methods=[method])

    async def stop_daemon() -> None:  # once the answer is on its way
        daemon.stop()

    return Starlette(
        routes=[
            route("/v1/status", lambda _: daemon.status()),
            route("/v1/peers", lambda _: {"peers": daemon.peers()}),
            route("/v1/sessions", lambda _: {"sessions": daemon.sessions()}),
            route("/v1/models", lambda _: {"models": daemon.models()}),
            route("/v1/why", lambda r: daemon.why(r.query_params.get("model", ""))),
            route("/v1/addresses", lambda _: daemon.addresses()),
            route("/v1/ping", lambda r: daemon.ping(r.query_params.get("peer", "")), "POST"),
            route("/v1/downloads", lambda _: {"downloads": daemon.downloads()}),
            route("/v1/here", lambda r: daemon.here(**_named(r, "model"))),
            route("/v1/pull", lambda r: daemon.pull(**_named(r, "model", "blocks")), "POST"),
            route("/v1/rm", lambda r: daemon.remove(**_named(r, "model")), "POST"),
            route("/v1/reload", lambda _: daemon.reload(), "POST"),
            route("/v1/drain", lambda _: daemon.drain(), "POST"),
            route("/v1/resume", lambda _: daemon.resume(), "POST"),
            route("/v1/train", lambda _: daemon.runs.status()),
            route("/v1/train/plan", lambda r: daemon.runs.plan(**_named(r, "name"))),
            route("/v1/train/join", lambda r: daemon.runs.join(**_named(r, "name", "role")), "POST"),
            route("/v1/train/pause", lambda r: daemon.runs.pause(**_named(r, "name"), is_paused=True), "POST"),
            route("/v1/train/unpause", lambda r: daemon.runs.pause(**_named(r, "name"), is_paused=False), "POST"),
            route("/v1/train/leave", lambda r: daemon.runs.leave(**_named(r, "name")), "POST"),
            route("/v1/train/order", lambda r: daemon.runs.order(**_order(r)), "POST"),
            route("/v1/train/checkpoint", lambda r: daemon.runs.checkpoint(**_named(r, "name")), "POST"),
            route("/v1/down", lambda _: {"stopping": True}, "POST", after=stop_daemon),
        ]
    )


def _named(request: Request, *names: str) -> dict[str, str]:
    return {name: request.query_params.get(name, "") for name in names}


def _order(request: Request) -> dict[str, Any]:
    anchors = request.query_params.get("anchors", "")
    return {**_named(request, "name", "state"), "anchors": tuple(a for a in anchors.split(",") if a)}


async def serve_control(
    daemon: Controlled, path: Path, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    """Serve the API on a Unix socket of mode 0600 until cancelled."""
    path.unlink(missing_ok=True)
    config = HypercornConfig()
    config.bind = [f"unix:{path}"]
    config.umask = 0o177
    config.accesslog = config.errorlog = None
    config.graceful_timeout = 0.2
    task_status.started()
    try:
        await serve(application(daemon), config, shutdown_trigger=trio.sleep_forever)
    finally:
        with trio.CancelScope(shield=True):
            if path.exists():
                os.unlink(path)
