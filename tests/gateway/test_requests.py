"""Requests as clients send them, each in its smallest form, to a gateway whose model a test plays."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from swarmd.errors import Code, Refused
from swarmd.gateway.generation import kept_sessions
from swarmd.gateway.generation.ending import read_end_tokens
from tests.gateway.played import CHATML, LONGEST, played_gateway
from tests.gateway.vocabularies import spm, unigram, word_piece

USER = [{"role": "user", "content": "Say hello."}]
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
SMILE = "\U0001f600"


def says(tokenizer: Tokenizer, text: str) -> Callable[[int], torch.Tensor]:
    """A model that says a text token by token, whatever the prompt, and then its end; each token once in the text."""
    ids = [*tokenizer.encode(text, add_special_tokens=False).ids, 0]
    successor = dict(itertools.pairwise(ids))

    def logits(token: int) -> torch.Tensor:
        scores = torch.zeros(tokenizer.get_vocab_size())
        scores[successor.get(token, ids[0])] = 20.0
        return scores

    return logits


async def test_the_played_model_says_what_it_is_told_to(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with played_gateway(tmp_path, logits_after=says(tokenizer, "Hello")) as played:
        answer = (await played.chat(temperature=0)).json()
        assert answer["choices"][0]["message"]["content"] == "Hello"
        assert answer["choices"][0]["finish_reason"] == "stop"


# --- plain defaults of clients -------------------------------------------------------------------------------------

CHAT: dict[str, dict[str, Any]] = {
    "LM Studio leaves the length open": {"max_tokens": -1},
    "the newer name of the length": {"max_completion_tokens": -1, "max_tokens": None},
    "only the likeliest token": {"top_p": 0},
    "text only": {"modalities": ["text"]},
    "llama.cpp's neutral values": {"repeat_penalty": 1.0, "typical_p": 1.0, "mirostat": 0, "min_keep": 0},
    "no thinking": {"thinking": {"type": "disabled"}},
    "thinking as it likes": {"thinking": {"type": "enabled", "budget_tokens": 1_000}},
    "labels": {"metadata": {"a": "b"}, "client_metadata": {"a": "b"}, "session_id": "x", "tags": ["y"]},
    "nulls": {
        "stream_options": {"include_usage": None},
        "ignore_eos": None,
        "stop": None,
        "logit_bias": None,
        "n": None,
    },
    "a tool without a type": {"tools": [{"type": None, "function": {"name": "now"}}]},
    "a refusal in the history": {
        "messages": [*USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, *USER]
    },
    "a thought in the history": {
        "messages": [*USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}]}, *USER]
    },
    "an answer that goes on": {
        "messages": [*USER, {"role": "assistant", "content": "Hello,"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
    "a temperature beyond float32": {"temperature": 1e-40},
    "the smallest temperature there is": {"temperature": 5e-324, "top_k": 0, "min_p": 0},
    "the smallest penalty": {"repetition_penalty": 0.01, "temperature": 1.0},
    "every penalty at once": {
        "repeat_penalty": 2,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "temperature": 1e-30,
    },
}


@pytest.mark.parametrize("client", CHAT)
async def test_what_clients_send_by_default_is_taken(tmp_path: Path, client: str) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.chat(**CHAT[client])
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_what_asks_for_something_is_refused_by_name(tmp_path: Path, body: dict[str, Any], param: str) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.chat(**body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("name", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [1e-40, -3.0, 7.0])
async def test_no_number_of_a_models_author_makes_it_fail(tmp_path: Path, name: str, value: float) -> None:
    async with played_gateway(tmp_path, generation={"do_sample": True, name: value}) as played:
        assert (await played.chat()).status_code == 200


async def test_a_refusal_in_the_history_is_text_and_a_thought_is_none(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        n_tokens = []
        for part in ({"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "no"}):
            turns = [*USER, {"role": "assistant", "content": [part]}, *USER]
            n_tokens.append((await played.chat(messages=turns)).json()["usage"]["prompt_tokens"])
        assert n_tokens[0] > n_tokens[1]


# --- schemas and tools ---------------------------------------------------------------------------------------------

RECURSIVE = {
    "type": "object",
    "properties": {"v": {"enum": [1]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
PLACE = {
    "type": "object",
    "properties": {"where": {"$ref": "#/$defs/P"}},
    "required": ["where"],
    "$defs": {"P": {"enum": ["Rome", "Oslo"]}},
}


def formed(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [PLACE, RECURSIVE])
async def test_a_forced_call_keeps_the_tools_schema(tmp_path: Path, parameters: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "go", "parameters": parameters}}]
    async with played_gateway(tmp_path) as played:
        answer = await played.chat(tools=tools, tool_choice="required", max_tokens=300, seed=1)
        call = answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]
        assert call["name"] == "go"
        arguments = json.loads(call["arguments"])
        assert set(arguments) == set(parameters["required"])
        assert "name" not in (arguments.get("next") or {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "right"),
    [
        ({"propertyNames": {"type": "string"}, "additionalProperties": {"enum": [1]}, "maxProperties": 0}, {}),
        ({"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "minItems": 1, "maxItems": 1}, [1]),
        ({"type": "string", "format": "password", "maxLength": 0}, ""),
    ],
)
async def test_words_of_zod_and_pydantic_are_taken(tmp_path: Path, schema: dict[str, Any], right: Any) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.chat(**formed({"type": "object", **schema}))
        assert json.loads(answer.json()["choices"][0]["message"]["content"]) == right


@pytest.mark.slow
async def test_any_json_object_may_have_a_schema(tmp_path: Path) -> None:
    schema = {
        "type": "object",
        "properties": {"c": {"enum": ["red"]}},
        "required": ["c"],
        "additionalProperties": False,
    }
    async with played_gateway(tmp_path) as played:
        answer = await played.chat(response_format={"type": "json_object", "schema": schema})
        assert json.loads(answer.json()["choices"][0]["message"]["content"]) == {"c": "red"}
        assert (await played.chat(response_format={"type": "json_object", "schema": 1})).status_code == 400


@pytest.mark.slow
async def test_the_bytes_of_tokens_are_their_own(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.chat(logprobs=True, top_logprobs=3, **formed({"enum": [SMILE]}))
        entries = answer.json()["choices"][0]["logprobs"]["content"]
        assert bytes(byte for token in entries for byte in token["bytes"]).decode() == f'"{SMILE}"'


# --- completions ---------------------------------------------------------------------------------------------------


def by_last_token(token: int) -> torch.Tensor:
    return torch.randn(1_024, generator=torch.Generator().manual_seed(token))


@pytest.mark.parametrize("n_more", [0, 1, 5])
async def test_a_prompt_tells_how_likely_its_tokens_are(tmp_path: Path, n_more: int) -> None:
    """As lm-eval asks, whose sums begin behind the context and leave out what is generated."""
    ids = [*range(20, 120)]  # more than go through the head at once
    body = {"prompt": [ids, ids[:7]], "max_tokens": n_more, "echo": True, "logprobs": 2, "temperature": 0}
    async with played_gateway(tmp_path, by_last_token) as played:
        answer = (await played.post("/v1/completions", **body)).json()
        streamed = (await played.post("/v1/completions", stream=True, **body)).text
        n_sent = sum(session.n_tokens for session in played.swarm.opened)
    expected = [by_last_token(before).log_softmax(-1) for before in ids[:-1]]
    for choice, n_prompt in zip(answer["choices"], (100, 7), strict=True):
        logprobs = choice["logprobs"]
        assert [len(logprobs[name]) for name in logprobs] == [n_prompt + n_more] * 4
        assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
        given = logprobs["token_logprobs"][1:n_prompt]
        wanted = [float(row[token]) for row, token in zip(expected, ids[1:n_prompt], strict=False)]
        assert given == pytest.approx(wanted, abs=1e-5)
        assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"][1:]), "two tokens may have one text"
        assert logprobs["text_offset"][0] == 0
    chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if '"choices":[{' in line]
    first = next(chunk for chunk in chunks if chunk["choices"][0]["index"] == 0)
    assert (
        first["choices"][0]["logprobs"]["token_logprobs"][1:]
        == answer["choices"][0]["logprobs"]["token_logprobs"][1:100]
    )
    assert n_sent < 3 * (100 + 7), "what was scored is gone on with"


# --- tokens --------------------------------------------------------------------------------------------------------


async def test_text_becomes_tokens_and_text_again(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        given = (await played.http.post("/tokenize", json={"prompt": "The sea is", "return_token_strs": True})).json()
        assert given["count"] == len(given["tokens"]) == len(given["token_strs"]) > 1
        assert given["max_model_len"] == LONGEST
        back = await played.http.post("/detokenize", json={"tokens": given["tokens"], "model": "played"})
        assert back.json() == {"prompt": "The sea is"}
        chat = (await played.post("/tokenize", messages=USER, add_generation_prompt=False)).json()
        back = await played.http.post("/detokenize", json={"tokens": chat["tokens"]})
        assert back.json()["prompt"] == "<user>Say hello."
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<e>"}, "bos_token": null, "x": 1}')
        (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
        info = (await played.http.get("/tokenizer_info")).json()
        assert info == {"eos_token": "<e>", "bos_token": None, "chat_template": "{{ messages }}"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/detokenize", {"tokens": [99_999_999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
async def test_tokens_that_are_none_are_refused(tmp_path: Path, path: str, body: dict[str, Any], param: str) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.http.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# --- Codex and Claude Code -----------------------------------------------------------------------------------------

RESPONSES: dict[str, dict[str, Any]] = {
    "client_metadata": {"client_metadata": {"a": "b"}},
    "a search of the web beside functions": {"tools": [NOW, {"type": "web_search", "external_web_access": False}]},
    "a namespace of tools": {"tools": [NOW, {"type": "namespace", "name": "n", "tools": [{**NOW, "name": "inner"}]}]},
    "another kind of call in the history": {
        "input": [
            {"role": "user", "content": "x"},
            {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
        ]
    },
}


@pytest.mark.parametrize("case", RESPONSES)
async def test_what_codex_sends_is_taken(tmp_path: Path, case: str) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.post("/v1/responses", **{"input": "hi", "max_output_tokens": 8, **RESPONSES[case]})
        assert answer.status_code == 200, answer.text


@pytest.mark.slow
async def test_a_call_of_a_namespace_says_which(tmp_path: Path) -> None:
    tools = [{"type": "namespace", "name": "n", "tools": [NOW]}]
    async with played_gateway(tmp_path) as played:
        body = {"input": "hi", "tools": tools, "tool_choice": "required", "max_output_tokens": 60}
        call = (await played.post("/v1/responses", **body)).json()["output"][0]
        assert (call["type"], call["namespace"], call["name"]) == ("function_call", "n", "now")
        namespaces = {**body, "tools": [NOW, *tools], "tool_choice": {"type": "function", "name": "n__now"}}
        call = (await played.post("/v1/responses", **namespaces)).json()["output"][0]
        assert (call["namespace"], call["name"]) == ("n", "now"), "whatever it was offered as"
        twice = await played.post("/v1/responses", input="hi", tools=[NOW, NOW])
        assert "same name" in twice.json()["error"]["message"]


MESSAGES: dict[str, dict[str, Any]] = {
    "a system's note among the turns": {"messages": [*USER, {"role": "system", "content": "note"}]},
    "more tokens than there is room for": {"max_tokens": 32_000},
    "a search of the web among the tools": {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
    "a mark for all that is cached": {"cache_control": {"type": "ephemeral"}},
}


@pytest.mark.parametrize("case", MESSAGES)
async def test_what_claude_code_sends_is_taken(tmp_path: Path, case: str) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.post("/v1/messages", **{"messages": USER, "max_tokens": 8, **MESSAGES[case]})
        assert answer.status_code == 200, answer.text


async def test_tokens_are_counted_however_many(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        turns = [{"role": "user", "content": "word " * 2_000}]
        counted = await played.post("/v1/messages/count_tokens", messages=turns)
        assert counted.json()["input_tokens"] > LONGEST
        assert (await played.post("/v1/messages", messages=turns, max_tokens=8)).status_code == 400


# --- addresses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/chat/completions", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/chat/completions", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/chat/completions/", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/messages", 404, "did you mean /v1/messages?"),
        ("GET", "/models", 404, "did you mean /v1/models?"),
        ("GET", "/v1/models/", 404, "did you mean /v1/models?"),
        ("GET", "/v1/chat/completions", 405, "asked by POST"),
        ("POST", "/v1/models", 405, "asked by GET"),
        ("POST", "/embeddings", 404, "did you mean /v1/embeddings?"),
        ("GET", "/v1/rerank", 405, "asked by POST"),
        ("DELETE", "/v1/nothing", 404, "see /openapi.json"),
    ],
)
async def test_a_wrong_address_is_answered_with_the_one_meant(
    tmp_path: Path, method: str, path: str, status: int, message: str
) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.http.request(method, path)
        assert answer.status_code == status
        assert message in json.dumps(answer.json())


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_page_of_an_origin_that_is_let_in_reads_the_answer(tmp_path: Path, is_streamed: bool) -> None:
    origin = {"origin": "https://chat.example"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-stainless-os"}
    body = {"model": "played", "messages": USER, "max_tokens": 4, "stream": is_streamed}
    async with played_gateway(tmp_path, origins=("https://chat.example",)) as played:
        before = await played.http.options("/v1/chat/completions", headers={**origin, **asks})
        assert before.status_code == 204
        assert before.headers["access-control-allow-headers"] == "authorization, x-stainless-os"
        answer = await played.http.post("/v1/chat/completions", json=body, headers=origin)
        assert answer.headers["access-control-allow-origin"] == "https://chat.example"
        other = await played.http.options("/v1/chat/completions", headers={**asks, "origin": "https://other.example"})
        assert other.status_code == 403
        assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("host", ["0.0.0.0:4180", "host.docker.internal:4180"])
async def test_a_foreign_host_is_told_of_the_setting(tmp_path: Path, host: str) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.http.get("/v1/models", headers={"host": host})
        assert answer.status_code == 403
        assert "[gateway] hosts" in answer.json()["error"]["message"]


# --- ends, and any tokens at all -----------------------------------------------------------------------------------


def test_every_file_of_a_tokenizer_may_name_an_end(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "a"}, "eot_token": "b"}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "c", "pad_token": "d"}))
    assert read_end_tokens(tmp_path, tokenizer) == {tokenizer.token_to_id(name) for name in "abc"}


@pytest.mark.parametrize("where", ["settings", "template", "stop"])
async def test_an_answer_ends_where_any_of_its_files_says_so(tmp_path: Path, tokenizer: Tokenizer, where: str) -> None:
    """The model's own configuration names another end, which never comes."""
    made = Tokenizer.from_str(tokenizer.to_str())
    if where != "settings":
        made.add_special_tokens(["!"])
    else:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "!"}))
    template = CHATML.replace("m.content }}", "m.content + '!' }}") if where == "template" else CHATML
    stop = {"stop": ["!"]} if where == "stop" else {}
    played_model = {"logits_after": says(tokenizer, "Hello!"), "tokenizer": made, "eos": frozenset[int]()}
    async with played_gateway(tmp_path, template=template, **played_model) as played:
        choice = (await played.chat(temperature=0, **stop)).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hello", "stop")
        body = {"temperature": 0, "ignore_eos": True, "max_tokens": 20, **stop}
        choice = (await played.chat(**body)).json()["choices"][0]
        assert choice["finish_reason"] == ("stop" if where == "stop" else "length")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("kind", [spm, unigram, word_piece])
