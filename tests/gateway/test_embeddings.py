"""Texts as vectors and in the order of their likeness, over a played model whose states are known."""

from __future__ import annotations

import base64
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from swarmd.gateway.generation.quotas import KeyLimits
from tests.gateway.played import LONGEST, played_gateway


def vector(tokens: list[int], pooling: str = "mean") -> torch.Tensor:
    numbers = torch.tensor(tokens, dtype=torch.float32)
    states = torch.stack([numbers.cos(), numbers.sin(), torch.ones(len(tokens))], 1)
    return torch.nn.functional.normalize(states.mean(0) if pooling == "mean" else states[-1], dim=0)


async def test_texts_and_tokens_become_vectors_of_length_one(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        ids = played.engine.tokenizer.encode("The function returns").ids
        given: list[tuple[Any, list[list[int]]]] = [
            ("The function returns", [ids]),
            (["The function returns"] * 9, [ids] * 9),
            ([5, 6, 7], [[5, 6, 7]]),
            ([[5, 6], [7]], [[5, 6], [7]]),
        ]
        for texts, tokens in given:
            for pooling in ("mean", "last"):
                answer = await played.post("/v1/embeddings", input=texts, pooling=pooling)
                assert answer.status_code == 200, answer.text
                body = answer.json()
                assert [row["index"] for row in body["data"]] == list(range(len(tokens)))
                expected = torch.stack([vector(each, pooling) for each in tokens])
                assert torch.allclose(torch.tensor([row["embedding"] for row in body["data"]]), expected, atol=1e-6)
                assert body["usage"] == {"prompt_tokens": sum(map(len, tokens)), "total_tokens": sum(map(len, tokens))}
        packed = await played.post("/v1/embeddings", input=[5, 6], encoding_format="base64")
        numbers = struct.unpack("<3f", base64.b64decode(packed.json()["data"][0]["embedding"]))
        assert torch.allclose(torch.tensor(numbers), vector([5, 6]))
        short = await played.post("/v1/embeddings", input=[5, 6], dimensions=2)
        assert torch.allclose(
            torch.tensor(short.json()["data"][0]["embedding"]),
            torch.nn.functional.normalize(vector([5, 6])[:2], dim=0),
        )
        assert not played.engine.n_kept, "nobody goes on from a text that was measured"


async def test_documents_come_in_the_order_of_their_likeness(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        documents: list[Any] = ["zzz", {"text": "The function returns a list"}, "The function returns"]
        answer = await played.post("/v1/rerank", query="The function returns", documents=documents)
        results = answer.json()["results"]
        assert results[0]["index"] == 2
        assert results[0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
        scores = [row["relevance_score"] for row in results]
        assert scores == sorted(scores, reverse=True)
        assert results[0]["document"] == {"text": "The function returns"}
        one = await played.post("/rerank", query="x", documents=documents, top_n=1, return_documents=False)
        assert len(one.json()["results"]) == 1
        assert "document" not in one.json()["results"][0]


async def test_ollama_has_them_in_its_form(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        ids = played.engine.tokenizer.encode("The function").ids
        several = (await played.post("/api/embed", input=["The function", "The function"])).json()
        assert torch.allclose(torch.tensor(several["embeddings"]), torch.stack([vector(ids)] * 2), atol=1e-6)
        assert several["prompt_eval_count"] == 2 * len(ids)
        one = (await played.post("/api/embeddings", prompt="The function")).json()
        assert torch.allclose(torch.tensor(one["embedding"]), vector(ids), atol=1e-6)


async def test_texts_that_are_too_many_for_a_key_are_refused_before_any_is_read(tmp_path: Path) -> None:
    async with played_gateway(tmp_path) as played:
        secret = played.keys.add("anna", KeyLimits(tokens_minute=60))
        played.http.headers["authorization"] = f"Bearer {secret}"
        refused = await played.post("/v1/embeddings", input=[[5] * 21] * 4)
        assert refused.status_code == 429
        assert "can never be answered" in refused.json()["error"]["message"]
        assert not played.swarm.opened
        fits = await played.post("/v1/embeddings", input=[[5] * 20] * 2)
        assert fits.status_code == 200, fits.text


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"input": []}, "length"),
        ("/v1/embeddings", {"input": ""}, "without a token"),
        ("/v1/embeddings", {"input": ["a", 5]}, "a text, its tokens"),
        ("/v1/embeddings", {"input": ["a"] * 257}, "at most 256"),
        ("/v1/embeddings", {"input": [10**9]}, "token ids are from 0"),
        ("/v1/embeddings", {"input": [5] * (LONGEST + 1)}, "divide it"),
        ("/v1/embeddings", {"input": "a", "dimensions": 4}, "vectors have 3"),
        ("/v1/embeddings", {"input": "a", "pooling": "max"}, "Invalid enum value"),
        ("/v1/embeddings", {}, "input"),
        ("/v1/rerank", {"query": "a", "documents": []}, "length"),
        ("/v1/rerank", {"query": "a", "documents": [5]}, "documents"),
    ],
)
async def test_what_has_no_vector_is_refused(tmp_path: Path, path: str, body: dict[str, Any], words: str) -> None:
    async with played_gateway(tmp_path) as played:
        answer = await played.post(path, **body)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert not played.engine.running
