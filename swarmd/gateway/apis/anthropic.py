"""Anthropic's Messages: the same conversations in another form, errors in its own.

Source: Anthropic's API reference, "Messages", "Count tokens" and "Streaming".
"""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from swarmd.client.text.answer_reader import AnswerPart
from swarmd.gateway.apis import streams
from swarmd.gateway.apis.openai import (
    CollectedAnswer,
    format_warnings,
    make_tool,
    read_result,
    read_schema,
    thinking_options,
)
from swarmd.gateway.apis.refusals import ApiError, bad_request
from swarmd.gateway.apis.schema import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    Count,
    JsonObject,
    SamplingFields,
    Share,
    Stop,
)
from swarmd.gateway.apis.skipped import Skipped
from swarmd.gateway.apis.streams import Emit
from swarmd.gateway.apis.talk import AnswerEvent, GenerationRequest, PreparedRequest
from swarmd.gateway.generation.row import RowReport

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
BUSY = {429: "rate_limit_error", 503: "overloaded_error"}
NEEDED = ("image", "document")  # what is said in them would be missed, and nobody would know why
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class MessagesRequest(msgspec.Struct):
    """POST /v1/messages. ``thinking`` and ``metadata`` are hints."""

    model: str
    messages: Annotated[list[JsonObject], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    system: str | list[JsonObject] | None = None
    stream: bool | None = False
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=0, le=1_000_000)] | None = None
    stop_sequences: Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    tools: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: JsonObject | None = None
    thinking: JsonObject | None = None
    output_config: JsonObject | None = None


def parse_for_answer(request: MessagesRequest, key: str, skipped: Skipped) -> GenerationRequest:
    """Read a request that wants an answer, for which ``max_tokens`` is required. Raises ApiError."""
    if request.max_tokens is None:
        raise bad_request("max_tokens is missing", "max_tokens")
    return parse_request(request, key, skipped)


def parse_request(request: MessagesRequest, key: str, skipped: Skipped) -> GenerationRequest:
    """Translate a request, to be answered or only counted. Raises ApiError for what is not done here."""
    tools = _read_tools(request, skipped)
    choice = request.tool_choice or {"type": "auto"}
    kind = str(choice.get("type"))
    tool_choice = f"={choice.get('name')}" if kind == "tool" else CHOICES.get(kind)
    if tool_choice is None:
        raise bad_request("tool_choice.type is auto, any, tool or none", "tool_choice")
    messages = _read_messages(request, skipped)
    effort = (request.output_config or {}).get("effort")
    return GenerationRequest(
        model=request.model,
        sampled=SamplingFields(
            temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, stop=request.stop_sequences
        ),
        messages=messages,
        max_tokens=request.max_tokens,
        schema=_read_schema(request.output_config),
        tools=tools,
        tool_choice=tool_choice if tools else "none",
        several_calls=choice.get("disable_parallel_tool_use") is False,
        template=thinking_options(request.thinking, effort if isinstance(effort, str) else None),
        continues=messages[-1]["role"] == "assistant",
        key=key,
        skipped=skipped.told,
    )


def _read_schema(config: JsonObject | None) -> JsonObject | None:
    """What ``output_config`` wants the answer to fit; the effort that it may name is a hint."""
    form = (config or {}).get("format")
    if form is None:
        return None
    if not isinstance(form, dict):
        raise bad_request("output_config.format is an object", "output_config")
    nested = {"type": form.get("type"), "json_schema": {"schema": form.get("schema")}}
    return read_schema(nested, "output_config")


def _read_messages(request: MessagesRequest, skipped: Skipped) -> list[JsonObject]:
    turns: list[JsonObject] = []
    if request.system:
        turns.append({"role": "system", "content": _read_text(request.system, "system")})
    for index, turn in enumerate(request.messages):
        where = f"messages[{index}]"
        role = turn.get("role")
        content = turn.get("content")
        if role == "system" and isinstance(content, str | list):
            turns.append({"role": "system", "content": _read_text(content, where)})
            continue
        if role not in ("user", "assistant") or not isinstance(content, str | list):
            raise bad_request(f"{where}: expected the role user, assistant or system, and content", where)
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        turns += _read_turns(role, blocks, where, skipped)
    return turns


def _read_turns(role: str, blocks: list[Any], where: str, skipped: Skipped) -> list[JsonObject]:
    """Split one message into turns: results of tools are turns of their own, and come first."""
    results: list[JsonObject] = []
    texts: list[str] = []
    calls: list[JsonObject] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "tool_use":
            function = {"name": str(block.get("name", "")), "arguments": block.get("input")}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            content = read_result(block.get("content"), where, skipped)
            call_id = str(block.get("tool_use_id", ""))
            results.append({"role": "tool", "content": content, "tool_call_id": call_id})
        elif kind in NEEDED or not isinstance(kind, str):
            raise bad_request(f"{where}: blocks of type {str(kind)[:32]!r} are not supported here", where)
        elif kind not in ("thinking", "redacted_thinking"):
            skipped.add(f"{where}: a block of type {kind}")
    if results and not texts and not calls:
        return results
    turn: JsonObject = {"role": role, "content": "".join(texts)}
    if calls:
        turn["tool_calls"] = calls
    return [*results, turn]