async def test_any_tokens_of_any_vocabulary_are_an_answer(
    tmp_path: Path, kind: Callable[[], Tokenizer], streams: bool
) -> None:
    async with played_gateway(tmp_path, tokenizer=kind(), template="", eos=frozenset()) as played:
        for seed in range(5):
            body = {"prompt": [1, 2], "max_tokens": 60, "temperature": 1, "seed": seed, "stream": streams}
            answer = await played.post("/v1/completions", **body)
            assert answer.status_code == 200, answer.text
            assert "[DONE]" in answer.text or not streams


async def test_a_mistake_of_ours_ends_a_stream_with_an_error_event(
    tmp_path: Path, nothing_breaks_behind_a_guard: list[Any]
) -> None:
    def broken(token: int) -> torch.Tensor:
        raise LookupError("a bug")

    async with played_gateway(tmp_path, logits_after=broken) as played:
        answer = await played.chat(stream=True)
        last = [line for line in answer.text.splitlines() if line.startswith("data: ")][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "overloaded_error", "ask again"
    nothing_breaks_behind_a_guard.clear()


@pytest.mark.parametrize("looks_up", [True, False])
async def test_an_answer_that_outgrows_its_session_goes_on_in_a_larger_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks_up: bool
) -> None:
    def count_on(token: int) -> torch.Tensor:
        logits = torch.zeros(1_024)
        logits[100 + (token + 1) % (7 if looks_up else 900)] = 40.0
        return logits

    asked = {"prompt": "One two three", "max_tokens": 300, "temperature": 0, "logprobs": 0}
    async with played_gateway(tmp_path, count_on, can_crop=looks_up) as played:
        expected = (await played.post("/v1/completions", **asked)).json()
        assert len(played.swarm.opened) == 1
    monkeypatch.setattr(kept_sessions, "FIRST_TOKENS", 8)
    monkeypatch.setattr(kept_sessions, "HEADROOM_TOKENS", 4)
    async with played_gateway(tmp_path, count_on, can_crop=looks_up) as played:
        given = (await played.post("/v1/completions", **asked)).json()
        rooms = [session.max_tokens for session in played.swarm.opened]
        assert len(rooms) > 3
        assert rooms == sorted(rooms)
    assert given["choices"] == expected["choices"]
    assert given["usage"] == expected["usage"]


