"""Ollama's API, for programs that know nothing else: chat, generate, and what there is.

Streams are lines of JSON. Source: Ollama's documentation of its API; its client for Python (ollama 0.6.3).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.responses import Response

from swarmd.client.text.answer_reader import AnswerPart
from swarmd.gateway.apis.openai import (
    CollectedAnswer,
    format_warnings,
    make_tool,
    read_past_call,
    read_schema,
    thinking_options,
)
from swarmd.gateway.apis.refusals import ApiError, bad_request
from swarmd.gateway.apis.schema import MAX_MESSAGES, MAX_TOOLS, JsonObject, SamplingFields
from swarmd.gateway.apis.skipped import Skipped
from swarmd.gateway.apis.streams import Emit, error_response
from swarmd.gateway.apis.talk import AnswerEvent, GenerationRequest, PreparedRequest, ends_unfinished
from swarmd.gateway.generation.row import RowReport

VERSION = "0.12.0"  # of the API that is spoken here, which programs look at before they ask
NS = 1_000_000_000  # its durations are in nanoseconds
ROLES = ("system", "user", "assistant", "tool")
KNOWN_OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty"),
)
SILENT_OPTIONS = ("num_ctx", "num_predict", "num_keep", "num_batch", "num_gpu", "num_thread", "repeat_last_n")


class OllamaTurn(msgspec.Struct):
    """One turn of a chat. ``images`` are refused."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[JsonObject] | None = None
    tool_name: str | None = None


class _Asked(msgspec.Struct, kw_only=True):
    model: str
    stream: bool = True
    format: str | JsonObject | None = None
    options: JsonObject | None = None
    think: bool | str | None = None
    keep_alive: Any = None


class OllamaChatRequest(_Asked, kw_only=True):
    """POST /api/chat."""

    messages: Annotated[list[OllamaTurn], Meta(max_length=MAX_MESSAGES)] = []
    tools: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(_Asked, kw_only=True):
    """POST /api/generate: a turn of a user's, or with ``raw`` a text that is gone on with."""

    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: list[str] | None = None


class OllamaModelRequest(msgspec.Struct):
    """POST /api/show and /api/pull; older programs say ``name``."""

    model: str = ""
    name: str = ""
    stream: bool = True

    @property
    def asked(self) -> str:
        """The model that is meant."""
        return self.model or self.name


# --- requests ------------------------------------------------------------------------------------------------------


def parse_chat(request: OllamaChatRequest, key: str, skipped: Skipped) -> GenerationRequest:
    """Translate a chat. Raises ApiError for what is not done here."""
    turns = _number_calls([_read_turn(turn, index) for index, turn in enumerate(request.messages)])
    tools = _read_tools(request.tools or (), skipped)
    goes_on = {"continues": ends_unfinished(turns), "is_guess": True}
    return _make_request(request, key, skipped, messages=turns, tools=tools, **goes_on)


def parse_generate(request: OllamaGenerateRequest, key: str, skipped: Skipped) -> GenerationRequest:
    """Translate a prompt. Raises ApiError for what is not done here."""
    _refuse_images(request.images, "images")
    if request.raw:
        return _make_request(request, key, skipped, prompt=request.prompt)
    system = [{"role": "system", "content": request.system}] if request.system else []
    return _make_request(request, key, skipped, messages=[*system, {"role": "user", "content": request.prompt}])


def _make_request(request: _Asked, key: str, skipped: Skipped, **more: Any) -> GenerationRequest:
    options = request.options or {}
    for name in options:
        if name not in (*KNOWN_OPTIONS, *SILENT_OPTIONS):
            skipped.add(f"options.{name}")
    known = {name: options[name] for name in KNOWN_OPTIONS if options.get(name) is not None}
    try:
        whole = {name: int(v) if isinstance(v, float) and v.is_integer() else v for name, v in known.items()}
        sampled = msgspec.convert(whole, SamplingFields)
        length = msgspec.convert(options.get("num_predict"), int | None)
    except msgspec.ValidationError as error:
        raise bad_request(f"options: {error}", "options") from None
    is_bounded = length is not None and length > 0  # else as long as there is room
    effort = request.think if isinstance(request.think, str) else None
    switched = {True: {"type": "enabled"}, False: {"type": "disabled"}}
    thinking = switched[request.think] if isinstance(request.think, bool) else None
    return GenerationRequest(
        model=request.model,
        sampled=sampled,
        max_tokens=length if is_bounded else None,
        schema=_read_format(request.format),
        template=thinking_options(thinking, effort),
        key=key,
        skipped=skipped.told,
        **more,
    )


def _read_format(form: str | JsonObject | None) -> JsonObject | None:
    if not form:
        return None
    if isinstance(form, dict):
        return read_schema({"type": "json_schema", "json_schema": {"schema": form}}, "format")
    if form != "json":
        raise bad_request(f"format is json or a JSON schema, not {form[:32]!r}", "format")
    return {}


def _read_turn(turn: OllamaTurn, index: int) -> JsonObject:
    where = f"messages[{index}]"
    if turn.role not in ROLES:
        raise bad_request(f"{where}.role is one of {', '.join(ROLES)}, not {turn.role[:32]!r}", f"{where}.role")
    _refuse_images(turn.images, f"{where}.images")
    read: JsonObject = {"role": turn.role, "content": turn.content or ""}
    if turn.thinking:
        read["reasoning_content"] = turn.thinking
    if turn.role == "tool":
        read["name"] = turn.tool_name or ""
    if turn.tool_calls:
        read["tool_calls"] = [read_past_call(call, where) for call in turn.tool_calls]
    return read


