"""JSON schemas as clients write them, put into words that the grammar library knows, without another meaning.

What is a remark only is left out, what can be said otherwise is, and what would be lost is refused with what to change.
Source: JSON Schema, draft 2020-12 ("format" and unknown words are annotations). Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100  # of schemas within schemas; what people write has ten
MAX_CALLS = 8  # of tools, at once
SINGLE_SUBSCHEMAS = {
    *("items", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"),
    *("unevaluatedProperties", "unevaluatedItems", "additionalItems", "contentSchema"),
}
LISTED_SUBSCHEMAS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
NAMED_SUBSCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
FORMATS = {
    *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"),
    *("idn-email", "idn-hostname", "uri-reference", "iri", "iri-reference", "uri-template", "json-pointer"),
    *("relative-json-pointer", "regex"),
}
"""The formats of JSON Schema, which bind a text; all others are remarks (OpenAPI's int64, password, binary)."""

Schema = dict[str, Any]


class BadSchema(Exception):
    """Why a schema cannot be used, said to its author."""


def normalise_schema(schema: Schema) -> Schema:
    """Write a schema in words that the library knows. Raises BadSchema."""
    return _transform_schema(schema, _replace_words, 0)


def schema_of_calls(tools: list[Schema], allows_several: bool) -> Schema:
    """Make the schema of calls of these tools: an object with name and arguments, or a list. Raises BadSchema.

    Each tool's schema has a place of its own in ``$defs``, and what it refers to ("#" is the tool's own) goes there.
    """
    calls: list[Schema] = []
    places: dict[str, Schema] = {}
    for number, tool in enumerate(tools):
        place = f"tool{number}"
        parameters = _close_object(tool["function"].get("parameters") or {"type": "object"})
        places[place] = _move_root(parameters, f"#/$defs/{place}")
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
    call: Schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    list_of_calls: Schema = {"type": "array", "items": call, "minItems": 1, "maxItems": MAX_CALLS}
    return {**(list_of_calls if allows_several else call), "$defs": places}


def _close_object(schema: Schema) -> Schema:
    """Allow the arguments that a function names, and no others: a small model would go on making some up."""
    is_open = "properties" in schema and "additionalProperties" not in schema
    return {**schema, "additionalProperties": False} if is_open else schema


def _move_root(schema: Schema, place: str) -> Schema:
    """Rewrite references of a schema whose root will be at ``place`` of another one. Raises BadSchema."""
    # "#/$defs/item" in a tool's schema means the tool's own definitions. Once it lies inside another schema, "#" is
    # that one's root: each such reference gets the new place in front. Others' (by $id or URL) stay.
    names = tuple(name for name in (schema.get("$id"), "") if isinstance(name, str))
    plain = {word: value for word, value in schema.items() if word not in ("$id", "$schema")}

    def point(part: Schema) -> Schema:
        ref = part.get("$ref")
        if not isinstance(ref, str):
            return part
        base, _, pointer = ref.partition("#")
        is_own = base in names and pointer[:1] in ("", "/")
        return {**part, "$ref": place + pointer} if is_own else part

    return _transform_schema(plain, point, 0)


def _transform_schema(schema: Schema, change: Callable[[Schema], Schema], depth: int) -> Schema:
    """Apply ``change`` to every schema within a schema, the inner ones first. Raises BadSchema."""
    if depth > MAX_DEPTH:
        raise BadSchema(f"schemas within schemas go {MAX_DEPTH} deep at most: name the inner ones in $defs")

    def transform(value: Any) -> Any:
        """Transform a value that is a schema; what is none stays."""
        return _transform_schema(value, change, depth + 1) if isinstance(value, dict) else value

    walked: Schema = {}
    for word, value in schema.items():
        if word in LISTED_SUBSCHEMAS and isinstance(value, list):
            walked[word] = [transform(inner) for inner in value]
        elif word in NAMED_SUBSCHEMAS and isinstance(value, dict):
            walked[word] = {name: transform(inner) for name, inner in value.items()}
        elif word in SINGLE_SUBSCHEMAS:
            walked[word] = transform(value)
        else:
            walked[word] = value
    return change(walked)


# Each word of a schema is one of these:
#
#     a remark only                          left out: a "format" that binds nothing
#     said in other words that are known     translated: propertyNames as patternProperties or properties
#     without another way to say it          refused by name: uniqueItems. Ignored, an answer could break it
#     all else                               stays, and the library decides
def _replace_words(schema: Schema) -> Schema:
    plain = dict(schema)
    if isinstance(plain.get("format"), str) and plain["format"] not in FORMATS:
        del plain["format"]
    if "uniqueItems" in plain:
        if plain["uniqueItems"] is True and not _is_at_most_one(plain.get("maxItems")):
            raise BadSchema("uniqueItems cannot be kept here: leave it out, and take out what comes twice yourself")
        del plain["uniqueItems"]
    if "propertyNames" in plain:
        return _limit_names(plain, plain.pop("propertyNames"))
    return plain


def _is_at_most_one(value: Any) -> bool:
    return type(value) in (int, float) and value <= 1


def _limit_names(schema: Schema, names: Any) -> Schema:
    """Let an object's property names fit ``names``, said by pattern or by naming them all. Raises BadSchema."""
    if names in ({}, True):
        return schema
    words = set(names) if isinstance(names, dict) else set()
    if isinstance(names, dict) and words <= {"type", "title", "description"}:
        return schema  # names are text anyhow
    pattern = names.get("pattern") if isinstance(names, dict) else None
    listed = names.get("enum") if isinstance(names, dict) else None
    if "properties" not in schema and "patternProperties" not in schema:
        value = schema.get("additionalProperties", True)
        if isinstance(pattern, str) and words <= {"type", "pattern"}:
            return {**schema, "patternProperties": {pattern: value}, "additionalProperties": False}
        are_texts = isinstance(listed, list) and all(isinstance(name, str) for name in listed)
        if isinstance(listed, list) and words <= {"type", "enum"} and are_texts:
            return {**schema, "properties": dict.fromkeys(listed, value), "additionalProperties": False}
    raise BadSchema("propertyNames cannot be kept here: say patternProperties, or name the properties")
