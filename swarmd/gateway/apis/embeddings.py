"""Texts as vectors: OpenAI's embeddings, and documents in the order in which they fit a query, as Jina and Cohere rank.

A vector is the mean of a text's last hidden states, or that of its last token, behind the model's final norm, of length
one. Any model of the swarm gives some; good ones come from models that were trained for it.
"""

from __future__ import annotations

import base64
import struct
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
import torch
import trio
from msgspec import Meta

from swarmd.gateway.apis import refusals
from swarmd.gateway.apis.refusals import ApiError, bad_request
from swarmd.gateway.apis.schema import JsonObject
from swarmd.gateway.generation.engine import GenerationEngine
from swarmd.gateway.generation.quotas import Quotas, Used
from swarmd.gateway.generation.row import RowReport

MOST_TEXTS = 256  # of one request
N_AT_ONCE = 4  # texts of one request that wait for a turn: others have theirs between
MOST_TOKENS = 1_000_000  # of one text, as numbers
Token = Annotated[int, Meta(ge=0)]
Tokens = Annotated[list[Token], Meta(min_length=1, max_length=MOST_TOKENS)]
Pooling = Literal["mean", "last"]


class EmbeddingsRequest(msgspec.Struct):
    """POST /v1/embeddings. ``pooling`` is swarmd's own; ``dimensions``: only so many of the first.

    ``input``: a text or its tokens, or a list of texts or of tokens.
    """

    input: str | Annotated[list[str | Token | Tokens], Meta(min_length=1, max_length=MOST_TOKENS)]
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    pooling: Pooling = "mean"
    user: str | None = None


class Document(msgspec.Struct):
    """A document with its text under a name, as some clients send it."""

    text: str


class RerankRequest(msgspec.Struct):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MOST_TEXTS)]
    model: str = ""
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool = True
    pooling: Pooling = "mean"