async def test_an_answer_that_gets_no_larger_session_ends_and_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_sessions, "FIRST_TOKENS", 8)
    monkeypatch.setattr(kept_sessions, "HEADROOM_TOKENS", 4)
    async with played_gateway(tmp_path, by_last_token, eos=frozenset()) as played:
        open_session = played.swarm.open_session

        async def open_one(terms: Any) -> Any:
            if played.swarm.opened:
                raise Refused(Code.NO_CAPACITY, "servers are full")
            return await open_session(terms)

        monkeypatch.setattr(played.swarm, "open_session", open_one)
        answer = await played.post("/v1/completions", prompt="One two three", max_tokens=300, temperature=0)
        choice = answer.json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert 8 < answer.json()["usage"]["completion_tokens"] < 300
        assert choice["text"]


async def test_where_servers_are_full_the_older_half_of_the_kept_sessions_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played_gateway(tmp_path) as played:
        for word in ("One", "Two", "Three"):
            await played.post("/v1/completions", prompt=f"{word} two three", max_tokens=4, temperature=0)
        assert played.engine.n_kept == 3
        open_session = played.swarm.open_session
        refused: list[Any] = []

        async def open_second_time(terms: Any) -> Any:
            if not refused:
                refused.append(terms)
                raise Refused(Code.NO_CAPACITY, "servers are full")
            return await open_session(terms)

        monkeypatch.setattr(played.swarm, "open_session", open_second_time)
        answer = await played.post("/v1/completions", prompt="Four two three", max_tokens=4, temperature=0)
        assert answer.status_code == 200
        assert played.engine.n_kept == 2, "one of three, and the new one"


async def test_what_another_key_asked_before_is_not_told(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        keys = {name: played.keys.add(name) for name in ("a", "b")}
        cached = {}
        for name in ("a", "b", "a"):
            played.http.headers["authorization"] = f"Bearer {keys[name]}"
            usage = (await played.chat(max_tokens=2)).json()["usage"]
            cached[name] = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached["b"] == 0
        assert cached["a"] > 0, "its own"
