"""One line of text that people copy: invites, and drafts of charters.

A prefix and ``-``, then base32 of a msgpack body and the first 8 bytes of its sha256, so that a cut or mistyped line is
told apart from a wrong one.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re

from swarmd.errors import ConfigError

_CHECK_BYTES = 8  # of a digest: a letter that was mistyped is found
_MOST_RUNS = 200  # of letters that are joined: a long line that was broken into narrow ones


class CutShortError(ConfigError):
    """A line that has begun, and is not there whole: the rest may follow."""


def encode(prefix: str, body: bytes) -> str:
    """Write a body as one line, in letters that can be read out."""
    checked = body + hashlib.sha256(body).digest()[:_CHECK_BYTES]
    return f"{prefix}-{base64.b32encode(checked).decode().rstrip('=').lower()}"


# A line comes as people paste it: broken by a mail program, quoted with "> ", in quotes or backticks, at the end of a
# sentence, or with the command in front. What counts is where the prefix begins. Behind it letters are joined, run by
# run, until the checksum is right. What stands around them is passed over, and nothing else has to be guessed.
def decode_untrusted(text: str, prefix: str, version: str, expected: str) -> bytes:
    """The body of a line as typed or pasted; ``expected`` it should be. Raises ConfigError that says what is wrong."""
    begin = re.search(rf"(?<![a-z0-9]){re.escape(prefix)}(\d+)-", text.lower())
    if begin is None:
        raise ConfigError(f"expected {expected} that starts with {prefix}{version}-, got {text.strip()[:20]!r}")
    if begin[1] != version:
        raise ConfigError(f"{expected} of version {begin[1]!r}; this swarmd reads version {version}: update swarmd")
    letters = ""
    for run in itertools.islice(re.finditer(r"[a-z2-7]+", text.lower()[begin.end() :]), _MOST_RUNS):
        letters += run[0]
        body = _decode_letters(letters)
        if body is not None:
            return body
    raise CutShortError(f"{expected} was cut short or mistyped, its checksum does not match: copy the whole line again")


def _decode_letters(letters: str) -> bytes | None:
    """The body that letters stand for; None where they are no whole line."""
    try:
        raw = base64.b32decode(letters.upper() + "=" * (-len(letters) % 8))
    except ValueError:  # binascii.Error among them
        return None
    body = raw[:-_CHECK_BYTES]
    return body if hashlib.sha256(body).digest()[:_CHECK_BYTES] == raw[-_CHECK_BYTES:] else None
