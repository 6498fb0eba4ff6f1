"""JSON schemas as clients write them, put into words that the grammar library knows, without another meaning.

What is a remark only is left out, what can be said otherwise is, and what would be lost is refused with what to change.
Source: JSON Schema, draft 2020-12 ("format" and unknown words are annotations). Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100  # of schemas within schemas; what people write has ten
MAX_CALLS = 8  # of tools, at once
ONE = {
    *("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedProperties", "unevaluatedItems", "additionalItems", "contentSchema"),
}
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"),
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
    *("relative-json-pointer", "regex"),
}
"""The formats of JSON Schema, which bind a text; all others are remarks (OpenAPI's int64, password, binary)."""

Schema = dict[str, Any]


class BadSchema(Exception):
    """Why a schema cannot be used, for whoever wrote it."""


def prepared(schema: Schema) -> Schema:
    """The same schema in words that are known. Raises BadSchema."""
    return _walked(schema, _in_known_words, 0)


def calls_of(tools: list[Schema], several: bool) -> Schema:
    """The schema of calls of these tools: an object with name and arguments, or a list of such. Raises BadSchema.

    Each tool's schema has a place of its own in ``$defs``, and what it refers to ("#" is the tool's own) goes there.
    """
    calls: list[Schema] = []
    places: dict[str, Schema] = {}
    for number, tool in enumerate(tools):
        place = f"tool{number}"
        places[place] = _moved(_closed(tool["function"].get("parameters") or {"type": "object"}), f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": {"$ref": f"#/$defs/{place}"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    one: Schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    listed: Schema = {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_CALLS}
    return {**(listed if several else one), "$defs": places}


def _closed(schema: Schema) -> Schema:
    """Arguments that a function names, and no others: a small model would go on making some up."""
    is_open = "properties" in schema and "additionalProperties" not in schema
    return {**schema, "additionalProperties": False} if is_open else schema


def _moved(schema: Schema, place: str) -> Schema:
    """A schema whose own root is at ``place`` of another one. Raises BadSchema."""
    names = tuple(name for name in (schema.get("$id"), "") if isinstance(name, str))
    plain = {word: value for word, value in schema.items() if word not in ("$id", "$schema")}

    def point(part: Schema) -> Schema:
        ref = part.get("$ref")
        if not isinstance(ref, str):
            return part
        base, _, pointer = ref.partition("#")
        return {**part, "$ref": place + pointer} if base in names and pointer[:1] in ("", "/") else part

    return _walked(plain, point, 0)


def _walk(schema: Any, change: Callable[[Schema], Schema], depth: int) -> Any:
    """What is no schema stays."""
    return _walked(schema, change, depth) if isinstance(schema, dict) else schema


def _walked(schema: Schema, change: Callable[[Schema], Schema], depth: int) -> Schema:
    """``change`` every schema within a schema, the inner ones first. Raises BadSchema."""
    if depth > MAX_DEPTH:
        raise BadSchema(f"schemas within schemas go {MAX_DEPTH} deep at most: name the inner ones in $defs")
    walked: Schema = {}
    for word, value in schema.items():
        if word in LISTS and isinstance(value, list):
            walked[word] = [_walk(one, change, depth + 1) for one in value]
        elif word in NAMED and isinstance(value, dict):
            walked[word] = {name: _walk(one, change, depth + 1) for name, one in value.items()}
        elif word in ONE:
            walked[word] = _walk(value, change, depth + 1)
        else:
            walked[word] = value
    return change(walked)


def _in_known_words(schema: Schema) -> Schema:
    plain = dict(schema)
    if isinstance(plain.get("format"), str) and plain["format"] not in FORMATS:
        del plain["format"]
    if "uniqueItems" in plain:
        if plain["uniqueItems"] is True and not _is_at_most_one(plain.get("maxItems")):
            raise BadSchema("uniqueItems cannot be kept here: leave it out, and take out what comes twice yourself")
        del plain["uniqueItems"]
    if "propertyNames" in plain:
        return _with_names(plain, plain.pop("propertyNames"))
    return plain


def _is_at_most_one(value: Any) -> bool:
    return type(value) in (int, float) and value <= 1


def _with_names(schema: Schema, names: Any) -> Schema:
    """An object whose properties' names fit ``names``: said by pattern, or by naming them all. Raises BadSchema."""
    if names in ({}, True) or (isinstance(names, dict) and set(names) <= {"type", "title", "description"}):
        return schema  # names are text anyhow
    pattern = names.get("pattern") if isinstance(names, dict) else None
    listed = names.get("enum") if isinstance(names, dict) else None
    if "properties" not in schema and "patternProperties" not in schema:
        value = schema.get("additionalProperties", True)
        if isinstance(pattern, str) and set(names) <= {"type", "pattern"}:
            return {**schema, "patternProperties": {pattern: value}, "additionalProperties": False}
        if isinstance(listed, list) and set(names) <= {"type", "enum"} and all(isinstance(n, str) for n in listed):
            return {**schema, "properties": dict.fromkeys(listed, value), "additionalProperties": False}
    raise BadSchema("propertyNames cannot be kept here: say patternProperties, or name the properties")
