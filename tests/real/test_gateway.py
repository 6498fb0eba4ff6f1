"""A gateway over three real servers of a real model: its answers, and what it does when things go wrong."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import openai
import psutil
import pytest
import torch
import trio
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response as OpenAIResponse
from swarmd_cli.main import app
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from swarmd.config import GatewayConfig
from swarmd.gateway import serving
from swarmd.gateway.address import read_url
from tests.real import forks
from tests.real.faults import revive
from tests.real.gateways import RUNNING, RealGateway, real_gateway
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.smollm2 import smollm2

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
    "Who wrote Hamlet?",
    "Say hello in Spanish.",
)
N_TOKENS = 25  # none of the answers ends within a character there
N_STREAMS = RUNNING  # while a server is killed
N_STRUCK_TOKENS = 48  # of each of them: the first is not at its end when most have begun
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 200}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "parameters": CITY}


@dataclass
class Stage:
    swarm: LocalSwarm
    volunteers: list[Volunteer]
    gateway: RealGateway
    folder: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key="none", max_retries=0, timeout=120)

    def ask(self, question: str, **more: Any) -> Any:
        options = {"model": "smol", "max_tokens": N_TOKENS, "temperature": 0, **more}
        return self.client.chat.completions.create(messages=[{"role": "user", "content": question}], **options)

    def stream(self, question: str, on_chunk: Any = lambda n: None, **more: Any) -> tuple[str, float]:
        """The text, and the longest pause between two pieces of it."""
        text, longest, last, n = "", 0.0, 0.0, 0
        for chunk in self.ask(question, stream=True, **more):
            if chunk.choices and chunk.choices[0].delta.content:
                text += chunk.choices[0].delta.content
                now, n = time.monotonic(), n + 1
                longest, last = max(longest, now - last if last else 0.0), now
                on_chunk(n)
        return text, longest


@pytest.fixture(scope="module")
def stage(smol: tuple[LocalSwarm, list[Volunteer], RealGateway]) -> Stage:
    return Stage(*smol, smollm2())


@pytest.fixture(scope="module")
def expected(stage: Stage) -> dict[str, str]:
    """What transformers' own generate answers, with the same template."""
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(stage.folder)
    model = AutoModelForCausalLM.from_pretrained(stage.folder, dtype=torch.float32)
    answers = {}
    for question in QUESTIONS:
        turns = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=False)
        out = model.generate(ids, max_new_tokens=N_TOKENS, do_sample=False)
        answers[question] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return answers


def test_answers_equal_transformers_own(stage: Stage, expected: dict[str, str]) -> None:
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:  # all at once: what they share changes nothing
        together = list(pool.map(lambda q: stage.ask(q).choices[0].message.content, QUESTIONS))
    assert dict(zip(QUESTIONS, together, strict=True)) == expected
    assert stage.stream(QUESTIONS[0])[0] == expected[QUESTIONS[0]]


def test_prompts_are_as_likely_as_transformers_says(stage: Stage) -> None:
    """Texts of a package and what might follow them, as lm-eval measures a model: the likeliest end is the same."""
    source = inspect.getdoc(json) or ""
    ends = (" JSON objects", " of the sea and the sky", "0000000000")
    tokenizer = AutoTokenizer.from_pretrained(stage.folder)
    model = AutoModelForCausalLM.from_pretrained(stage.folder, dtype=torch.float32)
    prompts = [tokenizer(source + end).input_ids for end in ends]
    answer = stage.client.completions.create(
        model="smol", prompt=prompts, max_tokens=1, logprobs=1, echo=True, temperature=0
    )
    sums = []
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.tensor(prompt[1:]).unsqueeze(1)).squeeze(1)
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        given = torch.tensor(choice.logprobs.token_logprobs[1 : len(prompt)])
        assert float((given - expected).abs().max()) < 1e-3
        assert abs(float(given.sum() - expected.sum())) < 5e-3
        sums.append(float(given.sum()))
    assert len(prompts[0]) > 200
    assert sums.index(max(sums)) == 0


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_are_transformers_last_hidden_states(stage: Stage, pooling: str) -> None:
    texts = ["The city of Oslo lies at a fjord. " * 20, "Rome", "A list of JSON objects"]
    tokenizer = AutoTokenizer.from_pretrained(stage.folder)
    model = AutoModelForCausalLM.from_pretrained(stage.folder, dtype=torch.float32).model
    answer = stage.client.embeddings.create(model="smol", input=texts, extra_body={"pooling": pooling})
    assert answer.usage.prompt_tokens == sum(len(tokenizer(text).input_ids) for text in texts)
    for text, item in zip(texts, answer.data, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0]
        expected = torch.nn.functional.normalize(states.mean(0) if pooling == "mean" else states[-1], dim=0)
        assert float((torch.tensor(item.embedding) - expected).abs().max()) < 1e-4


