"""What ``models add`` says of what is no checkpoint: one sentence, what is there and what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from swarmd_cli import source

from swarmd.errors import ConfigError
from swarmd.home.membership import MembershipFiles
from swarmd.home.models import ModelFolders, bundled_folder
from swarmd.home.paths import Home
from tests import checkpoints, families
from tests.cli.typed import swarmd


def add(home: Home, folder: Path, *words: str) -> str:
    return swarmd(home, "models", "add", str(folder), "--name", "new", *words)


def files(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF and more" if "sha256" in name or name.endswith(".gguf") else b"{}")
    return folder


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("README.md", "tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf"),
            r"holds GGUF files \(tiny-Q4_K_M.*models add FILE --name",
        ),
        (("config.json", "onnx/model.onnx"), r"a model for ONNX \(onnx/model\.onnx\)"),
        (("config.json", "pytorch_model.bin"), r"pytorch_model\.bin, which is pickle"),
        (("config.json", "consolidated.safetensors"), "neither model.safetensors nor"),
        (("config.json", "model-00001-of-00002.safetensors"), "the index that belongs to the parts"),
        (
            ("blobs/sha256-aa", "manifests/registry.ollama.ai/library/x/latest"),
            "is Ollama's store.*of 1 the largest is",
        ),
        (("adapters.safetensors", "adapter_config.json"), "an adapter of MLX"),
        (("notes.txt",), "config.json is missing"),
    ],
)
def test_what_is_no_checkpoint_is_called_what_it_is(
    names: tuple[str, ...], message: str, home: Home, tmp_path: Path
) -> None:
    folder = files(tmp_path / "given", *names)
    words = ("--base", "demo") if "adapter_config.json" in names else ()
    with pytest.raises(ConfigError, match=message) as refused:
        add(home, folder, *words)
    assert "\n" not in str(refused.value)
    assert "new" not in MembershipFiles(home).catalog().names


def test_a_repository_of_the_hub_with_other_formats_is_called_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = files(tmp_path / "snapshot", "config.json")
    (empty / "config.json").write_text(LLAMA)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *args, **command: str(empty))
    monkeypatch.setattr(source, "_files_on_hub", lambda name: ["README.md", "tiny.gguf"])
    with pytest.raises(ConfigError, match=r"org/tiny on the hub holds GGUF files .*swarmd models add org/tiny:Q4_K_M"):
        source.find_folder("org/tiny", "auto")


def test_of_a_repository_that_is_refused_by_its_settings_no_weights_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def download(name: str, **patterns: list[str]) -> str:
        found = list(filter_repo_objects(["config.json", "model.safetensors"], **patterns))
        fetched.extend(found)
        folder = files(tmp_path / "snapshot", *found)
        config = {**json.loads(LLAMA), "quantization_config": {"quant_method": "hqq"}}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ConfigError, match="quantization_config: hqq"):
        source.find_folder("org/tiny", "auto")
    assert fetched == ["config.json"]


LLAMA = json.dumps({"model_type": "llama", "num_hidden_layers": 1})
TWICE = (
    *("config.json", "tokenizer.json", "original/params.json", "original/consolidated.00.safetensors"),
    *("consolidated.safetensors", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
    *("model.safetensors", "old-model.safetensors", "onnx/model.safetensors", "README.md", "pytorch_model.bin"),
)


@pytest.mark.parametrize(
    ("more", "weights"),
    [
        ((), {"model.safetensors"}),
        (
            ("model.safetensors.index.json",),
            {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"},
        ),
        (("adapter_config.json", "adapter_model.safetensors"), {"adapter_model.safetensors"}),
    ],
)
def test_of_a_repository_with_its_weights_twice_only_those_that_it_names_are_fetched(
    more: tuple[str, ...], weights: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "c0ffee"

    def download(name: str, *, revision: str | None = None, **patterns: list[str]) -> str:
        assert revision in (None, "c0ffee"), "the same commit"
        for path in filter_repo_objects([*TWICE, *more], **patterns):
            files(snapshot, path)
        (snapshot / "config.json").write_text(LLAMA)
        index = {f"t{i}": f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
        if (snapshot / "model.safetensors.index.json").is_file():
            (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert source.find_folder("org/tiny", "auto") == snapshot
    fetched = {path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()}
    small = {"config.json", "tokenizer.json", *(name for name in more if name.endswith(".json"))}
    assert fetched == weights | small


def test_a_folder_with_its_weights_twice_is_read_by_the_names_that_it_has(home: Home, tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "model", n_layers=2)
    for path in bundled_folder().glob("tokenizer*"):
        shutil.copy(path, folder)
    tensors = load_file(folder / "model.safetensors")
    names = {name: f"model-{1 + ('lm_head' in name)}.safetensors" for name in tensors}
    for file in set(names.values()):
        part = {name: tensor for name, tensor in tensors.items() if names[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    files(folder, "consolidated.safetensors", "original/consolidated.00.safetensors")
    (folder / "model.safetensors").write_bytes(b"of an older model")
    assert "2 blocks" in add(home, folder)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-2\.safetensors is missing.*names 2, 1 of them are not there"):
        add(home, folder)


def cached(root: Path, *commits: str, main: str = "") -> Path:
    """A folder as the hub's cache has it, with the bundled model in it."""
    (root / "blobs").mkdir(parents=True)
    for commit in commits:
        (root / "snapshots" / commit).mkdir(parents=True)
        for path in bundled_folder().iterdir():
            if path.is_file():
                shutil.copy(path, root / "blobs" / path.name)
                (root / "snapshots" / commit / path.name).symlink_to(f"../../blobs/{path.name}")
    if main:
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(main)
    return root