def _number_calls(turns: list[JsonObject]) -> list[JsonObject]:
    """Give calls and results ids, in their order: Ollama has none, and some templates want them."""
    n_calls = n_results = 0
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            call["id"] = call["id"] or f"call_{n_calls}"
            n_calls += 1
        if turn["role"] == "tool":
            turn["tool_call_id"] = f"call_{n_results}"
            n_results += 1
    return turns


def is_empty(request: Any) -> bool:
    """Is nothing asked, but that the model be loaded or let go?"""
    if isinstance(request, OllamaGenerateRequest):
        return not request.prompt and not request.raw
    return isinstance(request, OllamaChatRequest) and not request.messages


def lets_go(request: Any) -> bool:
    """Does an empty request let its model go? Engines here stay: others may use them."""
    return request.keep_alive in (0, "0", "0s")


def answer_empty(request: Any) -> JsonObject:
    """Say that a model is loaded, or that its program needs it no longer."""
    reason = "unload" if lets_go(request) else "load"
    return {**_head(request), **_say(request, "", "", ()), "done": True, "done_reason": reason}


def _refuse_images(images: Sequence[str] | None, where: str) -> None:
    if images:
        raise bad_request(f"{where}: this model reads text only", where)


def _read_tools(tools: Sequence[JsonObject], skipped: Skipped) -> tuple[JsonObject, ...]:
    functions = []
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict):
            skipped.add(f"a tool of type {tool.get('type')}")
            continue
        functions.append(make_tool(function.get("name"), function.get("description"), function.get("parameters")))
    return tuple(functions)


# --- answers -------------------------------------------------------------------------------------------------------


async def answer(prepared: PreparedRequest, request: _Asked) -> JsonObject:
    """Generate the whole answer."""
    collected = CollectedAnswer()
    report = await prepared.run(0, collected.add_event)
    said = _say(request, collected.content, collected.reasoning, collected.calls)
    return {**_head(request), **said, **_end(collected, report, prepared)}


async def stream(prepared: PreparedRequest, request: _Asked, emit: Emit) -> None:
    """Generate an answer as lines."""
    collected = CollectedAnswer()

    async def write(text: str = "", reasoning: str = "", calls: Sequence[AnswerPart] = ()) -> None:
        await emit.send_line({**_head(request), **_say(request, text, reasoning, calls), "done": False})

    async def write_event(event: AnswerEvent) -> None:
        await collected.add_event(event)
        for part in event.parts:
            if part.kind == "call":
                await write(calls=[part])
            elif part.kind == "content":
                await write(part.text)
            else:
                await write(reasoning=part.text)

    emit.sign_of_life = write
    report = await prepared.run(0, write_event)
    await emit.send_line({**_head(request), **_say(request, "", "", ()), **_end(collected, report, prepared)})


def _head(request: _Asked) -> JsonObject:
    return {"model": request.model, "created_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def _say(request: _Asked, text: str, reasoning: str, calls: Sequence[AnswerPart]) -> JsonObject:
    thinking = {"thinking": reasoning} if reasoning else {}
    if isinstance(request, OllamaGenerateRequest):
        return {"response": text, **thinking}
    message: JsonObject = {"role": "assistant", "content": text, **thinking}
    if calls:
        functions = [{"name": part.name, "arguments": json.loads(part.text)} for part in calls]
        message["tool_calls"] = [{"function": function} for function in functions]
    return {"message": message}


def _end(collected: CollectedAnswer, report: RowReport, prepared: PreparedRequest) -> JsonObject:
    warnings = format_warnings(prepared.request)
    return {
        "done": True,
        "done_reason": "length" if collected.finish == "length" else "stop",
        "total_duration": round((report.queued_s + report.total_s) * NS),
        "load_duration": 0,
        "prompt_eval_count": report.n_prompt,
        "prompt_eval_duration": round(report.prefilled_s * NS),
        "eval_count": report.n_generated,
        "eval_duration": round((report.total_s - report.prefilled_s) * NS),
        **({"swarmd": {"warnings": warnings}} if warnings else {}),
    }


def list_entry(name: str, model: str, family: str = "") -> JsonObject:
    """One model as /api/tags and /api/ps have it. How large it is nobody here need know."""
    details = {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }
    return {
        "name": name,
        "model": name,
        "modified_at": "1970-01-01T00:00:00Z",
        "size": 0,
        "digest": model,
        "details": details,
    }


def show_model(name: str, model: str, family: str, context: int, chats: bool) -> JsonObject:
    """One model as /api/show has it."""
    info = {"general.architecture": family, f"{family}.context_length": context}
    capabilities = ["completion", "tools"] if chats else ["completion"]
    details = list_entry(name, model, family)["details"]
    return {"details": details, "model_info": info, "capabilities": capabilities, "parameters": "", "template": ""}


def format_error(error: ApiError) -> Response:
    """Answer with an error in Ollama's form."""
    return error_response(error, {"error": error.message})


async def emit_error(emit: Emit, error: ApiError) -> None:
    """End a stream with an error."""
    await emit.send_line({"error": error.message})
