"""What an answer consists of: text, thoughts, calls of tools, as the family marks them, while it grows.

The marks and their parser are transformers' own (``utils.chat_parsing``). A model for which it has none gives text;
where a request forces a call, a grammar makes it JSON, which needs no marks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

THOUGHTS = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of "content" or "reasoning" as it comes, or a whole "call" with its name and arguments (JSON)."""

    kind: str
    text: str
    name: str = ""


class PlainParts:
    """Text is text."""

    keeps_special = False

    def feed(self, text: str) -> list[AnswerPart]:
        return [AnswerPart("content", text)] if text else []

    def end(self) -> list[AnswerPart]:
        return []


class MarkedParts:
    """Parts as the family marks them."""

    keeps_special = True

    def __init__(self, template: dict[str, Any], tail: str, tools: list[dict[str, Any]] | None) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self._parser = ResponseParser(template, prefix=tail, tools=tools)

    def feed(self, text: str) -> list[AnswerPart]:
        return self._parts(self._parser.feed(text)) if text else []

    def end(self) -> list[AnswerPart]:
        return self._parts(self._parser.finalize()[1])

    def _parts(self, events: list[dict[str, Any]]) -> list[AnswerPart]:
        parts = []
        for event in events:
            kind, field = event.get("type"), event.get("field", "content")
            if kind == "region_chunk" and field in ("content", *THOUGHTS) and event.get("text"):
                parts.append(AnswerPart("content" if field == "content" else "reasoning", event["text"]))
            elif kind == "region_close" and field == "tool_calls":
                values = event.get("value")
                parts += [
                    _read_call(value)
                    for value in (values if isinstance(values, list) else [values])
                    if isinstance(value, dict)
                ]
        return parts


class ToolCallParts:
    """JSON of calls, which a grammar has forced: [{"name": ..., "arguments": {...}}, ...] or one such object."""

    keeps_special = False

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[AnswerPart]:
        self._text += text
        return []

    def end(self) -> list[AnswerPart]:
        try:
            calls = json.loads(self._text)
        except ValueError:  # cut off in the middle: what is there is all that there is
            return [AnswerPart("content", self._text)] if self._text else []
        return [_read_call({"function": call}) for call in (calls if isinstance(calls, list) else [calls])]


Parts = PlainParts | MarkedParts | ToolCallParts


def _read_call(value: dict[str, Any]) -> AnswerPart:
    function = value.get("function", value)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return AnswerPart("call", text, str(function.get("name", "")))


@cache
def load_marks(family: str) -> dict[str, Any] | None:
    """The marks of a family, as transformers' own server knows them. A model's own would be patterns of anybody's."""
    from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS as known

    return next((dict(template) for families, template in known.items() if family in families), None)
