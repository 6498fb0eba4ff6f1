"""A request's body, of the type that is expected and bounded as it comes. Nothing is decoded here."""

from __future__ import annotations

import trio
from starlette.requests import ClientDisconnect, Request

from swarmd.gateway.apis.refusals import ApiError, bad_request

MOST_BODY_BYTES = 8 * 2**20  # of a request: a context of a million tokens is half of it
MOST_DISCARDED_BYTES = 8 * MOST_BODY_BYTES  # are read of a larger one: who still sends does not hear why it is refused
BODY_WITHIN_S = 60.0  # for all of it: 8 MiB over 1 Mbit/s


async def read_body(request: Request, expected: str = "application/json") -> bytes:
    """Read the body, bounded as it comes. Raises ApiError."""
    # A client that still sends does not read: refused in the middle, it would never hear why. So a body that is too
    # large is read on and thrown away, but not without an end.
    kind, _, _ = request.headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind != expected:
        raise ApiError(415, "invalid_request_error", f"expected Content-Type: {expected}, not {kind[:64]!r}")
    body = bytearray()
    n_bytes = 0
    try:
        with trio.fail_after(BODY_WITHIN_S):
            async for part in request.stream():
                n_bytes += len(part)
                if n_bytes <= MOST_BODY_BYTES:
                    body += part
                elif n_bytes > MOST_DISCARDED_BYTES:
                    break
    except trio.TooSlowError:
        raise ApiError(408, "invalid_request_error", f"the body did not come within {BODY_WITHIN_S:.0f} s") from None
    except ClientDisconnect:
        raise bad_request("the client has gone") from None
    if n_bytes > MOST_BODY_BYTES:
        raise ApiError(413, "invalid_request_error", f"a request has at most {MOST_BODY_BYTES >> 20} MiB")
    return bytes(body)
