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

from swarmd.gateway.apis import anthropic, completions, openai, refusals, responses, schema, tokens
from swarmd.gateway.apis.openapi import openapi
from swarmd.gateway.apis.refusals import ApiError
from swarmd.gateway.apis.skipped import Skipped
from swarmd.gateway.apis.streams import (
    Emit,
    EventStream,
    WholeAnswer,
    error_response,
    json_response,
    run_while_connected,
)
from swarmd.gateway.apis.talk import GenerationRequest, PreparedRequest, make_prompt, prepare_request
from swarmd.gateway.generation.metrics import Metrics
from swarmd.gateway.generation.quotas import Quotas, QuotaUsedUp
from swarmd.gateway.generation.turns import Turns
from swarmd.gateway.guard import Guard, read_body
from swarmd.gateway.models import ListedModel, ServedModels
from swarmd.gateway.page import Page

logger = logging.getLogger(__name__)
Handler = Callable[[Request, str], Awaitable[Response]]
COUNT = "/v1/messages/count_tokens"
HELPERS = ("/tokenize", "/detokenize")

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class ApiForm(NamedTuple):
    """One API: how its requests are read, what they ask of the model, and how answers and errors are written."""

    request: type[Any]
    parse: Callable[[Any, str, Skipped], Sequence[GenerationRequest]]
    answer: Callable[[Sequence[PreparedRequest], Any], Awaitable[dict[str, Any]]]
    stream: Callable[[Sequence[PreparedRequest], Any, Emit], Awaitable[None]]
    fail: Callable[[Emit, ApiError], Awaitable[None]] = openai.emit_error
    refuse: Callable[[ApiError], Response] = error_response


def _single_prompt_form(
    request: type[Any],
    parse: Any,
    answer: Any,
    stream: Any,
    *errors: Any,
) -> ApiForm:
    """Make the form of an API whose requests have one prompt each."""

    def parse_one(body: Any, key: str, skipped: Skipped) -> list[GenerationRequest]:
        return [parse(body, key, skipped)]

    def answer_one(prepared_requests: Sequence[PreparedRequest], body: Any) -> Any:
        return answer(prepared_requests[0], body)

    def stream_one(prepared_requests: Sequence[PreparedRequest], body: Any, emit: Emit) -> Any:
        return stream(prepared_requests[0], body, emit)

    return ApiForm(request, parse_one, answer_one, stream_one, *errors)


FORMS = {
    "/v1/chat/completions": _single_prompt_form(
        schema.ChatRequest, openai.parse_chat, openai.answer_chat, openai.stream_chat
    ),
    "/v1/completions": ApiForm(
        schema.CompletionRequest,
        completions.parse_completion,
        completions.answer_completion,
        completions.stream_completion,
    ),
    "/v1/responses": _single_prompt_form(
        responses.ResponsesRequest, responses.parse_responses, responses.answer_response, responses.stream_response
    ),
    "/v1/messages": _single_prompt_form(
        anthropic.MessagesRequest,
        anthropic.parse_for_answer,
        anthropic.answer_message,
        anthropic.stream_message,
        anthropic.emit_error,
        anthropic.error_response,
    ),
}