def test_a_folder_of_the_hubs_cache_means_its_snapshot(home: Home, tmp_path: Path) -> None:
    assert "new:" in add(home, cached(tmp_path / "models--org--one", "abc"))
    assert not MembershipFiles(home).catalog().sources, "nobody said that the hub has it"
    two = cached(tmp_path / "models--org--two", "abc", "def")
    with pytest.raises(ConfigError, match=r"which snapshot \(one of abc, def\)"):
        add(home, two)
    assert source.find_folder(str(cached(tmp_path / "b", "abc", "def", main="def\n")), "auto").name == "def"


def test_a_model_without_a_tokenizer_or_with_a_broken_one_is_refused(home: Home, tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "model", n_layers=2)
    with pytest.raises(ConfigError, match=r"holds no tokenizer \(tokenizer\.json, tokenizer\.model\)"):
        add(home, folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"the tokenizer in .* cannot be used"):
        add(home, folder)
    for path in bundled_folder().glob("tokenizer*"):
        shutil.copy(path, folder)
    assert "2 blocks" in add(home, folder)


@pytest.mark.filterwarnings("ignore")  # of PEFT
def test_an_adapter_is_compared_with_its_base_before_it_is_published(home: Home, tmp_path: Path) -> None:
    other_base = checkpoints.make("llama", tmp_path / "other", n_layers=2, hidden_size=32)
    checkpoints.make_adapter(other_base, tmp_path / "lora", ["q_proj"], 1)
    with pytest.raises(ConfigError, match=r"the adapter's matrices for model\.layers\.0"):
        add(home, tmp_path / "lora", "--base", "demo")
    assert "new" not in MembershipFiles(home).catalog().names
    checkpoints.make_adapter(bundled_folder(), tmp_path / "fits", ["q_proj"], 1)
    assert "new:" in add(home, tmp_path / "fits", "--base", "demo")
    with pytest.raises(ConfigError, match="--base new is an adapter itself"):
        swarmd(home, "models", "add", str(tmp_path / "fits"), "--name", "other", "--base", "new")


def test_a_file_that_is_no_gguf_is_no_folder(home: Home, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match="is a file, and no GGUF"):
        add(home, tmp_path / "config.json")


@pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
def test_a_model_whose_layers_stay_together_says_so_in_its_own_configuration(home: Home, tmp_path: Path) -> None:
    folder = families.make_named("gemma4_text with shared keys", tmp_path / "gemma")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_folder() / name, folder)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    said = add(home, folder)
    assert "  3 blocks (they begin at layers 0, 1, 2; beside hidden states travel per_layer_input), 1" in said
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    (model,) = {model for name, (model, _) in MembershipFiles(home).catalog().models.items() if name == "new"}
    laid_out = ModelFolders(home).read()[model]
    converted = home.folder / "converted"
    assert [*converted.iterdir()] == [laid_out]
    assert laid_out.joinpath("model.safetensors").samefile(folder / "model.safetensors"), "no byte is there twice"
    assert json.loads((laid_out / "config.json").read_text())["swarmd"]["first_layers"] == [0, 1, 2]
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    assert add(home, laid_out) == add(home, other) == add(home, folder) == said, "the same model again"
    change = load_file(other / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in change.items()}, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="choose another name, or say --replace"):
        add(home, other)
    assert [*converted.iterdir()] == [laid_out], "nothing is made of what is refused"
    swarmd(home, "models", "rm", "new")
    assert not laid_out.exists()
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
