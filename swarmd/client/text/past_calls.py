"""Calls of tools that a conversation holds, in the form that its model's chat template takes.

Programs send arguments as JSON in a text. Most templates want the object: one that goes through its items fails on a
text, and one that writes JSON writes it twice. Some want the text. Which, is found out by trying (``chat_template``).
A template that knows no tools gets talk.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from swarmd.errors import ConfigError

SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")  # all that Mistral's templates take
PROBE_ID = "probe0000"  # a short one
PROBE_RESULT = "what came of it"
LONG_PROBE_ID = "call_0123456789abcdef"  # as OpenAI's are


def probe_turns(arguments: Any, call_id: str) -> list[dict[str, Any]]:
    """Make the shortest conversation with a call and its result."""
    function = {"name": "probe", "arguments": arguments}
    return [
        {"role": "user", "content": "?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "name": "probe", "content": PROBE_RESULT},
    ]


def wants_text(arguments: dict[str, Any], with_object: str, with_text: str) -> bool:
    """Does a template want arguments as text, by what it writes for an object and for its JSON?"""
    is_object_taken = all(str(value) in with_object for value in arguments.values())
    is_written_as_python = repr(arguments) in with_object
    return (not is_object_taken or is_written_as_python) and json.dumps(arguments) in with_text


def write_as_talk(
    messages: list[dict[str, Any]], shows_calls: bool, shows_results: bool, marks: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the messages for a template that leaves calls or results out: as an assistant's words, and as a user's.

    ``marks``: those before and behind a call.
    """
    rewritten: list[dict[str, Any]] = []
    for message in messages:
        calls = message.get("tool_calls") or []
        if calls and not shows_calls:
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            content = message.get("content") or ""
            rewritten.append(
                {
                    **others,
                    "content": "\n".join([*filter(None, [content]), *(_write_call(call, marks) for call in calls)]),
                }
            )
        elif message["role"] == "tool" and not shows_results:
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            rewritten.append({"role": "user", "content": result})
        else:
            rewritten.append(message)
    return rewritten


def _write_call(call: dict[str, Any], marks: Sequence[str]) -> str:
    function = call["function"]
    name = str(function.get("name"))
    arguments = _read_object(_arguments_of(function), name)
    written = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{marks[0]}\n{written}\n{marks[1]}"


def rewrite_calls(
    messages: list[dict[str, Any]],
    as_text: bool,
    has_short_ids: bool,
) -> list[dict[str, Any]]:
    """Return the messages with arguments and ids as a template takes them. Raises ConfigError."""
    rewritten = []
    for message in messages:
        changed = dict(message)
        if message.get("tool_calls"):
            changed["tool_calls"] = [_rewrite_call(call, as_text, has_short_ids) for call in message["tool_calls"]]
        if has_short_ids and isinstance(message.get("tool_call_id"), str):
            changed["tool_call_id"] = _short_id(message["tool_call_id"])
        rewritten.append(changed)
    return rewritten


def _rewrite_call(call: dict[str, Any], as_text: bool, has_short_ids: bool) -> dict[str, Any]:
    function = call["function"]
    arguments = _arguments_of(function)
    arguments = _write_json(arguments) if as_text else _read_object(arguments, str(function.get("name")))
    changed = {**call, "function": {**function, "arguments": arguments}}
    if has_short_ids and isinstance(call.get("id"), str):
        changed["id"] = _short_id(call["id"])
    return changed


def _arguments_of(function: dict[str, Any]) -> Any:
    """Return arguments as they were sent, an empty object for those of a function that takes none."""
    arguments = function.get("arguments")
    return {} if arguments in (None, "") else arguments


def _write_json(arguments: Any) -> str:
    """Write arguments with the blanks that models write, for some programs send them back without any.

    So what the model wrote is found in its cache. A text that is no JSON stays as it is.
    """
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(arguments)
    return json.dumps(arguments, ensure_ascii=False)


def _read_object(arguments: Any, name: str) -> dict[str, Any]:
    """Read arguments as the object that they are, or that their text holds. Raises ConfigError."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise ConfigError(
            f"a past call of {name[:64]} has the arguments {str(arguments)[:80]!r}, and this model's chat template "
            "takes a JSON object: correct them, or send the call as text"
        )
    return value


def _short_id(call_id: str) -> str:
    """Return an id that is short and the same for the same id."""
    if SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9]
