"""What ``models add`` makes of GGUF files: their own bits, plain numbers, or one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from gguf import GGUFReader, GGUFWriter
from swarmd_cli import source
from swarmd_cli.main import app
from swarmd_cli.source import choose_gguf
from typer.testing import CliRunner

from swarmd.compute.llama_cpp import library, proof
from swarmd.errors import ConfigError
from swarmd.home.membership import MembershipFiles
from swarmd.home.paths import Home
from tests.cli.typed import swarmd
from tests.compute.checkpoints.test_gguf import RIGHT
from tests.compute.llama_cpp.random_gguf import make_random_gguf
from tests.gguf_files import make_model, settings_of, tensors_of, write
from tests.gguf_writer import write_all


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    make_random_gguf("qwen3", path, {"vocab_size": 256}, has_words=True)
    return path


def add(home: Home, file: Path, *words: str) -> str:
    """All that is said, the hash last but one of its lines."""
    done = CliRunner().invoke(app, ["--home", str(home.folder), "models", "add", str(file), "--name", "new", *words])
    if done.exception is not None:
        raise done.exception
    return done.output


def hash_in(said: str) -> str:
    return next(line.split()[1] for line in said.splitlines() if line.startswith("new: "))


def read_made(home: Home) -> dict[str, object]:
    (folder,) = (home.folder / "converted").iterdir()
    return dict(json.loads((folder / "config.json").read_text()))


def test_a_file_keeps_its_bits(home: Home, file: Path) -> None:
    said = add(home, file)
    assert "6 layers as 4 blocks" in said
    assert "new: " in said
    (folder,) = (home.folder / "converted").iterdir()
    n_bytes = sum(path.stat().st_size for path in folder.iterdir())
    assert n_bytes < 1.1 * file.stat().st_size
    assert json.loads((folder / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": [0]}
    assert MembershipFiles(home).catalog().models["new"][1] == 4
    swarmd(home, "models", "rm", "new")
    assert not folder.exists()


def write_case(case: str, path: Path) -> Path:
    """A file of a model that transformers has, too."""
    family, architecture, changes, settings, _ = RIGHT[case]
    model = make_model(family, **changes)
    return write(path, architecture, settings_of(model, **settings), tensors_of(model, architecture))


def test_a_dtype_unpacks_it(home: Home, tmp_path: Path) -> None:
    path = write_case("qwen3", tmp_path / "small.gguf")
    add(home, path, "--dtype", "auto")
    assert read_made(home)["model_type"] == "qwen3"
    assert "2 layers as 2 blocks" in add(home, path, "--replace")


def test_a_family_that_cannot_be_cut_is_unpacked(home: Home, tmp_path: Path) -> None:
    said = add(home, write_case("qwen2moe", tmp_path / "moe.gguf"))
    assert "cannot be given blocks of qwen2moe: unpacking it instead" in said
    assert read_made(home)["model_type"] == "qwen2_moe"


def test_a_file_in_parts_is_one_model_and_a_part_that_lacks_is_named(home: Home, file: Path, tmp_path: Path) -> None:
    parts = split(file, tmp_path, 3)
    whole = add(home, file)
    swarmd(home, "models", "unpublish", "new")
    assert hash_in(add(home, parts[0])) == hash_in(whole), "the same bytes"
    with pytest.raises(ConfigError, match=r"part 2 of a model: say the first one, many-00001-of-00003.gguf"):
        add(home, parts[1], "--replace")
    shutil.copy(parts[1], parts[2])
    with pytest.raises(ConfigError, match=r"many-00003-of-00003.gguf is not the part of many-00001-of-00003.gguf"):
        add(home, parts[0], "--replace")
    parts[2].unlink()
    with pytest.raises(ConfigError, match=r"one of 3 parts, and beside it lacks many-00003-of-00003.gguf"):
        add(home, parts[0], "--replace")
    renamed = parts[0].rename(tmp_path / "other.gguf")
    with pytest.raises(ConfigError, match=r"says that it is part 1 of 3, and is not called so"):
        add(home, renamed, "--replace")


def split(file: Path, folder: Path, n: int) -> list[Path]:
    """As llama.cpp's own tool splits: settings in the first part, each tensor in one."""
    reader = GGUFReader(file)
    paths = [folder / f"many-{number:05}-of-{n:05}.gguf" for number in range(1, n + 1)]
    for number, path in enumerate(paths):
        writer = GGUFWriter(path, "qwen3")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", n)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for field in reader.fields.values() if number == 0 else ():
            if not field.name.startswith(("GGUF.", "general.architecture")):
                kinds = field.types
                writer.add_key_value(field.name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
        for tensor in reader.tensors[number::n]:
            writer.add_tensor(tensor.name, tensor.data.copy())
        write_all(writer)
    return paths


def test_what_is_wrong_with_a_file_is_said_before_anything_is_made(
    home: Home, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[:-5_000])
    with pytest.raises(ConfigError, match=r"it is cut short: .* fetch it again"):
        add(home, file)
    file.write_bytes(raw.replace(b"tokenizer.ggml.tokens", b"tokenizer.ggml.tokenz"))
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        add(home, file)
    file.write_bytes(raw)
    with monkeypatch.context() as patch:
        patch.setattr(library, "PACKAGE", "no-such-package")
        library.load_library.cache_clear()
        with pytest.raises(ConfigError, match=r"llama.cpp's library, which is not installed: pip install"):
            add(home, file)
        library.load_library.cache_clear()
    monkeypatch.setattr(proof.sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match=r"tiny.gguf cannot be served: llama.cpp's library ended its process \(1\)"):
        add(home, file)
    assert not list((home.folder / "converted").iterdir())
    assert "new" not in MembershipFiles(home).catalog().names


HUB = [
    *("README.md", "mmproj-F16.gguf", "tiny-Q4_K_M.gguf", "tiny-Q4_K_S.gguf", "tiny-UD-Q4_K_XL.gguf"),
    *("tiny-Q8_0-00002-of-00002.gguf", "tiny-Q8_0-00001-of-00002.gguf", "BF16/tiny-BF16-00001-of-00001.gguf"),
    *("a/tiny-IQ1_S.gguf", "b/tiny-IQ1_S.gguf"),
]


@pytest.mark.parametrize(
    ("bits", "chosen"),
    [
        ("Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        ("q4_k_s", ["tiny-Q4_K_S.gguf"]),
        ("UD-Q4_K_XL", ["tiny-UD-Q4_K_XL.gguf"]),
        ("Q8_0", ["tiny-Q8_0-00001-of-00002.gguf", "tiny-Q8_0-00002-of-00002.gguf"]),
        ("BF16", ["BF16/tiny-BF16-00001-of-00001.gguf"]),
    ],
)
def test_the_parts_of_one_quantisation_are_chosen(bits: str, chosen: list[str]) -> None:
    assert choose_gguf("org/tiny", HUB, bits) == chosen


@pytest.mark.parametrize(
    ("bits", "names", "complaint"),
    [
        ("Q5_0", HUB, "holds no model in Q5_0: say more of the file's name; there are .*tiny-Q4_K_M.gguf"),
        ("IQ1_S", HUB, "holds 2 models in IQ1_S: .* there are a/tiny-IQ1_S.gguf"),
        ("Q4", HUB, "holds no model in Q4"),
        ("Q4_0", ["config.json", "mmproj-F16.gguf"], "org/tiny on the hub holds no GGUF files"),
    ],
)
def test_bits_that_are_not_there_or_twice_are_refused(bits: str, names: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose_gguf("org/tiny", names, bits)


def test_a_quantisation_of_the_hub_is_fetched_and_packed(
    home: Home, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "snapshots"
    snapshot.mkdir()
    shutil.copy(file, snapshot / "tiny-Q8_0.gguf")

    def download(name: str, *, allow_patterns: list[str]) -> str:
        assert (name, allow_patterns) == ("org/tiny", ["tiny-Q8_0.gguf"])
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr(source, "_files_on_hub", lambda name: ["tiny-Q4_0.gguf", "tiny-Q8_0.gguf"])
    assert "4 blocks" in swarmd(home, "models", "add", "hf:org/tiny:Q8_0", "--name", "new")
