"""Ollama's API, as its own programs ask, before a model that a test plays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from swarmd.errors import NoRoute
from swarmd.gateway.apis.skipped import HEADER
from swarmd.home.models import bundled_folder
from tests.gateway.played import CHATML, HASH, LONGEST, MODEL, played_gateway
from tests.gateway.scripted import TEMPLATE, ScriptedModel, call

USER = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def says(text: str) -> Any:
    tokenizer = Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
    model = ScriptedModel(lambda turns, tools: text, tokenizer)
    model.ask([], [])
    return model.logits_after


def lines_of(answer: httpx.Response) -> list[Any]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


async def test_a_chat_streams_lines_unless_told_otherwise(tmp_path: Path) -> None:
    async with played_gateway(tmp_path, says("Hello you."), can_crop=False) as played:
        lines = lines_of(await played.post("/api/chat", messages=USER, keep_alive="5m", options={"num_ctx": 4_096}))
    assert "".join(line["message"]["content"] for line in lines) == "Hello you."
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    end = lines[-1]
    assert (end["model"], end["done_reason"], end["message"]["role"]) == (MODEL, "stop", "assistant")
    assert end["prompt_eval_count"] > 1 < end["eval_count"]
    assert end["total_duration"] >= end["prompt_eval_duration"] > 0


async def test_a_whole_answer_and_its_limits(tmp_path: Path) -> None:
    async with played_gateway(tmp_path, eos=frozenset()) as played:
        options = {"num_predict": 5, "temperature": 0, "mirostat": 2, "repeat_last_n": 64}
        answer = await played.post("/api/generate", prompt="The sea", system="Be brief.", stream=False, options=options)
        assert answer.headers[HEADER] == "options.mirostat"
        body = answer.json()
        assert (body["done"], body["done_reason"], body["eval_count"]) == (True, "length", 5)
        assert isinstance(body["response"], str)
        raw = await played.read_prompt("/api/generate", prompt="The sea", raw=True, options={"num_predict": 1})
        assert raw == "The sea"
        shown = await played.read_prompt("/api/generate", prompt="The sea", system="Be.", options={"num_predict": 1})
        assert shown == "<system>Be.<user>The sea<assistant>"


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_tool_is_called_with_an_object_and_its_result_comes_back(tmp_path: Path, is_streamed: bool) -> None:
    written = call("weather", {"place": "Rome"})
    async with played_gateway(tmp_path, says(written), template=TEMPLATE, family="qwen2", can_crop=False) as played:
        answer = await played.post("/api/chat", messages=USER, tools=[WEATHER], stream=is_streamed)
        lines = lines_of(answer) if is_streamed else [answer.json()]
        (calls,) = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
        assert calls == [{"function": {"name": "weather", "arguments": {"place": "Rome"}}}]
    turns = [*USER, {"role": "assistant", "content": "", "tool_calls": calls}]
    turns += [{"role": "tool", "tool_name": "weather", "content": "warm"}]
    async with played_gateway(tmp_path, template=TEMPLATE) as played:
        prompt = await played.read_prompt("/api/chat", messages=turns, options={"num_predict": 1})
        assert prompt.endswith(f"<assistant>{written}<tool>warm<assistant>")


async def test_an_answer_fits_its_format(tmp_path: Path) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    likes_nothing = torch.zeros(1_024)
    async with played_gateway(tmp_path, lambda token: likes_nothing) as played:
        answer = await played.post("/api/chat", messages=USER, format=schema, stream=False)
        assert json.loads(answer.json()["message"]["content"]) == {"n": 7}


async def test_what_there_is(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        (tag,) = (await played.http.get("/api/tags")).json()["models"]
        assert (tag["name"], tag["digest"]) == (MODEL, HASH)
        assert (await played.http.get("/api/ps")).json()["models"][0]["details"]["family"] == "llama"
        shown = (await played.post("/api/show")).json()
        assert shown["model_info"] == {"general.architecture": "llama", "llama.context_length": LONGEST}
        assert shown["capabilities"] == ["completion", "tools"]
        assert lines_of(await played.post("/api/pull")) == [{"status": "success"}]
        assert (await played.http.get("/api/version")).json()["version"]
        assert (await played.http.head("/")).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [("/api/generate", {}, "load"), ("/api/generate", {"keep_alive": 0}, "unload"), ("/api/chat", {}, "load")],
)
async def test_nothing_asked_loads_a_model_or_lets_it_go(
    tmp_path: Path, path: str, body: dict[str, Any], reason: str
) -> None:
    async with played_gateway(tmp_path) as played:
        answer = (await played.post(path, **body)).json()
        assert (answer["done"], answer["done_reason"]) == (True, reason)
        assert not played.swarm.opened


async def test_null_is_as_if_left_out_and_numbers_may_have_a_point(tmp_path: Path) -> None:
    turns = [*USER, {"role": "assistant", "content": None, "thinking": None, "tool_name": None}, *USER]
    async with played_gateway(tmp_path) as played:
        options = {"top_k": 40.0, "seed": 1.0, "num_predict": 3}
        assert (await played.post("/api/chat", messages=turns, options=options)).status_code == 200


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/api/chat", {"messages": [{"role": "wizard"}]}, 400, "messages[0].role is one of"),
    ("/api/chat", {"messages": [{**USER[0], "images": ["aGk="]}]}, 400, "messages[0].images: this model reads text"),
    ("/api/chat", {"messages": USER, "options": {"temperature": "hot"}}, 400, "options: "),
    ("/api/chat", {"messages": USER, "options": {"num_predict": "all"}}, 400, "options: "),
    ("/api/chat", {"messages": USER, "format": "yaml"}, 400, "format is json"),
    (
        "/api/chat",
        {"messages": [{**USER[0], "tool_calls": [{"function": 1}]}]},
        400,
        "expected objects with a function",
    ),
    ("/api/pull", {"model": "nope"}, 404, "the swarm has no model 'nope'"),
    ("/api/embed", {"input": ""}, 400, "without a token"),
    ("/api/embed", {}, 400, "input is missing"),
    ("/api/embeddings", {"prompt": 5}, 400, "prompt"),
    ("/v1/api/chat", {"messages": USER}, 404, "did you mean /api/chat?"),
    ("/api/tags", {}, 405, "is asked by GET, not by POST"),
]


@pytest.mark.parametrize(("path", "body", "status", "reason"), BAD)
async def test_errors_have_its_form(tmp_path: Path, path: str, body: dict[str, Any], status: int, reason: str) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.post(path, **body)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert reason in (error["message"] if path.startswith("/v1") else error)


async def test_a_chat_that_ends_with_an_answer_has_it_gone_on_with(tmp_path: Path) -> None:
    """Open WebUI's "Continue Response"; in OpenAI's form, too, unless vLLM's fields say otherwise."""
    async with played_gateway(tmp_path) as played:
        turns = [*USER, {"role": "assistant", "content": "The sea"}]
        for path in ("/api/chat", "/v1/chat/completions"):
            prompt = await played.read_prompt(
                path, messages=turns, stream=False, max_tokens=4, options={"num_predict": 4}
            )
            assert prompt.endswith("The sea"), path
        called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
        told = [*USER, called, {"role": "tool", "content": "x", "tool_name": "f"}]
        for fields in ({"add_generation_prompt": True}, {"continue_final_message": False}):
            prompt = await played.read_prompt("/v1/chat/completions", messages=turns, max_tokens=4, **fields)
            assert not prompt.endswith("The sea")
        prompt = await played.read_prompt("/api/chat", messages=told, stream=False, options={"num_predict": 4})
        assert not prompt.endswith("x")


