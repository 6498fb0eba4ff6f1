"""A gateway without a swarm: its own code from the HTTP request to the answer, over a model that a test plays."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import trio
from starlette.applications import Starlette
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from swarmd.client.links.link import SessionOptions, Statistics
from swarmd.client.links.ops import StepInput
from swarmd.client.sessions.session import ChainSession
from swarmd.client.text.chat_template import ChatTemplate
from swarmd.client.text.prompts import Prompt, answer, read_answer
from swarmd.errors import ConfigError
from swarmd.gateway.app import Gateway
from swarmd.gateway.batches.store import BatchStore
from swarmd.gateway.generation.engine import GenerationEngine
from swarmd.gateway.generation.head import HeadThread
from swarmd.gateway.generation.quotas import Quotas, UsageFile
from swarmd.gateway.generation.turns import Turns
from swarmd.gateway.guard import Guard
from swarmd.gateway.keys import Keys
from swarmd.gateway.models import ListedModel
from swarmd.gateway.page import Page
from swarmd.home.models import bundled_folder
from swarmd.values import ModelId

MODEL = "played"
HASH = ModelId("a" * 64)
LONGEST = 512  # tokens of its context
CHATML = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ '<' + m.role + '>' + m.content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
Next = Callable[[int], torch.Tensor]


@dataclass
class PlayedEnds:
    """The ends of a model whose next token depends on the last one only."""

    logits_after: Next
    vocabulary: int
    eos: frozenset[int] = frozenset({0})
    generation: dict[str, Any] = field(default_factory=dict)
    family: str = "llama"
    max_tokens: int = LONGEST
    can_crop: bool = True

    def embed(self, rows: list[list[int]], starts: list[int]) -> list[torch.Tensor]:
        return [torch.tensor(ids, dtype=torch.float32).reshape(1, -1, 1) for ids in rows]

    width: int = 3

    def states(self, hidden: torch.Tensor, arity: int) -> torch.Tensor:
        """Three numbers of each token."""
        token = hidden[:, 0].float()
        return torch.stack([token.cos(), token.sin(), torch.ones_like(token)], 1)

    def logits(self, hidden: torch.Tensor, arity: int) -> torch.Tensor:
        return torch.stack([self.logits_after(int(token)) for token in hidden[:, 0]])


class PlayedSession(ChainSession):
    """Gives back what it is sent."""

    served_logits = None
    can_fly = False
    hops_s = ()

    def __init__(self, max_tokens: int) -> None:
        self.played = Statistics()
        self.max_tokens = max_tokens
        self.n_tokens = 0

    @property
    def statistics(self) -> Statistics:
        return self.played

    @property
    def hop_names(self) -> tuple[str, ...]:
        return ("server",)

    @property
    def layer_arity(self) -> int:
        return 0

    def ignore_windows(self) -> None:
        """None are under way."""

    async def step(self, step: StepInput) -> torch.Tensor:
        await trio.lowlevel.checkpoint()
        assert step.hidden is not None
        self.n_tokens += step.hidden.shape[1] - sum(edit.crop for edit in step.edits)
        assert self.n_tokens <= self.max_tokens, "as servers have it"
        assert step.positions is not None
        assert step.positions[0, -1] + 1 == self.n_tokens
        return step.hidden


class PlayedSwarm:
    """Opens played sessions."""

    def __init__(self) -> None:
        self.opened: list[PlayedSession] = []

    def quantize(self, model: ModelId, n_blocks: int) -> str:
        return "none"

    async def open_session(self, terms: SessionOptions) -> PlayedSession:
        self.opened.append(PlayedSession(terms.max_tokens))
        return self.opened[-1]

    async def close_session(self, session: PlayedSession) -> None:
        await trio.lowlevel.checkpoint()


class PlayedPrompts:
    """Makes prompts here, as the child does."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, template: str) -> None:
        self.folder = folder
        self._tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        self._tokenizer.chat_template = template or None
        self._template = ChatTemplate(self._tokenizer)
        self.has_template = bool(template)
        self.shows_tools = "tools" in template
        self.made: list[Prompt] = []

    async def __aenter__(self) -> PlayedPrompts:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing was started."""

    async def text(self, text: str, special: bool = True) -> Prompt:
        return self._made({"text": text, "special": special})

    async def chat(self, messages: list[Any], tools: list[Any] | None, options: dict[str, Any]) -> Prompt:
        return self._made({"messages": messages, "tools": tools, "options": options})

    def _made(self, question: dict[str, Any]) -> Prompt:
        reply = answer(self._tokenizer, self._template, question)
        if "error" in reply:
            raise ConfigError(reply["error"])
        self.made.append(read_answer(reply))
        return self.made[-1]


class PlayedModels:
    """One model, loaded."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine

    async def load_engine(self, name: str) -> GenerationEngine:
        return self._engine

    def only_model(self) -> str:
        return MODEL

    def meant(self, name: str) -> str:
        return name

    def identify(self, name: str) -> str:
        return HASH if name.removesuffix(":latest") == MODEL else name

    def loaded_engines(self) -> dict[str, GenerationEngine]:
        return {MODEL: self._engine}

    def list_models(self) -> list[ListedModel]:
        return [ListedModel(MODEL, HASH, 1, (), LONGEST, True)]


