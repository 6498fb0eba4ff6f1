"""OpenAI's chat completions and completions: their requests as ``GenerationRequest``, what comes of it in their form.

Source: OpenAI's API reference, and what its clients insist on (docs/gateway.md, "Clients").
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import trio

from swarmd.client.text.answer_reader import AnswerPart
from swarmd.gateway.apis.refusals import ApiError, bad_request
from swarmd.gateway.apis.schema import ChatMessage, ChatRequest, JsonObject, read_length
from swarmd.gateway.apis.skipped import Skipped, note_part
from swarmd.gateway.apis.streams import Emit
from swarmd.gateway.apis.talk import AnswerEvent, GenerationRequest, PreparedRequest, ends_unfinished
from swarmd.gateway.generation.row import RowReport
from swarmd.gateway.generation.sampling import SampledToken

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
TEXTS = ("text", "input_text", "output_text", "refusal")
THOUGHTS = (
    "thinking",
    "redacted_thinking",
    "reasoning",
    "reasoning_text",
)  # a model's own: no template wants them back
NO_EFFORTS = ("none", "minimal")  # of reasoning
EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}  # for templates, which know three of them
MOST_AT_ONCE = 16  # answers of one request: more would fill the queue, where they wait for each other
DONE = b"[DONE]"


# --- requests ------------------------------------------------------------------------------------------------------


def parse_chat(request: ChatRequest, key: str, skipped: Skipped) -> GenerationRequest:
    """Translate a request for a chat. Raises ApiError for what is not done here."""
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    tools = _read_tools(request.tools or [], skipped)
    messages = [read_turn(m, i, skipped) for i, m in enumerate(request.messages)]
    is_guess = request.continue_final_message is None  # llama.cpp and OpenRouter make it; vLLM has to be told
    continues = bool(request.continue_final_message)
    if is_guess:
        continues = request.add_generation_prompt is None and ends_unfinished(messages)
    if continues and messages[-1]["role"] != "assistant":
        raise bad_request("continue_final_message needs an assistant's message at the end", "continue_final_message")
    max_tokens = read_length(request.max_completion_tokens, "max_completion_tokens")
    if request.max_completion_tokens is None:
        max_tokens = read_length(request.max_tokens, "max_tokens")
    return GenerationRequest(
        model=request.model,
        sampled=request,
        messages=messages,
        max_tokens=max_tokens,
        wants_logprobs=bool(request.logprobs),
        n_top=request.top_logprobs or 0,
        schema=read_schema(request.response_format, "response_format"),
        tools=tools,
        tool_choice=read_tool_choice(request.tool_choice, bool(tools)),
        several_calls=request.parallel_tool_calls is True,
        template={
            **thinking_options(request.thinking, request.reasoning_effort),
            **(request.chat_template_kwargs or {}),
        },
        continues=continues,
        is_guess=is_guess,
        begins_answer=request.add_generation_prompt is not False,
        key=key,
        skipped=skipped.told,
    )


def read_turn(source: ChatMessage, index: int, skipped: Skipped) -> JsonObject:
    """Read one message into a turn as chat templates take it. Raises ApiError."""
    where = f"messages[{index}]"
    if source.role not in ROLES:
        raise bad_request(f"{where}.role is one of {', '.join(ROLES)}, not {source.role[:32]!r}", f"{where}.role")
    is_result = source.role == "tool"
    content = read_result(source.content, where, skipped) if is_result else read_text(source.content, where)
    turn: JsonObject = {"role": ROLES[source.role], "content": content}
    if source.tool_calls:
        turn["tool_calls"] = [read_past_call(call, where) for call in source.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(source, name)) is not None:
            turn[name] = value
    return turn


def thinking_options(thinking: JsonObject | None, effort: str | None) -> JsonObject:
    """Return what a template is told of thinking: whether it is switched on or off, and with how much effort."""
    kind = (thinking or {}).get("type")
    is_off = kind == "disabled" or effort in NO_EFFORTS
    is_on = kind in ("enabled", "adaptive") or bool(effort)
    options: JsonObject = {"reasoning_effort": EFFORTS.get(effort, effort)} if effort else {}
    if is_off or is_on:
        options |= dict.fromkeys(("enable_thinking", "thinking"), not is_off)
    return options


def read_text(content: Any, where: str) -> str:
    """Return the text of a message's content, without thoughts. Raises ApiError for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise bad_request(f"{where}.content is text, or a list of parts", where)
    texts: list[str] = []
    for part in content:
        kind = str(part.get("type"))
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind in THOUGHTS:
            continue
        if kind not in TEXTS or not isinstance(text, str):
            raise bad_request(f"{where}.content: this model reads text only, not {kind[:32]!r}", where)
        texts.append(text)
    return "".join(texts)


