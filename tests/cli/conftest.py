"""What tests of several verbs begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from swarmd_cli.context import set_home

from swarmd.home.founder import Founder
from swarmd.home.paths import Home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A founder's home; modules that need another one have their own."""
    state = Home(tmp_path / "home")
    Founder(state).found("ours")
    yield state
    set_home(None)
