"""Where a model's answers end: every token that its files name as an end, whichever of them it is.

A configuration often knows the end of a text only, the tokenizer that of a turn. What its chat template writes after an
assistant's turn is found by the child that makes prompts (``client.text.chat_template``).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from swarmd.errors import ConfigError
from swarmd.protocol.models.manifest import read_json

FILES = ("tokenizer_config.json", "special_tokens_map.json")
WORDS = ("eos_token", "eot_token", "eom_token")  # end of sequence, of a turn, of a message: names of files' own


def read_end_tokens(folder: Path, tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ends that a tokenizer's own files name."""
    ends: set[int] = set()
    for name in FILES:
        settings = read_settings(folder / name)
        for word in WORDS:
            text = settings.get(word)
            text = text.get("content") if isinstance(text, dict) else text
            token = tokenizer.token_to_id(text) if isinstance(text, str) else None
            if token is not None:
                ends.add(token)
    return frozenset(ends)


def read_settings(path: Path) -> dict[str, Any]:
    """Return what a file of a tokenizer's says; nothing where it is missing, or no JSON object."""
    try:
        settings = read_json(path)
    except (OSError, ConfigError):
        return {}
    return settings if isinstance(settings, dict) else {}
