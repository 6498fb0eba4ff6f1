"""OpenAI's Responses, without a memory: the whole input comes each time, as Codex sends it.

Source: OpenAI's API reference, "Responses" and its streaming events.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from swarmd.gateway.apis.openai import CollectedAnswer, function_tool, schema_of, text_of, tool_choice_of
from swarmd.gateway.apis.parts import AnswerPart
from swarmd.gateway.apis.refusals import ApiError, bad
from swarmd.gateway.apis.schema import MAX_MESSAGES, MAX_TOOLS, Length, SamplingFields, StreamOptions, length_of
from swarmd.gateway.apis.streams import Emit
from swarmd.gateway.apis.talk import AnswerEvent, GenerationRequest, PreparedRequest
from swarmd.gateway.generation.row import RowReport


class ResponsesRequest(SamplingFields):
    """POST /v1/responses. ``reasoning`` and ``include`` are hints; nothing is stored, so nothing can be looked up."""

    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_output_tokens: Length | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None


def of_responses(request: ResponsesRequest, key: str) -> GenerationRequest:
    """Raises ApiError for what is not done here."""
    if request.truncation not in (None, "disabled"):
        raise bad("truncation is not supported here: shorten the input", "truncation", "unsupported_parameter")
    tools = tuple(one.function for one in _functions(request))
    form = (request.text or {}).get("format")
    flat = form if isinstance(form, dict) else {"type": "text"}
    nested = {"type": flat.get("type"), "json_schema": {"schema": flat.get("schema")}}
    return GenerationRequest(
        model=request.model,
        sampled=request,
        messages=_messages(request),
        max_tokens=length_of(request.max_output_tokens, "max_output_tokens"),
        schema=schema_of(nested, "text.format"),
        tools=tools,
        tool_choice=tool_choice_of(request.tool_choice, bool(tools)),
        several_calls=request.parallel_tool_calls is True,
        key=key,
    )


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    if request.instructions:
        turns.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*turns, {"role": "user", "content": request.input}]
    names = {(one.namespace, one.name): one.offered_name for one in _functions(request)}
    for index, item in enumerate(request.input):
        _add(turns, item, f"input[{index}]", names)
    return turns


def _add(turns: list[dict[str, Any]], item: dict[str, Any], where: str, names: Mapping[tuple[str, str], str]) -> None:
    """Add one item of the history; ``names`` are those that functions are offered by. Raises ApiError."""
    kind = item.get("type", "message")
    if kind == "message":
        role = {"developer": "system"}.get(str(item.get("role")), str(item.get("role")))
        if role not in ("system", "user", "assistant"):
            raise bad(f"{where}.role is system, developer, user or assistant, not {role[:32]!r}", where)
        text = text_of(item.get("content"), where)
        if role == "system" and turns and turns[0]["role"] == "system":  # templates take one, and first
            turns[0]["content"] += f"\n\n{text}"
        else:
            turns.append({"role": role, "content": text})
    elif kind in ("function_call", "custom_tool_call"):
        own = {"arguments": str(item.get("arguments", "{}"))}
        if kind == "custom_tool_call":  # whose input is text of any form
            own = {"arguments": json.dumps({"input": str(item.get("input", ""))}, ensure_ascii=False)}
        name = str(item.get("name", ""))
        call = {"name": names.get((str(item.get("namespace", "")), name), name), **own}
        entry = {"id": item.get("call_id"), "type": "function", "function": call}
        if turns and turns[-1]["role"] == "assistant":
            turns[-1].setdefault("tool_calls", []).append(entry)
        else:
            turns.append({"role": "assistant", "content": "", "tool_calls": [entry]})
    elif kind in ("function_call_output", "custom_tool_call_output"):
        content = text_of(item.get("output"), where)
        turns.append({"role": "tool", "content": content, "tool_call_id": str(item.get("call_id", ""))})
    elif kind != "reasoning":  # which is the model's own, and no template wants it back
        raise bad(f"{where}: items of type {str(kind)[:32]!r} are not supported here", where)


@dataclass(frozen=True, slots=True)
class _OfferedFunction:
    """A function as the model is offered it, its own name, and the namespace that it is in ("" for none)."""

    function: dict[str, Any]
    name: str
    namespace: str

    @property
    def offered_name(self) -> str:
        return str(self.function["function"]["name"])


def _functions(request: ResponsesRequest) -> list[_OfferedFunction]:
    """The functions among the tools. Raises ApiError.

    One whose name another one has, too, is offered with its namespace before it. A search of the web is left out:
    whoever serves the model would do it, and none here does.
    """
    written: list[tuple[dict[str, Any], str]] = []
    for tool in request.tools or ():
        inner = tool.get("tools")
        if tool.get("type") == "namespace" and isinstance(inner, list) and all(isinstance(one, dict) for one in inner):
            written += [(one, str(tool.get("name", ""))) for one in inner]
        elif not is_web_search(tool):
            written.append((tool, ""))
    times = Counter(str(tool.get("name")) for tool, _ in written)
    found: list[_OfferedFunction] = []
    for tool, namespace in written:
        name = str(tool.get("name"))
        is_twice = bool(namespace) and times[name] > 1
        function = _function({**tool, "name": f"{namespace}__{name}"} if is_twice else tool)
        found.append(_OfferedFunction(function, name, namespace))
    if len({one.offered_name for one in found}) < len(found):
        raise bad("tools: two functions have the same name, in the same namespace", "tools")
    return found


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad(f"tools: only functions are supported, not {str(tool.get('type'))[:32]!r}", "tools")
    return function_tool(tool.get("name"), tool.get("description"), tool.get("parameters"))


def is_web_search(tool: dict[str, Any]) -> bool:
    """A search that the server would do, of whatever version."""
    return str(tool.get("type")).startswith("web_search")


# --- answers -------------------------------------------------------------------------------------------------------


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _response(request: ResponsesRequest, about: dict[str, Any], **more: Any) -> dict[str, Any]:
    tools = [
        {"type": "function", "strict": False, "parameters": {}, **{k: v for k, v in tool.items() if v is not None}}
        for tool in request.tools or ()
    ]
    fixed = {
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "metadata": {},
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "temperature": request.temperature,
        "tool_choice": request.tool_choice or "auto",
        "tools": tools,
        "top_p": request.top_p,
        "store": False,
    }
    return {**about, "object": "response", **fixed, **more}


def _ended(
    request: ResponsesRequest, about: dict[str, Any], heard: CollectedAnswer, output: Any, told: RowReport
) -> dict[str, Any]:
    is_cut = heard.finish == "length"
    usage = {
        "input_tokens": told.n_prompt,
        "input_tokens_details": {"cached_tokens": told.n_cached, "cache_write_tokens": 0},
        "output_tokens": told.n_generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": told.n_prompt + told.n_generated,
    }
    why = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
    return _response(request, about, status="incomplete" if is_cut else "completed", output=output, usage=usage, **why)


def _text_item(item: str, text: str, status: str) -> dict[str, Any]:
    part = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}] if status != "in_progress" else []
    return {"id": item, "type": "message", "role": "assistant", "status": status, "content": part}


def _call_item(part: AnswerPart, request: ResponsesRequest) -> dict[str, Any]:
    about = {"id": _new_id("fc"), "call_id": _new_id("call"), "type": "function_call", "status": "completed"}
    found = next((one for one in _functions(request) if one.offered_name == part.name), None)
    place = {"namespace": found.namespace} if found is not None and found.namespace else {}
    return {**about, **place, "name": part.name if found is None else found.name, "arguments": part.text}


async def respond(talk: PreparedRequest, request: ResponsesRequest) -> dict[str, Any]:
    """The whole answer."""
    about = {"id": _new_id("resp"), "created_at": int(time.time())}
    heard = CollectedAnswer()
    told = await talk.run(0, heard.hear)
    output = [_text_item(_new_id("msg"), heard.content, "completed")] if heard.content or not heard.calls else []
    return _ended(request, about, heard, [*output, *(_call_item(part, request) for part in heard.calls)], told)


class ResponseWriter:
    """A response as it is streamed: items open and close, every event has its number."""

    def __init__(self, talk: PreparedRequest, request: ResponsesRequest, emit: Emit) -> None:
        self._talk = talk
        self._request = request
        self._emit = emit
        self._about = {"id": _new_id("resp"), "created_at": int(time.time())}
        self._number = -1
        self._heard = CollectedAnswer()
        self._output: list[dict[str, Any]] = []
        self._text_id = ""  # of the item that grows
        self._text = ""

    async def run(self) -> None:
        begun = _response(self._request, self._about, status="in_progress")
        await self._say("response.created", response=begun)
        await self._say("response.in_progress", response=begun)
        told = await self._talk.run(0, self._hear)
        await self._close_text()
        ended = _ended(self._request, self._about, self._heard, self._output, told)
        await self._say(f"response.{ended['status']}", response=ended)

    async def fail(self, emit: Emit, error: ApiError) -> None:
        reason = {"code": "server_error", "message": error.message}
        failed = _response(self._request, self._about, status="failed", error=reason, output=self._output)
        await self._say("response.failed", response=failed)

    async def _hear(self, event: AnswerEvent) -> None:
        await self._heard.hear(event)
        for part in event.parts:
            if part.kind == "call":
                await self._close_text()
                await self._add_call(part)
            elif part.kind == "content" and part.text:
                await self._add_text(part.text)

    async def _add_text(self, text: str) -> None:
        place = {"output_index": len(self._output), "content_index": 0}
        if not self._text_id:
            self._text_id, self._text = _new_id("msg"), ""
            item = _text_item(self._text_id, "", "in_progress")
            await self._say("response.output_item.added", output_index=len(self._output), item=item)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            await self._say("response.content_part.added", item_id=self._text_id, part=part, **place)
        self._text += text
        await self._say("response.output_text.delta", item_id=self._text_id, delta=text, logprobs=[], **place)

    async def _close_text(self) -> None:
        if not self._text_id:
            return
        item = _text_item(self._text_id, self._text, "completed")
        place = {"item_id": self._text_id, "output_index": len(self._output), "content_index": 0}
        await self._say("response.output_text.done", text=self._text, logprobs=[], **place)
        await self._say("response.content_part.done", part=item["content"][0], **place)
        await self._say("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._text_id = ""

    async def _add_call(self, part: AnswerPart) -> None:
        item, index = _call_item(part, self._request), len(self._output)
        begun = {**item, "status": "in_progress", "arguments": ""}
        await self._say("response.output_item.added", output_index=index, item=begun)
        place = {"item_id": item["id"], "output_index": index}
        await self._say("response.function_call_arguments.delta", delta=part.text, **place)
        done = {"arguments": part.text, "name": part.name}
        await self._say("response.function_call_arguments.done", **done, **place)
        await self._say("response.output_item.done", output_index=index, item=item)
        self._output.append(item)

    async def _say(self, kind: str, **fields: Any) -> None:
        self._number += 1
        await self._emit.event({"type": kind, "sequence_number": self._number, **fields}, kind)


async def stream_response(talk: PreparedRequest, request: ResponsesRequest, emit: Emit) -> None:
    """The same as events."""
    writing = ResponseWriter(talk, request, emit)
    try:
        await writing.run()
    except ApiError as error:
        await writing.fail(emit, error)
