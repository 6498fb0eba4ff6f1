"""Which path does what: the routes of the gateway, each behind the guard, each refusing in OpenAI's form."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarmd.gateway.apis import anthropic, openai, refusals, responses, schema
from swarmd.gateway.apis.openapi import openapi
from swarmd.gateway.apis.refusals import ApiError
from swarmd.gateway.apis.streams import Emit, EventStream, WholeAnswer, json_response, refused, while_there
from swarmd.gateway.apis.talk import GenerationRequest, PreparedRequest, prepare, prompt_of
from swarmd.gateway.generation.metrics import Metrics
from swarmd.gateway.generation.turns import Turns
from swarmd.gateway.guard import Guard, body_of
from swarmd.gateway.models import ListedModel, ServedModels
from swarmd.gateway.page import Page

logger = logging.getLogger(__name__)
Handler = Callable[[Request, str], Awaitable[Response]]
COUNT = "/v1/messages/count_tokens"

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class ApiForm(NamedTuple):
    """One API: how its requests are read, what they ask of the model, and how answers and errors are written."""

    request: type[Any]
    asked: Callable[[Any, str], Sequence[GenerationRequest]]
    whole: Callable[[Sequence[PreparedRequest], Any], Awaitable[dict[str, Any]]]
    stream: Callable[[Sequence[PreparedRequest], Any, Emit], Awaitable[None]]
    fail: Callable[[Emit, ApiError], Awaitable[None]] = openai.fail
    refused: Callable[[ApiError], Response] = refused


def _single(request: type[Any], asked: Any, whole: Any, stream: Any, *errors: Any) -> ApiForm:
    """An API of one prompt a request."""
    return ApiForm(
        request,
        lambda wanted, key: [asked(wanted, key)],
        lambda talks, wanted: whole(talks[0], wanted),
        lambda talks, wanted, emit: stream(talks[0], wanted, emit),
        *errors,
    )


FORMS = {
    "/v1/chat/completions": _single(schema.ChatRequest, openai.of_chat, openai.chat, openai.stream_chat),
    "/v1/completions": ApiForm(
        schema.CompletionRequest, openai.of_completion, openai.completion, openai.stream_completion
    ),
    "/v1/responses": _single(
        responses.ResponsesRequest, responses.of_responses, responses.respond, responses.stream_response
    ),
    "/v1/messages": _single(
        anthropic.MessagesRequest,
        anthropic.of_answered,
        anthropic.message,
        anthropic.stream_message,
        anthropic.fail,
        anthropic.refused,
    ),
}


class Gateway:
    """What the routes need, and what they do."""

    def __init__(self, models: ServedModels, guard: Guard, turns: Turns, origins: tuple[str, ...], page: Page) -> None:
        self.models = models
        self.page = page
        self.guard = guard
        self.turns = turns
        self.metrics = Metrics()
        self._origins = origins

    def application(self) -> Starlette:
        """Build the ASGI application."""
        return Starlette(
            routes=[
                self._route("/health", self._health),
                self._route("/metrics", self._show_metrics),
                self._route("/v1/models", self._list_models),
                self._route("/v1/models/{name:path}", self._show_model),
                *(self._route(path, partial(self._answer, form=form), "POST") for path, form in FORMS.items()),
                self._route(COUNT, self._count, "POST"),
                self._route("/openapi.json", self._describe),
                self._route("/", self.page.file),
                self._route("/page/files/{name}", self.page.file),
                self._route("/page/news", self.page.news),
                Route("/page/{verb}", self._guarded(self.page.act, needs_token=True), methods=["POST"]),
                Route("/{path:path}", self._guarded(self._nothing_here), methods=METHODS),
            ],
            exception_handlers={Exception: _broken},
        )

    def _route(self, path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, self._guarded(handler), methods=[method, "OPTIONS"])

    def _guarded(self, handler: Handler, needs_token: bool = False) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                key = self.guard.admit(request, needs_token)
                response = Response(status_code=204) if request.method == "OPTIONS" else await handler(request, key)
            except ApiError as error:
                self.metrics.refused.labels(str(error.status)).inc()
                in_its_form = anthropic.refused if request.url.path.startswith("/v1/messages") else refused
                response = in_its_form(error)
            if request.headers.get("origin") in self._origins:
                allow_origin(response, request.headers["origin"])
            return response

        return endpoint

    # --- what is there -----------------------------------------------------------------------------------------

    async def _health(self, request: Request, key: str) -> Response:
        whole = [listed.name for listed in self.models.listed() if not listed.missing]
        if whole:
            return json_response({"status": "ok", "models": whole})
        return refused(ApiError(503, "server_error", "no model is whole in the swarm", None, "model_incomplete", 5))

    async def _show_metrics(self, request: Request, key: str) -> Response:
        self.metrics.running.set(self.turns.n_running)
        self.metrics.waiting.set(self.turns.n_waiting)
        for name, engine in self.models.engines().items():
            self.metrics.kept.labels(name).set(engine.n_kept)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _list_models(self, request: Request, key: str) -> Response:
        return json_response({"object": "list", "data": [_entry(listed) for listed in self.models.listed()]})

    async def _show_model(self, request: Request, key: str) -> Response:
        name, listed = request.path_params["name"], self.models.listed()
        if not name:
            return await self._nothing_here(request, key)
        for one in listed:
            if one.name == name:
                return json_response(_entry(one))
        raise refusals.unknown_model(name, [one.name for one in listed])

    async def _describe(self, request: Request, key: str) -> Response:
        kinds = {path: form.request for path, form in FORMS.items()}
        return json_response(openapi({**kinds, COUNT: anthropic.MessagesRequest}))

    async def _nothing_here(self, request: Request, key: str) -> Response:
        raise nothing_at(request.method, request.url.path)

    # --- answers -----------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, key: str, form: ApiForm) -> Response:
        wanted = schema.read(await body_of(request), form.request)
        talks = await self._talks(request, form.asked(wanted, key))
        if wanted.stream:
            return EventStream(lambda emit: form.stream(talks, wanted, emit), form.fail)
        return WholeAnswer(lambda: form.whole(talks, wanted), form.refused)

    async def _talks(self, request: Request, asked: Sequence[GenerationRequest]) -> list[PreparedRequest]:
        """Make ready what one request asks for, as long as whoever sent it is there. Raises ApiError."""
        engine = await self.models.engine(asked[0].model)  # a model that is being loaded is there for the next one, too
        talks: list[PreparedRequest] = []

        async def make_ready() -> None:
            for one in asked:
                talks.append(await prepare(engine, one, self.metrics))

        await while_there(request.receive, make_ready)
        return talks

    async def _count(self, request: Request, key: str) -> Response:
        wanted = schema.read(await body_of(request), anthropic.MessagesRequest)
        engine = await self.models.engine(wanted.model)
        prompt = await prompt_of(engine, anthropic.of_messages(wanted, key))
        return json_response({"input_tokens": len(prompt.ids)})


def nothing_at(method: str, path: str) -> ApiError:
    """What is wrong with an address, and which one was meant, where that can be told."""
    shown = path[:100]
    names = [part for part in path.split("/") if part and part != "v1"]
    meant = "/v1/" + "/".join(names)
    is_there = meant in (*FORMS, COUNT, "/v1/models")
    if is_there and meant != path:
        return ApiError(404, "invalid_request_error", f"there is nothing at {shown}: did you mean {meant}?")
    if is_there or path in ("/health", "/metrics", "/openapi.json"):
        allowed = "POST" if meant in (*FORMS, COUNT) else "GET"
        return ApiError(405, "invalid_request_error", f"{shown} is asked by {allowed}, not by {method[:16]}")
    if names[-1:] == ["embeddings"]:
        return ApiError(404, "invalid_request_error", "there are no embeddings here: models of the swarm write text")
    return ApiError(404, "invalid_request_error", f"there is nothing at {shown}; see /openapi.json for what there is")


async def _broken(request: Request, error: Exception) -> Response:
    """Our own mistake: in the log as it is, to the client as one sentence."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return refused(refusals.our_mistake())


def allow_origin(response: Response, origin: str) -> None:
    """Let a page of an origin that was configured read the answer."""
    response.headers["access-control-allow-origin"] = origin
    response.headers["access-control-allow-headers"] = "authorization, content-type, x-api-key"
    response.headers["vary"] = "origin"


def _entry(listed: ListedModel) -> dict[str, object]:
    about = {"id": listed.name, "object": "model", "created": 0, "owned_by": "swarmd"}
    missing = [[span.start, span.end] for span in listed.missing]
    limit = {} if listed.max_tokens is None else {"max_model_len": listed.max_tokens}
    ours = {"hash": listed.model, "blocks": listed.n_blocks, "missing": missing, "chats": listed.chats}
    return {**about, **limit, "swarmd": ours}
