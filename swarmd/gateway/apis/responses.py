"""OpenAI's Responses, without a memory: the whole input comes each time, as Codex sends it.

Source: OpenAI's API reference, "Responses" and its streaming events.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from swarmd.client.text.answer_reader import AnswerPart
from swarmd.gateway.apis.openai import (
    CollectedAnswer,
    format_warnings,
    make_tool,
    read_result,
    read_schema,
    read_text,
    read_tool_choice,
    thinking_options,
)
from swarmd.gateway.apis.refusals import ApiError, bad_request
from swarmd.gateway.apis.schema import (
    MAX_MESSAGES,
    MAX_TOOLS,
    JsonObject,
    Length,
    SamplingFields,
    StreamOptions,
    read_length,
)
from swarmd.gateway.apis.skipped import Skipped
from swarmd.gateway.apis.streams import Emit
from swarmd.gateway.apis.talk import AnswerEvent, GenerationRequest, PreparedRequest
from swarmd.gateway.generation.row import RowReport

FUNCTIONS = ("function", "custom")
OFFERED_KINDS = (*FUNCTIONS, "namespace")
TOOL_ITEMS = ("additional_tools", "tool_search_output")  # of a history, which bring tools
SILENT_ITEMS = (*TOOL_ITEMS, "reasoning", "tool_search_call")  # a model's own, or read elsewhere
TEXT_ARGUMENT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
FunctionNames = Mapping[tuple[str, str], str]
"""By which name a function is offered, by its namespace and its own name."""


class ResponsesRequest(SamplingFields):
    """POST /v1/responses. ``reasoning`` and ``include`` are hints; nothing is stored, so nothing can be looked up."""

    model: str
    input: str | Annotated[list[JsonObject], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_output_tokens: Length | None = None
    tools: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    text: JsonObject | None = None
    truncation: str | None = None
    reasoning: JsonObject | None = None
    include: list[str] | None = None


def parse_responses(request: ResponsesRequest, key: str, skipped: Skipped) -> GenerationRequest:
    """Translate a request. Raises ApiError for what is not done here."""
    if request.truncation not in (None, "disabled"):
        skipped.add("truncation")
    for tool in (*(request.tools or ()), *_brought_tools(request)):
        if tool.get("type") not in OFFERED_KINDS:
            skipped.add(f"a tool of type {tool.get('type')}")
    offered = _offered_functions(request)
    tools = tuple(function.function for function in offered)
    messages = _read_messages(request, offered, skipped)
    effort = (request.reasoning or {}).get("effort")
    text_format = (request.text or {}).get("format")
    flat = text_format if isinstance(text_format, dict) else {"type": "text"}
    nested = {"type": flat.get("type"), "json_schema": {"schema": flat.get("schema")}}
    return GenerationRequest(
        model=request.model,
        sampled=request,
        messages=messages,
        max_tokens=read_length(request.max_output_tokens, "max_output_tokens"),
        schema=read_schema(nested, "text.format"),
        tools=tools,
        tool_choice=read_tool_choice(request.tool_choice, bool(tools)),
        several_calls=request.parallel_tool_calls is True,
        template=thinking_options(None, effort if isinstance(effort, str) else None),
        key=key,
        skipped=skipped.told,
    )


def _read_messages(
    request: ResponsesRequest, functions: Sequence[_OfferedFunction], skipped: Skipped
) -> list[JsonObject]:
    turns: list[JsonObject] = []
    if request.instructions:
        turns.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*turns, {"role": "user", "content": request.input}]
    names = {(function.namespace, function.name): function.offered_name for function in functions}
    for index, item in enumerate(request.input):
        _add_item(turns, item, f"input[{index}]", names, skipped)
    if not turns:
        raise bad_request("input holds nothing that a model could answer", "input")
    return turns


def _add_item(turns: list[JsonObject], item: JsonObject, where: str, names: FunctionNames, skipped: Skipped) -> None:
    """Add one item of the history; ``names`` are those that functions are offered by. Raises ApiError."""
    kind = item.get("type", "message")
    if kind == "message":
        role = str(item.get("role"))
        if role == "developer":
            role = "system"
        if role not in ("system", "user", "assistant"):
            raise bad_request(f"{where}.role is system, developer, user or assistant, not {role[:32]!r}", where)
        turns.append({"role": role, "content": read_text(item.get("content"), where)})
    elif kind in ("function_call", "custom_tool_call"):
        _add_call(turns, item, names)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        content = read_result(item.get("output"), where, skipped)
        call_id = str(item.get("call_id", ""))
        turns.append({"role": "tool", "content": content, "tool_call_id": call_id})
    elif kind == "item_reference":
        raise bad_request(f"{where}: nothing is stored here, so nothing can be looked up", where)
    elif kind not in SILENT_ITEMS:
        skipped.add(f"an item of type {kind}")


def _add_call(turns: list[JsonObject], item: JsonObject, names: FunctionNames) -> None:
    """Add a call that the model made before, to the assistant's turn that it belongs to."""
    arguments = item.get("arguments")
    if item.get("type") == "custom_tool_call":  # whose input is text of any form
        text = str(item.get("input", ""))
        arguments = json.dumps({"input": text}, ensure_ascii=False)
    name = str(item.get("name", ""))
    namespace = str(item.get("namespace", ""))
    call = {"name": names.get((namespace, name), name), "arguments": arguments}
    entry = {"id": item.get("call_id"), "type": "function", "function": call}
    if turns and turns[-1]["role"] == "assistant":
        turns[-1].setdefault("tool_calls", []).append(entry)
    else:
        turns.append({"role": "assistant", "content": "", "tool_calls": [entry]})