async def answer_embeddings(
    engine: GenerationEngine, request: EmbeddingsRequest, key: str, quotas: Quotas, cuts: bool = False
) -> JsonObject:
    """Return a vector for each text; ``cuts`` those that are too long. Raises ApiError."""
    if request.dimensions is not None and request.dimensions > engine.ends.width:
        raise bad_request(f"dimensions: this model's vectors have {engine.ends.width}", "dimensions")
    texts = _list_texts(request.input)
    vectors, n_tokens = await embed_all(engine, texts, request.pooling, key, quotas, cuts)
    if request.dimensions is not None:
        vectors = torch.nn.functional.normalize(vectors[:, : request.dimensions], dim=1)
    data = [
        {"object": "embedding", "index": index, "embedding": _encode(vector.tolist(), request.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
    return {"object": "list", "model": request.model, "data": data, "usage": usage}


def _list_texts(given: str | list[Any]) -> list[str | list[int]]:
    """List the texts of a request. Raises ApiError."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [given]
    if int in kinds or len(given) > MOST_TEXTS:
        raise bad_request(f"input is a text, its tokens, or at most {MOST_TEXTS} of such", "input")
    return given


class OllamaEmbedRequest(msgspec.Struct):
    """POST /api/embed, and /api/embeddings with one ``prompt``, as Ollama had it before."""

    model: str = ""
    input: str | Annotated[list[str], Meta(min_length=1, max_length=MOST_TEXTS)] | None = None
    prompt: str | None = None
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    truncate: bool = True


async def answer_ollama(engine: GenerationEngine, request: OllamaEmbedRequest, key: str, quotas: Quotas) -> JsonObject:
    """Return a vector for each text, in Ollama's form. Raises ApiError."""
    given = request.prompt if request.input is None else request.input
    if given is None:
        raise bad_request("input is missing: a text, or a list of them", "input")
    asked = EmbeddingsRequest(given if isinstance(given, str) else [*given], dimensions=request.dimensions)
    answer = await answer_embeddings(engine, asked, key, quotas, request.truncate)
    vectors = [row["embedding"] for row in answer["data"]]
    if request.input is None:
        return {"embedding": vectors[0]}
    return {"model": request.model, "embeddings": vectors, "prompt_eval_count": answer["usage"]["prompt_tokens"]}


async def answer_rerank(engine: GenerationEngine, request: RerankRequest, key: str, quotas: Quotas) -> JsonObject:
    """Return the documents, those that are most like the query first. Raises ApiError."""
    texts = [document if isinstance(document, str) else document.text for document in request.documents]
    vectors, n_tokens = await embed_all(engine, [request.query, *texts], request.pooling, key, quotas)
    scores = (vectors[1:] @ vectors[0]).tolist()
    order = sorted(range(len(texts)), key=lambda index: -scores[index])[: request.top_n]
    results = []
    for index in order:
        result: JsonObject = {"index": index, "relevance_score": scores[index]}
        if request.return_documents:
            result["document"] = {"text": texts[index]}
        results.append(result)
    return {"model": request.model, "results": results, "usage": {"total_tokens": n_tokens}}


def _encode(vector: list[float], form: str) -> list[float] | str:
    """Return numbers, or float32 of little end first as base64, which OpenAI's own client asks for."""
    if form == "float":
        return vector
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


async def embed_all(
    engine: GenerationEngine,
    texts: list[str | list[int]],
    pooling: str,
    key: str,
    quotas: Quotas,
    cuts: bool = False,
) -> tuple[torch.Tensor, int]:
    """Return a vector of length one for each text, [n, d], and how many tokens they have together. Raises ApiError.

    A text that is too long is cut or refused.
    """
    prompts = [await _read_text(engine, text, cuts) for text in texts]
    n_tokens = sum(map(len, prompts))
    reports = [RowReport(len(prompt)) for prompt in prompts]
    with refusals.as_api_errors():
        n_reserved = n_tokens + quotas.reserve(key, n_tokens, 0)
    try:
        vectors = await _embed_prompts(engine, prompts, reports, pooling, key)
    finally:
        n_read = sum(report.n_prompt for report in reports if report.is_sent)
        quotas.settle(key, n_reserved, Used(0, n_read, 0))
    return torch.nn.functional.normalize(vectors, dim=1), n_tokens


async def _embed_prompts(
    engine: GenerationEngine, prompts: list[tuple[int, ...]], reports: list[RowReport], pooling: str, key: str
) -> torch.Tensor:
    """Return a vector for each prompt, [n, d]. Raises ApiError for the first that has none."""
    vectors: list[torch.Tensor] = [torch.empty(0)] * len(prompts)
    room = trio.Semaphore(N_AT_ONCE)
    refused: list[ApiError] = []

    async def embed(index: int, nursery: trio.Nursery) -> None:
        async with room:
            try:
                with refusals.as_api_errors():
                    states = await engine.embed(prompts[index], key, reports[index])
            except ApiError as error:
                refused.append(error)
                nursery.cancel_scope.cancel()
                return
        vectors[index] = states.mean(0) if pooling == "mean" else states[-1]

    async with trio.open_nursery() as nursery:
        for index in range(len(prompts)):
            nursery.start_soon(partial(embed, nursery=nursery), index)
    if refused:
        raise refused[0]
    return torch.stack(vectors)


async def _read_text(engine: GenerationEngine, text: str | list[int], cuts: bool) -> tuple[int, ...]:
    with refusals.as_api_errors("input"):
        ids = tuple(text) if isinstance(text, list) else (await engine.prompts.text(text)).ids
    if not ids:
        raise bad_request("a text without a token has no vector", "input")
    limit = engine.ends.max_tokens
    if len(ids) > limit and not cuts:
        message = f"a text has {len(ids)} tokens, and this model reads at most {limit}: divide it"
        raise bad_request(message, "input", "context_length_exceeded")
    ids = ids[:limit]
    refusals.require_tokens(ids, engine.ends.vocabulary, "input")
    return ids
