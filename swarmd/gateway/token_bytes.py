"""Which bytes each token of a vocabulary stands for, where its decoder writes token after token.

A decoder that looks at what stands beside a token (WordPiece's spaces) has no such bytes, and an unknown one is not
guessed. Source: the decoders of tokenizers, as ``tokenizer.json`` names them.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from tokenizers import Tokenizer

PIECEWISE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
"""Decoders that write each token by itself; ``Strip`` takes a space off the whole text's beginning only."""


class TokenBytes:
    """The bytes of one tokenizer's tokens. ``kind`` names its decoder; ``is_known``: whether there are such bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoders = _decoders(json.loads(tokenizer.to_str()).get("decoder"))
        kinds = {str(decoder.get("type")) for decoder in decoders}
        self.kind = " and ".join(sorted(kinds)) or "none"
        self._is_byte_level = kinds == {"ByteLevel"}
        self.is_known = self._is_byte_level or (bool(kinds) and kinds <= PIECEWISE)
        self._has_bytes = "ByteFallback" in kinds
        self._spaces = tuple(filter(None, (_replaced(decoder) for decoder in decoders)))

    def __getitem__(self, token: int) -> bytes:
        """The bytes of a token; where there are none by itself, those of its text."""
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return b""
        if self._is_byte_level:
            table = byte_level()
            return bytes(table[c] for c in written) if all(c in table for c in written) else written.encode()
        if not self.is_known:
            return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()
        if self._has_bytes and (byte := _fallback(written)) is not None:
            return byte
        for old, new in self._spaces:
            written = written.replace(old, new)
        return written.encode()


def _decoders(written: Any) -> list[dict[str, Any]]:
    """The decoders that are applied, one after the other."""
    if not isinstance(written, dict):
        return []
    inner = written.get("decoders") if written.get("type") == "Sequence" else None
    return [written] if inner is None else [found for one in inner for found in _decoders(one)]


def _replaced(decoder: dict[str, Any]) -> tuple[str, str] | None:
    if decoder.get("type") == "Metaspace":
        return str(decoder.get("replacement", "▁")), " "
    pattern = decoder.get("pattern")
    if decoder.get("type") == "Replace" and isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        return pattern["String"], str(decoder.get("content", ""))
    return None


def _fallback(written: str) -> bytes | None:
    """The byte that ``<0x0A>`` stands for."""
    if len(written) != 6 or not written.startswith("<0x") or not written.endswith(">"):
        return None
    try:
        return bytes([int(written[3:5], 16)])
    except ValueError:
        return None


@cache
def byte_level() -> dict[str, int]:
    """The letters by which byte-level vocabularies write bytes: printable ones stand for themselves (GPT-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return table | {chr(256 + place): byte for place, byte in enumerate(others)}
