"""Text from others as people are shown it: it cannot act on a terminal, hide a part of itself, or feign another line.

Inside, text stays as it came: signatures and names are compared byte by byte. It is cleaned where it goes out to be
read: in errors, log lines, answers of the control socket, the gateway's page, and on the command line's streams
(``swarmd_cli.terminal``). Source: Unicode 17, chapter 4.5 (general categories) and chapter 23 (format characters).
"""

from __future__ import annotations

import unicodedata
from typing import Any

# Controls, format characters (directions, joiners, tags), halves of surrogate pairs, private and unassigned characters,
# separators of lines and paragraphs: nothing of these can be seen, and a terminal may act on it.
UNSEEN_CATEGORIES = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
# Letters and marks that are drawn as nothing, though their categories are those of others that are seen.
UNSEEN_LETTERS = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
# Directions that are forced upon what follows. Marks and joiners are none of these: some scripts are wrong without.
FORCED_DIRECTIONS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
LINE_SPACES = frozenset("\n\t")


def clean_line(text: str) -> str:
    """Write a name, or what else is one line, with ? for what cannot be seen; line ends and tabs become spaces."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(" " if char in LINE_SPACES else _show_or_mark(char) for char in text)


def clean_text(text: str) -> str:
    """Write text of several lines with ? for what cannot be seen; line ends and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if char in LINE_SPACES else _show_or_mark(char) for char in text)


def _show_or_mark(char: str) -> str:
    is_unseen = unicodedata.category(char) in UNSEEN_CATEGORIES or char in UNSEEN_LETTERS
    return "?" if is_unseen else char


def clean_answer(text: str) -> str:
    """Write a model's text for a terminal: as it is, with ? for what acts on the terminal; \\r is left out."""
    # A model writes in any script. Joiners and marks of direction are part of Persian, Hindi or an emoji, and stay.
    if text.isascii() and text.isprintable():
        return text
    return "".join(_stay_or_mark(char) for char in text)


def _stay_or_mark(char: str) -> str:
    if char in LINE_SPACES:
        return char
    if char == "\r":
        return ""
    is_acting = unicodedata.category(char) in ("Cc", "Cs") or char in FORCED_DIRECTIONS
    return "?" if is_acting else char


def clean_strings(value: Any) -> Any:
    """Clean all strings of a value that JSON can hold, keys included, each as one line."""
    if isinstance(value, str):
        return clean_line(value)
    if isinstance(value, dict):
        return {clean_strings(key): clean_strings(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [clean_strings(inner) for inner in value]
    return value
