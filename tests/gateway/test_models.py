"""Models of the gateway: which can chat; on a busy machine what is late is tried again, and all else goes on."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import trio
from msgspec.structs import replace

from swarmd.client.text import prompts, tokenizer_trial
from swarmd.config import GatewayConfig
from swarmd.errors import ConfigError, SwarmUnavailable
from swarmd.gateway import models as served
from swarmd.gateway.apis.refusals import ApiError
from swarmd.gateway.generation.turns import Turns
from swarmd.gateway.models import ServedModels
from swarmd.home.models import bundled_folder
from swarmd.plan.chains.view import SwarmView
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.models.draft import WEIGHTS_FILE
from swarmd.values import ModelId, PeerId
from tests.drafts import SETTINGS, make_draft

MODEL = ModelId("a" * 64)
N_BLOCKS = 6


class OneModel:
    """A swarm whose one model lies in ``folder``; nothing is asked of its servers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.weights_folder = folder
        self.drafts_folder = folder / "drafts"

    def view(self) -> SwarmView:
        times: dict[str, Any] = {"sequence": 1, "issued_at": 0, "expires_at": 60, "certificate": ()}
        span = SpanRecord(peer=PeerId("server"), model=MODEL, start=0, end=N_BLOCKS, state="online", **times)
        return SwarmView({}, (span,), Catalog(models={"demo": (MODEL, N_BLOCKS)}))

    async def resolve(self, name: str) -> tuple[ModelId, int]:
        return MODEL, N_BLOCKS

    def folder_here(self, model: ModelId) -> Path | None:
        return self._folder if (self._folder / "config.json").is_file() else None

    async def folder(self, model: ModelId, n_blocks: int) -> Path:
        return self._folder


async def prepared(folder: Path, nursery: trio.Nursery) -> ServedModels:
    models = ServedModels(OneModel(folder), Turns(1, 1, 1), nursery, GatewayConfig())  # type: ignore[arg-type]  # a swarm of its kind
    await models.prepare()
    return models


@pytest.mark.parametrize(
    ("files", "chats"),
    [
        ({}, None),
        ({"config.json": "{}"}, False),
        ({"config.json": "{}", "tokenizer_config.json": "[]"}, False),
        ({"config.json": "{}", "tokenizer_config.json": "{"}, False),
        ({"config.json": "{}", "tokenizer_config.json": '{"chat_template": "{{ messages }}"}'}, True),
        ({"config.json": "{}", "chat_template.jinja": "{{ messages }}"}, True),
    ],
    ids=["nothing of it is here", "no tokenizer", "no object", "no JSON", "in its settings", "in a file"],
)
async def test_whether_a_model_can_chat_is_told_by_its_files(
    tmp_path: Path, files: dict[str, str], chats: bool | None
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    async with trio.open_nursery() as nursery:
        models = ServedModels(OneModel(tmp_path), Turns(1, 1, 1), nursery, GatewayConfig())  # type: ignore[arg-type]  # a swarm of its kind
        assert [listed.chats for listed in models.list_models()] == [chats]


@pytest.mark.slow
async def test_other_names_stand_for_models_and_no_model_for_another(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        names = {"demo": "another", "gpt-5": "demo", "*": "big"}
        models = ServedModels(OneModel(tmp_path), Turns(1, 1, 1), nursery, GatewayConfig(names=names))  # type: ignore[arg-type]  # a swarm of its kind
        assert [models.identify(asked) for asked in ("demo", "demo:latest", "gpt-5:latest", "x")] == [MODEL] * 3 + [
            "big"
        ]
        assert [models.meant(asked) for asked in ("demo", MODEL, "gpt-5", "claude")] == ["demo", MODEL, "demo", "big"]


@pytest.mark.parametrize(("late", "limit"), [(prompts, "STARTED_WITHIN_S"), (tokenizer_trial, "MOST_S")])
async def test_a_gateway_outlives_a_tokenizer_that_is_read_too_late(
    late: object, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trio.open_nursery() as nursery:
        with monkeypatch.context() as busy:
            busy.setattr(late, limit, 0.01)
            models = await prepared(bundled_folder(), nursery)
            with pytest.raises(ApiError, match=r"took more than 0\.01 s: this machine is busy") as refused:
                await models.load_engine("demo")
            assert (refused.value.status, bool(refused.value.retry_after_s)) == (503, True), "clients ask again"
        engine = await models.load_engine("demo")
        assert (await engine.prompts.text("Hi")).ids, "the next request tries again"
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_gateway_outlives_a_tokenizer_that_cannot_be_used(tmp_path: Path) -> None:
    for path in bundled_folder().iterdir():
        shutil.copy(path, tmp_path / path.name)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    async with trio.open_nursery() as nursery:
        models = await prepared(tmp_path, nursery)
        with pytest.raises(ApiError) as refused:
            await models.load_engine("demo")
        assert refused.value.status == 400
        nursery.cancel_scope.cancel()


@pytest.mark.slow
async def test_a_child_that_ended_and_is_late_again_is_said_to_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    async with prompts.Prompts(bundled_folder(), most_s=0.0) as made:
        with pytest.raises(ConfigError, match="making the prompt took more than 0 s"):
            await made.text("Hi")
        monkeypatch.setattr(prompts, "STARTED_WITHIN_S", 0.01)
        with pytest.raises(SwarmUnavailable, match=r"reading the tokenizer .* took more than 0\.01 s"):
            await made.text("Hi")


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(20):
        while not condition():
            await trio.sleep(0.01)


async def test_a_draft_is_used_once_it_can_be_and_whatever_was_wrong_with_it_ends_no_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served, "DRAFT_LOOK_INTERVAL_S", 0.01)
    swarm = OneModel(bundled_folder())
    swarm.drafts_folder = tmp_path
    right = replace(SETTINGS, hidden=128, embedding=128)

    async with trio.open_nursery() as nursery:
        models = ServedModels(swarm, Turns(1, 1, 1), nursery, GatewayConfig())  # type: ignore[arg-type]  # a swarm of its kind
        engine = await models.load_engine("demo")
        for settings, base, message in (
            (replace(SETTINGS, hidden=8), MODEL, "takes in hidden states of 8 elements"),
            (right, "b" * 64, "learned from bbbbbbbbbbbb"),
        ):
            make_draft(tmp_path / MODEL, base, settings)
            await until(lambda message=message: message in caplog.text)
            assert engine.make_draft is None
        make_draft(tmp_path / MODEL, MODEL, replace(right, acceptance=()))
        (tmp_path / MODEL / WEIGHTS_FILE).write_bytes(b"half of it")
        caplog.clear()
        make_draft(tmp_path / MODEL, MODEL, right)
        await until(lambda: engine.make_draft is not None)
        first = engine.make_draft
        make_draft(tmp_path / MODEL, MODEL, right, tokens=torch.arange(4, 8, dtype=torch.int32))
        await until(lambda: engine.make_draft not in (None, first))
        (tmp_path / MODEL / WEIGHTS_FILE).write_bytes(b"half of it")
        await until(lambda: "does not hold the tensors of this draft" in caplog.text)
        assert engine.make_draft is None
        nursery.cancel_scope.cancel()


async def test_a_device_that_is_not_here_is_said_at_the_start(tmp_path: Path) -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(ConfigError, match="the device 'cuda:7' cannot be used here"):
            ServedModels(OneModel(tmp_path), Turns(1, 1, 1), nursery, GatewayConfig(device="cuda:7"))  # type: ignore[arg-type]  # a swarm of its kind
