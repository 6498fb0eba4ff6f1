"""A gateway whose model says what a script tells it, at a port of this machine: for agents, which want to be led.

One answer is written at a time, and nothing is tried ahead, so each answer's tokens come in their order.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import trio
from hypercorn.config import Config as HypercornConfig
from tokenizers import Tokenizer

from swarmd.client.drafting.lookup import Lookup
from swarmd.client.text.prompts import Prompt
from swarmd.gateway.generation import answer
from swarmd.gateway.generation.row import RowReport
from swarmd.gateway.listening import open_listener, url_of
from swarmd.home.models import bundled_folder
from swarmd.net.http import serve_http
from tests.gateway.played import PlayedPrompts, played_gateway

Script = Callable[[list[dict[str, Any]], list[dict[str, Any]]], str]
"""(turns, tools) -> what the model says to them."""

# As Qwen 2.5 and Hermes write calls, with nothing behind a turn.
TEMPLATE = """
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for m in messages %}<{{ m.role }}>{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
N_WORDS = 1_024  # of the demo's tokenizer


def call(name: str, arguments: dict[str, Any]) -> str:
    """How the model calls a tool."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


class NothingAhead(Lookup):
    """Tries no tokens ahead."""

    def propose(self, text: Sequence[int], tried: Sequence[int], max_tokens: int, min_chance: float) -> list[int]:
        return []


@dataclass
class ScriptedModel:
    """Says the script's replies token by token, in the order in which they were asked for."""

    script: Script
    tokenizer: Tokenizer
    waiting: deque[deque[int]] = field(default_factory=deque)

    def ask(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
        ids = self.tokenizer.encode(self.script(turns, tools), add_special_tokens=False).ids
        self.waiting.append(deque([*ids, 0]))

    def logits_after(self, token: int) -> torch.Tensor:
        reply = self.waiting[0]
        following = reply.popleft()
        if not reply:
            self.waiting.popleft()
        return torch.zeros(N_WORDS).index_fill(0, torch.tensor(following), 40.0)


@dataclass
class ScriptedGateway:
    """Where it listens, what it was asked, and what became of it. ``ends.max_tokens`` is the model's context."""

    url: str
    ends: Any = None
    asked: list[list[dict[str, Any]]] = field(default_factory=list)
    reports: list[RowReport] = field(default_factory=list)


@asynccontextmanager
async def scripted_gateway(folder: Path, script: Script, context: int) -> AsyncIterator[ScriptedGateway]:
    """Serve a scripted model over HTTP on loopback."""
    tokenizer = Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
    model = ScriptedModel(script, tokenizer)
    listener = open_listener("127.0.0.1:0", has_keys=False)
    gateway = ScriptedGateway(url_of(listener))
    chat = PlayedPrompts.chat

    async def ask(prompts: PlayedPrompts, turns: list[Any], tools: Any, options: dict[str, Any]) -> Prompt:
        prompt = await chat(prompts, turns, tools, options)
        gateway.asked.append(turns)
        model.ask(turns, tools or [])
        return prompt

    config = HypercornConfig()
    config.accesslog = None
    async with played_gateway(
        folder, model.logits_after, template=TEMPLATE, max_tokens=context, family="qwen2", n_running=1
    ) as played:
        gateway.ends = played.engine.ends
        write = played.engine.write

        async def note(options: Any, on_delta: Any, report: RowReport) -> None:
            gateway.reports.append(report)
            await write(options, on_delta, report)

        with (
            patch.object(PlayedPrompts, "chat", ask),
            patch.object(answer, "Lookup", NothingAhead),
            patch.object(played.engine, "write", note),
        ):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve_http, played.application, config, [listener])
                yield gateway
                nursery.cancel_scope.cancel()


def last_text(turns: list[dict[str, Any]], role: str) -> str:
    """The text of the last turn of a role, without what agents put around it in angle brackets."""
    texts = [str(turn.get("content") or "") for turn in turns if turn["role"] == role]
    return re.sub(r"<([a-z_-]+)>.*?</\1>", "", texts[-1], flags=re.DOTALL).strip() if texts else ""
