"""Text out of tokens, as it grows: whole characters only, and nothing that may turn out to be a stop string.

The text is what the tokenizer's decoder makes of all tokens together, prompt included, less what it makes of the
prompt; nothing that was given is taken back. Any tokens have a text: those that make no character are U+FFFD, as the
decoder has it. Pure but for the tokenizer.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from swarmd.gateway.generation.token_bytes import TokenBytes

UNKNOWN = "\ufffd"


class Writer:
    """One answer's text. ``stopped`` is the stop string that ended it, which is no part of it.

    Special tokens are hidden, but for those that are ``shown``; a stop string may still name them.
    """

    def __init__(
        self,
        tokens: TokenBytes,
        stops: Sequence[str],
        preceding: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokens = tokens
        self._hides = frozenset(tokens.special) - shown
        self._stops = tuple(stops)
        names = [tokens[token].decode(errors="replace") for token in self._hides]
        self._minds_hidden = any(name in stop for stop in self._stops for name in names if name)
        self._text = _make_text(tokens, [token for token in preceding if token not in self._hides])
        self._held = ""  # the beginning of a stop string, perhaps
        self._shown: list[bool] = []  # of its characters
        self.stopped: str | None = None

    def add(self, token: int) -> str:
        """Return what the text grows by, for certain."""
        if self.stopped is not None:
            return ""
        if token not in self._hides:
            return self._release(self._text.add(token))
        if not self._minds_hidden:
            return ""
        text_before = self._release(self._text.flush())
        if self.stopped is not None:
            return text_before
        return text_before + self._release(self._tokens[token].decode(errors="replace"), is_shown=False)

    def finish(self) -> str:
        """Return the end of it: what was held back and is no stop string, and the rest of a character."""
        if self.stopped is not None:
            return ""
        text = self._release(self._text.flush())
        if self.stopped is None:
            text += self._take(len(self._held))
        return text

    def _release(self, part: str, is_shown: bool = True) -> str:
        """Add to what is held, and let go of what can be no part of a stop string any more."""
        # Held is the longest end of the text that a stop string may begin with:
        #
        #     text    a b c E N        stop string: END
        #             released| held
        #
        # A special token's name may be a part of a stop string too. Its letters are held, but not shown.
        self._held += part
        self._shown += [is_shown] * len(part)
        matches = []
        for stop in self._stops:
            start = self._held.find(stop)
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if matches:  # the one that ends first counts, however tokens cut the text
            _, start, self.stopped = min(matches)
            return self._take(start)
        n_held = max((_count_overlap(self._held, stop) for stop in self._stops), default=0)
        return self._take(len(self._held) - n_held)

    def _take(self, n_characters: int) -> str:
        """Let go of the first of those that were held."""
        pairs = zip(self._held[:n_characters], self._shown[:n_characters], strict=True)
        text = "".join(character for character, is_shown in pairs if is_shown)
        self._held = self._held[n_characters:]
        self._shown = self._shown[n_characters:]
        return text


def _count_overlap(text: str, stop: str) -> int:
    """Count the text's last characters that begin ``stop``."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in sizes if stop.startswith(text[-n:])), 0)


# --- the text of tokens, by kinds of decoders ----------------------------------------------------------------------


# A token is no piece of text: one character may take several tokens, and what a token writes may depend on those
# beside it. Three kinds of decoders, each with its own rule of what is certain:
#
#     _Utf8Text      the bytes of all tokens are one stream of UTF-8 (byte-level BPE)
#     _ByteRuns      single-byte tokens stand between tokens of text (SentencePiece with byte fallback)
#     _DecodedText   nothing is known: decode all again, and compare


class _Text(Protocol):
    """Text after other tokens."""

    def add(self, token: int) -> str:
        """Take a token; returns what is certain by now."""

    def flush(self) -> str:
        """Return what was not certain, as it is when nothing follows."""


def _make_text(tokens: TokenBytes, preceding: Sequence[int]) -> _Text:
    if not tokens.is_known:
        return _DecodedText(tokens, preceding)
    return _ByteRuns(tokens, preceding) if tokens.has_runs else _Utf8Text(tokens, preceding)


class _Utf8Text:
    """All bytes are one text; what is no UTF-8 in it is U+FFFD, once for each beginning of a character."""

    def __init__(self, tokens: TokenBytes, preceding: Sequence[int]) -> None:
        self._tokens = tokens
        self._is_first = not preceding
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in preceding:  # of which a character may not be whole yet
            self._decoder.decode(tokens[token])

    def add(self, token: int) -> str:
        written = self._tokens.first(token) if self._is_first else self._tokens[token]
        self._is_first = False
        return self._decoder.decode(written)

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _ByteRuns:
    """Single bytes in a run are a text if all of them together are UTF-8, else U+FFFD for each.

    So no byte is written before a token of another kind ends the run: the last byte decides about the first.
    """

    def __init__(self, tokens: TokenBytes, preceding: Sequence[int]) -> None:
        self._tokens = tokens
        self._is_first = not preceding
        self._drops_space = tokens.drops_first_space and not preceding
        self._run = bytearray()
        for token in preceding:
            byte = tokens.single_byte(token)
            self._run = bytearray() if byte is None else self._run + byte
        self._n_before = len(self._run)

    def add(self, token: int) -> str:
        byte = self._tokens.single_byte(token)
        if byte is not None:
            self._run += byte
            self._is_first = False
            return ""
        written = self._tokens.first(token) if self._is_first else self._tokens[token]
        self._is_first = False
        return self._strip_first_space(self._end_run() + written.decode())

    def flush(self) -> str:
        return self._strip_first_space(self._end_run())

    def _end_run(self) -> str:
        """End the run; returns the text of its bytes beyond the prompt's."""
        run = bytes(self._run)
        n_before = self._n_before
        self._run.clear()
        self._n_before = 0
        if len(run) == n_before:
            return ""
        try:
            text = run.decode()
        except UnicodeDecodeError:
            return UNKNOWN * (len(run) - n_before)
        return text[len(run[:n_before].decode(errors="ignore")) :]

    def _strip_first_space(self, text: str) -> str:
        """Return a text without the space that it must not begin with."""
        if text and self._drops_space:
            self._drops_space = False
            return text.removeprefix(" ")
        return text


class _DecodedText:
    """Text of a decoder that nothing is known of: what one token more adds to the decoded text, once it is complete."""

    def __init__(self, tokens: TokenBytes, preceding: Sequence[int]) -> None:
        self._decode = tokens.tokenizer.decode
        self._ids = list(preceding)
        self._n_given = len(self._ids)

    def add(self, token: int) -> str:
        self._ids.append(token)
        return self._take_new_text(is_last=False)

    def flush(self) -> str:
        return self._take_new_text(is_last=True)

    def _take_new_text(self, is_last: bool) -> str:
        given_text = self._decode(self._ids[: self._n_given], skip_special_tokens=False)
        full_text = self._decode(self._ids, skip_special_tokens=False)
        if full_text.endswith(UNKNOWN) and not is_last:
            return ""
        text: str = full_text[len(given_text) :]
        if self._n_given < len(self._ids):
            self._ids = self._ids[self._n_given :]
        self._n_given = len(self._ids)
        return text
