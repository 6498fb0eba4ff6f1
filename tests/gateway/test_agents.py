"""What ten agents send, reduced from recordings of their versions, to a gateway whose model a test plays.

``agents/`` has the requests: fields and their order as they came, texts replaced by others of the same length.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import trio
from tokenizers import Tokenizer
from trio.testing import MockClock

from swarmd.gateway.apis import streams
from swarmd.gateway.apis.skipped import HEADER, MOST_TOLD
from swarmd.home.models import bundled_folder
from tests.gateway.played import CHATML, PlayedGateway, played_gateway

FILES = sorted((Path(__file__).parent / "agents").glob("*.json"))
CONTEXT = 65_536
FAILED = "response.failed"
USER = [{"role": "user", "content": "Say hello."}]
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
WITH_CALLS = CHATML.replace("m.content", "(m.content or '') + ((m.tool_calls | tojson) if m.tool_calls else '')")
ALTERNATING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "{{ '<' + m.role + '>' + (m.content or '') }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def says_some(n_tokens: int) -> Callable[[int], torch.Tensor]:
    """A model that says some tokens and ends, whatever it is asked; for one answer at a time."""
    left = n_tokens

    def logits_after(token: int) -> torch.Tensor:
        nonlocal left
        logits = torch.zeros(1_024)
        logits[1_000 + left if left else 0] = 40.0
        left = left - 1 if left else n_tokens
        return logits

    return logits_after


def events_of(answer: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def send(played: PlayedGateway, request: dict[str, Any]) -> httpx.Response:
    return await played.http.post(request["path"], json={**request["body"], "temperature": 0})


def count_cached(events: list[Any]) -> tuple[int, int]:
    """How many tokens of a prompt were cached, and how many it has, by a stream of any API."""
    for event in reversed(events):
        usage = event.get("usage") or event.get("response", {}).get("usage")
        if usage and "prompt_tokens" in usage:
            return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]
        if usage and "input_tokens_details" in usage:
            return usage["input_tokens_details"]["cached_tokens"], usage["input_tokens"]
        if usage:
            cached = usage["cache_read_input_tokens"]
            return cached, cached + usage["input_tokens"]
    raise AssertionError("no usage came")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("template", [WITH_CALLS, ALTERNATING], ids=["any turn", "no system"])
async def test_what_an_agent_sends_is_answered(tmp_path: Path, file: Path, template: str) -> None:
    recorded = json.loads(file.read_text(encoding="utf-8"))
    async with played_gateway(tmp_path, says_some(5), template=template, max_tokens=CONTEXT) as played:
        for request in recorded["requests"]:
            answer = await send(played, request)
            assert answer.status_code == 200, answer.text[:500]
            events = events_of(answer)
            assert events
            assert not [event for event in events if event.get("error") or event.get("type") in ("error", FAILED)]


@pytest.mark.parametrize("agent", ["codex", "claude"])
async def test_the_second_turn_sends_only_what_is_new(tmp_path: Path, agent: str) -> None:
    (file,) = [file for file in FILES if file.stem.startswith(agent)]
    first, second = json.loads(file.read_text(encoding="utf-8"))["requests"]
    async with played_gateway(tmp_path, says_some(5), template=WITH_CALLS, max_tokens=CONTEXT) as played:
        _, n_first = count_cached(events_of(await send(played, first)))
        n_cached, n_second = count_cached(events_of(await send(played, second)))
    assert n_second > n_first >= n_cached >= 0.95 * n_first


SKIPPED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "fields": ("/v1/chat/completions", {"messages": USER, "typical_p": 0.5, "modalities": ["audio"]}, ["typical_p"]),
    "tools of a server's": (
        "/v1/responses",
        {"input": "hi", "tools": [NOW, {"type": "web_search"}, {"type": "image_generation"}]},
        ["a tool of type web_search", "a tool of type image_generation"],
    ),
    "items": ("/v1/responses", {"input": [*USER, {"type": "web_search_call", "id": "w"}]}, ["web_search_call"]),
    "no header by somebody else's letters": ("/v1/responses", {"input": "hi", "a\r\nb: c\u2028": 1}, ["a? b: c?"]),
    "tools of a chat's": ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "mcp"}]}, ["type mcp"]),
    "blocks": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{"type": "server_tool_use"}, {"type": "text", "text": "hi"}]}]},
        ["a block of type server_tool_use"],
    ),
    "versions of tools": (
        "/v1/messages",
        {"messages": USER, "tools": [{"type": "bash_20991231", "name": "bash"}]},
        ["a tool of type bash_20991231"],
    ),
    "more than is worth a header": (
        "/v1/messages",
        {"messages": USER, **{f"new{i}": 1 for i in range(MOST_TOLD + 3)}},
        ["new15, and 3 more"],
    ),
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("case", SKIPPED)
async def test_what_is_not_known_here_is_skipped_and_told(tmp_path: Path, case: str, is_streamed: bool) -> None:
    path, body, told = SKIPPED[case]
    async with played_gateway(tmp_path) as played:
        sent = {"max_tokens": 4, "stream": is_streamed, **body}
        answer = await played.post(path, **sent)
        assert answer.status_code == 200, answer.text
        for what in told:
            assert what in answer.headers[HEADER]
        if not is_streamed:
            assert answer.json()["swarmd"]["warnings"]


async def test_nothing_is_told_where_nothing_is_skipped(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.chat(user="me", store=False, tools=[], max_tokens=4)
        assert HEADER not in answer.headers
        assert answer.json()["swarmd"]["warnings"] == []


async def test_parts_of_a_result_that_are_no_text_become_a_note(tmp_path: Path) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    found = {"type": "tool_reference", "tool_name": "later"}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}

    def result(*parts: Any) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": list(parts)}]}

    tools = [{"name": "later", "input_schema": {"type": "object"}, "defer_loading": True}]
    async with played_gateway(tmp_path, template=WITH_CALLS) as played:
        for part, shown, has_tool in (
            (image, "[an image, which this model cannot see]", False),
            (found, "later", True),
        ):
            body = {"messages": [*USER, call, result({"type": "text", "text": "seen"}, part)], "tools": tools}
            prompt = await played.read_prompt("/v1/messages", max_tokens=4, **body)
            assert shown in prompt
            assert ('"parameters"' in prompt) == has_tool, "a tool that is put off counts from when it was found"
        image_of_users = [{"role": "user", "content": [image]}]
        refused = await played.post("/v1/messages", messages=image_of_users, max_tokens=4)
        assert (refused.status_code, "'image'" in refused.json()["error"]["message"]) == (400, True)


async def test_a_tool_of_any_text_is_called_with_text(tmp_path: Path) -> None:
    tool = {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "grammar"}}
    body = {"input": "hi", "tools": [tool], "tool_choice": {"type": "custom", "name": "apply_patch"}, "seed": 3}
    quote = Tokenizer.from_file(str(bundled_folder() / "tokenizer.json")).token_to_id('"')
    likes_quotes = torch.zeros(1_024).index_fill(0, torch.tensor(quote), 9.0)
    async with played_gateway(tmp_path, lambda token: likes_quotes) as played:
        answer = (await played.post("/v1/responses", max_output_tokens=400, **body)).json()
        (call,) = answer["output"]
        assert (call["type"], call["name"], type(call["input"])) == ("custom_tool_call", "apply_patch", str)
        streamed = events_of(await played.post("/v1/responses", max_output_tokens=400, stream=True, **body))
        kinds = [event["type"] for event in streamed]
        assert "response.custom_tool_call_input.done" in kinds
        assert streamed[-1]["response"]["output"][0]["input"] == call["input"]


async def test_tools_that_the_history_brings_are_offered(tmp_path: Path) -> None:
    brought = {"type": "additional_tools", "tools": [{**NOW, "name": "brought"}]}
    async with played_gateway(tmp_path) as played:
        prompt = await played.read_prompt("/v1/responses", input=[*USER, brought], max_output_tokens=4)
        assert "brought" in prompt


async def test_a_tool_that_is_found_again_is_offered_once(tmp_path: Path) -> None:
    a, b, c = ({**NOW, "name": name} for name in "abc")
    found = [{"type": "namespace", "name": "mcp", "tools": tools} for tools in ([a, b], [b, c])]
    history = [*USER, *({"type": "tool_search_output", "tools": [space]} for space in found)]
    tools = [{**NOW, "name": "x", "defer_loading": True}]
    history.append({"type": "tool_search_output", "tools": [{**NOW, "name": "x"}]})
    async with played_gateway(tmp_path) as played:
        prompt = await played.read_prompt("/v1/responses", input=history, tools=tools, max_output_tokens=4)
        assert [prompt.count(f'"name": "{name}"') for name in "abcx"] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "and then?", "previous_response_id": "resp_1"}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("/v1/messages", {"messages": USER, "max_tokens": 4, "tools": [{"name": ["x"], "defer_loading": True}] * 2}),
    ],
)
async def test_what_would_answer_another_question_is_refused(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.post(path, **body)
        assert answer.status_code == (200 if "tools" in body else 400), answer.text


async def test_a_length_is_what_an_answer_may_come_to(tmp_path: Path) -> None:
    """The model never ends by itself; its context has 512 tokens."""
    async with played_gateway(tmp_path, eos=frozenset(), generation={"do_sample": False}) as played:
        for limit in ({"max_tokens": 32_000}, {"max_tokens": None}, {"max_tokens": -1}):
            answer = (await played.chat(temperature=0, **limit)).json()
            assert answer["usage"]["total_tokens"] == 512
            assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_prompt_that_is_too_long_is_refused_in_words_that_agents_know(tmp_path: Path, path: str) -> None:
    turns = [{"role": "user", "content": "word " * 600}]
    body = {"input": turns} if path.endswith("responses") else {"messages": turns, "max_tokens": 9}
    async with played_gateway(tmp_path) as played:
        answer = await played.post(path, **body)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["message"].startswith("prompt is too long: ")
        assert " tokens > 511 maximum. This model's maximum context length is 512 tokens" in error["message"]
        assert error.get("code", "context_length_exceeded") == "context_length_exceeded"


SIGNS = {
    "/v1/chat/completions": '"delta":{"content":""}',
    "/v1/completions": '"text":""',
    "/v1/responses": '"type":"response.in_progress"',
    "/v1/messages": '{"type":"ping"}',
}


@pytest.mark.parametrize("path", SIGNS)
async def test_a_silent_stream_stays_alive_by_events(
    tmp_path: Path, path: str, virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six minutes until the first token."""
    body = {"/v1/responses": {"input": "hi"}, "/v1/completions": {"prompt": "hi"}}.get(path, {"messages": USER})
    async with played_gateway(tmp_path, says_some(3)) as played:
        step = played.session_kind.step

        async def slow_step(session: Any, sent: Any) -> Any:
            await trio.sleep(360)
            return await step(session, sent)

        monkeypatch.setattr(played.session_kind, "step", slow_step)
        answer = await played.post(path, **body, stream=True, **({"max_tokens": 1} if "responses" not in path else {}))
        n_signs = answer.text.count(SIGNS[path])
        assert n_signs >= 360 / streams.KEEP_ALIVE_S - 1
        assert "still there" not in answer.text
        numbers = [event.get("sequence_number") for event in events_of(answer)]
        assert numbers == [*range(len(numbers))] or "responses" not in path
