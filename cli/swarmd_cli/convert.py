"""``swarmd models add FILE.gguf``: the file becomes a folder of safetensors under the home, once."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path

from swarmd_cli.context import home
from swarmd_cli.terminal import drawing_by_library

FOLDER = "converted"  # under the home; a folder for each file and dtype
READER = 2  # what an older one made of a file may be another model


def is_gguf(path: Path) -> bool:
    """Is it a file that says so, or one that is called so?"""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF" or path.suffix.lower() == ".gguf"


def convert_gguf(path: Path, dtype: str) -> Path:
    """Return the folder with what is in a GGUF file, made now if it is not there yet. Raises ConfigError."""
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"  # transformers' bar would be pages of a log
    print(f"{path.name}: looking at {path.stat().st_size / 2**20:.0f} MiB ...", file=sys.stderr)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = home().folder / FOLDER / f"{path.stem[:64]}-{dtype}-{digest[:16]}-{READER}"
    if folder.is_dir():
        print(f"{path.name}: converted before, in {folder}", file=sys.stderr)
        return folder
    from swarmd.compute.checkpoints import gguf

    # The folder gets its name only once it is complete: an interrupted conversion is none, and begins anew.
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True, mode=0o700)

    guarded = sys.stderr

    def report(line: str) -> None:
        print(f"{path.name}: {line}", file=guarded)

    try:
        with drawing_by_library():
            conversion = gguf.convert(path, unfinished, dtype, report)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    cost = "nothing is lost"
    if conversion.loss:
        cost = f"rounding to it takes {100 * conversion.loss:.2g} % of a tensor at most"
    report(f"{conversion.n_parameters / 1e6:.0f} million parameters as {conversion.dtype}, {cost}")
    return folder


def delete_converted(folder: Path) -> bool:
    """Delete a folder that was made here; any other stays, and is none of ours."""
    is_ours = folder.parent == (home().folder / FOLDER).resolve()
    if is_ours:
        shutil.rmtree(folder, ignore_errors=True)
    return is_ours
