"""What was given to ``swarmd models add``: a checkpoint, an adapter, a GGUF file, an id of the hub, or something else.

Models are published in many formats. What is none of ours is named, with what to do instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from glob import escape
from itertools import islice
from pathlib import Path, PurePosixPath

from swarmd.errors import ConfigError
from swarmd.protocol.models.adapter import WEIGHTS_FILE, is_adapter
from swarmd.protocol.models.draft import is_draft
from swarmd.protocol.models.manifest import INDEX_FILE, SINGLE_FILE, shard_names
from swarmd.values import some_of
from swarmd_cli.convert import is_gguf, use_gguf

HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
HUB_GGUF = re.compile(rf"(?:hf:)?({HUB_ID.pattern}):([\w.-]+)")
"""A repository of the hub, and which of its GGUF files: by the bits that their names say."""
HUB_FILES = ("*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
"""What is fetched first; weights are those that these name."""
PART_NUMBER = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)", re.IGNORECASE)
MOST_LISTED = 32  # files of a repository that a refusal names: one has some twenty quantisations
MOST_NAMES = 10_000  # that are looked at in a folder: a home folder has more, and a checkpoint never
PICKLED = re.compile(r"(^|/)(pytorch_model|adapter_model|model|consolidated)[^/]*\.bin$|\.(pt|pth|ckpt)$")
"""Names of weights as torch saves them; other programs' files end in .bin, too."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def find_folder(source: str, dtype: str) -> Path:
    """Find a folder as it is; a GGUF file becomes one under the home, an id of the hub one in the hub's own cache.

    ``ORG/NAME:BITS`` is a GGUF file of the hub.

    Raises ConfigError, with what is there, for what is neither a checkpoint nor an adapter.
    """
    # What lies on this disk comes first: "org/model" may be a folder here and an id of the hub. Only a name that is
    # neither file nor folder, and has an id's form, is looked up.
    folder = Path(source)
    if is_gguf(folder):
        return use_gguf(folder, dtype)
    if folder.is_file():
        raise ConfigError(f"{folder} is a file, and no GGUF: say the folder that holds config.json and *.safetensors")
    if folder.exists():
        return _find_checkpoint(folder)
    of_gguf = HUB_GGUF.fullmatch(source)
    if of_gguf is None and not HUB_ID.fullmatch(source):
        raise ConfigError(f"there is no file or folder {folder}")
    from swarmd.weights.hub import open_client

    open_client().close()  # what is wrong with proxies and certificates is said before the library stumbles over it
    with asking_hub(f"there is no folder {source}, and the hub does not give {source}"):
        if of_gguf is not None:
            return use_gguf(_download_gguf(of_gguf[1], of_gguf[2]), dtype)
        folder = _download(source)
        if not _is_checkpoint(folder):
            refuse_known_formats(f"{source} on the hub", _files_on_hub(source), f"{source}:Q4_K_M")
    return folder


@contextmanager
def asking_hub(trouble: str) -> Iterator[None]:
    """Guard what the hub's library does: one sentence for whatever it raises. Raises ConfigError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"{trouble}: {reason}") from None
    except (TypeError, KeyError, ValueError) as error:  # of answers that are not a hub's
        raise ConfigError(f"{trouble}: it answers otherwise than a hub does ({error}): look at HF_ENDPOINT") from None


def _download(source: str) -> Path:
    """Fetch a repository of the hub into its cache: settings, then the weights that belong to them. Returns its folder.

    Repositories hold the same weights twice (``original/``, ``consolidated.safetensors``): those are left where they
    are. Raises ConfigError for an index that is none, and what the hub's library raises.
    """
    from huggingface_hub import snapshot_download

    folder = download_settings(source)
    names = [WEIGHTS_FILE] if is_adapter(folder) else shard_names(folder)
    return Path(snapshot_download(source, revision=folder.name, allow_patterns=[escape(name) for name in names]))


def download_settings(source: str) -> Path:
    """Fetch all but the weights of a repository of the hub. Raises ConfigError for what is refused by its settings."""
    from huggingface_hub import snapshot_download

    from swarmd.compute.model.plain_config import read_config

    folder = Path(snapshot_download(source, allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"]))
    if not is_adapter(folder) and (folder / "config.json").is_file():
        read_config(folder)
    return folder


def _download_gguf(repository: str, bits: str) -> Path:
    """Fetch the parts of one quantisation of a repository; returns the first. Raises ConfigError, and the hub's own."""
    from huggingface_hub import snapshot_download

    names = choose_gguf(repository, _files_on_hub(repository), bits)
    folder = Path(snapshot_download(repository, allow_patterns=[escape(name) for name in names]))
    return folder / names[0]


