"""A run started from Python: what it makes of a recipe's files, and the lines that docs/training.md shows."""

from __future__ import annotations

import json
import re
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tokenizers import Tokenizer

from swarmd.errors import ConfigError
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.models import ModelFolders
from swarmd.home.paths import Home
from swarmd.protocol.models import manifest
from swarmd.protocol.runs.recipe import Recipe
from swarmd.train.store.data import highest_token, pack_texts, require_known_token
from swarmd.train.store.disk import RunFolder
from swarmd.training_runs import _find_source, initialise_model, name_folder, start_run, tokenise_texts
from tests.real.training import ROOT, tiny_model

RECIPE = Recipe("run", "0" * 64, "1" * 64)
LINES = re.compile(r"```python\n([^`]*training_runs[^`]*)```")
RECIPE_FILE = """
name = "caesar"
model = "tiny"
data = "{root}/examples/caesar.jsonl"
[optimizer]
kind = "sgd"
[batch]
target = 8
micro = 2
tokens = 48
[stop]
steps = 5
"""


class PlayedDaemon(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """A control API that answers as a test says, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, dict[str, Any]] = {"train": {"training": "on", "runs": [], "others": []}}
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                daemon.asked.append(self.path.removeprefix("/v1/").partition("?")[0])
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(daemon.answers.get(daemon.asked[-1], {})).encode())

            do_POST = do_GET

            def log_message(self, *arguments: Any) -> None: ...

        super().__init__(str(path), Handler)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    Founder(home).found("ours")
    return home


@pytest.fixture
def daemon(home: Home) -> Iterator[PlayedDaemon]:
    with PlayedDaemon(home.socket) as played:
        thread = threading.Thread(target=played.serve_forever, args=(0.01,))
        thread.start()
        yield played
        played.shutdown()
        thread.join()


def test_the_lines_of_the_docs_start_a_run(
    tmp_path: Path,
    home: Home,
    daemon: PlayedDaemon,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tiny_model(tmp_path / "tiny")
    (tmp_path / "recipe.toml").write_text(RECIPE_FILE.format(root=ROOT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SWARMD_HOME", str(home.folder))
    (lines,) = LINES.findall((ROOT / "docs" / "training.md").read_text())
    exec(lines, {})
    (folder,) = home.runs.iterdir()
    run = RunFolder(folder).run()
    assert capsys.readouterr().out.split() == [run.id, "of", "35", "rows"]
    assert daemon.asked == ["train", "reload", "train/join"]
    assert run.recipe.anchors == (MembershipFiles(home).identity().peer_id,)
    held = ModelFolders(home).read()
    assert {run.recipe.model, run.recipe.data} <= held.keys()
    assert (held[run.recipe.model] / "model.safetensors").is_file(), "its first weights were made"


def test_a_name_that_is_taken_is_refused_unless_another_run_is_wanted(
    tmp_path: Path, home: Home, daemon: PlayedDaemon
) -> None:
    tiny_model(tmp_path / "tiny")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE_FILE.format(root=ROOT))
    daemon.answers["train"]["others"] = [{"name": "caesar"}, {"name": "caesar-2"}]
    with pytest.raises(ConfigError, match=r"there already: swarmd train join caesar .* called 'caesar-3'"):
        start_run(recipe, home=home)
    assert start_run(recipe, again=True, home=home).run.recipe.name == "caesar-3"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('model = "nope"', "no model 'nope'"),
        ('data = "none.txt"', "none.txt is no file, and no hash"),
    ],
)
def test_what_is_wrong_with_a_recipe_leaves_nothing_behind(
    tmp_path: Path, home: Home, daemon: PlayedDaemon, written: str, message: str
) -> None:
    tiny_model(tmp_path / "tiny")
    key = written.partition(" ")[0]
    lines = RECIPE_FILE.format(root=ROOT).splitlines()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("\n".join(written if line.startswith(f"{key} ") else line for line in lines))
    with pytest.raises(ConfigError, match=message):
        start_run(recipe, home=home)
    with pytest.raises(ConfigError, match="--role is one of train, reduce, anchor, not 'boss'"):
        start_run(recipe, "boss", home=home)
    assert not home.runs.exists()
    assert len(ModelFolders(home).read()) == 1, "the bundled model"


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
    path.write_text(path.read_text().replace("\n", "\n\n"))  # a blank line is no row, and counts as a line
    with pytest.raises(ConfigError, match=r"line 3 says which of its tokens count .* 1 of 2 lines"):
        tokenise_texts(path, tiny_model(tmp_path / "tiny"), 1024)


def test_rows_whose_tokens_all_count_are_taken(tmp_path: Path) -> None:
    path = lines(tmp_path / "data.jsonl", {"text": "Gallia est."}, {"input_ids": [5, 6], "labels": [5, 6]})
    assert tokenise_texts(path, tiny_model(tmp_path / "tiny"), 1024)[1] == [5, 6]


def test_a_text_is_one_row_without_its_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_bytes(b"Gallia est.\n")
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfGallia est.\r\n")
    model = tiny_model(tmp_path / "tiny")
    plain, marked = (tokenise_texts(tmp_path / f"{name}.txt", model, 1024) for name in ("plain", "marked"))
    assert plain == marked


def test_a_text_that_is_no_utf8_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes("Gallia\ngrößer".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"x\.txt is not UTF-8: line 2 has the byte 0xf6; convert it first"):
        tokenise_texts(tmp_path / "x.txt", tiny_model(tmp_path / "tiny"), 1024)


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
    tmp_path: Path, home: Home, daemon: PlayedDaemon
) -> None:
    """A folder that swarmd filled has a file for each block."""
    model = MembershipFiles(home).catalog().hash_of("demo")
    daemon.answers["here"] = {"here": True, "folder": "/filled/by/swarmd"}
    of_catalog = _find_source(home, structs.replace(RECIPE, model="demo"), tmp_path)
    assert of_catalog == (model, Path("/filled/by/swarmd"))
    local = tiny_model(tmp_path / "beside")
    assert _find_source(home, structs.replace(RECIPE, model="beside"), tmp_path) == (None, local)


def test_first_weights_of_a_run_go_with_the_files_that_they_were_made_from(tmp_path: Path) -> None:
    """A tokenizer that was mended between two starts of one name; the earlier run's folder stays as it is."""
    source = tiny_model(tmp_path / "tiny")
    models = tmp_path / "models"
    first = initialise_model(source, RECIPE, models)
    first_id = manifest.model_id(manifest.read_folder(first))
    assert initialise_model(source, RECIPE, models) == first
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens(["<new>"])
    tokenizer.save(str(source / "tokenizer.json"))
    second = initialise_model(source, RECIPE, models)
    assert second != first
    assert (second / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert manifest.model_id(manifest.read_folder(first)) == first_id
    assert initialise_model(source, RECIPE, models) == second


@pytest.mark.parametrize(
    ("name", "folder"), [("größe 1", "größe_1"), ("../../x", "_.._x"), ("a/b", "a_b"), ("..", "run")]
)
def test_a_run_named_as_a_path_makes_its_folders_where_they_belong(name: str, folder: str) -> None:
    assert name_folder(name) == folder
