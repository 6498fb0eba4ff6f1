"""A batch as OpenAI has it: the lines of its file, those of its answers, and what is told of it.

Nothing here reads a clock or a disk.
"""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Collection, Mapping
from contextlib import suppress
from io import BytesIO
from secrets import token_hex
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from swarmd.gateway.apis.schema import JsonObject

MOST_LINES = 50_000  # of one batch, as OpenAI has it
MOST_TOLD = 20  # faults of a file: a person mends these first
WINDOW_S = 86_400  # within which a batch is answered, or ends with what there is
LINE_ENDS = {"\u2028".encode(): rb"\u2028", "\u2029".encode(): rb"\u2029", "\x85".encode(): rb"\u0085"}
Id = Annotated[str, Meta(min_length=1, max_length=512)]
Labels = Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
State = Literal["in_progress", "completed", "failed", "expired", "cancelled"]


class BatchRequest(msgspec.Struct):
    """POST /v1/batches: answer each line of a file that was uploaded."""

    input_file_id: str
    endpoint: str
    completion_window: Literal["24h"] = "24h"
    metadata: Labels | None = None


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch, as its file has it; ``body`` is read when its turn comes."""

    custom_id: Id
    url: str
    body: msgspec.Raw
    method: Literal["POST"] = "POST"


class LineFault(msgspec.Struct, frozen=True):
    """What is wrong with a line of a batch's file; lines count from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class StoredBatch(msgspec.Struct):
    """A batch, as it is kept: whose it is, what it asks, and what has become of it. Times are seconds since 1970.

    ``owner`` is the key that it is for (``Guard.owner``).
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    metadata: dict[str, str] | None = None
    state: State = "in_progress"
    ended_at: int | None = None
    cancelling_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    faults: tuple[LineFault, ...] = ()
    n_lines: int = 0
    n_completed: int = 0
    n_failed: int = 0

    @property
    def expires_at(self) -> int:
        """When it ends with what there is."""
        return self.created_at + WINDOW_S


def read_lines(data: bytes, endpoint: str) -> tuple[list[BatchLine], list[LineFault]]:
    """Read a batch's file; a batch with faults is not begun. Empty lines count, and are nothing."""
    lines: list[BatchLine] = []
    faults: list[LineFault] = []
    known: set[str] = set()
    for number, text in enumerate(BytesIO(data.removeprefix(BOM_UTF8)), 1):
        if number > MOST_LINES:
            faults.append(LineFault("too_many_requests", f"more than {MOST_LINES} lines do not fit in a batch"))
        if len(faults) >= MOST_TOLD or number > MOST_LINES:
            break
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=BatchLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            faults.append(LineFault("invalid_json_line", str(error), number))
            continue
        if line.url != endpoint:
            message = f"this batch is for {endpoint}, not for {line.url[:100]!r}"
            faults.append(LineFault("invalid_url", message, number, "url"))
        if line.custom_id in known:
            message = f"custom_id {line.custom_id[:100]!r} is another line's, too"
            faults.append(LineFault("duplicate_custom_id", message, number, "custom_id"))
        known.add(line.custom_id)
        lines.append(line)
    if not lines and not faults:
        faults.append(LineFault("empty_file", "the file has no requests"))
    return lines, faults


class _Answered(msgspec.Struct):
    custom_id: str


def read_answered(data: bytes) -> tuple[set[str], int]:
    """Tell which requests a file of answers has, and how many of its bytes are whole lines: a kill may cut the last."""
    answered = set()
    n_bytes = 0
    for text in BytesIO(data):
        if not text.endswith(b"\n"):
            break
        n_bytes += len(text)
        with suppress(msgspec.DecodeError, UnicodeDecodeError):  # of a damaged one nothing is known: it is asked again
            answered.add(msgspec.json.decode(text, type=_Answered).custom_id)
    return answered, n_bytes


def write_answer(custom_id: str, status: int, body: JsonObject) -> bytes:
    """Write the line of a request that was answered, or refused with an HTTP status."""
    return _write_line(custom_id, {"status_code": status, "request_id": f"req_{token_hex(12)}", "body": body}, None)


def write_expired(custom_id: str) -> bytes:
    """Write the line of a request that was not answered within the window."""
    message = f"not answered within {WINDOW_S // 3600} hours"
    return _write_line(custom_id, None, {"code": "batch_expired", "message": message})


def _write_line(custom_id: str, response: JsonObject | None, error: JsonObject | None) -> bytes:
    line = {"id": f"batch_req_{token_hex(12)}", "custom_id": custom_id, "response": response, "error": error}
    encoded = msgspec.json.encode(line)
    for raw, escaped in LINE_ENDS.items():  # which many programs take for the end of a line
        encoded = encoded.replace(raw, escaped)
    return encoded + b"\n"


def describe(batch: StoredBatch) -> JsonObject:
    """Tell of a batch, in OpenAI's form."""
    is_stopping = batch.state == "in_progress" and batch.cancelling_at is not None
    ends: Mapping[str, int | None] = {
        f"{state}_at": batch.ended_at if batch.state == state else None
        for state in ("completed", "failed", "expired", "cancelled")
    }
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": msgspec.to_builtins(batch.faults)} if batch.faults else None,
        "input_file_id": batch.input_file_id,
        "completion_window": "24h",
        "status": "cancelling" if is_stopping else batch.state,
        "output_file_id": batch.output_file_id if batch.n_completed else None,
        "error_file_id": batch.error_file_id if batch.n_failed else None,
        "created_at": batch.created_at,
        "in_progress_at": None if batch.state == "failed" else batch.created_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.ended_at if batch.state == "completed" else None,
        "cancelling_at": batch.cancelling_at,
        **ends,
        "request_counts": {"total": batch.n_lines, "completed": batch.n_completed, "failed": batch.n_failed},
        "metadata": batch.metadata,
    }


def list_page(items: Collection[JsonObject], limit: int, after: str | None) -> JsonObject:
    """List what is behind ``after``, at most ``limit``, in OpenAI's form."""
    ids = [item["id"] for item in items]
    start = 0 if after is None else ids.index(after) + 1 if after in ids else len(ids)
    page = [*items][start : start + limit]
    bounds = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return {"object": "list", "data": page, "has_more": start + limit < len(items), **bounds}
