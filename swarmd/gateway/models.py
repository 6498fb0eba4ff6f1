"""The models of the swarm as the gateway has them: found by name, loaded when first asked for, and kept."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import trio
from tokenizers import Tokenizer

from swarmd.client.drafts import AUTO, FoundDraft, find_draft, load_draft
from swarmd.client.links.link import SessionOptions
from swarmd.client.model.swarm_head import HeadChecks, head_called
from swarmd.client.model.traced_pass import trace_ends
from swarmd.client.swarm import AsyncSwarm
from swarmd.client.text.prompts import Prompts, has_template
from swarmd.client.text.tokenizer_trial import try_out
from swarmd.compute.hardware.device import pick_card
from swarmd.compute.model.ends import Ends
from swarmd.config import GatewayConfig
from swarmd.errors import ConfigError, NoRoute, SwarmError
from swarmd.gateway.apis import refusals
from swarmd.gateway.generation.engine import GenerationEngine
from swarmd.gateway.generation.head import HeadThread
from swarmd.gateway.generation.turns import Turns
from swarmd.values import ModelId, Span

logger = logging.getLogger(__name__)

LOADED_WITHIN_S = 600.0  # the client's part of a model, from members on a home's link
DRAFT_LOOK_INTERVAL_S = 300.0  # between two looks for a draft that was made or published meanwhile


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model that the swarm's catalog names; ``missing`` is what nobody serves now.

    ``chats``: whether it has a chat template; None as long as nothing of it is on this machine.
    """

    name: str
    model: ModelId
    n_blocks: int
    missing: tuple[Span, ...]
    max_tokens: int | None
    chats: bool | None = None


ANY_NAME = "*"  # in ``names``: whatever is asked for
LATEST = ":latest"  # which programs that know Ollama write behind names


