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
from swarmd.client.text.call_bodies import NAME, Call, ends_in_string, fit_arguments, read_calls

GAP = "\n\n"  # between two messages of one answer
MOST_WITHIN = 64  # closing marks within texts: the call is read anew at each
MOST_GIVEN_UP = 16  # marks that began no call: who speaks of marks so often does not call


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """A piece of "content" or "reasoning" as it comes, or a complete "call" with its name and arguments (JSON)."""

    kind: str
    text: str
    name: str = ""


# One buffer, of which no more is kept than may still become something else:
#
#     ... text | <tool_ca          what may be the beginning of a mark waits for more, and white space before it, too
#     <tool_call> {"name": ...     a call waits for its end
#     <think> ... | </thi          thoughts flow, but for what may be their end
#
# ``_searched``: no mark begins before it, so that nothing is searched anew for each piece that comes.
class AnswerReader:
    """Reads one answer. ``tools`` as OpenAI has them: without any, marks of calls are text.

    ``is_thinking``: the prompt ended within thoughts.
    """

    def __init__(
        self, regions: Sequence[Region], tools: Sequence[dict[str, Any]] | None = None, is_thinking: bool = False
    ) -> None:
        self._tools = tools
        functions = [tool.get("function", tool) for tool in tools or ()]
        self._schemas = {function.get("name"): function.get("parameters") for function in functions}
        self._regions = [region for region in regions if region.kind != "call" or tools]
        thoughts = (region for region in regions if region.kind == "reasoning")
        self._region = next(thoughts, None) if is_thinking else None
        self._opened = ""  # how the region's mark was written, with white space before it
        self._name = ""  # of a call, if its mark says it
        self._text = ""
        self._searched = 0
        self._skips_blank = is_thinking
        self._gap = ""
        self._thoughts: list[str] = []  # those that have not ended
        self._has_content = False
        self._has_calls = False
        self._n_given_up = 0
        self._n_within = 0

    def feed(self, text: str) -> list[AnswerPart]:
        """Return the parts that are certain once this text has come."""
        self._text += text
        return self._read(is_complete=False)

    def end(self, was_cut: bool = False) -> list[AnswerPart]:
        """Return what was held back until the end. ``was_cut``: the model would have gone on."""
        parts = self._read(is_complete=True)
        while self._region is not None and self._region.kind == "call":
            body, self._text = self._text, ""
            parts += self._end_call(body, "", is_closed=False)
            parts += self._read(is_complete=True)
        if self._text.strip() or not (self._has_calls or self._skips_blank):
            parts += self._say(self._text)
        if self._region is not None and not was_cut:  # some begin to call without an end to their thoughts
            calls = AnswerReader([region for region in self._regions if region.kind == "call"], self._tools)
            found = (*calls.feed("".join(self._thoughts)), *calls.end())
            parts += [part for part in found if part.kind == "call"]
        return parts

    def _read(self, is_complete: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while (found := self._find(is_complete)) is not None:
            region, match = found
            before = self._text[: match.start()]
            self._text = self._text[match.end() :]
            self._searched = 0
            if self._region is None:
                kept = before.rstrip()
                parts += self._say(kept)
                self._open(region, match, before[len(kept) :])
            elif region.kind == "call":
                parts += self._end_call(before, match.group(), is_closed=True)
            else:
                parts += self._say(before.rstrip())
                self._region = None
                self._skips_blank = True
        if self._is_no_call():
            body, self._text = self._text, ""
            parts += self._give_up(body, "")
            return [*parts, *self._read(is_complete)]
        if not is_complete and (self._region is None or self._region.kind == "reasoning"):
            parts += self._say(self._take_certain())
        return parts

    def _take_certain(self) -> str:
        """Take what can be no part of a mark any more, but for white space at its end: a mark may follow."""
        certain = self._text[: self._searched].rstrip()
        self._text = self._text[len(certain) :]
        self._searched -= len(certain)
        return certain

    def _find(self, is_complete: bool) -> tuple[Region, regex.Match[str]] | None:
        """Find the next mark that is certain. What more text may change is none yet."""
        best: tuple[Region, regex.Match[str]] | None = None
        waits_at = len(self._text)
        for region in self._regions if self._region is None else [self._region]:
            pattern = region.opens if self._region is None else region.closes
            if pattern is None or (self._region is None and region.begins_answer and self._has_content):
                continue
            match = pattern.search(self._text, self._searched, partial=not is_complete)
            if match is None or (self._region is None and region.begins_answer and not self._is_first(match)):
                continue
            if not is_complete and match.end() == len(self._text):
                waits_at = min(waits_at, match.start())
            elif best is None or (match.start(), -match.end()) < (best[1].start(), -best[1].end()):
                best = region, match
        if best is not None and best[1].start() < waits_at:
            return best
        self._searched = waits_at
        return None

    def _is_first(self, match: regex.Match[str]) -> bool:
        """Does nothing stand before it in what has not been given yet?"""
        return not self._text[: match.start()].strip()

    def _open(self, region: Region, match: regex.Match[str], blank: str) -> None:
        if region.kind == "nothing":
            self._gap = GAP if self._has_content else ""
            self._skips_blank = True
            return
        self._region = region
        self._opened = blank + match.group()
        self._name = next((name for name in match.groupdict().values() if name), "")
        self._skips_blank = region.kind == "reasoning"
        self._thoughts = []

    def _say(self, text: str) -> list[AnswerPart]:
        if self._skips_blank:
            text = text.lstrip()
        if not text:
            return []
        self._skips_blank = False
        if self._region is not None:
            self._thoughts.append(text)
            return [AnswerPart("reasoning", text)]
        text, self._gap = self._gap + text, ""
        self._has_content = self._has_content or bool(text.strip())
        return [AnswerPart("content", text)]

    def _is_no_call(self) -> bool:
        """Does what follows a mark show that it was only spoken of?"""
        region = self._region
        if region is None or region.kind != "call" or region.body is None:
            return False
        return region.body.match(self._text, partial=True) is None

    def _end_call(self, body: str, closed: str, is_closed: bool) -> list[AnswerPart]:
        """Return the calls of a region, or what was written for them as text. May find that it has not ended."""
        assert self._region is not None
        try:
            read = read_calls(body, is_closed, self._schemas, self._name)
            calls = [self._format_call(call) for call in read]
            if self._region.is_bare and not all(call.has_arguments and call.name in self._schemas for call in read):
                raise ValueError("no tool's name, and no mark")
        except ValueError:
            if is_closed and self._n_within < MOST_WITHIN and ends_in_string(body):  # the mark stands within a text
                self._n_within += 1
                self._text = body + closed + self._text
                self._searched = len(body) + len(closed)
                return []
            return self._give_up(body, closed)
        self._region = None
        self._has_calls = True
        return calls

    def _give_up(self, body: str, closed: str) -> list[AnswerPart]:
        """Have the mark that was opened be text, and read on right behind it: a good call may follow."""
        self._region = None
        self._text = body + closed + self._text
        self._searched = 0
        self._n_given_up += 1
        if self._n_given_up == MOST_GIVEN_UP:
            self._regions = [region for region in self._regions if region.kind != "call"]
        return self._say(self._opened)

    def _format_call(self, call: Call) -> AnswerPart:
        """Return a call in OpenAI's form. Raises ValueError for what no program could make."""
        if not isinstance(call.name, str) or not NAME.fullmatch(call.name):
            raise ValueError("a call without a name")
        fitting = fit_arguments(call, self._schemas.get(call.name))
        text = json.dumps(fitting, ensure_ascii=False, allow_nan=False)
        f"{call.name}{text}".encode()  # half a surrogate pair is in no answer
        return AnswerPart("call", text, call.name)
