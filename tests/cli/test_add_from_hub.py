"""A model of the hub that is added without a copy: every byte is asked for once, and nothing of its weights stays."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from swarmd_cli import hub_reading
from swarmd_cli.context import set_home
from swarmd_cli.verbs.models import add_source

from swarmd.errors import ConfigError, Unreachable
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.models import bundled_folder
from swarmd.home.paths import Home
from swarmd.protocol.models import manifest
from swarmd.weights.digests import KeptDigests
from swarmd.weights.hub import Hub
from swarmd.weights.library import Library
from tests import checkpoints
from tests.played_hub import HubHandler, served
from tests.quantised_files import write_quantised

COMMIT = "c0ffee"
BREAKS_AFTER = 10_000  # bytes of the first answer of each file


class PlayedHub:
    """Serves a folder as the hub does; of each file the first answer breaks off."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.n_sent: dict[str, int] = {}
        self.broken: set[str] = set()  # files of which an answer broke off
        self.hashes: dict[str, str] = {}  # that it promises, where they are not the right ones
        self.is_gone = False
        self.resumes_at: int | None = None  # where it says that later answers begin

    def handler(self) -> type[HubHandler]:
        hub = self

        class Handler(HubHandler):
            def _find(self) -> Path | None:
                path = hub.folder / Path(self.path).name
                if path.is_file() and not hub.is_gone and self.path.startswith(f"/org/name/resolve/{COMMIT}/"):
                    return path
                self.send_error(404)
                return None

            def do_HEAD(self) -> None:
                path = self._find()
                if path is not None:
                    digest = hashlib.sha256(path.read_bytes()).hexdigest()
                    self.send_response(200)
                    self.send_header("X-Repo-Commit", COMMIT)
                    self.send_header("ETag", f'"{hub.hashes.get(path.name, digest)}"')
                    self.send_header("Content-Length", str(path.stat().st_size))
                    self.end_headers()

            def do_GET(self) -> None:
                path = self._find()
                if path is None:
                    return
                data = self.begin_range(path, hub.resumes_at if path.name in hub.broken else None)
                if path.name not in hub.broken and len(data) > BREAKS_AFTER:
                    hub.broken.add(path.name)
                    data = data[:BREAKS_AFTER]
                    self.close_connection = True
                hub.n_sent[path.name] = hub.n_sent.get(path.name, 0) + len(data)
                self.wfile.write(data)

        return Handler


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedHub]:
    folder = tmp_path / "hub" / COMMIT
    plain = checkpoints.make("llama", tmp_path / "plain", n_layers=2)
    write_quantised(plain, folder, "awq")
    for path in bundled_folder().glob("tokenizer*"):
        shutil.copy(path, folder)
    split(folder)
    settings = tmp_path / "settings" / COMMIT
    played = PlayedHub(folder)

    def download(name: str, **patterns: Any) -> str:
        shutil.copytree(folder, settings, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
        return str(settings)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with served(played.handler(), monkeypatch):
        yield played


def split(folder: Path) -> None:
    """Write the one file of a checkpoint as two, with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = {name: f"model-{1 + ('layers.1' in name)}.safetensors" for name in tensors}
    for file in sorted(set(names.values())):
        part = {name: tensor for name, tensor in tensors.items() if names[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    state = Home(tmp_path / "home")
    Founder(state).found("ours")
    set_home(state.folder)
    return state


def test_the_model_is_the_one_that_a_copy_gives_and_none_of_it_stays(
    hub: PlayedHub, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    said = add_source("org/name", "tiny", no_copy=True)
    made = manifest.read_folder(hub.folder)
    model = manifest.model_id(made)
    assert model in said
    assert re.search(
        r"awq of [\d.]+ KiB; its blocks take [\d.]+ KiB in 16 bits, .* in int8, .* in int4 of memory", said
    )
    catalog = MembershipFiles(home).catalog()
    assert catalog.models["tiny"] == (model, 2)
    assert catalog.sources[model] == f"org/name@{COMMIT}"
    for name in manifest.shard_names(hub.folder):
        size = (hub.folder / name).stat().st_size
        assert name in hub.broken
        header_bytes = 16 + int.from_bytes((hub.folder / name).read_bytes()[:8], "little")
        assert hub.n_sent[name] == size + header_bytes, "what had come before it broke off is not asked for again"
    assert "hashing model-2.safetensors" in capsys.readouterr().err
    assert not list(home.folder.rglob("*.safetensors"))
    held = Library(home.weights, {}).folders
    library = Library(home.weights, {})
    library.look({})
    assert not library.folders[model].held, f"its manifest is here, and nothing else: {held}"
    chunk = Hub(f"org/name@{COMMIT}", made).read_piece(((len(made.files), 0),))
    assert made.tensors[0].is_chunk(0, chunk), "servers fetch their blocks from there"


def test_files_that_were_hashed_are_not_asked_for_again(
    hub: PlayedHub, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.hashes["model-2.safetensors"] = "0" * 64
    with pytest.raises(ConfigError, match="gave other bytes"):
        add_source("org/name", "tiny", no_copy=True)
    hub.n_sent.clear()
    del hub.hashes["model-2.safetensors"]
    assert manifest.model_id(manifest.read_folder(hub.folder)) in add_source("org/name", "tiny", no_copy=True)
    sizes = {name: (hub.folder / name).stat().st_size for name in manifest.shard_names(hub.folder)}
    assert hub.n_sent["model-1.safetensors"] < sizes["model-1.safetensors"] / 4, "its header only"
    assert hub.n_sent["model-2.safetensors"] > sizes["model-2.safetensors"]
    assert re.search(r"model-1\.safetensors \(.*: hashed before", capsys.readouterr().err)
    assert not list(home.digests.iterdir()), "the model is added: nothing of it stays"


def test_kept_digests_that_are_broken_are_read_anew(hub: PlayedHub, home: Home) -> None:
    hub.hashes["model-2.safetensors"] = "0" * 64
    with pytest.raises(ConfigError, match="gave other bytes"):
        add_source("org/name", "tiny", no_copy=True)
    del hub.hashes["model-2.safetensors"]
    (kept,) = home.digests.iterdir()
    kept.write_bytes(b"no digests")
    assert manifest.model_id(manifest.read_folder(hub.folder)) in add_source("org/name", "tiny", no_copy=True)


def test_a_hub_that_gives_other_bytes_than_it_promises_is_refused(hub: PlayedHub, home: Home) -> None:
    hub.hashes["model-2.safetensors"] = "0" * 64
    with pytest.raises(
        ConfigError, match=r"model-2\.safetensors of org/name@c0ffee: the hub gave other bytes than its"
    ):
        add_source("org/name", "tiny", no_copy=True)
    assert "tiny" not in MembershipFiles(home).catalog().names


def test_an_index_that_lies_is_refused(hub: PlayedHub, home: Home) -> None:
    path = hub.folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.norm.weight"] = "model-2.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"it says that model\.norm\.weight is in model-2\.safetensors"):
        add_source("org/name", "tiny", no_copy=True)


def test_scales_that_are_no_numbers_are_refused(hub: PlayedHub, home: Home) -> None:
    path = hub.folder / "model-1.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.scales"
    tensors[name] = torch.full_like(tensors[name], torch.nan)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"up_proj\.scales holds what is no number"):
        add_source("org/name", "tiny", no_copy=True)


def test_a_hub_that_goes_away_is_said(hub: PlayedHub, home: Home) -> None:
    hub.is_gone = True
    with pytest.raises(Unreachable, match=r"the hub does not give model-1\.safetensors of org/name@c0ffee"):
        add_source("org/name", "tiny", no_copy=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"source": "."}, "is for models of the hub"),
        ({"source": "org/name:Q4_K_M"}, "is for models of the hub"),
        ({"source": "org/name", "base": "demo"}, "adapters and drafts are small"),
    ],
)
def test_what_is_no_model_of_the_hub_is_refused(home: Home, words: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        add_source(name="tiny", no_copy=True, **words)


def test_headers_that_deny_the_configuration_cost_no_weights(hub: PlayedHub, home: Home) -> None:
    path = hub.folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 96}))
    with pytest.raises(ConfigError, match=r"by config\.json it is"):
        add_source("org/name", "tiny", no_copy=True)
    assert not hub.broken, "no answer was as long as any weight"


def test_biases_of_zeros_that_a_tool_wrote_are_left_out(hub: PlayedHub, home: Home) -> None:
    plain = checkpoints.make("llama", hub.folder.parent / "again", n_layers=2)
    for folder in (hub.folder, hub.folder.with_name(f"{COMMIT}-plain")):
        shutil.rmtree(folder)
    write_quantised(plain, hub.folder, "gptq")
    for path in bundled_folder().glob("tokenizer*"):
        shutil.copy(path, hub.folder)
    path = hub.folder / "model.safetensors"
    bias = torch.zeros(64)
    save_file({**load_file(path), "model.layers.0.self_attn.q_proj.bias": bias}, path, {"format": "pt"})
    assert manifest.model_id(manifest.read_folder(hub.folder)) in add_source("org/name", "tiny", no_copy=True)
    save_file({**load_file(path), "model.layers.0.self_attn.q_proj.bias": bias + 1}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"takes model\.layers\.0\.self_attn\.q_proj\.bias"):
        add_source("org/name", "other", no_copy=True)


def test_a_hub_that_resumes_elsewhere_is_not_believed(hub: PlayedHub, home: Home) -> None:
    hub.resumes_at = 0
    with pytest.raises(Unreachable, match=r"the hub gives bytes 0-.*, and was asked for bytes 10000 on"):
        add_source("org/name", "tiny", no_copy=True)


def test_an_adapter_is_added_with_a_copy(hub: PlayedHub, home: Home) -> None:
    (hub.folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="add it without --no-copy"):
        hub_reading.read_on_hub("org/name", print, KeptDigests(home.digests), lambda folder, read: None)
