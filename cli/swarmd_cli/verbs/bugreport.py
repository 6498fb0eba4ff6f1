"""Everything that helps to find a fault, in one file, without what is nobody else's business."""

from __future__ import annotations

import getpass
import io
import json
import platform
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated

import typer

from swarmd.printable import clean_text
from swarmd_cli.context import ask_json, home

VERBS = ("status", "peers", "sessions", "models", "downloads", "why", "train")
LOG_LINES = 2_000  # of each log: some hours of a busy day
Out = Annotated[Path | None, typer.Option("--out", help="Where to write it; else a new file in this folder.")]


def bugreport(out: Out = None) -> None:
    """Gather settings, states and logs into a tar, with keys, names and addresses removed.

    Example: swarmd bugreport --out report.tar.gz
    """
    from swarmd.errors import ConfigError
    from swarmd_cli.redact import make_redactor, read_secrets

    folder = home().folder
    path = out or Path(f"swarmd-bugreport-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz")
    names = {
        str(Path.home()): "~",
        socket.gethostname(): "[machine]",
        getpass.getuser(): "[user]",
    }
    redact = make_redactor(read_secrets(folder), names)
    texts = {name: clean_text(redact(text)) for name, text in _gather_texts(folder).items()}
    try:
        with tarfile.open(path, "x:gz") as tar:
            for name, text in texts.items():
                data = text.encode()
                entry = tarfile.TarInfo(f"swarmd-bugreport/{name}")
                entry.size = len(data)
                entry.mtime = int(time.time())
                tar.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    print(f"Wrote {path}: {', '.join(texts)}.")
    print("Keys, invites, names of this machine and public addresses are taken out. Look before you send it:")
    print(f"tar -xOzf {path} | less")


def _gather_texts(folder: Path) -> dict[str, str]:
    """Gather texts by file name; what cannot be had says why."""
    packages = sorted(f"{package.metadata['Name']} {package.version}" for package in distributions())
    description = [f"swarmd on {platform.platform()}, Python {sys.version.split()[0]}", *packages]
    texts = {"about.txt": "\n".join(description) + "\n", "config.toml": _read_tail(folder / "config.toml")}
    for verb in VERBS:
        texts[f"{verb}.json"] = _text_or_error(partial(_ask_as_text, verb))
    texts["home.txt"] = _text_or_error(partial(_list_files, folder))
    texts["service.log"] = _text_or_error(_read_service_log)
    for name in ("daemon.log", "gateway.log"):
        if (folder / name).is_file():
            texts[name] = _read_tail(folder / name)
    return texts


def _ask_as_text(verb: str) -> str:
    answer = ask_json(verb)
    for row in (answer, *answer.get("peers", ())):
        row.pop("name", None)  # what members are called, this one too
    return json.dumps(answer, indent=1)


def _text_or_error(text: Callable[[], str]) -> str:
    from swarmd.errors import SwarmError

    try:
        return text()
    except (SwarmError, OSError) as error:
        return f"not there: {error}\n"


def _read_tail(path: Path) -> str:
    try:
        lines = path.read_text(errors="replace", encoding="utf-8").splitlines()
    except OSError as error:
        return f"not there: {error.strerror}\n"
    return "\n".join(lines[-LOG_LINES:]) + "\n"


def _list_files(folder: Path) -> str:
    """List names, sizes and modes of what lies in the home folder, not what they hold."""
    rows = [(path, path.stat()) for path in sorted(folder.iterdir())]
    return "".join(f"{oct(status.st_mode)[-3:]} {status.st_size:>12} {path.name}\n" for path, status in rows)


def _read_service_log() -> str:
    from swarmd_cli.managers import find_manager

    command = find_manager(False).logs(LOG_LINES, follow=False)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout or f"not there: {done.stderr}\n"
