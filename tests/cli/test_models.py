"""Names and weights of models: what takes one away without the other, and who may."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from swarmd_cli.context import set_home
from swarmd_cli.main import app
from swarmd_cli.verbs.look import merge_names
from typer.testing import CliRunner

from swarmd.errors import ConfigError
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.models import ModelFolders, bundled_folder
from swarmd.home.paths import Home
from swarmd.protocol.membership.identity import Identity, certify
from swarmd.status import ModelRow
from tests import checkpoints
from tests.cli.answers import filled
from tests.cli.typed import swarmd
from tests.drafts import make_draft

MODEL = "b" * 64


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A founder's home, with one model under two names, from the hub."""
    state = Home(tmp_path)
    Founder(state).found("ours")
    entry = (MODEL, 4)
    Founder(state).change_catalog(
        lambda c: msgspec.structs.replace(
            c, models={**c.models, "smol": entry, "my smol": entry}, sources={MODEL: "org/smol@main"}
        )
    )
    yield state
    set_home(None)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x\ny", "can be seen"),
        ("\x1b[2J", "can be seen"),
        ("a" * 64, "look like a model's hash"),
        ("b" * 65, "1 to 64"),
    ],
)
def test_names_that_nobody_can_read_or_that_mean_something_else_are_refused(
    name: str, message: str, home: Home
) -> None:
    with pytest.raises(ConfigError, match=message):
        swarmd(home, "models", "add", str(bundled_folder()), "--name", name)


def as_mere_member(home: Home) -> None:
    """Make the home one of a member that did not found the swarm."""
    identity = Identity.generate()
    founder = Founder(home).key()
    swarm = msgspec.structs.replace(
        MembershipFiles(home).swarm(),
        certificate=(certify(founder, identity.public_key, "member", int(time.time()) + 600),),
    )
    MembershipFiles(home).write_key(identity)
    MembershipFiles(home).write_swarm(swarm)
    (home.folder / "founder.key").unlink()


def test_weights_that_another_name_needs_are_not_removed(home: Home, tmp_path: Path) -> None:
    ModelFolders(home).add(MODEL, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'smol' needs the same weights.*unpublish 'my smol'"):
        swarmd(home, "models", "rm", "my smol")
    assert MODEL in ModelFolders(home).read()
    assert "no longer offers it" in swarmd(home, "models", "rm", MODEL), "the hash means the weights"
    assert MODEL not in ModelFolders(home).read()


def test_a_name_is_taken_back_and_the_last_one_with_where_the_hub_has_it(home: Home) -> None:
    assert "still called smol" in swarmd(home, "models", "unpublish", "my smol")
    assert sorted(MembershipFiles(home).catalog().models) == ["demo", "smol"]
    assert MembershipFiles(home).catalog().sources
    assert f"swarmd models rm {MODEL}" in swarmd(home, "models", "unpublish", "smol")
    assert sorted(MembershipFiles(home).catalog().models) == ["demo"]
    assert not MembershipFiles(home).catalog().sources
    with pytest.raises(ConfigError, match="no name 'smol'; it has: demo"):
        swarmd(home, "models", "unpublish", "smol")


def test_who_may_not_publish_learns_how_he_may(home: Home) -> None:
    as_mere_member(home)
    with pytest.raises(ConfigError, match=f"swarmd models delegate {MembershipFiles(home).identity().peer_id}"):
        swarmd(home, "models", "unpublish", "smol")


def test_a_model_of_two_names_is_one_row(home: Home) -> None:
    assert "my smol, smol" in swarmd(home, "models", "ls")
    rows = [filled(ModelRow, name=name, model=MODEL) for name in "ab"]
    assert [row.name for row in merge_names(rows)] == ["a, b"]


def test_who_may_not_publish_is_told_before_anything_is_read_or_converted(home: Home, tmp_path: Path) -> None:
    as_mere_member(home)
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF, and nothing that could be converted")
    for words in (["--name", "new"], ["--name", "smol", "--replace"]):
        with pytest.raises(ConfigError, match=f"swarmd models delegate {MembershipFiles(home).identity().peer_id}"):
            swarmd(home, "models", "add", str(file), *words)
    with pytest.raises(ConfigError, match="says 'smol' is bbbbbbbbbbbb: a founder adds it, or says swarmd models"):
        swarmd(home, "models", "add", str(bundled_folder()), "--name", "smol")


def test_add_ends_with_what_to_type_next(home: Home) -> None:
    done = CliRunner().invoke(
        app, ["--home", str(home.folder), "models", "add", str(bundled_folder()), "--name", "t w"]
    )
    assert done.exit_code == 0, done.output
    assert "now: swarmd up --serve 't w'" in done.stderr


def test_a_draft_is_named_beside_the_model_that_it_is_for(tmp_path: Path) -> None:
    home = Home(tmp_path / "founder")
    Founder(home).found("ours")
    base = MembershipFiles(home).catalog().models["demo"][0]
    folder = make_draft(tmp_path / "draft", base)
    with pytest.raises(ConfigError, match="is a draft: say --draft-for MODEL"):
        swarmd(home, "models", "add", str(folder), "--name", "guess")
    with pytest.raises(ConfigError, match="give one of them"):
        swarmd(home, "models", "add", str(folder), "--name", "guess", "--draft-for", "demo", "--base", "demo")
    wrong = make_draft(tmp_path / "wrong", "a" * 64)
    with pytest.raises(ConfigError, match="learned from aaaa"):
        swarmd(home, "models", "add", str(wrong), "--name", "guess", "--draft-for", "demo")
    assert "guess: " in swarmd(home, "models", "add", str(folder), "--name", "guess", "--draft-for", "demo")
    listed = json.loads(swarmd(home, "models", "ls", "--json"))["drafts"]
    assert [(row["name"], row["for"]) for row in listed] == [("guess", "demo")]
    assert "Drafts" in swarmd(home, "models", "ls")
    assert "no longer in the catalog" in swarmd(home, "models", "unpublish", "guess")
    assert not MembershipFiles(home).catalog().drafts
    set_home(None)


def test_a_whole_model_can_be_a_draft(tmp_path: Path) -> None:
    home = Home(tmp_path)
    Founder(home).found("ours")
    small = checkpoints.make("llama", tmp_path / "small", n_layers=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_folder() / name, small)
    swarmd(home, "models", "add", str(small), "--name", "small", "--draft-for", "demo")
    catalog = MembershipFiles(home).catalog()
    assert catalog.drafts["small"][1] == catalog.models["demo"][0]
    assert "small" not in catalog.models
    set_home(None)
