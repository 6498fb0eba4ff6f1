"""Where state lies, for programs that only want to knock: no keys, no records, nothing that takes time to import."""

from __future__ import annotations

import os
from pathlib import Path

SOCKET = "control.sock"


def default_folder() -> Path:
    """The state folder when none was named."""
    chosen = os.environ.get("SWARMD_HOME")
    return Path(chosen) if chosen else Path.home() / ".local" / "share" / "swarmd"
