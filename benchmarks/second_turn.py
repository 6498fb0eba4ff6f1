"""The first token of a conversation's second turn, beside that of its first: ``python -m benchmarks.second_turn``.

As agents ask: a long system's turn, tools, a call and its result in between, notes of the system's, and in each request
other ids, metadata and times of day. SmolLM2-135M over three servers of this machine; medians of several conversations.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx

from tests.real.gateways import smol_gateway

N_CONVERSATIONS = 7
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string", "description": "A file"}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Will {name} a file.", "parameters": PARAMETERS}}
    for name in ("read", "write", "list", "search", "remove", "rename")
]


def ask(http: httpx.Client, messages: list[dict[str, Any]]) -> tuple[float, str, int, int]:
    """Ask; returns seconds to the first token, the answer, its prompt's tokens, and how many of them were kept."""
    noise = {"metadata": {"request": time.time_ns()}, "user": str(time.time_ns()), "prompt_cache_key": str(time.time())}
    body = {"model": "smol", "messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 24, "stream": True}
    body |= {"stream_options": {"include_usage": True}, **noise}
    begun_at = time.perf_counter()
    first_s = 0.0
    text = ""
    usage: dict[str, Any] = {}
    with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        for line in answer.iter_lines():
            chunk = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            delta = chunk["choices"][0]["delta"] if chunk.get("choices") else {}
            if delta.get("content"):
                first_s = first_s or time.perf_counter() - begun_at
                text += delta["content"]
            usage = chunk.get("usage") or usage
    return first_s, text, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def main() -> None:
    """Print the medians."""
    texts = [" ".join(text.split())[:6_000] for _, text in sorted(topics.items()) if len(text) > 8_000]
    rows = []
    with tempfile.TemporaryDirectory() as folder, smol_gateway(Path(folder)) as (_, _, gateway), gateway.http() as http:
        ask(http, [{"role": "user", "content": "Hi"}])  # the model is loaded
        for number, text in enumerate(texts[:N_CONVERSATIONS]):
            turns: list[dict[str, Any]] = [
                {"role": "system", "content": f"You work on files. What there is to know:\n{text}"},
                {"role": "user", "content": "What is in the first file?"},
            ]
            first_s, said, n_prompt, _ = ask(http, turns)
            call = {
                "id": f"call_{number}",
                "type": "function",
                "function": {"name": "read", "arguments": '{"path":"a"}'},
            }
            turns += [
                {"role": "assistant", "content": said, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": f"call_{number}", "content": "A line of words."},
                {"role": "system", "content": f"It is {time.strftime('%H:%M:%S')} now."},
                {"role": "user", "content": "And what in the second one?"},
            ]
            second_s, _, _, n_kept = ask(http, turns)
            rows.append((first_s, second_s, second_s / first_s, n_prompt, n_kept))
    first_s, second_s, ratio, n_prompt, n_kept = (statistics.median(column) for column in zip(*rows, strict=True))
    print(f"first turn, {n_prompt:.0f} tokens: {first_s:.3f} s to its first token")
    print(f"second turn, {n_kept:.0f} tokens kept: {second_s:.3f} s; {ratio:.3f} of the first's")


if __name__ == "__main__":
    main()