def read_result(content: Any, where: str, skipped: Skipped) -> str:
    """Return the text of a tool's result, with a note for each part that is none. Raises ApiError."""
    if not isinstance(content, list):
        return read_text(content, where)
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str):
            texts.append(text)
        else:
            texts.append(note_part(part))
            skipped.add(f"{where}: {part.get('type') if isinstance(part, dict) else 'a part'} in a result")
    return "\n".join(texts)


def read_past_call(call: JsonObject, where: str) -> JsonObject:
    """Read a call that the model made before, as chat templates take it. Raises ApiError."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad_request(f"{where}.tool_calls: expected objects with a function and its name", where)
    return {"id": call.get("id"), "type": "function", "function": function}


def _read_tools(tools: Sequence[JsonObject], skipped: Skipped) -> tuple[JsonObject, ...]:
    """Read the functions among the tools; others, which a server would run, are skipped. Raises ApiError."""
    functions = []
    for tool in tools:
        kind = tool.get("type", "function")
        if kind != "function":
            skipped.add(f"a tool of type {kind}")
            continue
        function = tool.get("function", tool)
        if not isinstance(function, dict):
            raise bad_request("tools: a function is an object with a name", "tools")
        functions.append(make_tool(function.get("name"), function.get("description"), function.get("parameters")))
    return tuple(functions)


def make_tool(name: Any, description: Any, parameters: Any) -> JsonObject:
    """Make a tool as chat templates take it. Raises ApiError."""
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        raise bad_request(
            f"tools: a function's name has 1 to 128 letters, digits and -_.:, not {str(name)[:140]!r}", "tools"
        )
    if not isinstance(parameters, dict | None) or not isinstance(description, str | None):
        raise bad_request(f"tools: {name} needs a JSON schema, and a description that is text", "tools")
    function = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}


def read_tool_choice(choice: str | JsonObject | None, has_tools: bool) -> str:
    """Return "none", "auto", "required", or "=" and the name of a function. Raises ApiError."""
    if choice is None:
        return "auto" if has_tools else "none"
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":  # all are: a choice among them is a hint
        mode = choice.get("mode") or (choice.get("allowed_tools") or {}).get("mode")
        return "required" if mode == "required" and has_tools else "auto"
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else choice.get("name")
        if not isinstance(name, str):
            form = '{"type": "function", "function": {"name": ...}}'
            raise bad_request(f"tool_choice names a function: {form}", "tool_choice")
        choice = f"={name}"
    elif choice not in ("none", "auto", "required"):
        message = f"tool_choice is none, auto, required, or names a function, not {choice[:32]!r}"
        raise bad_request(message, "tool_choice")
    if not has_tools and choice not in ("none", "auto"):
        raise bad_request("tool_choice needs tools that the client runs", "tool_choice")
    return choice


def read_schema(response_format: JsonObject | None, param: str) -> JsonObject | None:
    """Return the schema that an answer has to fit; {} is any JSON object. Raises ApiError."""
    kind = (response_format or {"type": "text"}).get("type")
    if response_format is None or kind == "text":
        return None
    if kind == "json_object":  # llama.cpp and Together take a schema with it
        schema = response_format.get("schema")
        if not isinstance(schema, dict | None):
            raise bad_request(f"{param}.schema is a JSON schema", param)
        return dict(schema or {})
    inner = response_format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise bad_request(f"{param} is text, json_object, or json_schema with a schema", param)
    return dict(schema)


# --- answers -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class CollectedAnswer:
    """One answer, put together from its events."""

    content: str = ""
    reasoning: str = ""
    calls: list[AnswerPart] = field(default_factory=list)
    choices: list[SampledToken] = field(default_factory=list)
    finish: str = "stop"
    stopped: str | None = None

    async def add_event(self, event: AnswerEvent) -> None:
        """Append what an event brings."""
        for part in event.parts:
            if part.kind == "call":
                self.calls.append(part)
            elif part.kind == "reasoning":
                self.reasoning += part.text
            else:
                self.content += part.text
        self.choices += event.choices
        self.finish = event.finish or self.finish
        self.stopped = event.stopped or self.stopped


async def run_all(
    prepared_requests: Sequence[PreparedRequest], n: int
) -> tuple[list[CollectedAnswer], list[RowReport]]:
    """Compute every answer to every prompt, side by side. Raises ApiError."""
    # The answers of one prompt stand side by side: answer i belongs to prompt i // n, and is its answer i % n.
    answers = [CollectedAnswer() for _ in range(n * len(prepared_requests))]
    reports: list[RowReport | None] = [None] * len(answers)

    async def run_one(index: int) -> None:
        prepared = prepared_requests[index // n]
        reports[index] = await prepared.run(index % n, answers[index].add_event)

    await run_together([partial(run_one, index) for index in range(len(answers))])
    return answers, [report for report in reports if report is not None]


def format_usage(reports: Sequence[RowReport], n_prompts: int = 1) -> JsonObject:
    """Count tokens as OpenAI does: a prompt counts once, however many answers it has."""
    n = max(1, len(reports) // n_prompts)
    first_reports = reports[::n]  # one of each prompt
    n_prompt = sum(report.n_prompt for report in first_reports)
    n_cached = sum(report.n_cached for report in first_reports)
    n_written = sum(report.n_generated for report in reports)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_written,
        "total_tokens": n_prompt + n_written,
        "prompt_tokens_details": {"cached_tokens": n_cached},
        "completion_tokens_details": {"reasoning_tokens": sum(report.n_reasoning for report in reports)},
    }


def format_extra(reports: Sequence[RowReport], request: GenerationRequest) -> JsonObject:
    """Return what the page and ``swarmd chat`` show under an answer, and what of the request was left out."""
    last = reports[-1]
    doubts = []
    for doubt in sorted(last.doubts, key=lambda doubt: doubt.first_token):
        token = max(0, doubt.first_token + 1 - last.n_prompt)  # of the answer, whose first token is 0
        doubts.append({"token": token, "hop": doubt.hop, "reason": doubt.reason})
    return {
        "chain": list(last.chain),
        "repairs": list(last.repairs),
        "first_token_s": round(last.prefilled_s, 4),
        "seconds": round(last.total_s, 4),
        "longest_stall_s": round(last.longest_stall_s, 4),
        "tried_ahead": last.n_drafted,
        "taken_ahead": last.n_accepted,
        "void_windows": last.n_void,
        "tried_because": last.tried_because,
        "doubts": doubts,
        "warnings": format_warnings(request),
    }


def format_warnings(request: GenerationRequest) -> list[str]:
    """Say in sentences what of a request was left out."""
    return [f"{what}: skipped, as nothing here does it" for what in request.skipped]


def make_envelope(kind: str, prefix: str, model: str) -> JsonObject:
    """Begin an answer: a new id, its kind, the time and the model."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


