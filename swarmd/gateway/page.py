"""The page at /: plain files, what is new as a stream, and what this machine's owner tells it to do.

No script from elsewhere can run in it, and no other page can put it into a frame (Content-Security-Policy).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from swarmd.client.swarm import AsyncSwarm
from swarmd.errors import SwarmError
from swarmd.gateway import news
from swarmd.gateway.apis import openai
from swarmd.gateway.apis.refusals import ApiError
from swarmd.gateway.apis.streams import Emit, EventStream, error_response, json_response
from swarmd.gateway.models import ServedModels
from swarmd.gateway.news import Machine

KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
FOLDER = files("swarmd.gateway") / "page"
VENDORED = "vendor"  # what others wrote, as they published it: versions and licences in LICENSES.txt
FILES = {path.name: path for path in FOLDER.iterdir() if path.is_file()}
FILES |= {f"{VENDORED}/{path.name}": path for path in (FOLDER / VENDORED).iterdir()}
HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
VERBS = ("drain", "resume")

Guarded = Callable[[Request], Awaitable[Response]]


class Page:
    """What the page needs of the swarm and of this machine."""

    def __init__(self, swarm: AsyncSwarm, models: ServedModels, machine: Machine) -> None:
        self._swarm = swarm
        self._models = models
        self._machine = machine

    async def file(self, request: Request, key: str) -> Response:
        """Answer with one of the files; the page itself where none is named."""
        name = request.path_params.get("name", "index.html")
        if name not in FILES:
            raise ApiError(404, "invalid_request_error", f"the page has no {name[:64]!r}")
        suffix = name[name.rindex(".") :]
        headers = {**HEADERS, "content-type": f"{KINDS[suffix]}; charset=utf-8"}
        return Response(FILES[name].read_bytes(), headers=headers)

    async def news(self, request: Request, key: str) -> Response:
        """Stream everything at first, then what changes."""

        async def produce(emit: Emit) -> None:
            async def say(name: str, raw: bytes) -> None:
                await emit.send_event(raw, name)

            await news.send_changes(self._swarm_now, self._flows_now, self._machine, say)

        return EventStream(produce, openai.emit_error, error_response)

    async def act(self, request: Request, key: str) -> Response:
        """Have the daemon do something; only a request with the token gets here."""
        verb = request.path_params["verb"]
        if verb not in VERBS:
            raise ApiError(404, "invalid_request_error", f"the page can tell it to {', '.join(VERBS)}")
        try:
            return json_response(await self._machine.ask(verb, "POST"))
        except SwarmError as error:
            raise ApiError(409, "invalid_request_error", str(error)) from None

    def _swarm_now(self) -> dict[str, Any]:
        return news.describe_swarm(self._swarm.view(), self._machine.peer, self._models.list_models())

    def _flows_now(self) -> list[dict[str, Any]]:
        engines = self._models.loaded_engines().values()
        return [news.describe_flow(engine.model, report) for engine in engines for report in engine.running]