class ServedModels:
    """Finds and loads; engines run in the nursery that is given."""

    def __init__(
        self,
        swarm: AsyncSwarm,
        turns: Turns,
        nursery: trio.Nursery,
        settings: GatewayConfig,
    ) -> None:
        self._names = settings.names
        self._kept_for_s = 60 * settings.kept_minutes
        self._swarm = swarm
        self._turns = turns
        self._nursery = nursery
        self._head = settings.head
        self._card = pick_card(settings.device)
        self._engines: dict[tuple[ModelId, str], GenerationEngine] = {}
        self._loading: dict[ModelId, trio.Lock] = {}
        self._chats: dict[ModelId, bool] = {}

    def list_models(self) -> list[ListedModel]:
        """List the models of the catalog, sorted by name."""
        view = self._swarm.view()
        limits = {model: engine.ends.max_tokens for (model, _), engine in self._engines.items()}
        listed = []
        for name, (model_hash, n_blocks) in sorted(view.catalog.models.items()):
            model = ModelId(model_hash)
            missing = tuple(view.missing(model, n_blocks))
            limit = limits.get(model)
            listed.append(ListedModel(name, model, n_blocks, missing, limit, self.chats(model)))
        return listed

    def chats(self, model: ModelId) -> bool | None:
        """Whether a model has a chat template; None where its files are not here. Fetches nothing."""
        for (loaded, _), engine in self._engines.items():
            if loaded == model:
                return engine.prompts.has_template
        if model not in self._chats and (folder := self._swarm.folder_here(model)) is not None:
            self._chats[model] = has_template(folder)
        return self._chats.get(model)

    def loaded_engines(self) -> dict[str, GenerationEngine]:
        """Return the engines of the models that are loaded, by name."""
        names = {listed.model: listed.name for listed in self.list_models()}
        return {names.get(model, model): engine for (model, _), engine in self._engines.items()}

    async def prepare(self) -> None:
        """Load the model that is served, if only one is: its first user should not wait for that."""
        served = [listed.name for listed in self.list_models() if not listed.missing]
        if len(served) == 1:
            with suppress(refusals.ApiError):  # the first user is told
                await self.load_engine(served[0])

    def only_model(self) -> str:
        """The model that a request means which names none. Raises ApiError where several are served."""
        served = [listed.name for listed in self.list_models() if not listed.missing]
        if len(served) == 1:
            return served[0]
        raise refusals.bad_request(f"model is missing; the swarm serves: {', '.join(served) or 'none now'}", "model")

    def meant(self, name: str) -> str:
        """Which model a name stands for: that of the swarm, else what the settings say, else itself."""
        # Programs ask for models of their makers, for small tasks beside the one that was chosen: Claude Code does.
        listed = self._swarm.view().catalog.models
        for known in (name, name.removesuffix(LATEST)):
            if known in listed or known in {model for model, _ in listed.values()}:
                return known
        known_names = (name, name.removesuffix(LATEST), ANY_NAME)
        return next((self._names[known] for known in known_names if known in self._names), name)

    def identify(self, name: str) -> str:
        """The hash of the model that a name stands for; the name itself where the swarm has none."""
        meant = self.meant(name)
        model, _ = self._swarm.view().catalog.models.get(meant, (meant, 0))
        return model

    async def load_engine(self, name: str) -> GenerationEngine:
        """The engine of a model, loaded if need be. Raises ApiError: unknown, or blocks are missing now."""
        try:
            model, n_blocks = await self._swarm.resolve(self.meant(name))
            dtype = self._swarm.view().served_dtype(model, n_blocks)
        except ConfigError:
            raise refusals.unknown_model(name, [listed.name for listed in self.list_models()]) from None
        except SwarmError as error:
            raise refusals.from_swarm_error(error) from None
        # One load of a model at a time: all who want it wait for the first. Servers may change to another dtype, whose
        # numbers are others; then it is loaded once more, and the old engine serves its requests to the end.
        async with self._loading.setdefault(model, trio.Lock()):
            if (model, dtype) not in self._engines:
                with refusals.as_api_errors():
                    try:
                        with trio.fail_after(LOADED_WITHIN_S):
                            self._engines[model, dtype] = await self._load(model, n_blocks, dtype)
                    except trio.TooSlowError:
                        raise NoRoute(f"{name} was not loaded within {LOADED_WITHIN_S:.0f} s") from None
        return self._engines[model, dtype]

    async def _load(self, model: ModelId, n_blocks: int, dtype: str) -> GenerationEngine:
        folder = await self._swarm.folder(model, n_blocks)
        head_source = head_called(self._head, self._swarm.weights_folder)
        head_folder = head_source if isinstance(head_source, Path) else None

        def load() -> tuple[Ends, Tokenizer]:
            try_out(folder)
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            ends = Ends(folder, getattr(torch, dtype), head_folder, is_quick=head_source is None, card=self._card)
            ends.use_line(trace_ends(ends))
            return ends, tokenizer

        if not (folder / "tokenizer.json").is_file():
            raise ConfigError("this model has no tokenizer.json: it cannot be asked by text")
        ends, tokenizer = await trio.to_thread.run_sync(load)
        # Checks are of this model alone: what was found of another's logits says nothing of it.
        head = HeadThread(ends, head_source if isinstance(head_source, HeadChecks) else None)
        options = SessionOptions(model, n_blocks, 1, 1, dtype, head=head.checks is not None)
        engine = GenerationEngine(self._swarm, options, head, tokenizer, Prompts(folder), self._turns, self._kept_for_s)
        await self._nursery.start(engine.run)
        self._nursery.start_soon(self._follow_draft, engine, folder, getattr(torch, dtype))
        return engine

    async def _follow_draft(self, engine: GenerationEngine, folder: Path, dtype: torch.dtype) -> None:
        """Have an engine use the draft that there is for its model: it may be made or published at any time."""
        used: FoundDraft | None = None
        said = ""
        while True:
            try:
                found = await find_draft(self._swarm, AUTO, engine.model)
                if found != used:
                    used, engine.make_draft = None, None
                    if found is not None:
                        ends = engine.ends
                        load = partial(load_draft, found, folder, ends.input_embeddings, ends.width, dtype)
                        engine.make_draft = await trio.to_thread.run_sync(load)
                    used = found
            except Exception as error:  # noqa: BLE001 - a draft is done without, whatever is wrong with it
                if (failure := f"{type(error).__name__}: {error}") != said:
                    said = failure
                    logger.warning("%s without a draft: %s", engine.model[:12], said)
            await trio.sleep(DRAFT_LOOK_INTERVAL_S)
