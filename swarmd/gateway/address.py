"""Where the gateway of a home is, for programs that want to ask it: two small files, and no torch."""

from __future__ import annotations

from pathlib import Path

TOKEN_FILE = "gateway.token"
ADDRESS_FILE = "gateway.address"


def read_url(folder: Path) -> str | None:
    """The URL of the gateway that runs, or ran until it was killed."""
    return _read(folder / ADDRESS_FILE)


def read_token(folder: Path) -> str:
    """What lets this machine's user in, whatever keys there are; "" while none runs."""
    return _read(folder / TOKEN_FILE) or ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None
