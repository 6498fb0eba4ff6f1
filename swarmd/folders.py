"""Where state lies and how it is written, for programs that only want to knock: nothing that takes time to import."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import sys
from pathlib import Path
from typing import TextIO

from swarmd.errors import ConfigError

logger = logging.getLogger(__name__)

SOCKET = "control.sock"
OF_OTHERS = 0o077  # bits of a mode that are for other users than the owner


MOST_SOCKET_BYTES = 107 if sys.platform == "linux" else 103  # of a Unix socket's path: macOS and the BSDs take fewer


def default_folder() -> Path:
    """The state folder when none was named. Raises ConfigError where this user has no home folder."""
    return resolve_folder(Path(os.environ.get("SWARMD_HOME") or "~/.local/share/swarmd"))


def resolve_folder(folder: Path) -> Path:
    """A state folder as its user named it, ``~`` replaced. Raises ConfigError for one that cannot be used."""
    try:
        resolved = folder.expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{folder}: this user has no home folder (HOME is not set): say which one with --home or SWARMD_HOME"
        ) from None
    n_bytes = len(os.fsencode(resolved.absolute() / SOCKET))
    if n_bytes > MOST_SOCKET_BYTES:
        raise ConfigError(
            f"{resolved} is too long for the socket in it: {n_bytes} bytes, at most {MOST_SOCKET_BYTES}: "
            "choose a shorter folder with --home or SWARMD_HOME"
        )
    return resolved


# A crash, or a full disk, must never leave half a file: a half key or catalog would lose a member its place. So the new
# content goes to a new name on the same disk, is flushed, and only then takes the old one's place, which is atomic. The
# mode is set when the file is made: a secret is at no moment readable for others.
def write_file(path: Path, content: str | bytes, secret: bool = False) -> None:
    """Write a file whole or not at all; a secret one is its owner's alone. Raises ConfigError."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    data = content.encode() if isinstance(content, str) else content
    try:
        _write_new(new, data, 0o600 if secret else 0o644)
        new.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):  # where nothing can be written, nothing can be removed
            new.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def read_file(path: Path) -> bytes | None:
    """Read a file; None where there is none. Raises ConfigError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def remove_file(path: Path) -> None:
    """Remove a file, if there is one. Raises ConfigError."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot remove {path}: {error.strerror}") from None


def require_writable(folder: Path) -> None:
    """Raise ConfigError for a folder in which nothing can be made: closed to its user, or on a read-only disk."""
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"nothing can be written in {folder}: open it (chmod u+rwx), have its disk mounted for writing, or choose "
            "another --home"
        )


def rewrite_file(path: Path, data: bytes) -> None:
    """Write anew what a person's file holds, whole or not at all: links to it, its mode and its owner stay.

    Raises ConfigError, also for a file that its owner may not write, or that is another user's.
    """
    target = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for links in a circle
    if not target.exists():
        write_file(target, data)
        return
    if not os.access(target, os.W_OK):
        raise ConfigError(f"{target} may not be written (mode {_mode(target):o}): chmod u+w {target} allows it")
    new = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        _write_new(new, data, 0o600)
        _copy_rights(target, new)
        new.replace(target)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {target}: {error.strerror}") from None


def _write_new(path: Path, data: bytes, mode: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _copy_rights(old: Path, new: Path) -> None:
    """Give a file the owner, mode and access lists of another; its time is its own."""
    import shutil  # which loads every format of archives: only who rewrites a file pays

    status = old.stat()
    os.chown(new, status.st_uid, status.st_gid)
    shutil.copystat(old, new)
    os.utime(new)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def is_open_to_others(path: Path) -> bool:
    """Can other users of this machine open a file or folder, if they can reach it?"""
    try:
        return bool(_mode(path) & OF_OTHERS)
    except OSError:
        return False


def close_to_others(folder: Path) -> None:
    """Make a folder its owner's alone, and say so where it was not."""
    if not is_open_to_others(folder):
        return
    mode = _mode(folder)
    try:
        folder.chmod(mode & ~OF_OTHERS)
    except OSError as error:
        text = "other users of this machine can open %s (mode %o), and it cannot be closed to them: %s"
        logger.warning(text, folder, mode, error.strerror)
        return
    logger.warning("other users of this machine could open %s (mode %o): it is its owner's alone now", folder, mode)


# A lock that another user of the machine may open can be held by them for ever. So a file that was open to others is
# replaced by a new one before it is locked: their handle then leads to a file that nobody looks at any more.
def open_own(path: Path, anew: bool = False) -> TextIO:
    """Open a file that only its owner can open, made where it is not; ``anew`` replaces it. Raises ConfigError."""
    try:
        if anew:
            path.unlink(missing_ok=True)
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}") from None


def is_answered(path: Path) -> bool:
    """Does a program listen at a socket?"""
    with socket.socket(socket.AF_UNIX) as knocking, contextlib.suppress(OSError):
        knocking.connect(str(path))
        return True
    return False
