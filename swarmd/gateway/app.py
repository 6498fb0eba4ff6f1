"""Which path does what: the routes of the gateway, each behind the guard, each refusing in OpenAI's form."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarmd.errors import ConfigError
from swarmd.gateway.apis import anthropic, completions, embeddings, ollama, openai, refusals, responses, schema, tokens
from swarmd.gateway.apis.body import read_body
from swarmd.gateway.apis.openapi import openapi
from swarmd.gateway.apis.refusals import ApiError
from swarmd.gateway.apis.skipped import HEADER, Skipped
from swarmd.gateway.apis.streams import (
    Emit,
    EventStream,
    LineStream,
    WholeAnswer,
    error_response,
    json_response,
    run_while_connected,
)
from swarmd.gateway.apis.talk import GenerationRequest, PreparedRequest, make_prompt, prepare_request
from swarmd.gateway.batches.batch import BatchRequest
from swarmd.gateway.batches.routes import batch_routes
from swarmd.gateway.batches.runner import Batches
from swarmd.gateway.batches.store import BatchStore
from swarmd.gateway.generation.engine import GenerationEngine
from swarmd.gateway.generation.metrics import Metrics
from swarmd.gateway.generation.quotas import Quotas
from swarmd.gateway.generation.turns import Turns
from swarmd.gateway.guard import Guard
from swarmd.gateway.keys import describe_keys
from swarmd.gateway.models import ListedModel, ServedModels
from swarmd.gateway.page import Page

logger = logging.getLogger(__name__)
Handler = Callable[[Request, str], Awaitable[Response]]
COUNT = "/v1/messages/count_tokens"

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


class ApiForm(NamedTuple):
    """One API: how its requests are read, what they ask of the model, and how answers and errors are written."""

    request: type[Any]
    parse: Callable[[Any, str, Skipped], Sequence[GenerationRequest]]
    answer: Callable[[Sequence[PreparedRequest], Any], Awaitable[dict[str, Any]]]
    stream: Callable[[Sequence[PreparedRequest], Any, Emit], Awaitable[None]]
    fail: Callable[[Emit, ApiError], Awaitable[None]] = openai.emit_error
    refuse: Callable[[ApiError], Response] = error_response
    streams: type[EventStream] = EventStream


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


class VectorForm(NamedTuple):
    """A request that is answered by comparing texts, not by writing one."""

    request: type[Any]
    answer: Callable[[GenerationEngine, Any, str, Quotas], Awaitable[dict[str, Any]]]
    refuse: Callable[[ApiError], Response] = error_response


RERANK = VectorForm(embeddings.RerankRequest, embeddings.answer_rerank)
OLLAMA_EMBED = VectorForm(embeddings.OllamaEmbedRequest, embeddings.answer_ollama, ollama.format_error)
VECTORS = {
    "/v1/embeddings": VectorForm(embeddings.EmbeddingsRequest, embeddings.answer_embeddings),
    "/v1/rerank": RERANK,
    "/rerank": RERANK,
    "/api/embed": OLLAMA_EMBED,
    "/api/embeddings": OLLAMA_EMBED,
}
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
    "/api/chat": _single_prompt_form(
        ollama.OllamaChatRequest,
        ollama.parse_chat,
        ollama.answer,
        ollama.stream,
        ollama.emit_error,
        ollama.format_error,
        LineStream,
    ),
    "/api/generate": _single_prompt_form(
        ollama.OllamaGenerateRequest,
        ollama.parse_generate,
        ollama.answer,
        ollama.stream,
        ollama.emit_error,
        ollama.format_error,
        LineStream,
    ),
}


HEADER_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")
MOST_HEADERS = 64  # that a page may ask to send
ALLOWED_HEADERS = ("authorization", "content-type", "x-api-key")  # where it does not say which
POSTS = (*FORMS, COUNT, *VECTORS, "/tokenize", "/detokenize", "/api/show", "/api/pull", "/v1/files", "/v1/batches")
GETS = (
    *("/v1/models", "/health", "/metrics", "/openapi.json", "/tokenizer_info"),
    *("/api/tags", "/api/ps", "/api/version"),
)


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
        store: BatchStore,
        n_batched: int,
    ) -> None:
        self.quotas = quotas
        self.batches = Batches(store, self._admit_line, self._answer_line, n_batched, quotas.clock)
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
                *(self._route(path, partial(self._measure, form=form), "POST") for path, form in VECTORS.items()),
                self._route("/tokenize", self._tokenize, "POST"),
                self._route("/detokenize", self._detokenize, "POST"),
                self._route("/tokenizer_info", self._tokenizer_info),
                self._route("/api/tags", self._list_for_ollama),
                self._route("/api/ps", self._list_loaded),
                self._route("/api/version", self._tell_version),
                self._route("/api/show", self._show_for_ollama, "POST"),
                self._route("/api/pull", self._pull, "POST"),
                *(
                    Route(path, self._guarded(handler), methods=[*methods, "OPTIONS"])
                    for path, methods, handler in batch_routes(self.batches, self.guard.owner)
                ),
                self._route("/openapi.json", self._describe),
                self._route("/", self.page.file),
                self._route("/page/files/{name:path}", self.page.file),
                self._route("/page/news", self.page.news),
                Route("/page/keys", self._guarded(self._list_keys, needs_token=True)),
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
                response = _refuse(request.url.path, error)
            if request.headers.get("origin") in self._origins:
                allow_origin(response, request)
            return response

        return answer

    # --- what is there -----------------------------------------------------------------------------------------

    async def _list_keys(self, request: Request, key: str) -> Response:
        """List the keys and what they used: to this machine's owner only."""
        try:
            return json_response({"keys": describe_keys(self.guard.keys, self.quotas.file, self.quotas.clock())})
        except ConfigError as error:
            raise ApiError(409, "invalid_request_error", str(error)) from None

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
        return Response(self.metrics.text(with_keys=not key), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _list_models(self, request: Request, key: str) -> Response:
        entries = [_model_entry(model) for model in self._allowed_models(key)]
        return json_response({"object": "list", "data": entries})

    async def _show_model(self, request: Request, key: str) -> Response:
        name = request.path_params["name"]
        listed = self._allowed_models(key)
        if not name:
            return await self._nothing_here(request, key)
        for model in listed:
            if model.model == self.models.identify(name):
                return json_response(_model_entry(model))
        raise refusals.unknown_model(name, [model.name for model in listed])

    # --- Ollama's -----------------------------------------------------------------------------------------------

    async def _list_for_ollama(self, request: Request, key: str) -> Response:
        entries = [ollama.list_entry(model.name, model.model) for model in self._allowed_models(key)]
        return json_response({"models": entries})

    async def _list_loaded(self, request: Request, key: str) -> Response:
        engines = self.models.loaded_engines()
        allowed = [model for model in self._allowed_models(key) if model.name in engines]
        entries = [ollama.list_entry(m.name, m.model, engines[m.name].ends.family) for m in allowed]
        never = {"size_vram": 0, "expires_at": "9999-12-31T23:59:59Z"}
        return json_response({"models": [{**entry, **never} for entry in entries]})

    async def _tell_version(self, request: Request, key: str) -> Response:
        return json_response({"version": ollama.VERSION})

    async def _show_for_ollama(self, request: Request, key: str) -> Response:
        body = schema.decode_request(await read_body(request), ollama.OllamaModelRequest, Skipped())
        engine = await self._load_for(key, body.asked)
        context, chats = engine.ends.max_tokens, engine.prompts.has_template
        return json_response(ollama.show_model(body.asked, engine.model, engine.ends.family, context, chats))

    async def _pull(self, request: Request, key: str) -> Response:
        """Say that a model is there: its blocks lie at the servers, and nothing is fetched for it."""
        body = schema.decode_request(await read_body(request), ollama.OllamaModelRequest, Skipped())
        self._require_model(key, body.asked)
        listed = self.models.list_models()
        if self.models.identify(body.asked) not in [model.model for model in listed]:
            raise refusals.unknown_model(body.asked, [model.name for model in listed])

        async def say_so(emit: Emit) -> None:
            await emit.send_line({"status": "success"})

        if not body.stream:
            return json_response({"status": "success"})
        return LineStream(say_so, ollama.emit_error, ollama.format_error)

    def _allowed_models(self, key: str) -> list[ListedModel]:
        allowed = {self.models.identify(name) for name in self.guard.models_of(key)}
        return [model for model in self.models.list_models() if not allowed or model.model in allowed]

    async def _describe(self, request: Request, key: str) -> Response:
        kinds = {path: form.request for path, form in FORMS.items()}
        helpers: dict[str, type[Any]] = {"/tokenize": tokens.TokenizeRequest, "/detokenize": tokens.DetokenizeRequest}
        vectors = {path: form.request for path, form in VECTORS.items()}
        kinds |= {COUNT: anthropic.MessagesRequest, "/v1/batches": BatchRequest}
        return json_response(openapi({**kinds, **vectors, **helpers}))

    async def _nothing_here(self, request: Request, key: str) -> Response:
        raise explain_missing_path(request.method, request.url.path)

    # --- answers -----------------------------------------------------------------------------------------------

    async def _answer(self, request: Request, key: str, form: ApiForm) -> Response:
        skipped = Skipped()
        body, requests = self._read(await read_body(request), key, form, skipped)
        if ollama.is_empty(body):
            if not ollama.lets_go(body):
                await self.models.load_engine(body.model)
            return json_response(ollama.answer_empty(body))
        self._admit(key)
        # Loading goes on though the client has gone: the model is there for the next one, too.
        engine = await self.models.load_engine(body.model)
        prepared_requests: list[PreparedRequest] = []

        async def prepare() -> None:
            prepared_requests.extend(await self._prepare_all(engine, requests))

        await run_while_connected(request.receive, prepare)
        if body.stream:
            produce = partial(form.stream, prepared_requests, body)
            return form.streams(produce, form.fail, form.refuse, skipped.headers)
        return WholeAnswer(lambda: form.answer(prepared_requests, body), form.refuse, skipped.headers)

    async def _measure(self, request: Request, key: str, form: VectorForm) -> Response:
        skipped = Skipped()
        body = schema.decode_request(await read_body(request), form.request, skipped)
        engine = await self._load_for(key, body.model or self.models.only_model())
        self._admit(key)
        return WholeAnswer(lambda: form.answer(engine, body, key, self.quotas), form.refuse, skipped.headers)

    async def _answer_line(self, path: str, owner: str, content: bytes) -> dict[str, Any]:
        """Answer a request of a batch, which was admitted. Raises ApiError."""
        key = self.guard.require_owner(owner)
        if path in VECTORS:
            asked = schema.decode_request(content, VECTORS[path].request, Skipped())
            engine = await self._load_for(key, asked.model or self.models.only_model())
            return await VECTORS[path].answer(engine, asked, key, self.quotas)
        body, requests = self._read(content, key, FORMS[path], Skipped())
        engine = await self.models.load_engine(body.model)
        return await FORMS[path].answer(await self._prepare_all(engine, requests, keeps=False), body)

    def _admit_line(self, owner: str) -> None:
        self._admit(self.guard.require_owner(owner))

    def _read(
        self, content: bytes, key: str, form: ApiForm, skipped: Skipped
    ) -> tuple[Any, Sequence[GenerationRequest]]:
        """Read a request of a key: its body, and what it asks of the model. Raises ApiError."""
        body = schema.decode_request(content, form.request, skipped)
        self._require_model(key, body.model)
        return body, [] if ollama.is_empty(body) else form.parse(body, key, skipped)

    async def _prepare_all(
        self, engine: GenerationEngine, requests: Sequence[GenerationRequest], keeps: bool = True
    ) -> list[PreparedRequest]:
        """Prepare what one request asks for. Raises ApiError."""
        prepared_requests = []
        for generation_request in requests:
            meant = replace(generation_request, model=self.models.meant(generation_request.model), keeps=keeps)
            prepared_requests.append(await prepare_request(engine, meant, self.metrics, self.quotas))
        return prepared_requests

    def _admit(self, key: str) -> None:
        """Count a request. Raises ApiError for one too many."""
        with refusals.as_api_errors():
            self.quotas.admit(key)

    async def _load_for(self, key: str, name: str) -> GenerationEngine:
        """The engine of a model that a key is for. Raises ApiError."""
        self._require_model(key, name)
        return await self.models.load_engine(name)

    def _require_model(self, key: str, name: str) -> None:
        """Refuse a model that a key is not for, whatever it is called. Raises ApiError."""
        allowed = self.guard.models_of(key)
        if allowed and self.models.identify(name) not in {self.models.identify(known) for known in allowed}:
            message = f"this key is for {', '.join(allowed)}, not for {name[:100]!r}"
            raise ApiError(403, "permission_error", message, "model", "model_not_found")

    async def _count(self, request: Request, key: str) -> Response:
        skipped = Skipped()
        body = schema.decode_request(await read_body(request), anthropic.MessagesRequest, skipped)
        engine = await self._load_for(key, body.model)
        prompt = await make_prompt(engine, anthropic.parse_request(body, key, skipped))
        return json_response({"input_tokens": len(prompt.ids)}, headers=skipped.headers)

    async def _tokenize(self, request: Request, key: str) -> Response:
        skipped = Skipped()
        body = schema.decode_request(await read_body(request), tokens.TokenizeRequest, skipped)
        engine = await self._load_for(key, body.model or self.models.only_model())
        return json_response(await tokens.tokenize(engine, body, skipped), headers=skipped.headers)

    async def _detokenize(self, request: Request, key: str) -> Response:
        skipped = Skipped()
        body = schema.decode_request(await read_body(request), tokens.DetokenizeRequest, skipped)
        engine = await self._load_for(key, body.model or self.models.only_model())
        return json_response(tokens.detokenize(engine, body), headers=skipped.headers)

    async def _tokenizer_info(self, request: Request, key: str) -> Response:
        engine = await self._load_for(key, request.query_params.get("model") or self.models.only_model())
        return json_response(tokens.tokenizer_info(engine.prompts.folder))


def explain_missing_path(method: str, path: str) -> ApiError:
    """Say what is wrong with an address, and which one was meant, where that can be told."""
    shown = path[:100]
    names = [part for part in path.split("/") if part and part != "v1"]
    meant_paths = ["/v1/" + "/".join(names), "/" + "/".join(names)]
    intended_path = next((meant for meant in meant_paths if meant in (*POSTS, *GETS)), "")
    takes_post = intended_path in POSTS
    is_there = bool(intended_path)
    status = 404
    if is_there and intended_path != path:
        message = f"there is nothing at {shown}: did you mean {intended_path}?"
    elif is_there:
        status = 405
        message = f"{shown} is asked by {'POST' if takes_post else 'GET'}, not by {method[:16]}"
    else:
        message = f"there is nothing at {shown}; see /openapi.json for what there is"
    return ApiError(status, "invalid_request_error", message)


def _refuse(path: str, error: ApiError) -> Response:
    """Answer with an error in the form of the API that was asked."""
    if path.startswith("/v1/messages"):
        return anthropic.error_response(error)
    return ollama.format_error(error) if path.startswith("/api/") else error_response(error)


async def _answer_broken(request: Request, error: Exception) -> Response:
    """Answer for our own mistake: the log has it as it is, the client gets one sentence."""
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return error_response(refusals.internal_error())


def allow_origin(response: Response, request: Request) -> None:
    """Let a page of an origin that was configured send what it asks to send, and read the answer."""
    # Clients for browsers send headers of their own, whose names change with their versions: whatever they ask for.
    asked = request.headers.get("access-control-request-headers", "")
    names = [name.strip() for name in asked.split(",")]
    named = [name for name in names if HEADER_NAME.fullmatch(name)][:MOST_HEADERS]
    response.headers["access-control-allow-origin"] = request.headers["origin"]
    response.headers["access-control-allow-headers"] = ", ".join(named or ALLOWED_HEADERS)
    response.headers["access-control-allow-methods"] = "GET, POST, DELETE"
    response.headers["access-control-expose-headers"] = f"retry-after, {HEADER}"
    response.headers["vary"] = "origin"


def _model_entry(listed: ListedModel) -> dict[str, object]:
    entry = {"id": listed.name, "object": "model", "created": 0, "owned_by": "swarmd"}
    missing = [[span.start, span.end] for span in listed.missing]
    limit = {} if listed.max_tokens is None else {"max_model_len": listed.max_tokens}
    ours = {"hash": listed.model, "blocks": listed.n_blocks, "missing": missing, "chats": listed.chats}
    return {**entry, **limit, "swarmd": ours}
