"""Batches over HTTP, before a model that is played: answers, errors, restarts, keys, limits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from swarmd.gateway.apis.body import MOST_BODY_BYTES
from swarmd.gateway.batches import store as stored
from swarmd.gateway.batches.batch import WINDOW_S
from swarmd.gateway.batches.runner import MOST_OPEN
from swarmd.gateway.generation.quotas import KeyLimits
from swarmd.gateway.generation.turns import QueueFull
from tests.gateway.played import MODEL, PlayedGateway, played_gateway

CHAT = "/v1/chat/completions"


def request(name: str, url: str = CHAT, **fields: Any) -> str:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": name}],
        "max_tokens": 4,
        "temperature": 0,
        **fields,
    }
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


async def upload(played: PlayedGateway, text: str | bytes, **headers: str) -> httpx.Response:
    files = {"file": ("asked.jsonl", text.encode() if isinstance(text, str) else text)}
    return await played.http.post("/v1/files", files=files, data={"purpose": "batch"}, headers=headers)


async def begin(played: PlayedGateway, text: str, endpoint: str = CHAT, **headers: str) -> dict[str, Any]:
    uploaded = await upload(played, text, **headers)
    assert uploaded.status_code == 200, uploaded.text
    asked = {"input_file_id": uploaded.json()["id"], "endpoint": endpoint, "completion_window": "24h"}
    answer = await played.http.post("/v1/batches", json={**asked, "metadata": {"of": "a test"}}, headers=headers)
    assert answer.status_code == 200, answer.text
    batch: dict[str, Any] = answer.json()
    return batch


async def ended(played: PlayedGateway, batch: dict[str, Any], **headers: str) -> dict[str, Any]:
    with trio.fail_after(60):
        while batch["status"] in ("in_progress", "cancelling"):
            await trio.sleep(0.01)
            batch = (await played.http.get(f"/v1/batches/{batch['id']}", headers=headers)).json()
    return batch


async def read(played: PlayedGateway, file_id: str | None, **headers: str) -> dict[str, Any]:
    if file_id is None:
        return {}
    content = (await played.http.get(f"/v1/files/{file_id}/content", headers=headers)).text
    return {line["custom_id"]: line for line in map(json.loads, content.splitlines())}


async def begin_stuck(
    played: PlayedGateway, monkeypatch: pytest.MonkeyPatch, names: Sequence[str], n_answered: int
) -> dict[str, Any]:
    """Begin a batch of which so many requests are answered, and the others wait for ever."""
    open_session = played.swarm.open_session

    async def open_some(terms: Any) -> Any:
        if len(played.swarm.opened) == n_answered:
            await trio.sleep_forever()
        return await open_session(terms)

    monkeypatch.setattr(played.swarm, "open_session", open_some)
    batch = await begin(played, "\n".join(map(request, names)))
    with trio.fail_after(60):
        while (await played.http.get(f"/v1/batches/{batch['id']}")).json()["request_counts"]["completed"] < n_answered:
            await trio.sleep(0.01)
    return batch


def fill_queue(played: PlayedGateway, monkeypatch: pytest.MonkeyPatch, n_times: int) -> list[str]:
    """Have the next requests told to come back at once; returns whose they were, as they come."""
    refused: list[str] = []
    require_room = played.engine.turns.require_room

    def refuse_some(key: str) -> None:
        if len(refused) < n_times:
            refused.append(key)
            raise QueueFull("64 requests wait already")
        require_room(key)

    monkeypatch.setattr(played.engine.turns, "require_room", refuse_some)
    monkeypatch.setattr("swarmd.gateway.apis.refusals.WAIT_S", 0)
    return refused


async def test_each_request_is_answered_as_if_it_had_been_asked_alone(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        names = [f"q{n}" for n in range(7)]
        lines = [*map(request, names), request("bad", temperature=9)]
        batch = await ended(played, await begin(played, "\n".join(lines)))
        assert batch["status"] == "completed"
        assert batch["metadata"] == {"of": "a test"}
        assert batch["request_counts"] == {"total": 8, "completed": 7, "failed": 1}
        answers = await read(played, batch["output_file_id"])
        assert set(answers) == set(names)
        alone = await played.post(CHAT, messages=[{"role": "user", "content": "q3"}], max_tokens=4, temperature=0)
        assert answers["q3"]["response"]["status_code"] == 200
        assert answers["q3"]["response"]["body"]["choices"] == alone.json()["choices"]
        errors = await read(played, batch["error_file_id"])
        assert errors["bad"]["response"]["status_code"] == 400
        assert errors["bad"]["response"]["body"]["error"]["param"] == "temperature"


async def test_texts_are_embedded_and_completed(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        lines = [json.dumps({"custom_id": "e", "url": "/v1/embeddings", "body": {"model": MODEL, "input": "One two"}})]
        batch = await ended(played, await begin(played, "\n".join(lines), "/v1/embeddings"))
        answers = await read(played, batch["output_file_id"])
        assert answers["e"]["response"]["body"]["data"][0]["object"] == "embedding"
        lines = [request("c", "/v1/completions", prompt="One two")]
        batch = await ended(played, await begin(played, "\n".join(lines), "/v1/completions"))
        assert (await read(played, batch["output_file_id"]))["c"]["response"]["body"]["object"] == "text_completion"


async def test_a_file_with_faults_is_not_begun(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        batch = await begin(played, f"{request('a')}\n{{\n{request('a')}")
        assert batch["status"] == "failed"
        assert [fault["line"] for fault in batch["errors"]["data"]] == [2, 3]
        assert not played.swarm.opened


async def test_a_gateway_that_was_killed_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"q{n}" for n in range(5)]
    async with played_gateway(tmp_path) as played:
        batch = await begin_stuck(played, monkeypatch, names, n_answered=2)
    (output,) = (path for path in (tmp_path / stored.FOLDER).glob("file-*.jsonl") if b'"response"' in path.read_bytes())
    with output.open("ab") as file:
        file.write(b'{"id":"cut')
    async with played_gateway(tmp_path) as played:
        batch = await ended(played, (await played.http.get(f"/v1/batches/{batch['id']}")).json())
        assert batch["request_counts"] == {"total": 5, "completed": 5, "failed": 0}
        assert set(await read(played, batch["output_file_id"])) == set(names)
        assert len(played.swarm.opened) == 3, "those that had no answer"
        assert len(output.read_text().splitlines()) == 5
    async with played_gateway(tmp_path) as played:
        assert (await played.http.get(f"/v1/batches/{batch['id']}")).json() == batch


async def test_who_has_too_much_to_do_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with played_gateway(tmp_path) as played:
        refused = fill_queue(played, monkeypatch, n_times=2)
        batch = await ended(played, await begin(played, request("a")))
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert len(refused) == 2


async def test_a_batch_is_cancelled_or_expires_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000_000.0
    async with played_gateway(tmp_path, clock=lambda: now) as played:
        batch = await begin_stuck(played, monkeypatch, "abc", n_answered=1)
        path = f"/v1/batches/{batch['id']}"
        assert (await played.http.post(f"{path}/cancel")).json()["status"] in ("cancelling", "cancelled")
        batch = await ended(played, (await played.http.get(path)).json())
        assert (batch["status"], batch["cancelled_at"]) == ("cancelled", now)
        assert len(await read(played, batch["output_file_id"])) == 1
        assert (await played.http.post(f"{path}/cancel")).status_code == 409
        late = await begin(played, request("late"))
    now += WINDOW_S
    async with played_gateway(tmp_path, clock=lambda: now) as played:
        batch = await ended(played, (await played.http.get(f"/v1/batches/{late['id']}")).json())
        assert batch["status"] == "expired"
        errors = await read(played, batch["error_file_id"])
        assert errors["late"]["error"]["code"] == "batch_expired"


async def test_each_key_sees_its_own_and_pays_for_it(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        a = {"authorization": f"Bearer {played.keys.add('a', KeyLimits(requests_day=2))}"}
        b = {"authorization": f"Bearer {played.keys.add('b')}"}
        batch = await ended(played, await begin(played, "\n".join(map(request, "xyz")), **a), **a)
        assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
        (error,) = (await read(played, batch["error_file_id"], **a)).values()
        assert error["response"]["body"]["error"]["code"] == "insufficient_quota"
        for path in (f"/v1/batches/{batch['id']}", f"/v1/files/{batch['output_file_id']}"):
            assert (await played.http.get(path, headers=b)).status_code == 404
        assert (await played.http.get("/v1/files", headers=b)).json()["data"] == []
        stolen = {"input_file_id": batch["input_file_id"], "endpoint": CHAT}
        assert (await played.http.post("/v1/batches", json=stolen, headers=b)).status_code == 404
        played.keys.remove("b")
        assert (await played.http.get("/v1/files", headers=b)).status_code == 401


async def test_what_a_key_that_was_taken_back_still_wants_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played_gateway(tmp_path) as played:
        key = {"authorization": f"Bearer {played.keys.add('gone')}"}
        uploaded = await upload(played, request("x"), **key)
        asked = {"input_file_id": uploaded.json()["id"], "endpoint": CHAT}
        played.keys.add("other")
        begun = await played.http.post("/v1/batches", json=asked, headers=key)
        played.keys.remove("gone")  # before its first request: no task has run since
        token = {"authorization": "Bearer token"}
        assert begun.status_code == 200
        assert (await played.http.get("/v1/batches", headers=token)).json()["data"] == []
        folder = tmp_path / stored.FOLDER
        with trio.fail_after(10):
            while not any(b"this key was taken back" in path.read_bytes() for path in folder.glob("file-*.jsonl")):
                await trio.sleep(0.01)


async def test_what_cannot_be_read_now_is_not_asked_again_and_ends_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with played_gateway(tmp_path) as played:
        batch = await begin_stuck(played, monkeypatch, "ab", n_answered=1)
    (output,) = (path for path in (tmp_path / stored.FOLDER).glob("file-*.jsonl") if b'"response"' in path.read_bytes())
    kept = output.read_bytes()
    read_bytes = Path.read_bytes

    def fail(path: Path) -> bytes:
        if path == output:
            raise OSError(24, "Too many open files")
        return read_bytes(path)

    with monkeypatch.context() as broken:
        broken.setattr(Path, "read_bytes", fail)
        async with played_gateway(tmp_path) as played:
            other = await ended(played, await begin(played, request("c")))
            assert other["status"] == "completed", "the gateway lives"
            assert (await played.http.get(f"/v1/batches/{batch['id']}")).json()["status"] == "in_progress"
    assert output.read_bytes() == kept
    async with played_gateway(tmp_path) as played:
        batch = await ended(played, (await played.http.get(f"/v1/batches/{batch['id']}")).json())
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        assert output.read_bytes().startswith(kept)


async def test_a_full_disk_loses_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with played_gateway(tmp_path) as played:
        append = stored.BatchStore.append
        refused: list[bytes] = []

        def refuse_twice(store: stored.BatchStore, file_id: str, lines: bytes) -> bool:
            if len(refused) < 2:
                refused.append(lines)
                return False
            return append(store, file_id, lines)

        monkeypatch.setattr(stored.BatchStore, "append", refuse_twice)
        monkeypatch.setattr("swarmd.gateway.batches.runner.FULL_DISK_S", 0)
        batch = await ended(played, await begin(played, "\n".join(map(request, "abc"))))
        assert batch["request_counts"]["completed"] == 3
        assert set(await read(played, batch["output_file_id"])) == set("abc")


def test_lines_are_added_whole_or_not_at_all(tmp_path: Path) -> None:
    """A child whose files may have 120 bytes."""
    code = f"""
