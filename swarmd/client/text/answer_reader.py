"""What an answer consists of, while it grows: text, thoughts, calls of tools. Pure.

What is given does not depend on how the text is cut into pieces. A call that cannot be read is text: exactly what the
model wrote.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import regex

from swarmd.client.text.answer_formats import Region
from swarmd.client.text.call_bodies import fit_arguments, read_calls


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of "content" or "reasoning" as it comes, or a complete "call" with its name and arguments (JSON)."""

    kind: str
    text: str
    name: str = ""


# One buffer, of which no more is kept than may still become something else:
#
#     ... text | <tool_ca          what may be the beginning of a mark waits for more
#     <tool_call> {"name": ...     a call waits for its end
#     <think> ... | </thi          thoughts flow, but for what may be their end
#
# ``_searched``: no mark begins before it, so that a long call is not searched anew for each of its pieces.
class AnswerReader:
    """Reads one answer. ``tools`` as OpenAI has them: without any, marks of calls are text.

    ``is_thinking``: the prompt ended within thoughts.
    """

    def __init__(
        self, regions: Sequence[Region], tools: Sequence[dict[str, Any]] | None = None, is_thinking: bool = False
    ) -> None:
        functions = [tool.get("function", tool) for tool in tools or ()]
        self._schemas = {function.get("name"): function.get("parameters") for function in functions}
        self._regions = [region for region in regions if region.kind != "call" or tools]
        thoughts = (region for region in regions if region.kind == "reasoning")
        self._region = next(thoughts, None) if is_thinking else None
        self._opened = ""  # how the region's mark was written
        self._text = ""
        self._searched = 0
        self._thoughts = ""  # those that have not ended
        self._has_content = False
        self._has_calls = False

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain once this text has come."""
        self._text += text
        return self._read(is_complete=False)

    def end(self, was_cut: bool = False) -> list[AnswerPart]:
        """Return what was held back until the end. ``was_cut``: the model would have gone on."""
        parts = self._read(is_complete=True)
        region = self._region
        if region is not None and region.kind == "call":
            return [*parts, *self._end_call(region, self._text, "", is_closed=False)]
        if self._text.strip() or not self._has_calls:
            parts += self._say(self._text)
        if region is not None and not was_cut:  # some begin to call without an end to their thoughts
            calls = AnswerReader([other for other in self._regions if other.kind == "call"], self._tools())
            parts += [part for part in (*calls.feed(self._thoughts), *calls.end()) if part.kind == "call"]
        return parts

    def _read(self, is_complete: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while (found := self._find(is_complete)) is not None:
            region, match = found
            before = self._text[: match.start()]
            self._text = self._text[match.end() :]
            self._searched = 0
            if self._region is None:
                parts += self._say(before)
                if region.kind != "nothing":
                    self._region = region
                    self._opened = match.group()
                    self._thoughts = ""
            elif region.kind == "call":
                parts += self._end_call(region, before, match.group(), is_closed=True)
            else:
                parts += self._say(before)
                self._region = None
        if not is_complete and (self._region is None or self._region.kind == "reasoning"):
            parts += self._say(self._text[: self._searched])
            self._text = self._text[self._searched :]
            self._searched = 0
        return parts

    def _find(self, is_complete: bool) -> tuple[Region, regex.Match[str]] | None:
        """Find the next mark that is certain. What more text may change is none yet."""
        best: tuple[Region, regex.Match[str]] | None = None
        waits_at = len(self._text)
        for region in self._regions if self._region is None else [self._region]:
            pattern = region.opens if self._region is None else region.closes
            match = pattern.search(self._text, self._searched, partial=not is_complete) if pattern else None
            if match is None or (self._region is None and region.begins_answer and not self._is_begun(match)):
                continue
            if not is_complete and match.end() == len(self._text):
                waits_at = min(waits_at, match.start())
            elif best is None or (match.start(), -match.end()) < (best[1].start(), -best[1].end()):
                best = region, match
        if best is not None and best[1].start() < waits_at:
            return best
        self._searched = waits_at
        return None

    def _is_begun(self, match: regex.Match[str]) -> bool:
        """Is this where the answer begins?"""
        return not self._has_content and not self._text[: match.start()].strip()

    def _say(self, text: str) -> list[AnswerPart]:
        if not text:
            return []
        if self._region is not None:
            self._thoughts += text
            return [AnswerPart("reasoning", text)]
        self._has_content = self._has_content or bool(text.strip())
        return [AnswerPart("content", text)]

    def _end_call(self, region: Region, body: str, closed: str, is_closed: bool) -> list[AnswerPart]:
        """Return the calls of a region, or all that was written for them as text."""
        self._region = None
        try:
            calls = [self._format_call(name, arguments) for name, arguments in read_calls(body, is_closed)]
            if region.is_bare and not all(call.name in self._schemas for call in calls):
                raise ValueError("no tool's name, and no mark")
        except ValueError:
            return self._say(self._opened + body + closed)
        self._has_calls = True
        return calls

    def _format_call(self, name: Any, arguments: dict[str, Any]) -> AnswerPart:
        """Return a call in OpenAI's form. Raises ValueError for what no program could make."""
        if not isinstance(name, str) or not name:
            raise ValueError("a call without a name")
        fitting = fit_arguments(arguments, self._schemas.get(name))
        text = json.dumps(fitting, ensure_ascii=False, allow_nan=False)
        f"{name}{text}".encode()  # half a surrogate pair is in no answer
        return AnswerPart("call", text, name)

    def _tools(self) -> list[dict[str, Any]]:
        return [{"name": name, "parameters": schema} for name, schema in self._schemas.items()]
