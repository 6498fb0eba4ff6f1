"""Schemas put into known words: the same meaning, or a refusal that says what to change."""

from __future__ import annotations

from typing import Any

import pytest

from swarmd.gateway.generation.json_schema import MAX_DEPTH, BadSchema, normalise_schema, schema_of_calls

ONE = {"enum": [1]}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "format": "password"}, {"type": "string"}),
        ({"type": "integer", "format": "int64"}, {"type": "integer"}),
        ({"type": "string", "format": "date"}, {"type": "string", "format": "date"}),
        ({"items": ONE, "uniqueItems": True, "maxItems": 1}, {"items": ONE, "maxItems": 1}),
        ({"items": ONE, "uniqueItems": False}, {"items": ONE}),
        ({"propertyNames": {"type": "string"}, "additionalProperties": ONE}, {"additionalProperties": ONE}),
        (
            {"propertyNames": {"pattern": "^a"}, "additionalProperties": ONE},
            {"patternProperties": {"^a": ONE}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": ONE},
            {"properties": {"a": ONE, "b": ONE}, "additionalProperties": False},
        ),
        ({"anyOf": [{"properties": {"x": {"format": "hex"}}}]}, {"anyOf": [{"properties": {"x": {}}}]}),
        ({"properties": {"format": {"const": "hex"}}}, {"properties": {"format": {"const": "hex"}}}),
        ({"enum": [{"format": "hex"}]}, {"enum": [{"format": "hex"}]}),
    ],
)
def test_remarks_are_left_out_and_the_rest_is_said_otherwise(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    assert normalise_schema(schema) == expected


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"items": ONE, "uniqueItems": True}, "take out what comes twice"),
        ({"propertyNames": {"maxLength": 3}}, "say patternProperties"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"b": ONE}}, "name the properties"),
    ],
)
def test_what_would_be_lost_is_refused_with_what_to_change(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(BadSchema, match=why):
        normalise_schema({"properties": {"x": schema}})


def test_schemas_within_schemas_have_a_depth() -> None:
    schema: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 2):
        schema = {"items": schema}
    with pytest.raises(BadSchema, match="deep at most"):
        normalise_schema(schema)


@pytest.mark.parametrize("ref", ["#/$defs/P", "http://example.com/tool#/$defs/P"])
def test_a_tools_references_move_with_its_schema(ref: str) -> None:
    own_schema = {"$id": "http://example.com/tool", "properties": {"x": {"$ref": ref}}, "$defs": {"P": ONE}}
    tools = [{"function": {"name": name, "parameters": own_schema}} for name in ("a", "b")]
    places = schema_of_calls(tools, allows_several=True)["$defs"]
    assert [places[f"tool{n}"]["properties"]["x"]["$ref"] for n in (0, 1)] == [
        "#/$defs/tool0/$defs/P",
        "#/$defs/tool1/$defs/P",
    ]
