"""Change one setting of a TOML file that a person wrote: the rest stays as it is written, or the file stays as it is.

tomlkit edits; ``tomllib``, which the daemon reads with, then has to find the one change and no other.
"""

from __future__ import annotations

import codecs
from typing import Any

from swarmd.config import parse_toml
from swarmd.errors import ConfigError
from swarmd.text_files import decode_text


def set_in_file(raw: bytes, source: str, table: str, key: str, value: Any) -> bytes:
    """Set ``key`` in ``[table]`` of a file's bytes; mark and line ends stay. Raises ConfigError naming ``source``."""
    mark = codecs.BOM_UTF8 if raw.startswith(codecs.BOM_UTF8) else b""
    text = decode_text(raw, source)
    # tomlkit ends new lines with LF: a file of CRLF is edited as one of LF. One that mixes them stays mixed.
    is_crlf = 0 < text.count("\n") == text.count("\r\n")
    changed = set_value(text.replace("\r\n", "\n") if is_crlf else text, source, table, key, value)
    return mark + (changed.replace("\n", "\r\n") if is_crlf else changed).encode()


def set_value(text: str, source: str, table: str, key: str, value: Any) -> str:
    """Set ``key`` in ``[table]`` of a TOML text. Raises ConfigError for one that cannot be kept as it is written."""
    before = parse_toml(text, source)
    settings = before.get(table, {})
    if not isinstance(settings, dict):
        raise ConfigError(f"{source}: {table} is a table [{table}], not {settings!r}")
    changed = _edit(text, table, key, value)
    expected = {**before, table: {**settings, key: value}}
    if changed is None or not _is_same(parse_toml(changed, source), expected):
        raise ConfigError(
            f"{source} is written in a way that cannot be kept while it is changed: set {key} in its table [{table}] "
            "with an editor"
        )
    return changed


def _edit(text: str, table: str, key: str, value: Any) -> str | None:
    """Edit by tomlkit; None for what it cannot edit, or would order otherwise."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError
    from tomlkit.items import AoT, Table

    # Beside its own errors it raises what its dictionaries raise, for some valid files.
    try:
        document = tomlkit.parse(text)
        if tomlkit.dumps(document) != text:
            return None
        if table not in document:
            document[table] = tomlkit.table()
        settings = document[table]
        if settings and all(isinstance(item, Table | AoT) for item in settings.values()):
            return None  # it has no header of its own: a new one would be given the comment of its first table
        _set_before_comments(settings, key, value)
        return tomlkit.dumps(document)
    except (TOMLKitError, LookupError, TypeError, ValueError, AttributeError, RecursionError):
        return None


def _set_before_comments(settings: Any, key: str, value: Any) -> None:
    """Set a key; a new one comes before the blanks and comments that end its table, as they are about what follows."""
    from tomlkit.items import Table

    is_new = key not in settings
    ending = []
    if is_new and isinstance(settings, Table):
        body = settings.value.body  # pairs of key and item: blanks and comments have no key
        while body and body[-1][0] is None:
            ending.append(body.pop()[1])
    settings[key] = value
    for item in reversed(ending):
        settings.add(item)


def _is_same(left: Any, right: Any) -> bool:
    """Are two values of TOML the same, type and all? NaN is the same as itself here."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_is_same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_is_same, left, right))
    return repr(left) == repr(right)