async def answer_chat(prepared: PreparedRequest, request: ChatRequest) -> JsonObject:
    """Generate the whole answer."""
    answers, reports = await run_all([prepared], request.n or 1)
    choices = [_chat_choice(i, answer, prepared) for i, answer in enumerate(answers)]
    head = make_envelope("chat.completion", "chatcmpl", request.model)
    extra = format_extra(reports, prepared.request)
    return {**head, "choices": choices, "usage": format_usage(reports), "swarmd": extra}


def _chat_choice(index: int, answer: CollectedAnswer, prepared: PreparedRequest) -> JsonObject:
    content = answer.content or (None if answer.calls else "")
    message: JsonObject = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [format_call(part) for part in answer.calls]
    logprobs = _format_logprobs(answer.choices, prepared) if prepared.request.wants_logprobs else None
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish}


def format_call(part: AnswerPart) -> JsonObject:
    """Write a call of a tool, with a new id."""
    return {
        "id": f"call_{secrets.token_hex(12)}",
        "type": "function",
        "function": {"name": part.name, "arguments": part.text},
    }


def _format_logprobs(choices: Sequence[SampledToken], prepared: PreparedRequest) -> JsonObject:
    def format_token(token: int, logprob: float) -> JsonObject:
        text = prepared.engine.tokenizer.decode([token], skip_special_tokens=False)
        token_bytes = list(prepared.engine.token_bytes[token])
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": token_bytes}

    content = []
    for choice in choices:
        top = [format_token(token, logprob) for token, logprob in choice.top]
        content.append({**format_token(choice.token, choice.logprob), "top_logprobs": top})
    return {"content": content, "refusal": None}


