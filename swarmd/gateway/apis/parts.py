"""What an answer consists of: text, thoughts, calls of tools, as the family marks them, while it grows.

The marks and their parser are transformers' own (``utils.chat_parsing``). A model for which it has none gives text;
where a request forces a call, a grammar makes it JSON, which needs no marks. A call that is cut off, or that no
program could make, is text as well: exactly what the model wrote.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from swarmd.gateway.apis.schema import JsonObject

# Three readers of an answer's text, of which one request has one:
#
#     ToolCallParts   a call is forced: a grammar makes the text JSON, read when it is complete
#     MarkedParts     the family marks thoughts and calls, and no grammar holds the answer
#     PlainParts      all else
THOUGHTS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of "content" or "reasoning" as it comes, or a complete "call" with its name and arguments (JSON)."""

    kind: str
    text: str
    name: str = ""


class PlainParts:
    """All text is content."""

    keeps_special = False

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are complete once this text has come."""
        return [AnswerPart("content", text)] if text else []

    def end(self) -> list[AnswerPart]:
        """Return what was held back until the end."""
        return []


class MarkedParts:
    """Parts as the family marks them. Without ``tools`` there are no calls: marks of some are text."""

    keeps_special = True

    def __init__(self, template: JsonObject, tail: str, tools: list[JsonObject] | None) -> None:
        from swarmd.gateway.apis.call_region import CallRegionParser  # late: transformers takes a second

        self._parser = CallRegionParser(template, tail, tools)

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are complete once this text has come."""
        return self._read_events(self._parser.feed(text)) if text else []

    def end(self) -> list[AnswerPart]:
        """Return what the parser held back."""
        return self._read_events(self._parser.finalize()[1])

    def _read_events(self, events: list[JsonObject]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for event in events:
            kind = event.get("type")
            field = event.get("field", "content")
            if kind == "region_chunk" and field in ("content", *THOUGHTS) and event.get("text"):
                parts.append(AnswerPart("content" if field == "content" else "reasoning", event["text"]))
            elif "written" in event:
                parts += _read_calls(event["value"], event["written"])
        return parts


class ToolCallParts:
    """JSON of calls, which a grammar has forced: [{"name": ..., "arguments": {...}}, ...] or one such object."""

    keeps_special = False

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[AnswerPart]:
        """Collect the text: JSON can be read only once it is complete."""
        self._text += text
        return []

    def end(self) -> list[AnswerPart]:
        """Return the calls, or the text itself where it was cut off."""
        try:
            decoded = json.loads(self._text)
        except (ValueError, RecursionError):  # cut off in the middle: what is there is all that there is
            decoded = None
        calls = decoded if isinstance(decoded, list) else [decoded]
        return _read_calls([{"function": call} for call in calls], self._text)


Parts = PlainParts | MarkedParts | ToolCallParts


def _read_calls(value: Any, written: str) -> list[AnswerPart]:
    """Read one call or a list of them; what was ``written`` for them is content where one is none."""
    parts: list[AnswerPart] = []
    for call in value if isinstance(value, list) else [value]:
        part = _read_call(call)
        if part is None:
            return [AnswerPart("content", written)] if written else []
        parts.append(part)
    return parts


def _read_call(value: Any) -> AnswerPart | None:
    """Read a call that was parsed; None for what no program could make: no name, or arguments that are no object."""
    function = value.get("function", value) if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        return None
    arguments = function.get("arguments")
    if arguments in (None, ""):  # of a function that takes none
        arguments = {}
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        is_object = isinstance(json.loads(text), dict)
        f"{name}{text}".encode()
    except (ValueError, RecursionError):  # also: half a surrogate pair, which no answer can hold
        return None
    return AnswerPart("call", text, name) if is_object else None


@cache
def load_marks(family: str) -> JsonObject | None:
    """Return the marks of a family, as transformers' own server knows them; None where it knows none."""
    # A model's own marks are not taken: they would be patterns that anybody wrote.
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as known

    return next((dict(template) for families, template in known.items() if family in families), None)
