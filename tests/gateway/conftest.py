"""What the gateway's tests share: the bundled model's tokenizer."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from swarmd.home.models import bundled_folder


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
