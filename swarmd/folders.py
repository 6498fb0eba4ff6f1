"""Where state lies and how it is written, for programs that only want to knock: nothing that takes time to import."""

from __future__ import annotations

import os
from pathlib import Path

from swarmd.errors import ConfigError

SOCKET = "control.sock"


def default_folder() -> Path:
    """The state folder when none was named."""
    chosen = os.environ.get("SWARMD_HOME")
    return Path(chosen) if chosen else Path.home() / ".local" / "share" / "swarmd"


def write_file(path: Path, content: str | bytes, secret: bool = False) -> None:
    """Write a file whole or not at all; a secret one is its owner's alone. Raises ConfigError."""
    new = path.with_name(f".{path.name}.{os.getpid()}.new")
    data = content.encode() if isinstance(content, str) else content
    try:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600 if secret else 0o644)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