import resource, signal
from pathlib import Path
from swarmd.gateway.batches.store import BatchStore
store = BatchStore(Path({str(tmp_path)!r}))
file = store.add_file("", "x", b"", 0)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (120, 120))
print([store.append(file.id, b"x" * 49 + b"\\n") for _ in range(3)], store.size_of(file.id))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[True, True, False] 100\n"


async def test_a_request_that_comes_back_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with played_gateway(tmp_path) as played:
        key = {"authorization": f"Bearer {played.keys.add('a', KeyLimits(requests_day=2))}"}
        fill_queue(played, monkeypatch, n_times=9)
        batch = await ended(played, await begin(played, "\n".join(map(request, "ab")), **key), **key)
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


async def test_a_batch_takes_no_conversations_place(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        await played.chat()
        assert played.engine.n_kept == 1
        await ended(played, await begin(played, "\n".join(map(request, "abc"))))
        assert played.engine.n_kept == 1


async def test_a_later_key_of_the_same_name_has_nothing_of_the_former(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        played.keys.add("other")
        former = {"authorization": f"Bearer {played.keys.add('anna')}"}
        file = (await upload(played, request("x"), **former)).json()
        played.keys.remove("anna")
        later = {"authorization": f"Bearer {played.keys.add('anna')}"}
        assert (await played.http.get("/v1/files", headers=later)).json()["data"] == []
        assert (await played.http.get(f"/v1/files/{file['id']}", headers=later)).status_code == 404


async def test_files_of_an_open_batch_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with played_gateway(tmp_path) as played:
        batch = await begin_stuck(played, monkeypatch, "ab", n_answered=1)
        for file in (await played.http.get("/v1/files")).json()["data"]:
            refused = await played.http.delete(f"/v1/files/{file['id']}")
            assert refused.status_code == 409
        assert batch["id"] in refused.json()["error"]["message"]


async def test_a_second_gateway_of_a_home_has_no_batches(tmp_path: Path) -> None:
    async with played_gateway(tmp_path), played_gateway(tmp_path) as second:
        refused = await upload(second, request("x"))
        assert refused.status_code == 503
        assert "ask that one" in refused.json()["error"]["message"]
        assert (await second.chat()).status_code == 200


async def test_of_batches_that_ended_the_last_ones_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MOST_KEY_BATCHES", 2)
    async with played_gateway(tmp_path) as played:
        for _ in range(4):
            await begin(played, "{")
        assert len((await played.http.get("/v1/batches")).json()["data"]) == 2
        assert len([*(tmp_path / stored.FOLDER).glob("batch_*")]) == 2


async def test_files_are_listed_read_and_deleted(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        text = request("a")
        file = (await upload(played, text)).json()
        assert (file["bytes"], file["filename"], file["purpose"]) == (len(text), "asked.jsonl", "batch")
        second = (await upload(played, text)).json()
        listed = (await played.http.get("/v1/files", params={"limit": 1})).json()
        assert listed["has_more"]
        rest = (await played.http.get("/v1/files", params={"after": listed["last_id"]})).json()["data"]
        assert {listed["data"][0]["id"], rest[0]["id"]} == {file["id"], second["id"]}
        assert (await played.http.get(f"/v1/files/{file['id']}/content")).text == text
        assert (await played.http.delete(f"/v1/files/{file['id']}")).json()["deleted"]
        assert (await played.http.get(f"/v1/files/{file['id']}")).status_code == 404
        folder = tmp_path / stored.FOLDER
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len([*folder.glob("file-*")]) == 2


async def test_what_is_no_upload_or_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with played_gateway(tmp_path) as played:
        assert (await played.http.post("/v1/files", json={})).status_code == 415
        form = {"content-type": "multipart/form-data; boundary=x"}
        heads = b"--x\r\ncontent-disposition: form-data" + b"; a=b" * 100_000
        for content in (b"", b"--x\r\n", b"garbage", b"--x\r\nno header\r\n\r\nx\r\n--x--\r\n", heads):
            refused = await played.http.post("/v1/files", content=content, headers=form)
            assert refused.status_code == 400, (content, refused.text)
        assert (
            await played.http.post("/v1/files", content=b"", headers={"content-type": "multipart/form-data"})
        ).status_code == 400
        other = await played.http.post("/v1/files", files={"file": b"x"}, data={"purpose": "fine-tune"})
        assert other.json()["error"]["param"] == "purpose"
        assert (await upload(played, b"x" * (MOST_BODY_BYTES + 1))).status_code == 413
        monkeypatch.setattr(stored, "MOST_KEY_BYTES", 100)
        assert (await upload(played, "x" * 101)).status_code == 413
        monkeypatch.setattr(stored, "MOST_KEY_FILES", 1)
        assert (await upload(played, "x")).status_code == 200
        assert "delete files first" in (await upload(played, "x")).json()["error"]["message"]
        unknown = await played.http.post("/v1/batches", json={"input_file_id": "../x", "endpoint": CHAT})
        assert unknown.status_code == 404
        for wrong in ({"endpoint": "/v1/messages"}, {"completion_window": "1h"}, {"metadata": {"a": 1}}):
            asked = {"input_file_id": "file-x", "endpoint": CHAT, **wrong}
            assert (await played.http.post("/v1/batches", json=asked)).status_code == 400
        for limit in ("0", "-1", "x", "9" * 5_000):
            assert (await played.http.get("/v1/batches", params={"limit": limit})).status_code == 400


async def test_a_key_has_only_some_batches_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with played_gateway(tmp_path) as played:

        async def wait(terms: Any) -> Any:
            await trio.sleep_forever()

        monkeypatch.setattr(played.swarm, "open_session", wait)
        for _ in range(MOST_OPEN):
            batch = await begin(played, request("x"))
        again = {"input_file_id": batch["input_file_id"], "endpoint": CHAT}
        refused = await played.http.post("/v1/batches", json=again)
        assert refused.status_code == 429
