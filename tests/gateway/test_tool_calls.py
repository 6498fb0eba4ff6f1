"""Calls of tools over all three APIs: what a model wrote wrong is text and ends properly; what it called comes back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from tests.gateway.played import played_gateway

USER = [{"role": "user", "content": "Write it down."}]
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
WRITE = {"name": "write", "description": "", "parameters": PARAMETERS}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": WRITE}],
    "responses": [{"type": "function", **WRITE}],
    "messages": [{"name": "write", "input_schema": PARAMETERS}],
}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 40}),
    "responses": ("/v1/responses", {"input": USER, "max_output_tokens": 40}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 40}),
}
STOPPED = {"chat": "stop", "responses": "completed", "messages": "end_turn"}
CUT = {"chat": "length", "responses": "incomplete", "messages": "max_tokens"}
CALLED = {"chat": "tool_calls", "responses": "completed", "messages": "tool_use"}
GOOD = ("I write. <tool_", 'call>\n{"name": "write", ', '"arguments": {"text": "a"}}\n</tool_call>')
CUT_OFF = (*GOOD[:2], '"arguments": {"text": "on and ')
MALFORMED = (*GOOD[:2], '"arguments": {"text": }}\n</tool_call>')


def says_pieces(tokenizer: Tokenizer, pieces: tuple[str, ...], ends: bool = True) -> dict[str, Any]:
    """A model that says these pieces, each of one token, and then its end, or the last one for ever."""
    made = Tokenizer.from_str(tokenizer.to_str())
    made.add_tokens([AddedToken(piece, normalized=False) for piece in pieces])
    ids = [made.token_to_id(piece) for piece in pieces]
    successor = dict(itertools.pairwise([*ids, 0 if ends else ids[-1]]))

    def logits(token: int) -> torch.Tensor:
        scores = torch.zeros(made.get_vocab_size())
        scores[successor.get(token, ids[0])] = 20.0
        return scores

    return {"tokenizer": made, "logits_after": logits, "family": "qwen3"}


async def ask(played: Any, api: str, is_streamed: bool, **more: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """Ask for an answer: its text, why it ended, and its calls, each with its arguments."""
    path, body = REQUESTS[api]
    answer = await played.post(path, **{**body, "tools": TOOLS[api], "temperature": 0, "stream": is_streamed, **more})
    assert answer.status_code == 200, answer.text
    return (READ_STREAM if is_streamed else READ_WHOLE)[api](answer)


Answer = tuple[str, str, list[tuple[str, str]]]


def read_chat(answer: httpx.Response) -> Answer:
    choice = answer.json()["choices"][0]
    functions = [call["function"] for call in choice["message"].get("tool_calls", [])]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return choice["message"]["content"] or "", choice["finish_reason"], calls


def read_response(answer: httpx.Response) -> Answer:
    return read_response_object(answer.json())


def read_response_object(response: dict[str, Any]) -> Answer:
    texts = [item["content"][0]["text"] for item in response["output"] if item["type"] == "message"]
    calls = [(item["name"], item["arguments"]) for item in response["output"] if item["type"] == "function_call"]
    return "".join(texts), response["status"], calls


def read_message(answer: httpx.Response) -> Answer:
    message = answer.json()
    texts = [block["text"] for block in message["content"] if block["type"] == "text"]
    calls = [(block["name"], json.dumps(block["input"])) for block in message["content"] if block["type"] == "tool_use"]
    return "".join(texts), message["stop_reason"], calls


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def read_chat_stream(answer: httpx.Response) -> Answer:
    assert answer.text.rstrip().endswith("data: [DONE]"), "the stream ends properly"
    choices = [event["choices"][0] for event in events(answer) if event["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    functions = [call["function"] for choice in choices for call in choice["delta"].get("tool_calls", [])]
    finishes = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(finishes) == 1
    return text, finishes[0], [(function["name"], function["arguments"]) for function in functions]


def read_response_stream(answer: httpx.Response) -> Answer:
    found = events(answer)
    text = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    whole = read_response_object(found[-1]["response"])
    assert whole[0] == text
    assert found[-1]["type"] == f"response.{whole[1]}"
    return whole


def read_message_stream(answer: httpx.Response) -> Answer:
    found = events(answer)
    assert found[-1]["type"] == "message_stop"
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    names = [e["content_block"].get("name") for e in found if e["type"] == "content_block_start"]
    arguments = [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
    reason = next(event["delta"]["stop_reason"] for event in found if event["type"] == "message_delta")
    return text, reason, list(zip([name for name in names if name], arguments, strict=True))


READ_WHOLE: dict[str, Callable[[httpx.Response], Answer]] = {
    "chat": read_chat,
    "responses": read_response,
    "messages": read_message,
}
READ_STREAM: dict[str, Callable[[httpx.Response], Answer]] = {
    "chat": read_chat_stream,
    "responses": read_response_stream,
    "messages": read_message_stream,
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("api", REQUESTS)
async def test_a_broken_call_is_text_and_the_answer_ends_as_it_did(
    tmp_path: Path, tokenizer: Tokenizer, api: str, is_streamed: bool
) -> None:
    async with played_gateway(tmp_path, **says_pieces(tokenizer, MALFORMED)) as played:
        assert await ask(played, api, is_streamed) == ("".join(MALFORMED), STOPPED[api], [])
        limit = {"max_output_tokens": 2} if api == "responses" else {"max_tokens": 2}
        assert await ask(played, api, is_streamed, **limit) == ("".join(MALFORMED[:2]), CUT[api], [])
    async with played_gateway(tmp_path, **says_pieces(tokenizer, CUT_OFF)) as played:
        assert await ask(played, api, is_streamed) == ("".join(CUT_OFF), STOPPED[api], []), "it ended by itself"
    async with played_gateway(tmp_path, **says_pieces(tokenizer, GOOD)) as played:
        assert await ask(played, api, is_streamed) == ("I write.", CALLED[api], [("write", '{"text": "a"}')])


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("api", REQUESTS)
async def test_who_wants_no_calls_gets_text(tmp_path: Path, tokenizer: Tokenizer, api: str, is_streamed: bool) -> None:
    none = {"type": "none"} if api == "messages" else "none"
    async with played_gateway(tmp_path, **says_pieces(tokenizer, GOOD)) as played:
        assert await ask(played, api, is_streamed, tool_choice=none) == ("".join(GOOD), STOPPED[api], [])
        assert await ask(played, api, is_streamed, tools=[]) == ("".join(GOOD), STOPPED[api], [])


# --- the second turn -----------------------------------------------------------------------------------------------

ITEMS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}{% endfor %}{% endfor %}<assistant>"
)


def history(api: str, arguments: Any) -> dict[str, Any]:
    """What a program sends after a call of ``write``, with the arguments as its API has them."""
    if api == "chat":
        call = {"id": "c1", "type": "function", "function": {"name": "write", "arguments": arguments}}
        turns = [{"role": "assistant", "content": None, "tool_calls": [call]}]
        return {"messages": [*USER, *turns, {"role": "tool", "tool_call_id": "c1", "content": "ok"}]}
    if api == "responses":
        called = {"type": "function_call", "call_id": "c1", "name": "write", "arguments": arguments}
        return {"input": [*USER, called, {"type": "function_call_output", "call_id": "c1", "output": "ok"}]}
    used = {"type": "tool_use", "id": "c1", "name": "write", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "ok"}
    return {"messages": [*USER, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]}


@pytest.mark.parametrize("api", REQUESTS)
async def test_a_template_goes_through_the_arguments_of_a_past_call(
    tmp_path: Path, tokenizer: Tokenizer, api: str
) -> None:
    arguments = {"text": "a"}
    path, body = REQUESTS[api]
    async with played_gateway(tmp_path, template=ITEMS, **says_pieces(tokenizer, GOOD)) as played:
        sent = arguments if api == "messages" else json.dumps(arguments)
        answer = await ask(played, api, False, **history(api, sent))
        assert answer == ("I write.", CALLED[api], [("write", '{"text": "a"}')])
        refused = await played.post(path, **{**body, **history(api, '{"text": "a')})
        assert refused.status_code == 400
        assert "a past call of write has the arguments" in refused.json()["error"]["message"]
        assert (await ask(played, api, False, **history(api, {} if api == "messages" else "")))[0] == "I write."


# --- thoughts, and what a grammar holds ----------------------------------------------------------------------------

BEGUN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ tools }}<assistant><think>"
THOUGHTS = ("I wonder.", "</think>")
SCHEMA = {
    "type": "object",
    "properties": {"text": {"enum": ["a"]}},
    "required": ["text"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_schema_holds_what_comes_behind_thoughts(
    tmp_path: Path, tokenizer: Tokenizer, is_streamed: bool
) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    body = {"messages": USER, "temperature": 0, "max_tokens": 60, "stream": is_streamed}
    async with played_gateway(tmp_path, template=BEGUN, **says_pieces(tokenizer, THOUGHTS)) as played:
        answer = await played.post(REQUESTS["chat"][0], **body, response_format=format_)
        assert read_thoughts(answer, is_streamed) == ("I wonder.", '{"text": "a"}', [])
        tool = {"type": "function", "function": {"name": "write", "parameters": SCHEMA}}
        called = await played.post(REQUESTS["chat"][0], **body, tools=[tool], tool_choice="required")
        assert read_thoughts(called, is_streamed) == ("I wonder.", "", [("write", '{"text": "a"}')])


def read_thoughts(answer: httpx.Response, is_streamed: bool) -> tuple[str, str, list[tuple[str, str]]]:
    assert answer.status_code == 200, answer.text
    text, _, calls = (READ_STREAM if is_streamed else READ_WHOLE)["chat"](answer)
    if not is_streamed:
        return answer.json()["choices"][0]["message"]["reasoning_content"], text, calls
    deltas = [event["choices"][0]["delta"] for event in events(answer) if event["choices"]]
    return "".join(delta.get("reasoning_content") or "" for delta in deltas), text, calls


async def test_thoughts_that_never_end_are_no_answer(tmp_path: Path, tokenizer: Tokenizer) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    async with played_gateway(tmp_path, template=BEGUN, **says_pieces(tokenizer, THOUGHTS[:1], ends=False)) as played:
        answer = await played.post(REQUESTS["chat"][0], messages=USER, max_tokens=5, response_format=format_)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert read_thoughts(answer, False)[:2] == ("I wonder." * 5, "")
