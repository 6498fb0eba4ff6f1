"""What the gateway takes, as OpenAPI 3.1: made of the very types that read the requests, and served at its own path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

ERRORS = {
    "400": "what is wrong with the request, and with which field of it",
    "401": "an API key is needed, or the one given is not known",
    "403": "another host's name, or a page of another origin",
    "404": "no such model",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "415": "the body is not application/json",
    "429": "too many wait already: come again after retry-after seconds",
    "500": "the gateway's own mistake, which is in its log",
    "503": "blocks of the model are missing: come again after retry-after seconds",
}
JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"


def openapi(requests: Mapping[str, type[msgspec.Struct]]) -> dict[str, Any]:
    """Describe paths that take a request in JSON, each by its struct."""
    structs = [*dict.fromkeys(requests.values())]
    schemas, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    by_struct = dict(zip(structs, schemas, strict=True))
    any_object = {"type": "object"}
    of_error = {"error": {"type": ["object", "string"]}}  # Ollama's is a sentence
    error_schema = {"type": "object", "required": ["error"], "properties": of_error}
    error = {JSON: {"schema": error_schema}}
    refusals = {status: {"description": description, "content": error} for status, description in ERRORS.items()}
    paths = {}
    for path, struct in requests.items():
        body = {"required": True, "content": {JSON: {"schema": by_struct[struct]}}}
        streams = LINES if path.startswith("/api/") else EVENTS
        answer = {"description": "the answer", "content": {JSON: {"schema": any_object}, streams: {}}}
        paths[path] = {"post": {"requestBody": body, "responses": {"200": answer, **refusals}}}
    info = {"title": "swarmd gateway", "version": "1"}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