@dataclass(frozen=True, slots=True)
class _OfferedFunction:
    """A function as the model is offered it, its own name, and the namespace that it is in ("" for none).

    ``is_custom``: it takes a text, which its model writes as the only argument.
    """

    function: JsonObject
    name: str
    namespace: str
    is_custom: bool = False

    @property
    def offered_name(self) -> str:
        """The name by which the model calls it."""
        return str(self.function["function"]["name"])


def _offered_functions(request: ResponsesRequest) -> list[_OfferedFunction]:
    """List the functions among the tools, also those that the history brought. Raises ApiError.

    A function whose name is taken twice is offered with its namespace in front. What a server would run is left out.
    """
    # A model knows functions by one name alone, and clients send several namespaces with functions of the same name.
    # Only those get a longer name, for a model calls a short one with fewer mistakes. A call comes back by the
    # offered name, and is given to the client with the function's own name and its namespace (``_call_item``).
    named = _flatten(request.tools or ())
    by_name = {(namespace, str(tool.get("name"))): (tool, namespace) for tool, namespace in named}
    if len(by_name) < len(named):
        raise bad_request("tools: two functions have the same name, in the same namespace", "tools")
    for tool, namespace in _flatten(_brought_tools(request)):  # the newest counts: a search may find one again
        by_name[namespace, str(tool.get("name"))] = tool, namespace
    tools = list(by_name.values())
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"tools: at most {MAX_TOOLS}, with those in the input", "tools")
    times = Counter(str(tool.get("name")) for tool, _ in tools)
    functions: list[_OfferedFunction] = []
    for tool, namespace in tools:
        name = str(tool.get("name"))
        is_twice = bool(namespace) and times[name] > 1
        function = _read_function({**tool, "name": f"{namespace}__{name}"} if is_twice else tool)
        functions.append(_OfferedFunction(function, name, namespace, tool.get("type") == "custom"))
    return functions


def _flatten(tools: Sequence[JsonObject]) -> list[tuple[JsonObject, str]]:
    """Return the functions among tools, each with the namespace that it is in ("" for none)."""
    flat: list[tuple[JsonObject, str]] = []
    for tool in tools:
        if tool.get("type") == "namespace":
            inner_tools = _objects(tool.get("tools"))
            flat += [(inner, str(tool.get("name", ""))) for inner in inner_tools if inner.get("type") in FUNCTIONS]
        elif tool.get("type") in FUNCTIONS:
            flat.append((tool, ""))
    return flat


def _brought_tools(request: ResponsesRequest) -> list[JsonObject]:
    """Return the tools that items of the history bring."""
    items = request.input if isinstance(request.input, list) else []
    return [tool for item in items if item.get("type") in TOOL_ITEMS for tool in _objects(item.get("tools"))]


def _objects(value: Any) -> list[JsonObject]:
    return [inner for inner in value if isinstance(inner, dict)] if isinstance(value, list) else []


def _read_function(tool: JsonObject) -> JsonObject:
    parameters = TEXT_ARGUMENT if tool.get("type") == "custom" else tool.get("parameters")
    return make_tool(tool.get("name"), tool.get("description"), parameters)


# --- answers -------------------------------------------------------------------------------------------------------


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _format_response(request: ResponsesRequest, identity: JsonObject, **fields: Any) -> JsonObject:
    tools = []
    for tool in request.tools or ():
        named = {name: value for name, value in tool.items() if value is not None}
        tools.append({**({"strict": False, "parameters": {}} if named.get("type") == "function" else {}), **named})
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
    return {**identity, "object": "response", **fixed, **fields}


def _format_ended(
    request: ResponsesRequest,
    prepared: PreparedRequest,
    identity: JsonObject,
    answer: CollectedAnswer,
    output: Any,
    report: RowReport,
) -> JsonObject:
    is_cut = answer.finish == "length"
    usage = {
        "input_tokens": report.n_prompt,
        "input_tokens_details": {"cached_tokens": report.n_cached, "cache_write_tokens": 0},
        "output_tokens": report.n_generated,
        "output_tokens_details": {"reasoning_tokens": report.n_reasoning},
        "total_tokens": report.n_prompt + report.n_generated,
    }
    status = "incomplete" if is_cut else "completed"
    details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {}
    fields = {"status": status, "output": output, "usage": usage, **details}
    warnings = format_warnings(prepared.request)
    return _format_response(request, identity, **fields, **({"swarmd": {"warnings": warnings}} if warnings else {}))