async def stream_chat(prepared: PreparedRequest, request: ChatRequest, emit: Emit) -> None:
    """Generate an answer in pieces: role, what comes, why it ended, and the usage where it is wanted."""
    head = make_envelope("chat.completion.chunk", "chatcmpl", request.model)
    growing = set(range(request.n or 1))  # answers that have not ended
    emit.sign_of_life = lambda: write_chunk(min(growing, default=0), {"content": ""})
    wants_usage = bool(request.stream_options and request.stream_options.include_usage)
    wants_logprobs = prepared.request.wants_logprobs
    reports: list[RowReport] = []

    async def write_chunk(
        index: int,
        delta: JsonObject,
        finish: str | None = None,
        logprobs: Any = None,
    ) -> None:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if wants_usage else {}
        await emit.send_event({**head, "choices": [choice], **usage})

    async def write_repairs(index: int, repairs: Sequence[str]) -> None:
        """Tell repairs as they happen. The page shows them; other clients skip the field."""
        choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}
        news = {"usage": None, "swarmd": {"repairs": repairs}}
        await emit.send_event({**head, "choices": [choice], **news})

    async def run_one(index: int) -> None:
        await write_chunk(index, {"role": "assistant", "content": ""})
        n_calls = 0

        async def write_event(event: AnswerEvent) -> None:
            # The log-probabilities of an event go with its first chunk, or with an empty one where it has no parts.
            nonlocal n_calls
            logprobs = _format_logprobs(event.choices, prepared) if wants_logprobs and event.choices else None
            for part in event.parts:
                if part.kind == "call":
                    delta: JsonObject = {"tool_calls": [{"index": n_calls, **format_call(part)}]}
                    n_calls += 1
                else:
                    delta = {"content" if part.kind == "content" else "reasoning_content": part.text}
                await write_chunk(index, delta, logprobs=logprobs)
                logprobs = None
            if logprobs is not None:
                await write_chunk(index, {}, logprobs=logprobs)
            if event.repairs:
                await write_repairs(index, event.repairs)
            if event.finish:
                growing.discard(index)
                await write_chunk(index, {}, event.finish)

        reports.append(await prepared.run(index, write_event))

    await run_together([partial(run_one, index) for index in range(request.n or 1)])
    if wants_usage:
        totals = {"usage": format_usage(reports), "swarmd": format_extra(reports, prepared.request)}
        await emit.send_event({**head, "choices": [], **totals})
    await emit.send_event(DONE)


async def run_together(tasks: Sequence[Any]) -> None:
    """Run all of them, MOST_AT_ONCE at a time; the first ApiError ends the others and is raised."""
    # A nursery would raise a group of errors, and clients want one. So each task's ApiError is kept aside; any other
    # error is a bug, and goes through the nursery as it is.
    failures: list[ApiError] = []

    places = trio.CapacityLimiter(MOST_AT_ONCE)

    async def run_guarded(task: Any) -> None:
        try:
            async with places:
                await task()
        except ApiError as error:
            failures.append(error)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for task in tasks:
            nursery.start_soon(run_guarded, task)
    if failures:
        raise failures[0]


async def emit_error(emit: Emit, error: ApiError) -> None:
    """End a stream that cannot go on: in words by which agents know that they may ask again, where they may."""
    # pi looks for "server error" in the message (0.74), qwen-code for the type (0.24); others ask again anyway.
    error_body = error.body
    if error.status >= 500:
        again = {"message": f"server error: {error.message}", "type": "overloaded_error"}
        error_body = {"error": {**error_body["error"], **again}}
    await emit.send_event(error_body)