def choose_gguf(repository: str, names: Iterable[str], bits: str) -> list[str]:
    """Which files of a repository are the model in these bits, the first part first. Raises ConfigError."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.lower().endswith(".gguf") and not Path(name).name.lower().startswith(("mmproj", "imatrix")):
            models.setdefault(PART_NUMBER.sub("", name), []).append(name)
    wanted = re.compile(rf"(?<![A-Za-z0-9]){re.escape(bits)}(?![A-Za-z0-9_])", re.IGNORECASE)
    chosen = [parts for name, parts in models.items() if wanted.search(name)]
    if len(chosen) == 1:
        return chosen[0]
    listed = ", ".join([parts[0] for parts in chosen or models.values()][:MOST_LISTED])
    if not models:
        raise ConfigError(f"{repository} on the hub holds no GGUF files")
    found = f"{len(chosen)} models in {bits}" if chosen else f"no model in {bits}"
    raise ConfigError(f"{repository} on the hub holds {found}: say more of the file's name; there are {listed}")


def check_tokenizer(folder: Path) -> None:
    """Refuse a model that nobody could ask anything. Raises ConfigError."""
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise ConfigError(
            f"{folder} holds no tokenizer ({', '.join(TOKENIZERS[:2])}): nobody could ask the model anything; "
            "copy its files from where the weights come from"
        )
    from swarmd.client.text.tokenizer import load_tokenizer  # after what costs no import of transformers

    load_tokenizer(folder)


def refuse_known_formats(where: str, names: Iterable[str], gguf: str = "FILE") -> None:
    """Raise ConfigError where the names tell of a format that swarmd does not read, with what to do instead.

    ``gguf``: how one of its GGUF files is called when it is added.
    """
    # The first that fits: a folder with GGUF files and pickles is a GGUF model with leftovers of its making.
    listed = sorted(names)
    by_suffix: dict[str, list[str]] = {}
    for name in listed:
        by_suffix.setdefault(PurePosixPath(name).suffix.lower(), []).append(name)
    if files := by_suffix.get(".gguf"):
        raise ConfigError(
            f"{where} holds GGUF files ({some_of(files)}) and no checkpoint of safetensors: add one of the files: "
            f"swarmd models add {gguf} --name NAME"
        )
    if files := by_suffix.get(".onnx"):
        raise ConfigError(
            f"{where} holds a model for ONNX ({some_of(files)}), a program rather than weights: add the checkpoint of "
            "safetensors that it was made from"
        )
    if files := [name for name in listed if PICKLED.search(name)]:
        raise ConfigError(
            f"{where} holds {some_of(files)}, which is pickle, and swarmd never opens that: convert it to safetensors"
        )
    if files := by_suffix.get(".safetensors"):
        raise ConfigError(
            f"{where} holds {some_of(files)}, and neither model.safetensors nor model.safetensors.index.json, which "
            "lists a model's parts: rename the one file, or add the index that belongs to the parts"
        )


def _find_checkpoint(folder: Path) -> Path:
    """Find a checkpoint's own folder: of the hub's cache, the snapshot that is in it. Raises ConfigError."""
    if (folder / "snapshots").is_dir() and (folder / "blobs").is_dir():
        return _find_snapshot(folder)
    has_blobs = (folder / "blobs").is_dir()
    ollama_files = _list_ollama_files(folder) if has_blobs else []
    if ollama_files or (has_blobs and (folder / "manifests").is_dir()):
        largest = f": of {len(ollama_files)} the largest is {ollama_files[0]}" if ollama_files else ""
        raise ConfigError(
            f"{folder} is Ollama's store, whose models are GGUF files called by their sha256{largest}: "
            "ollama show MODEL --modelfile names a model's own (FROM ...); swarmd models add THAT_FILE --name NAME"
        )
    if not _is_checkpoint(folder):
        paths = islice(folder.rglob("*"), MOST_NAMES)
        names = [path.relative_to(folder).as_posix() for path in paths]
        refuse_known_formats(str(folder), names)
    return folder


def _is_checkpoint(folder: Path) -> bool:
    """Is it a checkpoint, an adapter or a draft by its files' names? Whether it is sound shows when it is read."""
    # The very names that transformers and PEFT look for.
    return (
        is_adapter(folder) or is_draft(folder) or any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))
    )


def _find_snapshot(folder: Path) -> Path:
    """Find the snapshot that a folder models--ORG--NAME of the hub's cache means. Raises ConfigError."""
    snapshots = sorted(path for path in (folder / "snapshots").iterdir() if path.is_dir())
    main = folder / "refs" / "main"
    if main.is_file():
        named = folder / "snapshots" / main.read_text(encoding="utf-8").strip()[:64]
        if named in snapshots:
            return _find_checkpoint(named)
    if len(snapshots) != 1:
        listed = f"one of {some_of([path.name for path in snapshots])}" if snapshots else "none is there"
        raise ConfigError(
            f"{folder} is a folder of the hub's cache: say which snapshot ({listed}): {folder}/snapshots/…"
        )
    return _find_checkpoint(snapshots[0])


def _list_ollama_files(folder: Path) -> list[Path]:
    """List the GGUF files in Ollama's store, the largest first."""
    blobs = [path for path in (folder / "blobs").glob("sha256-*") if is_gguf(path)]
    return sorted(blobs, key=lambda path: path.stat().st_size, reverse=True)


def _files_on_hub(source: str) -> list[str]:
    from huggingface_hub import HfApi

    return list(HfApi().list_repo_files(source))
