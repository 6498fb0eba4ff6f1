"""A model's own tokenizer, from files that anybody may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from swarmd.client.text.tokenizer_trial import try_out
from swarmd.compute.model.plain_config import building, read_config


def load_tokenizer(folder: Path) -> Any:
    """Build it without code of its own and without the network, once it has stood its trial. Raises ConfigError."""
    try_out(folder)
    with building(f"the tokenizer in {folder} cannot be used"):
        return AutoTokenizer.from_pretrained(
            folder, config=read_config(folder), trust_remote_code=False, local_files_only=True
        )
