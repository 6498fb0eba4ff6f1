"""transformers' parser of answers, and what the model wrote for each call of a tool, whether it can be read or not.

Its own parser raises where a call cannot be read, and takes some that were cut off for whole. What a call has to
consist of is ``parts``' affair.
"""

from __future__ import annotations

import re
from typing import Any

from transformers.utils.chat_parsing import ResponseParser

from swarmd.gateway.apis.schema import JsonObject

CALLS = "tool_calls"  # the field of calls, as all families' marks name it
UNREADABLE = (ValueError, LookupError, TypeError, RecursionError)
"""What the library raises for a text that is no call, or for a tool's schema that is none."""


# The library has all text in one buffer, and three steps that see it:
#
#     ... text <tool_call> {"name": ... </tool_call> more ...
#              ^ opened    ^ body       ^            ^ _pos, as the region closes
#
# From where a region opened to ``_pos`` is what the model wrote for it, marks included. What the prompt itself opened
# begins with the model's first character.
class CallRegionParser(ResponseParser):  # type: ignore[misc]  # transformers is untyped
    """A parser whose closing events of calls also say what was ``written``; their value is None if that is no call.

    Without ``tools`` marks of calls are text.
    """

    def __init__(self, template: JsonObject, tail: str, tools: list[JsonObject] | None) -> None:
        self._n_prompt = 0
        self._region_start = 0
        self._body_start = 0
        fields = {name: field for name, field in template["fields"].items() if tools or name != CALLS}
        super().__init__({**template, "fields": fields}, prefix=tail, tools=tools)
        self._n_prompt = len(self._buffer)

    def _open_explicit(self, events: list[JsonObject], field: Any, m: Any) -> None:
        self._region_start = m.start()
        self._body_start = m.end()
        super()._open_explicit(events, field, m)

    def _close_current(self, events: list[JsonObject]) -> None:
        if self._current != CALLS or not self._opened:
            super()._close_current(events)
            return
        written = self._buffer[max(self._region_start, self._n_prompt) : self._pos]
        field = self._spec.fields[CALLS]
        is_closed = self._pos > self._body_start + len(self._body)
        try:
            if field.content == "xml-inline":
                _require_whole_tags(self._body, field.content_args["tag_pattern"], is_closed)
            super()._close_current(events)
        except UNREADABLE:
            events.append({"type": "region_close", "field": CALLS, "value": None})
            self._reset_to_implicit()
        events[-1]["written"] = written


def _require_whole_tags(body: str, tag_pattern: str, is_closed: bool) -> None:
    """Refuse tags that were cut off or are not closed: unlike JSON, what is left of them looks whole. ValueError."""
    outside = re.sub(tag_pattern, "", body, flags=re.DOTALL)
    if not is_closed or outside.strip():
        raise ValueError("a call that was not written to its end")