def _text_item(item_id: str, text: str, status: str) -> JsonObject:
    content = [] if status == "in_progress" else [_text_part(text)]
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_item(part: AnswerPart, request: ResponsesRequest) -> JsonObject:
    item: JsonObject = {"id": _new_id("fc"), "call_id": _new_id("call"), "status": "completed"}
    functions = [function for function in _offered_functions(request) if function.offered_name == part.name]
    name = part.name
    if functions:
        name = functions[0].name
    if functions and functions[0].namespace:
        item["namespace"] = functions[0].namespace
    if functions and functions[0].is_custom:
        text = json.loads(part.text).get("input")
        return {**item, "type": "custom_tool_call", "name": name, "input": text if isinstance(text, str) else part.text}
    return {**item, "type": "function_call", "name": name, "arguments": part.text}


async def answer_response(prepared: PreparedRequest, request: ResponsesRequest) -> JsonObject:
    """Generate the whole answer."""
    identity = {"id": _new_id("resp"), "created_at": int(time.time())}
    answer = CollectedAnswer()
    report = await prepared.run(0, answer.add_event)
    output: list[JsonObject] = []
    if answer.content or not answer.calls:
        output.append(_text_item(_new_id("msg"), answer.content, "completed"))
    output += [_call_item(part, request) for part in answer.calls]
    return _format_ended(request, prepared, identity, answer, output, report)


class ResponseWriter:
    """A response as it is streamed: items open and close, every event has its number.

    created, in_progress, then for each item of the output:

        text:  output_item.added, content_part.added, output_text.delta ...,
               output_text.done, content_part.done, output_item.done
        call:  output_item.added, function_call_arguments.delta, function_call_arguments.done, output_item.done
               (custom_tool_call_input.delta and .done, of a tool that takes a text)

    and at the end completed, incomplete or failed, with the whole response once more.
    """

    def __init__(self, prepared: PreparedRequest, request: ResponsesRequest, emit: Emit) -> None:
        self._prepared = prepared
        self._request = request
        self._emit = emit
        self._identity = {"id": _new_id("resp"), "created_at": int(time.time())}
        self._number = -1
        self._answer = CollectedAnswer()
        self._output: list[JsonObject] = []
        self._text_id = ""  # of the item that grows
        self._text = ""

    async def run(self) -> None:
        """Generate the answer. Raises ApiError."""
        opening = _format_response(self._request, self._identity, status="in_progress")
        await self._say("response.created", response=opening)
        self._emit.sign_of_life = lambda: self._say("response.in_progress", response=opening)
        await self._say("response.in_progress", response=opening)
        report = await self._prepared.run(0, self._write_event)
        await self._close_text()
        response = _format_ended(self._request, self._prepared, self._identity, self._answer, self._output, report)
        await self._say(f"response.{response['status']}", response=response)

    async def fail(self, error: ApiError) -> None:
        """End the stream with an error."""
        # Codex asks again after a server's error, and not after others.
        code = error.code if error.status < 500 and error.code else "server_error"
        reason = {"code": code, "message": error.message}
        fields = {"status": "failed", "error": reason, "output": self._output}
        failed = _format_response(self._request, self._identity, **fields)
        await self._say("response.failed", response=failed)

    async def _write_event(self, event: AnswerEvent) -> None:
        await self._answer.add_event(event)
        for part in event.parts:
            if part.kind == "call":
                await self._close_text()
                await self._add_call(part)
            elif part.kind == "content" and part.text:
                await self._add_text(part.text)

    async def _add_text(self, text: str) -> None:
        place = {"output_index": len(self._output), "content_index": 0}
        if not self._text_id:
            self._text_id = _new_id("msg")
            self._text = ""
            item = _text_item(self._text_id, "", "in_progress")
            await self._say("response.output_item.added", output_index=len(self._output), item=item)
            await self._say("response.content_part.added", item_id=self._text_id, part=_text_part(""), **place)
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
        item = _call_item(part, self._request)
        index = len(self._output)
        is_custom = item["type"] == "custom_tool_call"
        field = "input" if is_custom else "arguments"
        event = "response.custom_tool_call_input" if is_custom else "response.function_call_arguments"
        opening = {**item, "status": "in_progress", field: ""}
        await self._say("response.output_item.added", output_index=index, item=opening)
        place = {"item_id": item["id"], "output_index": index}
        await self._say(f"{event}.delta", delta=item[field], **place)
        await self._say(f"{event}.done", **{field: item[field]}, name=part.name, **place)
        await self._say("response.output_item.done", output_index=index, item=item)
        self._output.append(item)

    async def _say(self, kind: str, **fields: Any) -> None:
        self._number += 1
        await self._emit.send_event({"type": kind, "sequence_number": self._number, **fields}, kind)


async def stream_response(prepared: PreparedRequest, request: ResponsesRequest, emit: Emit) -> None:
    """Generate an answer as events."""
    writer = ResponseWriter(prepared, request, emit)
    try:
        await writer.run()
    except ApiError as error:
        await writer.fail(error)