def _read_text(content: str | list[Any], where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise bad_request(f"{where}: only blocks of text are taken", where)
    return "\n".join(texts)


def _read_tools(request: MessagesRequest, skipped: Skipped) -> tuple[JsonObject, ...]:
    """Read the tools that a client runs; those of a server's, and those put off, are skipped. Raises ApiError.

    A tool that is put off counts from when a result has named it, as Claude Code's search for tools does.
    """
    found = _names_found(request.messages)
    tools = []
    for tool in request.tools or ():
        kind = tool.get("type")
        if kind not in (None, "custom"):
            skipped.add(f"a tool of type {kind}")
        elif tool.get("defer_loading") is not True or str(tool.get("name")) in found:
            tools.append(make_tool(tool.get("name"), tool.get("description"), tool.get("input_schema")))
    return tuple(tools)


def _names_found(messages: list[JsonObject]) -> set[str]:
    """Return the names of tools that results refer to."""
    blocks = [block for turn in messages for block in _parts_of(turn)]
    parts = [part for block in blocks if block.get("type") == "tool_result" for part in _parts_of(block)]
    return {str(part.get("tool_name")) for part in parts if part.get("type") == "tool_reference"}


def _parts_of(holder: JsonObject) -> list[JsonObject]:
    content = holder.get("content")
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


# --- answers -------------------------------------------------------------------------------------------------------


def _format_usage(report: RowReport) -> dict[str, int]:
    fresh = report.n_prompt - report.n_cached
    cache = {"cache_read_input_tokens": report.n_cached, "cache_creation_input_tokens": 0}
    return {"input_tokens": fresh, "output_tokens": report.n_generated, **cache}


def _new_message(model: str) -> JsonObject:
    return {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "model": model}


def _warn(prepared: PreparedRequest) -> JsonObject:
    """Say what of a request was left out, if anything was."""
    warnings = format_warnings(prepared.request)
    return {"swarmd": {"warnings": warnings}} if warnings else {}


def _new_call(part: AnswerPart) -> JsonObject:
    return {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": part.name}


async def answer_message(prepared: PreparedRequest, request: MessagesRequest) -> JsonObject:
    """Generate the whole answer."""
    answer = CollectedAnswer()
    report = await prepared.run(0, answer.add_event)
    content: list[JsonObject] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.calls:
        content.append({"type": "text", "text": answer.content})
    content += [{**_new_call(part), "input": _parse_arguments(part)} for part in answer.calls]
    message = {**_new_message(request.model), "content": content, **_warn(prepared)}
    return {**message, **_stop_reason(answer), "usage": _format_usage(report)}


def _parse_arguments(part: AnswerPart) -> JsonObject:
    """A call's arguments; what a model wrote that is no object is shown as it is."""
    try:
        arguments = json.loads(part.text or "{}")
    except ValueError:
        arguments = None
    return arguments if isinstance(arguments, dict) else {"arguments": part.text}


def _stop_reason(answer: CollectedAnswer) -> JsonObject:
    reason = "stop_sequence" if answer.stopped is not None else REASONS[answer.finish]
    return {"stop_reason": reason, "stop_sequence": answer.stopped}


async def stream_message(prepared: PreparedRequest, request: MessagesRequest, emit: Emit) -> None:
    """Generate an answer as events: blocks open, grow and close."""
    # One block is open at a time, and ``n_blocks`` is its index. A part of another kind closes it and opens the
    # next; a call is a block by itself, for it comes whole.
    answer = CollectedAnswer()
    open_kind = ""
    n_blocks = 0

    async def say(kind: str, **fields: Any) -> None:
        await emit.send_event({"type": kind, **fields}, kind)

    async def close() -> None:
        nonlocal open_kind, n_blocks
        if open_kind:
            await say("content_block_stop", index=n_blocks)
            open_kind = ""
            n_blocks += 1

    async def write(kind: str, block: JsonObject, delta: JsonObject) -> None:
        nonlocal open_kind
        if open_kind != kind:
            await close()
            await say("content_block_start", index=n_blocks, content_block=block)
            open_kind = kind
        await say("content_block_delta", index=n_blocks, delta=delta)

    async def write_event(event: AnswerEvent) -> None:
        await answer.add_event(event)
        for part in event.parts:
            if part.kind == "call":
                await close()
                delta = {"type": "input_json_delta", "partial_json": part.text}
                await write("call", {**_new_call(part), "input": {}}, delta)
                await close()
            elif part.kind == "content":
                block = {"type": "text", "text": ""}
                await write("text", block, delta={"type": "text_delta", "text": part.text})
            else:
                block = {"type": "thinking", "thinking": "", "signature": ""}
                await write("thinking", block, delta={"type": "thinking_delta", "thinking": part.text})

    empty: JsonObject = {"content": [], "stop_reason": None, "stop_sequence": None}
    usage = _format_usage(RowReport(len(prepared.options.prompt)))
    opening = {**_new_message(request.model), **empty, "usage": usage, **_warn(prepared)}
    emit.sign_of_life = lambda: say("ping")
    await say("message_start", message=opening)
    report = await prepared.run(0, write_event)
    await close()
    await say("message_delta", delta=_stop_reason(answer), usage=_format_usage(report))
    await say("message_stop")


def format_error(error: ApiError) -> JsonObject:
    """Put an error into the body that Anthropic's clients read."""
    other_kind = "invalid_request_error" if error.status < 500 else "api_error"
    kind = {**KINDS, **BUSY}.get(error.status, other_kind)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def error_response(error: ApiError) -> Response:
    """Answer with an error in Anthropic's form."""
    return streams.error_response(error, format_error(error))


async def emit_error(emit: Emit, error: ApiError) -> None:
    """End a stream with an error."""
    await emit.send_event(format_error(error), "error")
