"""Keys with limits, as programs meet them at the gateway."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from swarmd.errors import ConfigError
from swarmd.gateway.generation.quotas import DAY_S, KeyLimits, UsageFile
from swarmd.gateway.keys import Keys
from tests.gateway.played import HASH, MODEL, PlayedGateway, played_gateway


def never_ends(token: int) -> torch.Tensor:
    return torch.zeros(1_024).index_fill(0, torch.tensor(100 + token % 7), 30.0)


async def ask(played: PlayedGateway, key: str, **body: Any) -> Any:
    return await played.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": [20, 21, 22], "max_tokens": 12, **body},
        headers={"authorization": f"Bearer {key}"},
    )


async def test_fifty_at_once_keep_to_a_quota_and_a_restart_forgives_nothing(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    key = keys.add("team", KeyLimits(tokens_day=200))
    answers: list[Any] = []
    async with played_gateway(tmp_path, never_ends) as played, trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(lambda: append(answers, ask(played, key)))
    taken = [answer.json()["usage"] for answer in answers if answer.status_code == 200]
    refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code == 429]
    used = UsageFile(tmp_path).of_day(int(time.time()) // DAY_S, "team")
    assert len(taken) + len(refused) == 50
    assert sum(usage["total_tokens"] for usage in taken) == used.tokens <= 200
    assert used.tokens > 100, "some were let in"
    assert used.requests <= 50
    async with played_gateway(tmp_path, never_ends) as played:
        again = await ask(played, key, max_tokens=200)  # has what is left
        while again.status_code == 200:
            again = await ask(played, key)
        assert (again.status_code, again.json()["error"]["code"]) == (429, "insufficient_quota")
        assert "retry-after" not in again.headers
        assert UsageFile(tmp_path).of_day(int(time.time()) // DAY_S, "team").tokens <= 200
        other = keys.add("other", KeyLimits(requests_minute=1))
        assert (await ask(played, other)).status_code == 200
        refusal = await ask(played, other)
        assert (refusal.status_code, int(refusal.headers["retry-after"]) <= 60) == (429, True)


async def test_the_owner_sees_what_keys_used_and_nobody_else_does(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    key = keys.add("team", KeyLimits(tokens_day=200), models=(MODEL,))
    async with played_gateway(tmp_path, never_ends) as played:
        await ask(played, key)
        for headers in ({}, {"authorization": f"Bearer {key}"}):
            assert (await played.http.get("/page/keys", headers=headers)).status_code == 401
        (told,) = (await played.http.get("/page/keys", headers={"authorization": "Bearer token"})).json()["keys"]
    assert (told["name"], told["models"], told["limits"]["tokens_day"]) == ("team", [MODEL], 200)
    assert told["today"] == {"requests": 1, "prompt": 3, "generated": 12} == told["ever"]
    assert "sha256" not in told


async def append(answers: list[Any], answer: Any) -> None:
    answers.append(await answer)


async def test_a_key_has_its_models_and_its_time(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    elsewhere = keys.add("elsewhere", models=("another",))
    here = keys.add("here", models=(MODEL,), days=1)
    now = time.time()
    async with played_gateway(tmp_path, never_ends, clock=lambda: now) as played:
        refused = await ask(played, elsewhere)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")
        assert "this key is for another, not for 'played'" in refused.json()["error"]["message"]
        listed = await played.http.get("/v1/models", headers={"x-api-key": elsewhere})
        assert listed.json()["data"] == []
        assert (await ask(played, here)).status_code == 200
        now += DAY_S + 1
        ended = await ask(played, here)
        assert (ended.status_code, "this key ended on" in ended.text) == (401, True)


async def test_a_key_for_one_model_learns_nothing_of_another(tmp_path: Path) -> None:
    key = {"x-api-key": Keys(tmp_path).add("elsewhere", models=("another",))}
    asked: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", "/detokenize", {"tokens": [1]}),
        ("GET", "/tokenizer_info", {}),
        ("POST", "/v1/messages/count_tokens", {"model": MODEL, "messages": [{"role": "user", "content": "a"}]}),
        ("POST", "/api/show", {"model": f"{MODEL}:latest"}),
        ("POST", "/api/pull", {"model": HASH}),
        ("GET", f"/v1/models/{MODEL}", {}),
    ]
    async with played_gateway(tmp_path, never_ends) as played:
        for method, path, body in asked:
            answer = await played.http.request(method, path, json=body or None, headers=key)
            assert answer.status_code in (403, 404), path
        assert (await played.http.get("/api/tags", headers=key)).json() == {"models": []}
        assert "elsewhere" not in (await played.http.get("/metrics", headers=key)).text
        token = {"authorization": "Bearer token"}
        assert "swarmd_key_tokens" in (await played.http.get("/metrics", headers=token)).text
        by_hash = {"x-api-key": Keys(tmp_path).add("by-hash", models=(HASH,))}
        assert (await played.http.get(f"/v1/models/{MODEL}", headers=by_hash)).status_code == 200


async def test_a_stream_beyond_a_quota_is_refused_before_it_begins(tmp_path: Path) -> None:
    key = Keys(tmp_path).add("team", KeyLimits(tokens_day=10))
    async with played_gateway(tmp_path, never_ends) as played:
        while (await ask(played, key, max_tokens=3)).status_code == 200:
            pass
        refused = await ask(played, key, stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")


async def test_a_prompt_counts_once_and_a_bad_request_not_at_all(tmp_path: Path) -> None:
    key = Keys(tmp_path).add("team", KeyLimits(tokens_day=10_000, requests_day=3))
    day = int(time.time()) // DAY_S
    async with played_gateway(tmp_path, never_ends) as played:
        assert (await ask(played, key, max_tokens=0)).status_code == 400
        assert (await ask(played, key, n=4, max_tokens=2)).json()["usage"]["total_tokens"] == 3 + 4 * 2
        scored = await ask(played, key, echo=True, logprobs=1, max_tokens=2)
        assert scored.json()["usage"]["total_tokens"] == 3 + 2
        assert (await ask(played, key, echo=True, logprobs=1, max_tokens=0)).status_code == 200
    assert UsageFile(tmp_path).of_day(day, "team") == (3, 3 * 3, 4 * 2 + 2)


async def test_a_damaged_file_of_usage_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "gateway-usage.db").write_text("no database at all, and longer than its head would be: " + "x" * 200)
    key = Keys(tmp_path).add("team", KeyLimits(tokens_day=10_000))
    async with played_gateway(tmp_path, never_ends) as played:
        assert (await ask(played, key)).status_code == 200


def test_a_key_of_an_older_gateway_has_no_limits(tmp_path: Path) -> None:
    (tmp_path / "gateway-keys.json").write_text('[{"name": "old", "sha256": "00", "made_at": 1}]')
    (key,) = Keys(tmp_path).all()
    assert (key.ends_at, key.models, key.limits) == (0, (), KeyLimits())
    with pytest.raises(ConfigError, match="days are 0 to"):
        Keys(tmp_path).add("new", days=-1)