class Gateway:
    """What the routes need, and what they do."""

    def __init__(
        self,
        models: ServedModels,
        guard: Guard,
        turns: Turns,
        origins: tuple[str, ...],
        page: Page,
        quotas: Quotas,
    ) -> None:
        self.quotas = quotas
        self.models = models
        self.page = page
        self.guard = guard
        self.turns = turns
        self.metrics = Metrics()
        self._origins = origins

    def application(self) -> Starlette:
        """Build the ASGI application."""
        forms = []
        for path, form in FORMS.items():
            forms.append(self._route(path, partial(self._answer, form=form), "POST"))
        return Starlette(
            routes=[
                self._route("/health", self._health),
                self._route("/metrics", self._show_metrics),
                self._route("/v1/models", self._list_models),
                self._route("/v1/models/{name:path}", self._show_model),
                *forms,
                self._route(COUNT, self._count, "POST"),
                self._route("/tokenize", self._tokenize, "POST"),
                self._route("/detokenize", self._detokenize, "POST"),
                self._route("/tokenizer_info", self._tokenizer_info),
                self._route("/openapi.json", self._describe),
                self._route("/", self.page.file),
                self._route("/page/files/{name}", self.page.file),
                self._route("/page/news", self.page.news),
                Route("/page/{verb}", self._guarded(self.page.act, needs_token=True), methods=["POST"]),
                Route("/{path:path}", self._guarded(self._nothing_here), methods=METHODS),
            ],
            exception_handlers={Exception: _answer_broken},
        )

    def _route(self, path: str, handler: Handler, method: str = "GET") -> Route:
        return Route(path, self._guarded(handler), methods=[method, "OPTIONS"])

    def _guarded(
        self,
        handler: Handler,
        needs_token: bool = False,
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                key = self.guard.admit(request, needs_token)
                response = Response(status_code=204) if request.method == "OPTIONS" else await handler(request, key)
            except ApiError as error:
                self.metrics.refused.labels(str(error.status)).inc()
                is_anthropic = request.url.path.startswith("/v1/messages")
                response = anthropic.error_response(error) if is_anthropic else error_response(error)
            if request.headers.get("origin") in self._origins:
                allow_origin(response, request.headers["origin"])
            return response

        return answer

    # --- what is there -----------------------------------------------------------------------------------------

    async def _health(self, request: Request, key: str) -> Response:
        served = [listed.name for listed in self.models.list_models() if not listed.missing]
        if served:
            return json_response({"status": "ok", "models": served})
        message = "no model is whole in the swarm"
        return error_response(ApiError(503, "server_error", message, code="model_incomplete", retry_after_s=5))

    async def _show_metrics(self, request: Request, key: str) -> Response:
        self.metrics.running.set(self.turns.n_running)
        self.metrics.waiting.set(self.turns.n_waiting)
        for name, engine in self.models.loaded_engines().items():
            self.metrics.kept.labels(name).set(engine.n_kept)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _list_models(self, request: Request, key: str) -> Response:
        allowed = self.guard.models_of(key)
        entries = [_model_entry(model) for model in self.models.list_models() if not allowed or model.name in allowed]
        return json_response({"object": "list", "data": entries})

    async def _show_model(self, request: Request, key: str) -> Response:
        name = request.path_params["name"]
        listed = self.models.list_models()
        if not name:
            return await self._nothing_here(request, key)
        for model in listed:
            if model.name == name:
                return json_response(_model_entry(model))
        raise refusals.unknown_model(name, [model.name for model in listed])

    async def _describe(self, request: Request, key: str) -> Response:
        kinds = {path: form.request for path, form in FORMS.items()}
        helpers: dict[str, type[Any]] = {"/tokenize": tokens.TokenizeRequest, "/detokenize": tokens.DetokenizeRequest}
        return json_response(openapi({**kinds, COUNT: anthropic.MessagesRequest, **helpers}))

    async def _nothing_here(self, request: Request, key: str) -> Response:
        raise explain_missing_path(request.method, request.url.path)

    # --- answers -----------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, key: str, form: ApiForm) -> Response:
        skipped = Skipped()
        body = schema.decode_request(await read_body(request), form.request, skipped)
        self._admit(key, body.model)
        prepared_requests = await self._prepare_all(request, form.parse(body, key, skipped))
        if body.stream:
            return EventStream(lambda emit: form.stream(prepared_requests, body, emit), form.fail, skipped.headers)
        return WholeAnswer(lambda: form.answer(prepared_requests, body), form.refuse, skipped.headers)

    async def _prepare_all(self, request: Request, requests: Sequence[GenerationRequest]) -> list[PreparedRequest]:
        """Prepare what one request asks for, as long as its client is connected. Raises ApiError."""
        # Loading goes on though the client has gone: the model is there for the next one, too.
        engine = await self.models.load_engine(requests[0].model)
        prepared_requests: list[PreparedRequest] = []

        async def prepare_each() -> None:
            for generation_request in requests:
                prepared = await prepare_request(engine, generation_request, self.metrics, self.quotas)
                prepared_requests.append(prepared)

        await run_while_connected(request.receive, prepare_each)
        return prepared_requests

    def _admit(self, key: str, name: str) -> None:
        """Count a request; refuse one too many, and a model that the key is not for. Raises ApiError."""
        allowed = self.guard.models_of(key)
        if allowed and not {name, self.models.meant(name)} & set(allowed):
            message = f"this key is for {', '.join(allowed)}, not for {name[:100]!r}"
            raise ApiError(403, "permission_error", message, "model", "model_not_found")
        try:
            self.quotas.admit(key)
        except QuotaUsedUp as error:
            raise refusals.quota_used_up(error) from None

    async def _count(self, request: Request, key: str) -> Response:
        skipped = Skipped()
        body = schema.decode_request(await read_body(request), anthropic.MessagesRequest, skipped)
        engine = await self.models.load_engine(body.model)
        prompt = await make_prompt(engine, anthropic.parse_request(body, key, skipped))
        return json_response({"input_tokens": len(prompt.ids)}, headers=skipped.headers)

    async def _tokenize(self, request: Request, key: str) -> Response:
        skipped = Skipped()
        body = schema.decode_request(await read_body(request), tokens.TokenizeRequest, skipped)
        engine = await self.models.load_engine(body.model or self.models.only_model())
        return json_response(await tokens.tokenize(engine, body, skipped), headers=skipped.headers)

    async def _detokenize(self, request: Request, key: str) -> Response:
        skipped = Skipped()
        body = schema.decode_request(await read_body(request), tokens.DetokenizeRequest, skipped)
        engine = await self.models.load_engine(body.model or self.models.only_model())
        return json_response(tokens.detokenize(engine, body), headers=skipped.headers)

    async def _tokenizer_info(self, request: Request, key: str) -> Response:
        engine = await self.models.load_engine(request.query_params.get("model") or self.models.only_model())
        return json_response(tokens.tokenizer_info(engine.prompts.folder))


def explain_missing_path(method: str, path: str) -> ApiError:
    """Say what is wrong with an address, and which one was meant, where that can be told."""
    shown = path[:100]
    names = [part for part in path.split("/") if part and part != "v1"]
    intended_path = "/v1/" + "/".join(names)
    takes_post = intended_path in (*FORMS, COUNT) or path in HELPERS
    is_there = takes_post or intended_path == "/v1/models"
    status = 404
    if is_there and intended_path != path:
        message = f"there is nothing at {shown}: did you mean {intended_path}?"
    elif is_there or path in ("/health", "/metrics", "/openapi.json", "/tokenizer_info", *HELPERS):
        status = 405
        message = f"{shown} is asked by {'POST' if takes_post else 'GET'}, not by {method[:16]}"
    elif names[-1:] == ["embeddings"]:
        message = "there are no embeddings here: models of the swarm write text"
    else:
        message = f"there is nothing at {shown}; see /openapi.json for what there is"
    return ApiError(status, "invalid_request_error", message)


async def _answer_broken(request: Request, error: Exception) -> Response:
    """Answer for our own mistake: the log has it as it is, the client gets one sentence."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(refusals.internal_error())


def allow_origin(response: Response, origin: str) -> None:
    """Let a page of an origin that was configured read the answer."""
    response.headers["access-control-allow-origin"] = origin
    response.headers["access-control-allow-headers"] = "authorization, content-type, x-api-key"
    response.headers["vary"] = "origin"


def _model_entry(listed: ListedModel) -> dict[str, object]:
    entry = {"id": listed.name, "object": "model", "created": 0, "owned_by": "swarmd"}
    missing = [[span.start, span.end] for span in listed.missing]
    limit = {} if listed.max_tokens is None else {"max_model_len": listed.max_tokens}
    ours = {"hash": listed.model, "blocks": listed.n_blocks, "missing": missing, "chats": listed.chats}
    return {**entry, **limit, "swarmd": ours}
