"""Which bytes each token of a vocabulary stands for, where its decoder writes token after token.

A decoder that looks at what stands beside a token (WordPiece's spaces) has no such bytes, and an unknown one is not
guessed. Source: the decoders of tokenizers, as ``tokenizer.json`` names them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from typing import Any

from tokenizers import Tokenizer

BYTE_LEVEL = "ByteLevel"
PIECEWISE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class TokenBytes:
    """The bytes of one tokenizer's tokens. ``kind`` names its decoder; ``is_known``: whether there are such bytes.

    ``has_runs``: bytes that stand together are characters only if all of them are (``<0x0A>`` and its like).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        # A tokenizer's file may name any decoders, in any order. Only those are trusted whose rule is known to look
        # at one token alone; all others are decoded as a whole (``writing._DecodedText``).
        self.tokenizer = tokenizer
        decoders = _list_decoders(json.loads(tokenizer.to_str()).get("decoder"))
        kinds = [str(decoder.get("type")) for decoder in decoders]
        self.kind = " and ".join(sorted(set(kinds))) or "none"
        self._is_byte_level = kinds == [BYTE_LEVEL]
        is_piecewise = bool(kinds) and all(map(_is_piecewise, decoders))
        self.is_known = self._is_byte_level or (is_piecewise and _is_fused(kinds))
        self.has_runs = self.is_known and "ByteFallback" in kinds
        self.drops_first_space = "Strip" in kinds
        self._replaced = [pair for pair in map(_replacement, decoders) if pair is not None]
        dropping = (decoder for decoder in decoders if decoder["type"] == "Metaspace" and _drops_space(decoder))
        self._dropped = next(map(_replacement, dropping), None)
        self.special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}

    def special_among(self, names: Iterable[str]) -> frozenset[int]:
        """Return those of some tokens, by their names, that are special ones of this vocabulary."""
        return frozenset(self.special.intersection(map(self.tokenizer.token_to_id, names)))

    def __getitem__(self, token: int) -> bytes:
        """The bytes of a token; where there are none by itself, those of its text."""
        written = self.tokenizer.id_to_token(token)
        if written is None:
            return b""
        if self._is_byte_level:
            table = byte_level_table()
            if all(letter in table for letter in written):
                return bytes(table[letter] for letter in written)
            return written.encode()
        if not self.is_known:
            return str(self.tokenizer.decode([token], skip_special_tokens=False)).encode()
        byte = self.single_byte(token)
        return self._plain(written).encode() if byte is None else byte

    def single_byte(self, token: int) -> bytes | None:
        """Return the byte that ``<0x0A>`` stands for; None for a token of another kind."""
        written = self.tokenizer.id_to_token(token) if self.has_runs else None
        if written is None or len(written) != 6:
            return None
        if not written.startswith("<0x") or not written.endswith(">"):
            return None
        try:
            return bytes([int(written[3:5], 16)])
        except ValueError:
            return None

    def first(self, token: int) -> bytes:
        """Return the bytes of a token that begins a text: some decoders leave its mark of a space out."""
        written = self.tokenizer.id_to_token(token)
        if self._dropped is None or written is None or self.single_byte(token) is not None:
            return self[token]
        return self._plain(written.replace(self._dropped[0], "")).encode()

    def _plain(self, written: str) -> str:
        for old, new in self._replaced:
            written = written.replace(old, new)
        return written


def _list_decoders(written: Any) -> list[dict[str, Any]]:
    """List the decoders that are applied, one after the other."""
    if not isinstance(written, dict):
        return []
    parts = written.get("decoders") if written.get("type") == "Sequence" else None
    if parts is None:
        return [written]
    return [decoder for part in parts for decoder in _list_decoders(part)]


def _is_piecewise(decoder: dict[str, Any]) -> bool:
    """Does it write each token by itself? A space taken off the whole text's beginning is its beginning's affair."""
    if decoder["type"] == "Replace":
        return _replacement(decoder) is not None
    if decoder["type"] == "Strip":
        return [decoder.get(name) for name in ("content", "start", "stop")] == [" ", 1, 0]
    return str(decoder["type"]) in PIECEWISE


def _is_fused(kinds: list[str]) -> bool:
    """Is a beginning taken off the whole text, not off each token?"""
    return "Strip" not in kinds or "Fuse" in kinds[: kinds.index("Strip")]


def _replacement(decoder: dict[str, Any]) -> tuple[str, str] | None:
    """Return which text a decoder replaces by which, None where it does not."""
    if decoder["type"] == "Metaspace":
        return str(decoder.get("replacement", "▁")), " "
    pattern = decoder.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if decoder["type"] == "Replace" and isinstance(text, str):
        return text, str(decoder.get("content", ""))
    return None


def _drops_space(metaspace: dict[str, Any]) -> bool:
    return str(metaspace.get("prepend_scheme")) != "never"


@cache
def byte_level_table() -> dict[str, int]:
    """Return the letters by which byte-level vocabularies write bytes (GPT-2's): printable ones are themselves."""
    ranges = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
    printable = [byte for first, last in ranges for byte in range(ord(first), ord(last) + 1)]
    table = {chr(byte): byte for byte in printable}
    unprintable = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + place): byte for place, byte in enumerate(unprintable)}
