"""Where the gateway of a home is, for programs that want to use it: two small files, and no torch."""

from __future__ import annotations

from pathlib import Path

TOKEN_FILE = "gateway.token"
ADDRESS_FILE = "gateway.address"


def read_url(folder: Path) -> str | None:
    """Return the URL of the gateway that runs, or ran until it was killed."""
    return _read(folder / ADDRESS_FILE)


def read_token(folder: Path) -> str:
    """Return what lets this machine's user in, whatever keys there are; "" while no gateway runs."""
    return _read(folder / TOKEN_FILE) or ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None
