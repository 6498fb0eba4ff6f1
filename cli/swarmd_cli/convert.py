"""``swarmd models add FILE.gguf``: the file becomes a folder under the home, once, at its own bits or unpacked."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swarmd.compute.llama_cpp.gguf_header import GgufHeader
    from swarmd.protocol.models.manifest import Manifest
from swarmd_cli.context import home
from swarmd_cli.terminal import drawing_by_library

FOLDER = "converted"  # under the home; a folder for each file and dtype
OWN = "own"  # bits: those that the file has
READER = 3  # what an older one made of a file may be another model


def is_gguf(path: Path) -> bool:
    """Is it a file that says so, or one that is called so?"""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix.lower() == ".gguf"


def use_gguf(path: Path, dtype: str) -> Path:
    """Return the folder with what is in a GGUF file, made now if it is not there yet. Raises ConfigError.

    ``dtype`` OWN: at its own bits where its family allows that, else as plain numbers of the best 16.
    """
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # transformers' bar would be pages of a log
    guarded = sys.stderr

    def report(line: str) -> None:
        print(f"{path.name}: {line}", file=guarded)

    from swarmd.compute.checkpoints import packing
    from swarmd.compute.llama_cpp.gguf_header import list_parts, read_all_parts

    header = read_all_parts(path)
    files = list_parts(header)
    report(f"looking at {sum(file.stat().st_size for file in files) / 2**20:.0f} MiB ...")
    if dtype == OWN and not packing.can_pack(header):
        report(f"llama.cpp's library cannot be given blocks of {header.architecture}: unpacking it instead")
        dtype = "auto"
    folder = home().folder / FOLDER / f"{path.stem[:64]}-{dtype}-{_digest(files)}-{READER}"
    if folder.is_dir():
        report(f"converted before, in {folder}")
        return folder
    with _growing(folder) as unfinished, drawing_by_library():
        report(_pack(header, unfinished, report) if dtype == OWN else _unpack(path, unfinished, dtype, report))
    return folder


@contextmanager
def _growing(folder: Path) -> Iterator[Path]:
    """A folder that gets its name only once it is complete: what is interrupted is none, and begins anew."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True, mode=0o700)
    try:
        yield unfinished
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def link_laid_out(folder: Path, laid_out: Manifest) -> Path:
    """Return a folder with the files of another by second names, and the configuration of this manifest.

    It is called by its hash, so that there is one, wherever the files were. Raises ConfigError.
    """
    from swarmd.protocol.models import manifest

    target = home().folder / FOLDER / f"laid-out-{manifest.model_id(laid_out)[:16]}"
    if target.is_dir():
        return target
    index = [manifest.INDEX_FILE] if (folder / manifest.INDEX_FILE).is_file() else []
    with _growing(target) as unfinished:
        for name in (*manifest.shard_names(folder), *index, *(file.name for file in laid_out.files)):
            _link((folder / name).resolve(), unfinished / name)
        (unfinished / "config.json").write_text(laid_out.config, encoding="utf-8")
    return target


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; a copy where that cannot be."""
    try:
        os.link(source, target)
    except OSError:  # another disk
        shutil.copyfile(source, target)


def _pack(header: GgufHeader, folder: Path, report: Callable[[str], None]) -> str:
    """Make it a folder at its own bits; returns what to say of it."""
    from swarmd.compute.checkpoints import packing

    packed = packing.pack(header, folder, report)
    return (
        f"{packed.n_layers} layers as {packed.n_blocks} blocks, {packed.n_bytes / 2**20:.0f} MiB at its own bits; "
        "to fine-tune it, or put adapters beside it, say --dtype auto, which unpacks it"
    )


def _unpack(path: Path, folder: Path, dtype: str, report: Callable[[str], None]) -> str:
    """Make it a folder of plain numbers; returns what to say of it."""
    from swarmd.compute.checkpoints import gguf

    conversion = gguf.convert(path, folder, dtype, report)
    cost = f"rounding to it takes {100 * conversion.loss:.2g} % of a tensor at most" if conversion.loss else ""
    return f"{conversion.n_parameters / 1e6:.0f} million parameters as {conversion.dtype}, {cost or 'nothing is lost'}"


def _digest(files: Sequence[Path]) -> str:
    """The beginning of the sha256 of all parts of a file."""
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:16]


def delete_converted(folder: Path) -> bool:
    """Delete a folder that was made here; any other stays, and is none of ours."""
    is_ours = folder.parent == (home().folder / FOLDER).resolve()
    if is_ours:
        shutil.rmtree(folder, ignore_errors=True)
    return is_ours
