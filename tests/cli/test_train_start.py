"""What ``train start`` makes of a recipe's files: data that a run can learn, first weights that follow the bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec import structs
from swarmd_cli.verbs import train
from swarmd_cli.verbs.train import _initialise, _tokenise
from tokenizers import Tokenizer

from swarmd.errors import ConfigError
from swarmd.home.membership import MembershipFiles
from swarmd.protocol.models import manifest
from swarmd.protocol.runs.recipe import Recipe
from swarmd.train.store.data import highest_token, pack_texts, require_known_token
from tests.real.training import tiny_model

RECIPE = Recipe("run", "0" * 64, "1" * 64)


@dataclass
class State:
    folder: Path


def lines(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Who crossed it?", "completion": " Caesar."},
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]},
        {"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 9]},
    ],
)
def test_rows_that_say_which_tokens_count_are_refused_with_their_line(tmp_path: Path, row: dict[str, Any]) -> None:
    path = lines(tmp_path / "data.jsonl", {"text": "Gallia est omnis divisa."}, row)
    with pytest.raises(ConfigError, match=r"line 2 says which of its tokens count .* 1 of 2 lines"):
        _tokenise(path, tiny_model(tmp_path / "tiny"), 1024)


def test_rows_whose_tokens_all_count_are_taken(tmp_path: Path) -> None:
    path = lines(tmp_path / "data.jsonl", {"text": "Gallia est."}, {"input_ids": [5, 6], "labels": [5, 6]})
    assert _tokenise(path, tiny_model(tmp_path / "tiny"), 1024)[1] == [5, 6]


def test_a_token_that_the_model_does_not_know_is_refused_with_the_limit(tmp_path: Path) -> None:
    texts = [[3, 4, 700, 5, 6, 7, 8]]
    with pytest.raises(ConfigError, match="the token 700, and the model knows those from 0 to 511"):
        pack_texts(texts, 3, 512, tmp_path / "data", 0)
    assert pack_texts(texts, 3, 1024, tmp_path / "data", 0) == 2
    highest = highest_token(tmp_path / "data", manifest.read_folder(tmp_path / "data"))
    assert highest == 700
    with pytest.raises(ConfigError, match="700"):
        require_known_token(highest, 512)


def test_a_model_of_the_catalog_keeps_its_hash_however_its_files_lie_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that swarmd filled has a file for each block."""
    catalog = SimpleNamespace(hash_of=lambda name: "a" * 64)
    monkeypatch.setattr(
        train, "ask_json", lambda verb, **query: {"here": True, "folder": str(tmp_path / query["model"])}
    )
    monkeypatch.setattr(MembershipFiles, "catalog", lambda self: catalog)
    state: Any = None
    of_catalog = train._find_source(state, structs.replace(RECIPE, model="demo"), tmp_path)
    assert of_catalog == ("a" * 64, tmp_path / ("a" * 64))
    local = tiny_model(tmp_path / "beside")
    assert train._find_source(state, structs.replace(RECIPE, model="beside"), tmp_path) == (None, local)


def test_first_weights_of_a_run_go_with_the_files_that_they_were_made_from(tmp_path: Path) -> None:
    """A tokenizer that was mended between two starts of one name; the earlier run's folder stays as it is."""
    source = tiny_model(tmp_path / "tiny")
    state = State(tmp_path / "home")
    first = _initialise(source, RECIPE, state)  # type: ignore[arg-type]
    first_id = manifest.model_id(manifest.read_folder(first))
    assert _initialise(source, RECIPE, state) == first  # type: ignore[arg-type]
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save(str(source / "tokenizer.json"))
    second = _initialise(source, RECIPE, state)  # type: ignore[arg-type]
    assert second != first
    assert (second / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert manifest.model_id(manifest.read_folder(first)) == first_id
    assert _initialise(source, RECIPE, state) == second  # type: ignore[arg-type]
