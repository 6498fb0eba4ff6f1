"""One way to read what came from outside, or lay on a disk: a bounded type in, a value out, or one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from swarmd.errors import ConfigError, RemoteProtocolError, SwarmError

T = TypeVar("T")


def decode(
    raw: Any,
    kind: type[T],
    subject: str,
    error: type[SwarmError] = RemoteProtocolError,
) -> T:
    """Decode ``raw`` as ``kind``; raises ``error`` naming ``subject``, whatever the bytes are."""
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as reason:
        raise error(f"{subject} does not parse: {reason}") from None


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """Read a file of this program's own; raises ConfigError with ``remedy`` for one that is damaged."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as reason:
        raise ConfigError(f"{path} cannot be read: {reason.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as reason:
        raise ConfigError(f"{path} is damaged ({reason}): {remedy}") from None