@dataclass
class PlayedGateway:
    """What a test talks with, and what is behind it."""

    http: httpx.AsyncClient
    engine: GenerationEngine
    swarm: PlayedSwarm
    keys: Keys
    prompts: PlayedPrompts
    application: Starlette
    session_kind: type[PlayedSession] = PlayedSession

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json={"model": MODEL, **body})

    async def read_prompt(self, path: str, **body: Any) -> str:
        """What the model is given for a request, as text."""
        n_asked = len(self.prompts.made)
        answer = await self.post(path, **body)
        assert answer.status_code == 200, answer.text
        (prompt,) = self.prompts.made[n_asked:]
        return str(self.engine.tokenizer.decode(list(prompt.ids), skip_special_tokens=False))

    async def chat(self, **body: Any) -> httpx.Response:
        turns = [{"role": "user", "content": "Say hello."}]
        return await self.post("/v1/chat/completions", **{"messages": turns, "max_tokens": 40, **body})


@asynccontextmanager
async def played_gateway(
    folder: Path,
    logits_after: Next | None = None,
    tokenizer: Tokenizer | None = None,
    template: str = CHATML,
    clock: Callable[[], float] = time.time,
    n_running: int = 4,
    origins: tuple[str, ...] = (),
    **ends: Any,
) -> AsyncIterator[PlayedGateway]:
    """Serve one model whose logits after each token are ``logits_after``; without them it says any token at all."""
    made = tokenizer or Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
    made.save(str(folder / "tokenizer.json"))
    vocabulary = ends.pop("vocabulary", made.get_vocab_size())
    played: Any = PlayedEnds(logits_after or (lambda token: torch.zeros(vocabulary)), vocabulary, **ends)
    swarm = PlayedSwarm()
    turns = Turns(n_running, 8, 8)
    keys = Keys(folder)
    prompts: Any = PlayedPrompts(made, folder, template)
    opened = SessionOptions(HASH, 1, 1, 1, "float32")
    engine = GenerationEngine(swarm, opened, HeadThread(played), made, prompts, turns, 600.0)  # type: ignore[arg-type]  # a swarm of its kind
    models: Any = PlayedModels(engine)
    nobody: Any = None
    guard = Guard(keys, (), origins, "token", True, clock)
    page = Page(nobody, models, nobody)
    quotas = Quotas(keys.limits_of, UsageFile(folder), clock)
    gateway = Gateway(models, guard, turns, origins, page, quotas, BatchStore(folder), n_batched=2)
    application = gateway.application()
    transport = httpx.ASGITransport(application)
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        await nursery.start(gateway.batches.run)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http:
            yield PlayedGateway(http, engine, swarm, keys, prompts, application)
        nursery.cancel_scope.cancel()
