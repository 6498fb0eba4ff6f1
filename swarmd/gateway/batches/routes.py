"""Files and batches over HTTP, as OpenAI's reference has them: each key sees its own, and nobody else's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from email import message_from_bytes
from email.message import Message

from starlette.requests import Request
from starlette.responses import Response

from swarmd.gateway.apis.body import read_body
from swarmd.gateway.apis.refusals import bad_request
from swarmd.gateway.apis.schema import JsonObject, decode_request
from swarmd.gateway.apis.skipped import Skipped
from swarmd.gateway.apis.streams import json_response
from swarmd.gateway.batches.batch import BatchRequest, describe, list_page
from swarmd.gateway.batches.runner import Batches
from swarmd.gateway.batches.store import StoredFile

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
MOST_NAME = 255  # letters of a file's name
MOST_HEAD = 1_024  # bytes of a part's head: two lines
MOST_PARTS = 16  # of a form
MOST_LISTED = 10_000  # of one page of a list

Handler = Callable[[Request, str], Awaitable[Response]]


def batch_routes(batches: Batches, owner_of: Callable[[str], str]) -> list[tuple[str, tuple[str, ...], Handler]]:
    """The paths of files and batches: which methods each takes, and what it does for a key."""
    store = batches.store

    def owned(handler: Handler) -> Handler:
        async def answer(request: Request, key: str) -> Response:
            store.require_own()
            return await handler(request, owner_of(key))

        return answer

    def describe_file(file: StoredFile) -> JsonObject:
        shown = {"filename": file.filename, "purpose": file.purpose, "created_at": file.created_at}
        return {"id": file.id, "object": "file", "bytes": store.size_of(file.id), **shown, "status": "processed"}

    async def answer_files(request: Request, owner: str) -> Response:
        if request.method == "POST":
            content = await read_body(request, "multipart/form-data")
            filename, data = read_form(request.headers["content-type"], content)
            return json_response(describe_file(store.add_file(owner, filename, data, batches.clock())))
        listed = [describe_file(file) for file in store.files_of(owner)]
        return json_response(list_page(listed, *_read_page(request)))

    async def answer_file(request: Request, owner: str) -> Response:
        file = store.file(owner, request.path_params["name"])
        if request.method == "DELETE":
            store.remove_file(file)
            return json_response({"id": file.id, "object": "file", "deleted": True})
        return json_response(describe_file(file))

    async def answer_content(request: Request, owner: str) -> Response:
        file = store.file(owner, request.path_params["name"])
        return Response(store.read(file.id), media_type="application/octet-stream")

    async def answer_batches(request: Request, owner: str) -> Response:
        if request.method == "POST":
            asked = decode_request(await read_body(request), BatchRequest, Skipped())
            return json_response(describe(batches.begin(owner, asked, ENDPOINTS)))
        listed = [describe(batch) for batch in store.batches_of(owner)]
        return json_response(list_page(listed, *_read_page(request)))

    async def answer_batch(request: Request, owner: str) -> Response:
        return json_response(describe(store.batch(owner, request.path_params["name"])))

    async def cancel_batch(request: Request, owner: str) -> Response:
        batch = store.batch(owner, request.path_params["name"])
        batches.cancel(batch)
        return json_response(describe(batch))

    handlers: list[tuple[str, tuple[str, ...], Handler]] = [
        ("/v1/files", ("GET", "POST"), answer_files),
        ("/v1/files/{name}", ("GET", "DELETE"), answer_file),
        ("/v1/files/{name}/content", ("GET",), answer_content),
        ("/v1/batches", ("GET", "POST"), answer_batches),
        ("/v1/batches/{name}", ("GET",), answer_batch),
        ("/v1/batches/{name}/cancel", ("POST",), cancel_batch),
    ]
    return [(path, methods, owned(handler)) for path, methods, handler in handlers]


def read_form(kind: str, content: bytes) -> tuple[str, bytes]:
    """Read a form of a content type, with one file; returns the file's name and its bytes. Raises ApiError."""
    # The standard library reads the few words of a part's head; contents are cut out as they are.
    boundary = _read_head(b"content-type: " + kind.encode("latin-1")).get_boundary()
    if not boundary:
        raise bad_request("the form has no boundary: Content-Type: multipart/form-data; boundary=...")
    parts: dict[object, tuple[str, bytes]] = {}
    mark = b"\r\n--" + boundary.encode("latin-1", "replace")
    for part in (b"\r\n" + content).split(mark, MOST_PARTS)[1:MOST_PARTS]:
        if part.startswith(b"--"):
            break
        head, _, data = part.partition(b"\r\n\r\n")
        fields = _read_head(head.strip())
        name = fields.get_param("name", header="content-disposition")
        parts[name] = (fields.get_filename("batch.jsonl"), data)
    if "file" not in parts:
        raise bad_request("file is missing: a form's part with the requests, one JSON object a line", "file")
    _, purpose = parts.get("purpose", ("", b""))
    if purpose.strip() != b"batch":
        raise bad_request("files are for batches here: purpose is batch", "purpose", "unsupported_value")
    filename, data = parts["file"]
    return filename[:MOST_NAME], data


def _read_head(head: bytes) -> Message:
    if len(head) > MOST_HEAD:
        raise bad_request(f"the form cannot be read: a part's head has at most {MOST_HEAD} bytes")
    try:
        return message_from_bytes(head)
    except (LookupError, TypeError, ValueError) as error:
        raise bad_request(f"the form cannot be read: {error}") from None


def _read_page(request: Request) -> tuple[int, str | None]:
    """Read which part of a list is asked for. Raises ApiError."""
    limit = request.query_params.get("limit", str(MOST_LISTED))
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= len(str(MOST_LISTED)) and int(limit) > 0):
        raise bad_request(f"limit is a number from 1 to {MOST_LISTED}", "limit")
    return min(int(limit), MOST_LISTED), request.query_params.get("after")
