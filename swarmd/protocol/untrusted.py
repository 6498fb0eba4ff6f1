"""One way to read msgpack that came from outside: a bounded type in, a value out, or the one error of the caller."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from swarmd.errors import RemoteProtocolError, SwarmError

T = TypeVar("T")


def decode(raw: Any, kind: type[T], what: str, error: type[SwarmError] = RemoteProtocolError) -> T:
    """Decode ``raw`` as ``kind``; raises ``error`` naming ``what``, whatever the bytes are."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as reason:
        raise error(f"{what} does not parse: {reason}") from None
