"""Names that people give to models, swarms and runs: what may be one."""

from __future__ import annotations

import re

from swarmd.errors import ConfigError

MAX_NAME = 64  # characters of what a person calls a model, a swarm or a run


def require_name(kind: str, name: str) -> None:
    """Refuse what is no name that a person can read and type. ``kind``: a model, a swarm, a run. Raises ConfigError."""
    if not 1 <= len(name) <= MAX_NAME:
        raise ConfigError(f"the name of {kind} has 1 to {MAX_NAME} characters, not {len(name)}")
    if not name.isprintable() or name != name.strip():
        raise ConfigError(f"the name of {kind} is one line of characters that can be seen, not {name!r}")
    if is_model_hash(name):
        raise ConfigError(f"the name of {kind} cannot look like a model's hash: {name}")


def is_model_hash(text: str) -> bool:
    """Is this a sha256 in hex, as models and adapters are named by?"""
    return re.fullmatch("[0-9a-f]{64}", text) is not None
