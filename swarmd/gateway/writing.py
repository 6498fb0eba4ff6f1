"""Text out of tokens, as it grows: whole characters only, and nothing that may turn out to be a stop string.

Pure but for the tokenizer, which decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Writer:
    """One answer's text. ``stopped`` is the stop string that ended it, which is no part of it."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], before: Sequence[int] = (), special: bool = False):
        self._tokenizer = tokenizer
        self._stream: Any = DecodeStream(ids=list(before), skip_special_tokens=not special)
        self._skips = not special
        self._stops = tuple(stops)
        self._pending: list[int] = []  # tokens of a character that is not whole yet
        self._held = ""  # the beginning of a stop string, perhaps
        self.stopped: str | None = None

    def add(self, token: int) -> str:
        """What the text grows by, for certain."""
        self._pending.append(token)
        part = self._stream.step(self._tokenizer, token)
        if part is None or self.stopped is not None:
            return ""
        self._pending.clear()
        return self._release(part)

    def finish(self) -> str:
        """The end of it: what was held back and is no stop string, and what is left of a character."""
        if self.stopped is not None:
            return ""
        rest = self._tokenizer.decode(self._pending, skip_special_tokens=self._skips) if self._pending else ""
        self._pending.clear()
        text = self._release(rest)
        if self.stopped is None:
            text, self._held = text + self._held, ""
        return text

    def _release(self, part: str) -> str:
        text, self._held = self._held + part, ""
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:  # the one that is whole first, however tokens cut the text
            _, at, self.stopped = min(found)
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many of the text's last characters begin ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