async def test_what_goes_wrong_before_the_first_line_has_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs read no errors in lines (Open WebUI 0.12)."""
    async with played_gateway(tmp_path) as played:

        async def refuse(terms: Any) -> Any:
            raise NoRoute("blocks 3 to 5 are served by nobody now")

        monkeypatch.setattr(played.swarm, "open_session", refuse)
        answer = await played.post("/api/chat", messages=USER)
        assert answer.status_code == 503
        assert answer.json() == {"error": "blocks 3 to 5 are served by nobody now"}
        assert answer.headers["retry-after"] == "5"


async def test_a_text_that_is_too_long_is_cut_unless_told_otherwise(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        long = "One two three " * LONGEST
        answer = await played.post("/api/embed", input=long)
        assert answer.json()["prompt_eval_count"] == LONGEST
        answer = await played.post("/api/embed", input=long, truncate=False)
        assert answer.status_code == 400
        assert "divide it" in answer.json()["error"]


async def test_where_nobody_said_that_an_answer_goes_on_it_is_answered_if_it_cannot(tmp_path: Path) -> None:
    """A schema holds a whole answer, and some templates leave something out of what an assistant said."""
    turns = [*USER, {"role": "assistant", "content": "The sea"}]
    async with played_gateway(tmp_path) as played:
        asked = {"messages": turns, "stream": False, "format": "json", "options": {"num_predict": 4}}
        assert not (await played.read_prompt("/api/chat", **asked)).endswith("The sea")
    changed = CHATML.replace("m.content", "m.content | upper")
    assert changed != CHATML
    async with played_gateway(tmp_path, template=changed) as played:
        asked = {"messages": turns, "stream": False, "options": {"num_predict": 4}}
        assert not (await played.read_prompt("/api/chat", **asked)).endswith("THE SEA")
        said = {"messages": turns, "max_tokens": 4, "continue_final_message": True}
        assert (await played.post("/v1/chat/completions", **said)).status_code == 400


async def test_a_page_may_read_why_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    origin = "https://chat.example"
    async with played_gateway(tmp_path, origins=(origin,)) as played:

        async def refuse(terms: Any) -> Any:
            raise NoRoute("blocks 3 to 5 are served by nobody now")

        monkeypatch.setattr(played.swarm, "open_session", refuse)
        for path, asked in (
            ("/api/chat", {"messages": USER}),
            ("/v1/chat/completions", {"messages": USER}),
            ("/v1/embeddings", {"input": "x"}),
        ):
            body = {"model": MODEL, **asked}
            answer = await played.http.post(path, json=body, headers={"origin": origin})
            assert answer.status_code == 503
            assert answer.headers["access-control-allow-origin"] == origin, path
