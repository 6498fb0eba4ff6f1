"""One line of text that people copy: invites, and drafts of charters.

A prefix and ``-``, then base32 of a msgpack body and the first 8 bytes of its sha256, so that a cut or mistyped line is
told apart from a wrong one.
"""

from __future__ import annotations

import base64
import hashlib

from swarmd.errors import ConfigError

_CHECK_BYTES = 8  # of a digest: a letter that was mistyped is found


def encode(prefix: str, body: bytes) -> str:
    """Write a body as one line, in letters that can be read out."""
    checked = body + hashlib.sha256(body).digest()[:_CHECK_BYTES]
    return f"{prefix}-{base64.b32encode(checked).decode().rstrip('=').lower()}"


def decode_untrusted(text: str, prefix: str, version: str, expected: str) -> bytes:
    """The body of a line as typed or pasted; ``expected`` it should be. Raises ConfigError that says what is wrong."""
    head, dash, tail = text.strip().partition("-")
    if not dash or not head.startswith(prefix):
        raise ConfigError(f"expected {expected} that starts with {prefix}{version}-, got {text.strip()[:20]!r}")
    if head.removeprefix(prefix) != version:
        found_version = head.removeprefix(prefix)
        raise ConfigError(
            f"{expected} of version {found_version!r}; this swarmd reads version {version}: update swarmd"
        )
    try:
        raw = base64.b32decode(tail.upper() + "=" * (-len(tail) % 8))
    except ValueError:  # binascii.Error among them
        raise ConfigError(f"{expected} was cut short or mistyped: copy the whole line again") from None
    body = raw[:-_CHECK_BYTES]
    check = raw[-_CHECK_BYTES:]
    if hashlib.sha256(body).digest()[:_CHECK_BYTES] != check:
        raise ConfigError(
            f"{expected} was cut short or mistyped, its checksum does not match: copy the whole line again"
        )
    return body