def test_a_batch_is_answered_as_its_requests_are(stage: Stage, expected: dict[str, str]) -> None:
    client = stage.client
    lines = []
    for question in QUESTIONS:
        body = {
            "model": "smol",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": N_TOKENS,
            "temperature": 0,
        }
        lines.append(json.dumps({"custom_id": question, "method": "POST", "url": "/v1/chat/completions", "body": body}))
    file = client.files.create(file=("asked.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    while batch.status == "in_progress":
        time.sleep(0.2)  # as its users ask
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    assert batch.output_file_id
    answers = map(json.loads, client.files.content(batch.output_file_id).text.splitlines())
    texts = {line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"] for line in answers}
    assert texts == expected
    assert [listed.id for listed in client.batches.list()] == [batch.id]
    assert client.files.delete(file.id).deleted


def test_a_next_turn_sends_only_what_is_new(stage: Stage) -> None:
    turns: list[Any] = [{"role": "user", "content": "Tell me about the city of Oslo, in two sentences."}]
    first = stage.client.chat.completions.create(model="smol", messages=turns, temperature=0, max_tokens=N_TOKENS)
    turns += [{"role": "assistant", "content": first.choices[0].message.content}]
    turns += [{"role": "user", "content": "And Rome?"}]
    second = stage.client.chat.completions.create(model="smol", messages=turns, temperature=0, max_tokens=8)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert cached >= first.usage.prompt_tokens + first.usage.completion_tokens - 4


@pytest.mark.parametrize("is_streamed", [True, False])
def test_who_goes_away_gives_the_servers_their_room_back(stage: Stage, is_streamed: bool) -> None:
    before = stage.gateway.metric("swarmd_request_success_total")
    host, port = stage.gateway.url.removeprefix("http://").split(":")
    body = {"model": "smol", "messages": [{"role": "user", "content": "Count to 500."}], "max_tokens": 2_000}
    raw = json.dumps({**body, "stream": is_streamed, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(head.encode() + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        if is_streamed:
            received = b""
            while received.count(b"data: ") < 3:
                received += connection.recv(65_536)
        else:
            stage.swarm.wait(lambda: stage.gateway.metric("swarmd_num_requests_running") == 1, "the request runs")
    stage.swarm.wait(lambda: stage.gateway.metric("swarmd_num_requests_running") == 0, "it was cancelled")
    assert stage.gateway.metric("swarmd_request_success_total") == before + 1

    def held() -> int:
        return len({row["session"] for v in stage.volunteers for row in v.ask("sessions")["sessions"]})

    n_kept = stage.gateway.metric("swarmd_num_sessions_kept")
    stage.swarm.wait(lambda: held() <= n_kept, "servers hold what is kept, and no more")


def test_a_server_killed_in_the_middle_changes_no_answer(stage: Stage, expected: dict[str, str]) -> None:
    pauses: list[float] = []
    n_running: list[float] = []
    begun = itertools.count(1)
    once = threading.Lock()

    def strike(n: int) -> None:
        """When most have begun."""
        if n == 4 and next(begun) > 0.7 * N_STREAMS and once.acquire(blocking=False):
            n_running.append(stage.gateway.metric("swarmd_num_requests_running"))
            stage.volunteers[1].signal(signal.SIGKILL, "both")

    def one(number: int) -> tuple[str, str]:
        question = QUESTIONS[number % len(QUESTIONS)]
        how = {"extra_body": {"ignore_eos": True}, "max_tokens": N_STRUCK_TOKENS}  # else short ones end before
        text, longest = stage.stream(question, strike, **how)
        pauses.append(longest)
        return question, text

    try:
        with ThreadPoolExecutor(N_STREAMS) as pool:
            texts = set(pool.map(one, range(N_STREAMS)))
        assert len(texts) == len(QUESTIONS), "the same question, the same text"
        assert all(text.startswith(expected[question]) for question, text in texts)
        assert [n > 0.6 * N_STREAMS for n in n_running] == [True], "most of them were under way"
        print(f"longest pause {max(pauses):.2f} s")
    finally:
        revive(stage.swarm, stage.volunteers)


@pytest.mark.prove  # it waits for as long as a repair waits for somebody to come
def test_the_last_holder_lost_ends_the_stream_with_an_error_and_the_talk_goes_on_later(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        first, last = swarm.serving((0, 3), (3, 6))
        with real_gateway(first.home.folder) as gateway, gateway.http() as http:
            body = {"model": "demo", "prompt": "The function", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
            whole = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                assert answer.status_code == 200
                events = []
                for line in answer.iter_lines():
                    events += [line] if line.startswith("data: ") else []
                    if len(events) == 5 and last.process is not None and last.process.poll() is None:
                        last.signal(signal.SIGKILL, "both")
                        assert last.process is not None
                        last.process.wait()
            error = json.loads(events[-1].removeprefix("data: "))["error"]
            assert (error["type"], error["code"]) == ("overloaded_error", "model_incomplete")
            refused = http.post("/v1/completions", json=body)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert http.get("/health").status_code == 503
            last.stop()
            last.start()
            swarm.wait(lambda: http.get("/health").status_code == 200, "the model is whole again")
            assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == whole


class TestShapes:
    """Every answer is what the official clients' own types say, in strict mode."""

    def test_chat(self, stage: Stage) -> None:
        with stage.gateway.http() as http:
            turns = [{"role": "user", "content": "Hi"}]
            body = {"model": "smol", "messages": turns, "max_tokens": 5, "logprobs": True, "top_logprobs": 2, "n": 2}
            whole = http.post("/v1/chat/completions", json=body).content
            ChatCompletion.model_validate_json(whole, strict=True)
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            lines = http.post("/v1/chat/completions", json=streamed).text.splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        chunks = [ChatCompletionChunk.model_validate_json(event, strict=True) for event in events[:-1]]
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
            "length"
        ] * 2
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 10
        assert all(chunk.usage is None for chunk in chunks[:-1])

    def test_a_schema_and_a_forced_call(self, stage: Stage) -> None:
        form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        answer = stage.ask("Make up a person.", response_format=form, max_tokens=100)
        assert set(json.loads(answer.choices[0].message.content)) == {"name", "age"}
        tools: Any = [{"type": "function", "function": WEATHER}]
        called = stage.ask("What is the weather in Rome?", tools=tools, tool_choice="required").choices[0]
        assert called.finish_reason == "tool_calls"
        assert called.message.content is None
        assert called.message.tool_calls[0].function.name == "weather"
        assert json.loads(called.message.tool_calls[0].function.arguments) == {"city": "Rome"}
        result = {"role": "tool", "tool_call_id": called.message.tool_calls[0].id, "content": "Sunny, 30 degrees"}
        turns = [{"role": "user", "content": "What is the weather in Rome?"}, called.message.model_dump(), result]
        after = stage.client.chat.completions.create(model="smol", messages=turns, tools=tools, max_tokens=8)
        assert after.choices[0].message.content

    def test_responses(self, stage: Stage, expected: dict[str, str]) -> None:
        options = {"model": "smol", "temperature": 0, "max_output_tokens": N_TOKENS, "input": QUESTIONS[0]}
        with stage.gateway.http() as http:
            raw = http.post("/v1/responses", json=options).content
        OpenAIResponse.model_validate_json(raw, strict=True)
        with stage.client.responses.stream(**options) as stream:  # type: ignore[arg-type]
            numbers = [event.sequence_number for event in stream]
            assert numbers == list(range(len(numbers)))
            assert stream.get_final_response().output_text == expected[QUESTIONS[0]]

    def test_messages(self, stage: Stage, expected: dict[str, str]) -> None:
        client = anthropic.Anthropic(base_url=stage.gateway.url, api_key="none", max_retries=0)
        turns: Any = [{"role": "user", "content": QUESTIONS[0]}]
        options: Any = {"model": "smol", "max_tokens": N_TOKENS, "messages": turns, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**options)
        assert whole.content[0].text == expected[QUESTIONS[0]]  # type: ignore[union-attr]
        assert whole.stop_reason == "end_turn"
        with client.messages.stream(**options) as stream:
            assert "".join(stream.text_stream) == expected[QUESTIONS[0]]
        count = client.messages.count_tokens(model="smol", messages=turns).input_tokens
        assert count == whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
        with pytest.raises(anthropic.NotFoundError, match="it has: demo, smol"):
            client.messages.create(**{**options, "model": "nope"})


BAD: dict[str, tuple[dict[str, Any], int, str | None]] = {
    "unknown model": ({"model": "nope"}, 404, "model"),
    "too long": ({"messages": [{"role": "user", "content": "word " * 9_000}]}, 400, "messages"),
    "temperature": ({"temperature": 5}, 400, "temperature"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0]"),
    "a role": ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    "no messages": ({"messages": []}, 400, "messages"),
    "a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        400,
        "response_format",
    ),
    "a tool that is none": ({"tools": [], "tool_choice": "required"}, 400, "tool_choice"),
    "a bias": ({"logit_bias": {"99999999": 1}}, 400, "logit_bias"),
    "top_logprobs alone": ({"top_logprobs": 3}, 400, "top_logprobs"),
    "the template's own": ({"chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template_kwargs"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_requests_are_refused_by_name(stage: Stage, what: str) -> None:
    change, status, param = BAD[what]
    body = {"model": "smol", "messages": [{"role": "user", "content": "x"}], **change}
    with stage.gateway.http() as http:
        answer = http.post("/v1/chat/completions", json=body)
        error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param), error
    assert error["message"]


def test_bad_bodies_and_strangers_pages_are_refused(stage: Stage) -> None:
    path, kind = "/v1/chat/completions", {"content-type": "application/json"}
    with stage.gateway.http() as http:
        for body, status in ((b"\xff\xfe{}", 400), (b"[" * 100_000, 400), (b"[]", 400), (b" " * 10_000_000, 413)):
            assert http.post(path, content=body, headers=kind).status_code == status
        assert http.post(path, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415
        for headers in (
            {"host": "evil.example"},
            {"host": "127.0.0.1.evil.example"},
            {"origin": "http://evil.example"},
        ):
            answer = http.post(path, json={}, headers={**kind, **headers})
            assert answer.status_code == 403
            assert "access-control-allow-origin" not in answer.headers
        assert http.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
        assert http.get("/v1/nothing").status_code == 404


def test_a_crowd_of_slow_connections_and_one_that_never_reads(stage: Stage) -> None:
    host, port = stage.gateway.url.removeprefix("http://").split(":")
    slow = []
    try:
        for _ in range(500):
            connection = socket.create_connection((host, int(port)), timeout=10)
            connection.sendall(b"P")
            slow.append(connection)
        raw = json.dumps({"model": "demo", "messages": [], "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        slow[0].sendall(head.encode()[1:] + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        assert stage.ask(QUESTIONS[3], max_tokens=4).choices[0].message.content
    finally:
        for connection in slow:
            connection.close()


def test_beyond_loopback_a_key_is_needed_and_asked_for(stage: Stage, tmp_path: Path) -> None:
    home = stage.volunteers[2].home.folder

    def verb(*words: str) -> Any:
        return CliRunner().invoke(app, ["--home", str(home), "gateway", *words])

    refused = verb("--listen", "0.0.0.0:0")
    assert "there is no API key" in str(refused.exception)
    key = verb("key", "add", "laptop").stdout.splitlines()[0]
    assert key.startswith("sk-swarmd-")
    assert key not in (home / "gateway-keys.json").read_text()
    try:
        with real_gateway(home) as gateway, gateway.http() as http:
            assert http.get("/v1/models").status_code == 401
            assert http.get("/v1/models", headers={"authorization": "Bearer sk-wrong"}).status_code == 401
            assert http.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == 200
            assert http.get("/v1/models", headers={"x-api-key": key}).status_code == 200
            assert http.get("/health").status_code == 200
            assert "laptop" in verb("key", "ls").stdout
            verb("key", "rm", "laptop")
            verb("key", "add", "other")
            assert http.get("/v1/models", headers={"x-api-key": key}).status_code == 401
    finally:
        verb("key", "rm", "other")


def test_killed_it_harms_nobody_and_told_to_end_it_ends(stage: Stage) -> None:
    with real_gateway(stage.volunteers[2].home.folder) as gateway:
        client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(model="smol", prompt="One", max_tokens=500, stream=True)
        next(iter(stream))
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(8) == 0
    with real_gateway(stage.volunteers[2].home.folder) as gateway:
        gateway.process.send_signal(signal.SIGKILL)
        gateway.process.wait()
    assert all(v.ask("status")["worker"]["pid"] for v in stage.volunteers)


def test_chat_in_a_terminal(stage: Stage, expected: dict[str, str], tmp_path: Path) -> None:
    home, saved = stage.volunteers[0].home.folder, tmp_path / "talk.json"
    command = [sys.executable, "-m", "swarmd_cli.main", "--home", str(home), "chat", "smol"]
    lines = [QUESTIONS[0], "/why", "/retry", "/nonsense", f"/save {saved}", "/model nope", "Hi", "/quit"]
    options = ["--temperature", "0", "--max-tokens", str(N_TOKENS)]
    done = subprocess.run(
        [*command, *options], input="\n".join(lines).encode(), capture_output=True, timeout=120, check=True
    )
    said = done.stdout.decode()
    assert said.count(expected[QUESTIONS[0]]) == 2, "asked, and asked again"
    assert "[0," in said, "why: the chain"
    assert "/nonsense is no command" in said
    assert "the swarm has no model 'nope'" in said
    assert "tokens/s" in done.stderr.decode()
    turns = json.loads(saved.read_text())["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"]


def test_run_answers_with_the_template_and_continues_without(stage: Stage, expected: dict[str, str]) -> None:
    words = ["--home", str(stage.volunteers[0].home.folder), "run", "smol"]
    until = ["--max-tokens", str(N_TOKENS)]
    asked = subprocess.run(
        [sys.executable, "-m", "swarmd_cli.main", *words, *until],
        input=QUESTIONS[0].encode(),
        capture_output=True,
        check=True,
    )
    assert asked.stdout.decode().strip() == expected[QUESTIONS[0]].strip()
    assert b"loading" not in asked.stderr, "the gateway that runs answers"
    own = forks.Command(*words, QUESTIONS[0], *until, "--json").finish()
    assert "loading" in own.stderr
    assert json.loads(own.stdout)["text"].strip() == expected[QUESTIONS[0]].strip(), "a client of its own, the same"
    raw = forks.Command(*words, "Once upon a", "--raw", "--max-tokens", "4").finish()
    assert raw.stdout.startswith("Once upon a"), raw.stderr


def test_the_daemon_keeps_a_gateway_running(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        volunteer = swarm.prepare("--no-serve")
        (volunteer.home.folder / "config.toml").write_text('[gateway]\non = true\nlisten = "127.0.0.1:0"\n')
        volunteer.start()

        def url() -> str | None:
            return read_url(volunteer.home.folder)

        swarm.wait(lambda: url() is not None, "the gateway listens")
        first = volunteer.ask("status")["gateway"]
        assert first["state"] == "running"
        os.kill(first["pid"], signal.SIGKILL)
        swarm.wait(lambda: volunteer.ask("status")["gateway"]["pid"] not in (None, first["pid"]), "another runs")
        pid = volunteer.ask("status")["gateway"]["pid"]
        volunteer.signal(signal.SIGKILL)
        swarm.volunteers.clear()
        volunteer.stop()
        deadline = time.monotonic() + 30
        while psutil.pid_exists(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not psutil.pid_exists(pid), "it ends with its daemon"


def test_it_begins_anew_before_its_membership_ends(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "CLIENT_LIFETIME_S", serving.RENEWED_BEFORE_S + 1.0)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        settings = GatewayConfig(listen=f"127.0.0.1:{found.getsockname()[1]}")
    urls: list[str] = []
    for _ in range(2):
        assert trio.run(serving.serve, stage.volunteers[1].home.folder, settings, urls.append), "and serves again"
    assert urls == [f"http://{settings.listen}"] * 2


def test_a_port_that_is_taken_is_said_so(stage: Stage) -> None:
    address = stage.gateway.url.removeprefix("http://")
    command = [sys.executable, "-m", "swarmd_cli.main", "--home", str(stage.volunteers[2].home.folder), "gateway"]
    done = subprocess.run([*command, "--listen", address], capture_output=True, text=True)
    assert done.returncode == 2
    assert "another gateway" in done.stderr


def test_a_long_beginning_is_computed_once(stage: Stage) -> None:
    """However many ask with the same system prompt, and each has the answer that it would have alone."""
    weather = "You know the weather. " + "It rained in Oslo, and the sun shone in Rome. " * 20
    questions = "Where did it rain?", "Where did the sun shine?"

    def reused() -> int:
        return sum(row["server"]["tokens_reused"] for v in stage.volunteers for row in v.ask("status")["hosting"])

    def ask(question: str) -> Any:
        turns: Any = [{"role": "system", "content": weather}, {"role": "user", "content": question}]
        answer = stage.client.chat.completions.create(model="smol", messages=turns, temperature=0, max_tokens=12)
        return answer.choices[0].message.content

    before = reused()
    first = ask(questions[0])
    n_at_once = itertools.count(2)  # more than sessions that were kept: one is new, perhaps by the other way
    answers = set()

    def is_reused() -> bool:
        n = next(n_at_once)
        with ThreadPoolExecutor(n) as pool:
            answers.update(list(pool.map(ask, [questions[1], *[questions[0]] * (n - 1)]))[1:])
        return reused() - before >= 200

    stage.swarm.wait(is_reused, "they took over what the first computed")
    assert answers == {first}
